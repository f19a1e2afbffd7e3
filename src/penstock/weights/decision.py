"""What all stages decide about a batch: whether its update is made, and what its gradient is multiplied by.

Every stage hands in a share; whoever has the sum of all shares comes to the same decision, bit for bit. Gradients were
accumulated of S * loss sum / c, with a constant c and the loss scale S, so that the gradient of the mean loss is the
accumulated one times c / (N S), where N is the loss weight of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Share(NamedTuple):
    """What one stage knows of a batch; what it does not know is zero.

    Attributes:
        squares: sum of the squares of its accumulated gradient; not finite if an element is not, or if they overflow.
        rest: what the rounding of that sum has lost.
        loss: sum over the batch, from the last stage.
        weight: N, from the last stage.
        scale: S, from the last stage.
        stop: 1 where somebody wants the run to end.
        evaluated, evaluated_weight: loss sum and weight of an evaluation, from the last stages.
    """

    squares: float = 0.0
    rest: float = 0.0
    loss: float = 0.0
    weight: float = 0.0
    scale: float = 0.0
    stop: float = 0.0
    evaluated: float = 0.0
    evaluated_weight: float = 0.0


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled, so that small gradients survive in float16.

    The scale of a batch depends on the batches before it, with double-buffered weights on all but the last one, whose
    update is not made yet when the last stage begins the batch. So a batch may still overflow under a scale that has
    been lowered since; it does not lower it again.

    Attributes:
        initial: of batch 0.
        growth: factor after `interval` batches in a row that were finite under the present scale.
        backoff: factor after a batch that was not finite.
        interval: None for a scale that never changes.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int | None = 2000

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (0 < self.initial < math.inf and self.growth >= 1 and 0 < self.backoff <= 1):
            raise ConfigError(f"a loss scale must be positive, its growth >= 1 and its backoff in (0, 1]; got {self}")
        if self.interval is not None and self.interval < 1:
            raise ConfigError(f"the interval of a loss scale must be at least 1 batch, got {self.interval}")


@dataclass(frozen=True)
class Policy:
    """What stages decide by.

    Attributes:
        clip: the largest global norm of a gradient of the mean loss; larger ones are scaled down to it.
        loss_scale: None where nothing is scaled.
    """

    clip: float | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be a positive number, got {self.clip}")


class Decision(NamedTuple):
    """What became of a batch.

    Attributes:
        batch: its number since the start of training.
        loss: the mean over the whole batch, of all parallel pipelines; NaN where N is zero, and where nobody asked.
        weight: N, the loss weight of the whole batch.
        norm: global norm of the gradient of the mean loss, before it was clipped; NaN where nobody asked for it, and
            where N is zero.
        scale: S, the loss scale that its backwards ran under.
        finite: no gradient was infinite or not a number, as far as anybody has looked.
        factor: what its accumulated gradient is multiplied by; zero where the update is skipped.
        stop: the run ends with the batches that have been announced by then.
        again: the update had been made before, otherwise, and was taken back (`penstock.weights.provisional`).
    """

    batch: int
    loss: float
    weight: float
    norm: float
    scale: float
    finite: bool
    factor: float
    stop: bool = False
    again: bool = False

    @property
    def skipped(self) -> bool:
        """Whether the next version is a copy of this one."""
        return not self.factor


def add_shares(shares: Sequence[Share]) -> Share:
    """All shares together; squares and weights are added exactly, losses in the order of the shares."""
    return Share(
        math.fsum(part for share in shares for part in (share.squares, share.rest)),
        0.0,
        sum(share.loss for share in shares),
        math.fsum(share.weight for share in shares),
        max(share.scale for share in shares),
        max(share.stop for share in shares),
        math.fsum(share.evaluated for share in shares),
        math.fsum(share.evaluated_weight for share in shares),
    )


def decide(batch: int, total: Share, divisor: float, clip: float | None) -> Decision:
    """The decision on a batch.

    Args:
        batch: its number.
        total: the sum of all shares.
        divisor: c.
        clip: the largest norm, if any.
    """
    squares, _, loss, weight, scale, stop, *_ = total
    finite = math.isfinite(squares)
    if not weight:
        return Decision(batch, math.nan, weight, math.nan, scale, finite, 0.0, bool(stop))
    mean = divisor / (weight * scale)
    norm = math.sqrt(squares) * mean
    factor = mean if finite else 0.0
    if clip is not None and finite:
        factor *= min(1.0, clip / (norm + _EPSILON))
    return Decision(batch, loss / weight, weight, norm, scale, finite, factor, bool(stop))


class Scaler:
    """The loss scale over time.

    Args:
        spec: how it changes; None for a scale of one.

    Attributes:
        scale: after all decisions that it has learnt.
        finite_in_a_row: batches under it.
        before: the scale before the last of these decisions.
    """

    def __init__(self, spec: LossScale | None) -> None:
        self._spec = spec
        self.scale = self.before = 1.0 if spec is None else spec.initial
        self.finite_in_a_row = 0

    @property
    def scales(self) -> bool:
        """Whether losses are scaled at all."""
        return self._spec is not None

    def learn(self, decision: Decision) -> None:
        """Take notice of a decision; they come in the order of their batches."""
        spec = self._spec
        self.before = self.scale
        if spec is None or spec.interval is None or not decision.weight:
            return
        if not decision.finite:
            if decision.scale <= self.scale:
                self.scale *= spec.backoff
                self.finite_in_a_row = 0
        elif decision.scale == self.scale:
            self.finite_in_a_row += 1
            if self.finite_in_a_row == spec.interval:
                self.scale *= spec.growth
                self.finite_in_a_row = 0
