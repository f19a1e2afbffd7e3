"""PipeMare: rates by delay, and backwards on estimates of what their forwards read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import ConfigError
from penstock.weights.corrections.base import Corrector, StagePlace, check_reschedule, rescheduled
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.step_info import Step


@dataclass(frozen=True)
class PipeMare:
    """PipeMare's corrections (arXiv 1910.05124, sec. 3), for the rule that keeps the newest weights only.

    T1: the learning rate of a stage with delay tau is divided by max(tau, 1)^(1 - min(k / K, 1)) at update k, so it
    acts only where the delay is more than one update. T2: delta <- gamma delta + (1 - gamma) (w(t+1) - w(t)) with
    gamma = D^(1 / tau); a backward whose forward read weights that were n updates older reads w - n delta. A forward
    that is run again does the same at its own moment: u = w - n delta, w and delta being those of then, n the updates
    since it was run first. Without a delay both change nothing. In low precision an estimate is made of the weights in
    fp32, and cast once.

    That the recomputed forward has an estimate of its own is the paper's (tau_fwd - tau_recomp updates lie between);
    that n counts each microbatch's own updates, here as in the backward, is the variant "penstock".

    Args:
        reschedule: K; 0 for none.
        decay: D; None for no T2.
    """

    reschedule: int
    decay: float | None = 0.135
    name: str = "pipemare"

    def __post_init__(self) -> None:
        """Make sure that the numbers make sense."""
        check_reschedule(self.reschedule)
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"decay (D) must lie between 0 and 1, such as 0.135; got {self.decay}")

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """It goes with everything."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _PipeMareOnStage:
        """For a stage."""
        return _PipeMareOnStage(self, layout, place)


class _PipeMareOnStage(Corrector):
    """What PipeMare does on one stage."""

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
        """Delta."""
        return {} if self.motion is None else {"motion": self.motion}

    def rate(self, updates: int) -> float:
        """T1."""
        return rescheduled(self.place.delay, updates, self._wanted.reschedule)

    def stepped(self, step: Step) -> None:
        """T2's delta."""
        assert self.motion is not None
        self.motion.views[step.name].mul_(self._gamma).add_((1.0 - self._gamma) * (step.after - step.before))
