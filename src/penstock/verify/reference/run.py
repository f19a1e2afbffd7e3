"""Trains the reference: batch after batch, microbatch after microbatch, then the update of all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapabilityError, DataError
from penstock.verify.reference.decisions import Scale, Scaling, equal_copies, factor_and_norm, tie_gradients
from penstock.verify.reference.delays import check_early, version_read
from penstock.verify.reference.method_to_stage import ReferencePlace, correct
from penstock.verify.reference.order_delays import USUAL, ReferenceOrder
from penstock.verify.reference.passes import Loss, draw_for, run_microbatch
from penstock.verify.reference.recompute import recompute_units, run_again
from penstock.verify.reference.stage import Block, Factory, ReferenceStage
from penstock.verify.reference.supported_methods import UPDATES_LATE, method_options

Equations = Callable[..., Callable[[int], float] | None]
"""(stage, place, **options): sets how a stage reads and steps; may return the factor on its rate."""


@dataclass
class Reference:
    """The numbers of a run.

    Attributes:
        losses: per batch, the sum of the losses over the sum of the weights; nan for a batch of weight 0.
        weights: per batch, N, the sum of the weights that the loss returned.
        versions: per version (one more than batches), the trainable parameters by canonical name.
        gradients: per batch, the gradient given to the optimizer, by canonical name; empty where the update was
            skipped.
        norms: per batch, the norm of grad f_t before clipping; only where a decision depends on it.
        scales: per batch, S_t.
        optimizers: per stage, the state of its optimizer at the end; empty for a stage without trainable parameters.
        buffers: the persistent buffers of all modules at the end, by canonical name.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    versions: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def train_reference(
    stages: Sequence[Mapping[str, Block]],
    loss: Loss,
    batches: Iterable[Sequence[tuple[Any, Any]]],
    *,
    method: str,
    optimizer: Factory,
    rate: Callable[[int], float] = lambda _: 1.0,
    divisor: float | None = None,
    drains: Collection[int] = (),
    clip: float | None = None,
    scaling: Scaling | None = None,
    seed: int | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    precision: torch.dtype | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    order: ReferenceOrder = USUAL,
    boundary: torch.dtype | None = None,
    equations: Equations | None = None,
) -> Reference:
    """Train a copy of a model by the equations of a method.

    Args:
        stages: per stage its blocks by name, applied in a row; parameters are called `block.name`, by the first one.
        loss: (last stage's output, target) -> sum and weight over a microbatch, or a sum of weight 1.
        batches: the microbatches of each batch, equally many in all batches.
        method: one of `METHODS`.
        optimizer: makes the optimizer of a stage from its named parameters.
        rate: number of updates made before -> factor on the initial learning rates. Methods that predict weights ask
            for the rates of the next updates as soon as one is made, also after the last.
        divisor: the constant c that the loss is divided by before its backward; m if None.
        drains: batches before which the pipeline was drained, so that stash starts again without delay.
        clip: the largest norm of a gradient.
        scaling: of the loss.
        seed: of the random numbers of blocks; torch's generators are left alone if None.
        parts: the microbatches of each parallel pipeline (or of each direction of one); each part sums its gradients
            in the order given, and the sums are added in the order of the parts. One part with all of them if None.
        precision, boundary: of passes, which read weights cast to it; of gradients between stages. None: as they are.
        tied: name of a parameter -> name of the parameter, on an earlier stage, that it shares its value with.
        options: of the method (`methods.OPTIONS`): reschedule (K of T1 in updates, 0 for no T1) and decay (D of T2,
            None for no T2); bias ("paper" or "adam": XPipe's corrections); beta of i-timeprest.
        order: of the passes, where it is not the method's own.
        equations: of a method of a user's own (`penstock.Method.reference`), which takes `options`; its forwards read
            the versions that those of `method` do.

    Raises:
        ConfigError: unknown method or option; tied parameters, whose stages the method updates differently; an order
            that does not fit.
        CapabilityError: the method does not support this optimizer, or several microbatches.
        DataError: batches have different numbers of microbatches.
    """
    chosen = method_options(method, options) if equations is None else options
    built = [ReferenceStage(blocks, optimizer) for blocks in stages]
    equal_copies(built, tied)
    for stage in built:
        stage.cast_frozen(precision)
    rest = Scale(scaling), seed, parts, tied, precision, order, boundary, equations
    run = Run(built, loss, method, chosen, rate, divisor, drains, clip, *rest)
    for t, batch in enumerate(batches):
        run.train(t, batch)
    return with_end(run.result, built)


