"""NAG-PP: Nesterov momentum as a remedy for delay.

Ajanthan et al. (ICML 2025, arXiv 2505.01099): the look-ahead of Nesterov momentum, with its gradient discounted by
1 - momentum, compensates for the delay; in practice torch's NAdam with beta1 = 0.99, on stashed weights. Without a
stash, a stage with delay tau has its rate divided by max(tau, 1)^(1 - min(k / K, 1)) at update k, and the momentum
0.9 + 0.09 (P - i) / P on stage i of P, counted from 1.

tau is the mean delay of the schedule, where the paper has floor((2 (P - i) + 1) / (2 K)), the smallest for K
microbatches per update; k counts updates from 0, where the paper's code counts from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import CapabilityError
from penstock.weights.corrections.base import Corrector, StagePlace, rescheduled
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.optimizer_adapters import name_of

LEAST, SPREAD = 0.9, 0.09
"""Momentum of the last stage, and the (approximate) extra momentum of the first."""


@dataclass(frozen=True)
class NagPP:
    """Settings of NAG-PP.

    Args:
        name: its name in the table of corrections.
        adapts: set the momentum and rate of a stage by its position; for the form without a stash.
        reschedule: K, the updates over which rates rise to the common one; 0 for none.
    """

    name: str
    adapts: bool
    reschedule: int = 0

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return None: every precision and recompute mode is supported."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _NagOnStage:
        """Create the corrector of a stage."""
        return _NagOnStage(self, layout, place)


class _NagOnStage(Corrector):
    def __init__(self, wanted: NagPP, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted = wanted

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept NAdam."""
        if not isinstance(optimizer, torch.optim.NAdam):
            instead = "use optimizer nadam" if self._wanted.adapts else "use optimizer nadam with beta1=0.99"
            raise CapabilityError(f"{self._wanted.name} needs NAdam, not {name_of(optimizer)}; {instead}")

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the momentum."""
        super().begin(optimizer)
        if self._wanted.adapts:
            behind = self.place.num_stages - 1 - self.place.stage
            for group in optimizer.param_groups:
                group["betas"] = LEAST + SPREAD * behind / self.place.num_stages, group["betas"][1]

    def rate(self, updates: int) -> float:
        """Return the rate factor, which starts lower where the delay is long."""
        return rescheduled(self.place.delay, updates, self._wanted.reschedule) if self._wanted.adapts else 1.0
