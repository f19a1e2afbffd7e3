"""Decisions of all stages about a batch: whether its update is made, and the factor on its gradient.

Every stage contributes a share, and makes the same decision from the sum of all shares, bit for bit. Gradients were
accumulated of S * loss sum / c, with a constant c and the loss scale S, so that the gradient of the mean loss is the
accumulated one times c / (N S), where N is the loss weight of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.checks import check_whole, is_number
from penstock.errors import ConfigError, VersionError
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.ir.version_rules import RULES

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


_NUMBERS = 8  # that losses and evaluations may return each, where stages tell each other
_NO_NUMBERS = (0.0,) * _NUMBERS


def packed_numbers(numbers: Mapping[str, float]) -> tuple[float, ...]:
    """Return numbers in the order of their names, and zeros behind them.

    Raises:
        ConfigError: there are too many.
    """
    if len(numbers) > _NUMBERS:
        raise ConfigError(f"the loss returns {len(numbers)} numbers; where stages decide together, at most {_NUMBERS}")
    return (*(float(numbers[name]) for name in sorted(numbers)), *_NO_NUMBERS[len(numbers) :])


class Share(NamedTuple):
    """The contribution of one stage to the decision on a batch; unknown values are zero.

    Attributes:
        squares: sum of the squares of its accumulated gradient; not finite if an element is not, or if they overflow.
        rest: rounding error of that sum.
        loss: sum over the batch, from the last stage.
        weight: N, from the last stage.
        scale: S, from the last stage.
        stop: 1 more than the batches after this one before an end that was requested; 0 without a request.
        evaluated, evaluated_weight: loss sum and weight of an evaluation, from the last stages.
        missing: of how many numbers `squares` is, taken from those that a stage trains, which its first holder adds; so
            zero over all stages, and a gradient that is left out of the norm is noticed.
        numbers, evaluated_numbers: beside the two losses (`packed_numbers`), from the last stages.
        size: of how many elements of each sample the loss is the mean, from the last stage; NaN in a sum of others.
    """

    squares: float = 0.0
    rest: float = 0.0
    loss: float = 0.0
    weight: float = 0.0
    scale: float = 0.0
    stop: float = 0.0
    evaluated: float = 0.0
    evaluated_weight: float = 0.0
    missing: float = 0.0
    numbers: tuple[float, ...] = _NO_NUMBERS
    evaluated_numbers: tuple[float, ...] = _NO_NUMBERS
    size: float = 0.0


@dataclass(frozen=True, repr=False)
class LossScale(ShortRepr):
    """What the loss is multiplied by before its backward, so that small gradients do not underflow in float16.

    The scale of a batch depends on the batches before it; under 2bw not on the last one, under 3bw not on the last two,
    whose updates are not decided yet when the batch begins. So a batch may still overflow under a scale that has been
    lowered since, and does not lower it again.

    Attributes:
        initial: the scale of the first batch.
        growth: the factor after `interval` batches in a row whose gradients were finite.
        backoff: the factor after a batch whose gradients were not.
        interval: None for a scale that never changes.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int | None = 2000

    def __post_init__(self) -> None:
        for name, lowest, highest, such in (
            ("initial", 0.0, math.inf, "a positive number"),
            ("growth", 1.0, math.inf, "a number of at least 1"),
            ("backoff", 0.0, 1.0, "a number above 0 and at most 1"),
        ):
            value = getattr(self, name)
            if not is_number(value) or not lowest <= value <= highest or value in (0, math.inf):
                raise ConfigError(f"loss scale: {name} must be {such}, got {value!r:.80}")
            object.__setattr__(self, name, float(value))  # numpy's numbers are no JSON, of which snapshots are made
        if self.interval is not None:
            check_whole("loss scale: interval", self.interval)


@dataclass(frozen=True)
class Policy:
    """Settings of the decision on a batch.

    Attributes:
        max_grad_norm: the largest global norm of a gradient of the mean loss; larger ones are scaled down to it.
        loss_scale: the loss scale; None to scale nothing.
    """

    max_grad_norm: float | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ConfigError(f"max_grad_norm must be a positive number, got {self.max_grad_norm}")


