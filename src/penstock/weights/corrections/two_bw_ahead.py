"""Weights with a constant delay that are read ahead of the updates that are missing (`2bw-ahead`, `3bw-ahead`).

Under 2BW the gradient that makes W(t+1) of W(t) is taken at W(t-1). Here it is taken at a prediction of W(t), which is
written once per update, where the last gradient still lies in its buffer, and serves all microbatches of a batch; under
3bw, where it is taken at W(t-2), at one that was made two updates before. After update t with the gradient g, eta being
the rate of the next update, and h the horizon, by default the delay:

    repeat   W^ = W(t+1) - h eta (a m + b g) / root   the step if g came again (`repeated_gradient`)
    motion   W^ = W(t+1) + h (W(t+1) - W(t))          the last motion once more, whatever the optimizer

Where the step is not elementwise (Muon's matrices) `repeat` takes the motion, which needs no second orthogonalization.
Updates, averages, evaluations and checkpoints have W. A skipped update predicts nothing: W^ = W.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.weights.corrections.base import Correction, Corrector, StagePlace
from penstock.weights.corrections.repeated_gradient_step import check_repeatable, is_elementwise, repeated_step
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.optimizer_adapters import Joined, optimizer_of
from penstock.weights.updates.parameter_change import Step


@dataclass(frozen=True)
class ReadingAhead:
    """Settings of predictions by the delay of a method.

    Args:
        motion: repeat the last motion of the weights, not the last gradient.
        horizon: the number of updates to predict, at least 0; the delay if None.
        a, b: weights of the mean of gradients and of the last gradient, both or none; by default the last gradient
            comes again.
    """

    motion: bool = False
    horizon: float | None = None
    a: float | None = None
    b: float | None = None
    name: str = "2bw-ahead"

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return None: every precision and recompute mode is supported."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _ReadingAheadOnStage:
        """Create the corrector of a stage."""
        return _ReadingAheadOnStage(self, layout, place)


def prediction_of(correction: Correction | None, delay: int) -> list[float | None] | None:
    """Return which prediction passes read in place of versions, as numbers; None if they read versions.

    Args:
        correction: of a method.
        delay: of its version rule.
    """
    if not isinstance(correction, ReadingAhead):
        return None
    horizon = delay if correction.horizon is None else correction.horizon
    return [float(correction.motion), float(horizon), correction.a, correction.b]


class _ReadingAheadOnStage(Corrector):
    reads_ahead = True

    def __init__(self, wanted: ReadingAhead, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted, self._horizon = wanted, place.delay if wanted.horizon is None else wanted.horizon
        self._chosen = None if wanted.a is None or wanted.b is None else (wanted.a, wanted.b)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept every optimizer for the last motion, elementwise ones and Muon for the last gradient."""
        if not self._wanted.motion:
            check_repeatable(optimizer)

    def looks_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether predictions need the weights before an update."""
        parts = optimizer.parts if isinstance(optimizer, Joined) else (optimizer,)
        return self._wanted.motion or not all(map(is_elementwise, parts))

    def ahead(self, step: Step) -> Tensor:
        """Return the values that passes read after an update."""
        horizon = self._horizon
        if self._wanted.motion or not is_elementwise(optimizer_of(step.optimizer, step.parameter)):
            return step.after + horizon * (step.after - step.before)
        return step.after - (horizon * step.rate(1)) * repeated_step(step, self._chosen)
