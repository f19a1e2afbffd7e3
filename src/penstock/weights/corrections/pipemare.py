"""PipeMare: learning rates by delay, and backwards on estimates of the weights that their forwards read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.weights.corrections.base import Corrector, StagePlace, rescheduled
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.updates.parameter_change import Step


@dataclass(frozen=True)
class PipeMare:
    """Settings of PipeMare's corrections (arXiv 1910.05124, sec. 3), for the rule that keeps the newest weights only.

    T1: the learning rate of a stage with delay tau is divided by max(tau, 1)^(1 - min(k / K, 1)) at update k, so it
    acts only where the delay is more than one update. T2: delta <- gamma delta + (1 - gamma) (w(t+1) - w(t)) with
    gamma = D^(1 / tau); a backward whose forward read weights that were n updates older reads w - n delta. A recomputed
    forward reads u = w - n delta, with w and delta as of the recompute, and n the updates since the first forward.
    Without a delay both change nothing. In low precision an estimate is computed from the fp32 weights, and cast once.

    The separate estimate of the recomputed forward follows the paper (tau_fwd - tau_recomp updates lie between);
    counting n for each microbatch, here as in the backward, is the variant "penstock".

    Args:
        reschedule: K; 0 for no T1.
        decay: D; None for no T2.
    """

    reschedule: int
    decay: float | None = 0.135
    name: str = "pipemare"

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return None: every precision and recompute mode is supported."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _PipeMareOnStage:
        """Create the corrector of a stage."""
        return _PipeMareOnStage(self, layout, place)


class _PipeMareOnStage(Corrector):
    def __init__(self, wanted: PipeMare, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted = wanted
        self._gamma = 0.0
        if wanted.decay is not None and place.delay > 0:
            self.watches = True
            self.motion = Buffer(layout, f"mean motion of {place.where}")
            self._gamma = wanted.decay ** (1.0 / float(place.delay))

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Return T2's delta, if it is used."""
        return {} if self.motion is None else {"motion": self.motion}

    def rate(self, updates: int) -> float:
        """Return the factor of T1."""
        return rescheduled(self.place.delay, updates, self._wanted.reschedule)

    def stepped(self, step: Step) -> None:
        """Update T2's delta."""
        assert self.motion is not None
        self.motion.views[step.name].mul_(self._gamma).add_((1.0 - self._gamma) * (step.after - step.before))
