"""Faults to plant in the pipeline's side of a verification; each leaves the reference and plain torch as they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from penstock.comm.collective import all_reduce
from penstock.runtime.data.batch_source import BatchSource
from penstock.runtime.update import decisions
from penstock.runtime.update.update_step import Updates
from penstock.stage.autograd.recompute import RecomputeInputSaver
from penstock.stage.stage_passes import StagePasses
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.train.prepare import build_pipeline, phase_schedules
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.memory.squared_norm import Squares, squared_norm
from penstock.weights.mixed_store import MixedStore
from penstock.weights.store import VersionStore
from penstock.weights.updates.rates import Rates
from penstock.weights.updates.updater import Updater

Patch = pytest.MonkeyPatch


def older_versions(patch: Patch) -> None:
    """Passes read the version before the one that the rule names, where it is alive."""
    real = VersionStore.read
    patch.setattr(VersionStore, "read", lambda self, v: real(self, v - 1 if v - 1 in self.versions else v))


def older_copies(patch: Patch) -> None:
    """Passes read a copy of the version before the one that the rule names, which no safety net watches over."""
    copies: dict[tuple[int, int], Buffer] = {}

    def read(self: VersionStore, v: int) -> Handle:
        if (id(self), v) not in copies:
            copies[id(self), v] = Buffer(self.layout, f"copy of version {v}")
            copies[id(self), v].load(self.versions[v].views)
        older = copies.get((id(self), v - 1), copies[id(self), v])
        if older.gradient not in self.gradients.values():  # that of a batch before, whose buffer may serve again
            older.gradient = None
        return Handle(older, older.epoch, v)

    patch.setattr(VersionStore, "read", read)


def newest_in_recompute(patch: Patch) -> None:
    """Forwards are run again on the newest weights."""
    real = StagePasses.recompute

    def recompute(self: StagePasses, key: tuple[int, int], version: int, value: Any = None) -> Any:
        weights = self.weights
        return real(self, key, weights.store.newest if isinstance(weights, TrainedWeights) else version, value)

    patch.setattr(StagePasses, "recompute", recompute)


def another_rule(name: str) -> Any:
    """The schedule is that of another method: legal in itself, but its versions are not those of this one."""

    def plant(patch: Patch) -> None:
        real = phase_schedules.ScheduleRequest
        patch.setattr(phase_schedules, "ScheduleRequest", lambda _, *numbers, **more: real(name, *numbers, **more))

    return plant


def stale_casts(patch: Patch) -> None:
    """In low precision, new versions hold what the ones before held."""
    real = MixedStore.update

    def update(self: MixedStore, batch: int, *arguments: Any) -> None:
        before = {name: view.clone() for name, view in self.versions[batch].views.items()}
        real(self, batch, *arguments)
        self.versions[batch + 1].load(before)

    patch.setattr(MixedStore, "update", update)


def dropped_microbatch(patch: Patch) -> None:
    """The gradient of microbatch 1 is not added on stage 0."""
    real = StagePasses.backward

    def backward(self: StagePasses, key: tuple[int, int], batch: int, *more: Any, **named: Any) -> Any:
        if key != (1, 0) or not self.module.where.startswith(("stage 0 ", "stage 0.")):
            return real(self, key, batch, *more, **named)
        before = {name: view.clone() for name, view in self.weights.store.gradients[batch].views.items()}
        result = real(self, key, batch, *more, **named)
        for name, view in self.weights.store.gradients[batch].views.items():
            view.copy_(before[name])
        return result

    patch.setattr(StagePasses, "backward", backward)


def doubled_norm_share(patch: Patch) -> None:
    """The squares of stage 1 count twice."""
    real = TrainedWeights.gradient_squares

    def squares(self: TrainedWeights, batch: int) -> Squares:
        found = real(self, batch)
        twice = found._replace(total=2 * found.total, rest=2 * found.rest)
        return twice if self.store.where.startswith("stage 1 ") else found

    patch.setattr(TrainedWeights, "gradient_squares", squares)


def ties_count_twice(patch: Patch) -> None:
    """The squares of a shared parameter count in the norm with every stage that holds it."""

    def squares(self: TrainedWeights, batch: int) -> Squares:
        return squared_norm(self.store.gradient(batch).views.values())._replace(elements=self.counted)

    patch.setattr(TrainedWeights, "gradient_squares", squares)


def no_ties(patch: Patch) -> None:
    """Every copy of a shared parameter gets the gradient of its own stage only."""
    patch.setattr(Updates, "tie", lambda *_: None)


def changed_decisions(**changes: Any) -> Any:
    """The decision comes of something else."""

    def plant(patch: Patch) -> None:
        real = decisions.decide
        m = changes.get("m", 1)

        def decide(batch: int, total: Any, divisor: float, clip: float | None) -> Any:
            decision = real(batch, total, divisor, changes.get("clip", clip))
            return decision._replace(factor=decision.factor * m)

        patch.setattr(decisions, "decide", decide)

    return plant


def next_rate(patch: Patch) -> None:
    """The learning rate is that of the next update."""
    real = Rates.put
    patch.setattr(Rates, "put", lambda self, update: real(self, update + 1))


def swapped(places: Mapping[int, int]) -> Any:
    """Microbatches change places."""

    def plant(patch: Patch) -> None:
        real = BatchSource.sample
        patch.setattr(BatchSource, "sample", lambda self, pipeline, k: real(self, pipeline, places.get(k, k)))

    return plant


def no_reduction(patch: Patch) -> None:
    """Parallel pipelines keep their own gradients."""
    patch.setattr(all_reduce, "_add", lambda tensors: None)


def sum_for_the_first_only(patch: Patch) -> None:
    """The first pipeline gets the sum of all gradients, the others keep their own."""

    def add(tensors: Any) -> None:
        for total, *others in zip(*tensors, strict=True):
            for other in others:
                total.add_(other)

    patch.setattr(all_reduce, "_add", add)


def overflows_ignored(patch: Patch) -> None:
    """Gradients that are not finite are stepped with."""
    real = decisions.decide

    def decide(batch: int, total: Any, divisor: float, clip: float | None) -> Any:
        decision = real(batch, total, divisor, clip)
        return decision if decision.finite else decision._replace(factor=divisor / (decision.weight * decision.scale))

    patch.setattr(decisions, "decide", decide)


def forgetful_optimizer(patch: Patch) -> None:
    """After update 3 the first moments are gone."""
    real = Updater._updated

    def updated(self: Updater) -> None:
        if self.updates == 3 and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        real(self)

    patch.setattr(Updater, "_updated", updated)


def older_state_dict(patch: Patch) -> None:
    """What is saved is the version before the newest."""
    patch.setattr(VersionStore, "newest_tensors", lambda self: dict(self.versions[min(self.versions)].views))


def wrong_loss(patch: Patch) -> None:
    """The loss that is reported is too large, with the right gradients."""
    real = build_pipeline.pipeline_of

    def pipeline_of(plan: Any, blocks: Any, loss: Any, *rest: Any) -> Any:
        return real(plan, blocks, lambda *pair: (loss(*pair)[0] + 1e-3, loss(*pair)[1]), *rest)

    patch.setattr(build_pipeline, "pipeline_of", pipeline_of)


def buffers_changed_twice(patch: Patch) -> None:
    """A forward that is run again changes buffers again."""
    patch.setattr(RecomputeInputSaver, "as_in_forward", lambda *_: nullcontext())


def never_rejected(patch: Patch) -> None:
    """An update that was made before the decision stays, whatever is decided."""
    patch.setattr(decisions.Decisions, "validate", lambda self, batch, total: self.settle(batch, 0.0, total))


def undone_by_half(patch: Patch) -> None:
    """An update that is made again starts from what the optimizer remembers after the first attempt."""
    patch.setattr(Updater, "go_back", lambda self, updates, _: self._tell() if self.updates != updates else None)
