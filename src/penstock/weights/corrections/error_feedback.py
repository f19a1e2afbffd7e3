"""Error feedback for a delay of one update.

Under double-buffered weights the step u_t of update t is computed from a gradient at W(t-1): it is the step that should
have been made one update earlier, in place of u_{t-1}. The difference is fed back:

    W(t+1) = W(t) + u_t + share (u_t - u_{t-1})

This needs one more parameter-sized buffer. One-Step Gradient Delay is Not a Barrier (arXiv 2606.30634) describes such
feedback at the level of updates, for any optimizer; its exact form was not available, so this is our interpretation
(variant "penstock").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.weights.corrections.base import Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.updates.parameter_change import Step


@dataclass(frozen=True)
class ErrorFeedback:
    """Settings of error feedback.

    Args:
        share: the share of the difference that is fed back; 0 for none.
    """

    share: float = 1.0
    name: str = "error-feedback"

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return None: every precision and recompute mode is supported."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _ErrorFeedbackOnStage:
        """Create the corrector of a stage."""
        return _ErrorFeedbackOnStage(self, layout, place)


class _ErrorFeedbackOnStage(Corrector):
    watches = True

    def __init__(self, wanted: ErrorFeedback, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._share = wanted.share
        self._last = Buffer(layout, f"last step of {place.where}")

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Return u_{t-1}; zero before the first update, which is made without feedback."""
        return {"step": self._last}

    def stepped(self, step: Step) -> None:
        """Add the difference to the new weights."""
        last, made = self._last.views[step.name], step.after - step.before
        if step.update > self.began:
            step.after.copy_(step.before + made + self._share * (made - last))
        last.copy_(made)