class Decision(NamedTuple):
    """What all stages have decided about the update of a batch.

    Attributes:
        batch: its number since the start of training.
        loss: the mean loss over the whole batch, of all parallel pipelines; NaN if its weight is zero, or if nobody
            asked.
        weight: N, what the loss sum of the whole batch is divided by.
        norm: the global norm of the gradient of the mean loss, before clipping; NaN if N is zero, or if nobody asked.
        scale: S, the loss scale under which its gradients were computed.
        finite: False if a gradient is infinite or NaN.
        factor: what its accumulated gradient is multiplied by; zero if the update is skipped.
        stop: whether the run ends after the batches announced by then.
        again: whether the update had been made otherwise before, and was undone (post-validation).
        numbers: what the loss has returned beside sum and weight, of the whole batch, on ranks of the last stage.
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
    numbers: Mapping[str, float] = MappingProxyType({})

    def __repr__(self) -> str:
        """Return the figures that somebody asked for; of the rest what is not as usual."""
        figures = [f"batch={self.batch}", f"loss={self.loss:.6g}", f"weight={self.weight:g}", f"norm={self.norm:.4g}"]
        if self.finite:  # so a figure is NaN only if nobody asked for it
            figures = [figure for figure in figures if not figure.endswith("=nan")]
        if self.scale != 1:
            figures.append(f"scale={self.scale:g}")
        figures += [name for name in ("skipped", "stop", "again") if getattr(self, name)]
        return f"Decision({', '.join(figures)})"

    @property
    def skipped(self) -> bool:
        """True if the update is skipped, so that the next version is a copy of this one."""
        return not self.factor


def add_shares(shares: Sequence[Share]) -> Share:
    """Sum all shares; squares and weights are added exactly, losses in the order of the shares."""
    return Share(
        math.fsum(part for share in shares for part in (share.squares, share.rest)),
        0.0,
        sum(share.loss for share in shares),
        math.fsum(share.weight for share in shares),
        max(share.scale for share in shares),
        min((share.stop for share in shares if share.stop), default=0.0),
        math.fsum(share.evaluated for share in shares),
        math.fsum(share.evaluated_weight for share in shares),
        math.fsum(share.missing for share in shares),
        tuple(map(math.fsum, zip(*(share.numbers for share in shares), strict=True))),
        tuple(map(math.fsum, zip(*(share.evaluated_numbers for share in shares), strict=True))),
        common_size([share.size for share in shares]),
    )


def common_size(sizes: Sequence[float]) -> float:
    """Return the number of elements of each sample that means have in common: 0 if unknown, NaN if they differ."""
    known = [size for size in sizes if size]
    return math.nan if any(not math.isclose(size, known[0]) for size in known) else sum(known[:1])


def check_size(batch: int, size: float) -> None:
    """Refuse means over unlike numbers of elements of each sample, which have no common weight (`common_size`).

    Raises:
        ConfigError: they were found to differ.
    """
    if math.isnan(size):
        raise ConfigError(
            f"batch {batch}: samples of some microbatches have other shapes than those of others, such as sequences "
            "of unlike lengths, and the loss is a mean over them, so how much each one counts is unknown; let the loss "
            "return the sum over the elements, and their number: (sum, weight)"
        )


def add_shares_alone(shares: Sequence[Share]) -> Share:
    """Sum the shares of one pipeline without its siblings, so that the norm lacks what these own."""
    return add_shares(shares)._replace(missing=0.0)


def decide(batch: int, total: Share, divisor: float, clip: float | None) -> Decision:
    """Decide on a batch from the sum of all shares.

    Args:
        batch: its number.
        total: the sum of all shares.
        divisor: c.
        clip: the largest norm, if any.

    Raises:
        VersionError: the norm is not that of the whole gradient.
        ConfigError: the means of parallel pipelines are over unlike numbers of elements.
    """
    check_size(batch, total.size)
    squares, _, loss, weight, scale, stop, *_ = total
    if total.missing:
        fault = f"without {total.missing:,.0f} of its" if total.missing > 0 else f"with {-total.missing:,.0f} more"
        raise VersionError(
            f"batch {batch}: the norm of the gradient is {fault} numbers, as a holder of sharded weights, or of shared "
            "parameters, has handed in others than its own; please report this"
        )
    finite = math.isfinite(squares)
    if not weight:
        return Decision(batch, math.nan, weight, math.nan, scale, finite, 0.0, stop == 1)
    mean = divisor / (weight * scale)
    norm = math.sqrt(squares) * mean
    factor = mean if finite else 0.0
    if clip is not None and finite:
        factor *= min(1.0, clip / (norm + _EPSILON))
    return Decision(batch, loss / weight, weight, norm, scale, finite, factor, stop == 1)


class Scaler:
    """The loss scale over the course of a run.

    Args:
        spec: its settings; None for a constant scale of one.

    Attributes:
        scale: the scale after all decisions so far.
        finite_in_a_row: consecutive finite batches under it.
    """

    def __init__(self, spec: LossScale | None) -> None:
        self._spec = spec
        self.scale = 1.0 if spec is None else spec.initial
        self._earlier = [self.scale] * max(rule.delay for rule in RULES.values())  # before the last decisions
        self.finite_in_a_row = 0

    @property
    def scales(self) -> bool:
        """True if losses are scaled."""
        return self._spec is not None

    def before(self, decisions: int) -> float:
        """Return the scale before the last few decisions, at most as many as a version rule delays."""
        return self._earlier[decisions - 1] if decisions > 0 else self.scale

    def state(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {"scale": self.scale, "before": self._earlier, "finite_in_a_row": self.finite_in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.scale, self.finite_in_a_row = state["scale"], int(state["finite_in_a_row"])
        self._earlier = list(state["before"])

    def learn(self, decision: Decision) -> None:
        """Adapt the scale to a decision; decisions come in the order of their batches."""
        spec = self._spec
        self._earlier = [self.scale, *self._earlier[:-1]]
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
