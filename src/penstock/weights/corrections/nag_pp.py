"""NAG-PP: Nesterov's momentum as the means against delay.

Ajanthan et al. (ICML 2025, arXiv 2505.01099): the look-ahead of Nesterov's momentum, with its gradient discounted by
1 - momentum, points where the delay leads; in practice torch's NAdam with beta1 = 0.99, on stashed weights. Without a
stash, a stage with delay tau has its rate divided by max(tau, 1)^(1 - min(k / K, 1)) at update k, and the momentum
0.9 + 0.09 (P - i) / P on stage i of P, counted from 1.

tau is the mean by the schedule, where the paper has floor((2 (P - i) + 1) / (2 K)), its least for K microbatches per
update; k counts updates from 0, where the paper's code counts from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import CapabilityError
from penstock.weights.corrections.base import Corrector, StagePlace, check_reschedule, rescheduled
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.adapters import name_of

LEAST, SPREAD = 0.9, 0.09
"""Momentum of the last stage, and how much more the first one has, nearly."""


@dataclass(frozen=True)
class NagPP:
    """What is wanted.

    Args:
        name: in the table of corrections.
        adapts: the momentum and the rate of a stage follow from its place; for the form without a stash.
        reschedule: K, updates over which rates rise to the common one; 0 for none.
    """

    name: str
    adapts: bool
    reschedule: int = 0

    def __post_init__(self) -> None:
        """Make sure that the number makes sense."""
        check_reschedule(self.reschedule)

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """It goes with everything."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _NagOnStage:
        """For a stage."""
        return _NagOnStage(self, layout, place)


class _NagOnStage(Corrector):
    def __init__(self, wanted: NagPP, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted = wanted

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """It is a way to use NAdam."""
        if not isinstance(optimizer, torch.optim.NAdam):
            instead = "take optimizer nadam" if self._wanted.adapts else "take optimizer nadam with beta1=0.99"
            raise CapabilityError(f"{self._wanted.name} is a way to use NAdam, not {name_of(optimizer)}; {instead}")

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the momentum."""
        super().begin(optimizer)
        if self._wanted.adapts:
            behind = self.place.num_stages - 1 - self.place.stage
            for group in optimizer.param_groups:
                group["betas"] = LEAST + SPREAD * behind / self.place.num_stages, group["betas"][1]

    def rate(self, updates: int) -> float:
        """Lower where the delay is long, at first."""
        return rescheduled(self.place.delay, updates, self._wanted.reschedule) if self._wanted.adapts else 1.0