@dataclass
class Run:
    """The state of a run; the attributes are the arguments of `train_reference`."""

    stages: list[ReferenceStage]
    loss: Loss
    method: str
    options: Mapping[str, Any]
    rate: Callable[[int], float]
    divisor: float | None
    drains: Collection[int]
    clip: float | None
    scale: Scale
    seed: int | None
    parts: Sequence[Sequence[int]] | None
    tied: Mapping[str, str]
    precision: torch.dtype | None
    order: ReferenceOrder
    boundary: torch.dtype | None = None
    equations: Equations | None = None
    result: Reference = field(default_factory=Reference)
    size: int = 0  # microbatches of a batch
    m: int = 0  # microbatches of one pipeline
    first: int = 0  # batch that the span starts with
    updates: int = 0

    def train(self, t: int, batch: Sequence[tuple[Any, Any]]) -> None:
        """Train on batch t."""
        self.first = t if t in self.drains else self.first
        self.size = self.size or self.begin(len(batch))
        if not batch or len(batch) != self.size:
            raise DataError(f"batch {t} has {len(batch)} microbatches, batch 0 has {self.size}: make them equal")
        c = float(self.size if self.divisor is None else self.divisor)
        s = self.scale.at(known=max(t - UPDATES_LATE.get(self.method, 0), 0))
        total, weight = self.accumulate(t, batch, c, s)
        for stage in self.stages:
            stage.add_parts()
        tie_gradients(self.stages, self.tied)
        votes = self.scale.scaling is not None or (self.parts is not None and len(self.parts) > 1)
        factor, norm = factor_and_norm(self.stages, c, weight, s, self.clip, votes, self.tied)
        self.scale.votes.append(not factor if weight else None)
        result = self.result
        result.gradients.append(self.update(t, factor))
        result.norms.append(norm)
        result.scales.append(s)
        result.losses.append(total / weight if weight else math.nan)
        result.weights.append(weight)

    def begin(self, size: int) -> int:
        """Set up everything that depends on the number of microbatches, such as delays; return it."""
        self.m = len(self.parts[0]) if self.parts else size
        self.order.check(self.method, len(self.stages), self.m)
        check_early(self.method, self.order, len(self.stages), self.m)
        for s, stage in enumerate(self.stages):
            place = ReferencePlace(s, len(self.stages), self.m, self.order.of_stage(s))
            if self.equations is not None:
                momentary = self.equations(stage, place, **self.options) or (lambda _: 1.0)
            else:
                momentary = correct(stage, place, self.method, self.options, bool(self.tied))
            stage.rate = partial(self.rate_of, momentary)
            stage.reading.on_version(stage)
            if self.order.recompute is not None and not stage.reading.repeats:
                raise CapabilityError(
                    f"{self.method}: it is undefined which weights a recomputed forward reads if its backward reads "
                    "other ones: leave recompute out"
                )
        return size

    def rate_of(self, momentary: Callable[[int], float], initial: float, ahead: int = 0) -> float:
        """Return the rate of a stage in the next update, or `ahead` updates later: that of the schedule, corrected."""
        return initial * self.rate(self.updates + ahead) * momentary(self.updates + ahead)

    def accumulate(self, t: int, batch: Sequence[tuple[Any, Any]], c: float, s: float) -> tuple[float, float]:
        """Accumulate the gradients of batch t, times s / c; return the sums of its losses and of their weights."""
        results = []
        for number, part in enumerate(self.parts or [range(self.size)]):
            for place, k in enumerate(part):
                results.append(self.microbatch(t, number, place, k, batch[k], c, s))
                for stage in self.stages:
                    stage.reading.after_microbatch(stage, t, number, s)
            for stage in self.stages:
                stage.end_part()
        total, weight = (sum(numbers) for numbers in zip(*results, strict=True))
        return total, weight

    def microbatch(
        self, t: int, part: int, place: int, k: int, sample: tuple[Any, Any], c: float, s: float
    ) -> tuple[float, float]:
        """Run microbatch k of batch t, which is number `place` of its part; return its loss and weight."""
        m, d = len(self.parts[part]) if self.parts else self.size, len(self.stages)
        versions = [self.version(t, place, m, i) for i in range(d)]
        for stage in self.stages:
            stage.reading.before_microbatch(t, part, (t - self.first) * m + place, c, self.result.weights)
        reads = [n.reading.read(n, v) for n, v in zip(self.stages, versions, strict=True)]
        draw = partial(draw_for, self.seed, t, k)
        rest = draw, self.loss, c, s, self.precision, self.boundary
        how = self.order.recompute
        if how is not None:
            moments = [self.order.moment(t, i, place, v) for i, v in enumerate(versions)]
            again = [n.reading.again(n, *vs) for n, *vs in zip(self.stages, versions, moments, strict=True)]
            others = [w for w in again if w is not None]
            if others:
                pieces = recompute_units(self.stages, how, self.order.sizes(len(self.stages)))
                return run_again(self.stages, sample, reads, others, pieces, *rest)
        return run_microbatch(self.stages, sample, reads, *rest)

    def version(self, t: int, k: int, m: int, s: int) -> int:
        """Return the version that stage s reads, or predicts from, for microbatch k of batch t."""
        return version_read(self.method, t, k, m, s, len(self.stages), self.first, self.order.delays)

    def update(self, t: int, factor: float) -> dict[str, Tensor]:
        """Step every stage, or copy the weights if the update is skipped; return the optimizers' gradients."""
        given: dict[str, Tensor] = {}
        for s, stage in enumerate(self.stages):
            if factor:
                given |= stage.update(factor, self.version(t, 0, self.m, s))
            stage.add_version(made=bool(factor))
        self.updates += bool(factor)  # a skipped update does not advance the learning rate
        for stage in self.stages:
            stage.reading.on_version(stage)
        return given


def with_end(result: Reference, stages: list[ReferenceStage]) -> Reference:
    """Add the values at the end of the run."""
    versions = zip(*(stage.versions for stage in stages), strict=True)
    result.versions = [{name: w for stage in parts for name, w in stage.items()} for parts in versions]
    result.optimizers = [stage.optimizer.state_dict() if stage.optimizer else {} for stage in stages]
    modules = {name: module for stage in stages for name, module in stage.modules.items()}
    for name, module in modules.items():
        saved = module.state_dict().keys()
        result.buffers |= {f"{name}.{own}": b for own, b in module.named_buffers() if own in saved}
    return result
