"""One rank of one pipeline: its stages, its record, its part in decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch

from penstock.comm.core.rank_grid import RankKey
from penstock.comm.core.recorder import Recorder
from penstock.comm.p2p.routing import ways_of
from penstock.errors import ConfigError
from penstock.partition.block_delays import BlockDelays
from penstock.partition.blocks import LazyBlock
from penstock.partition.sequence_slices import Slicing, check_blocks
from penstock.partition.tied import Tie, share_inside
from penstock.runtime.rank.snapshot import Snapshot
from penstock.runtime.update.decisions import Decisions
from penstock.runtime.update.divergence import Divergence
from penstock.runtime.update.stop_request import StopRequest
from penstock.schedule.ir.rules import RULES, Source, Update, VersionRule
from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.methods.combine import REDUCE, Combine
from penstock.schedule.proof.check import Proof
from penstock.schedule.proof.in_flight import Piece
from penstock.stage.autograd.recompute import Recompute, parts_to_recompute
from penstock.stage.graphs import Graphs
from penstock.stage.module import LossFunction, StageModule
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.weight_reads import OfForward, Reading
from penstock.stage.weight_reads_delayed import Rereading, check_real_delays
from penstock.stage.weight_reads_newest import Estimating, Rebinding, check_real
from penstock.weights.averaging import Agreement
from penstock.weights.corrections.base import Correction, Corrector, StagePlace
from penstock.weights.decision import Policy
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.older_versions import OlderVersions
from penstock.weights.mixed_store import MixedStore
from penstock.weights.optim.updater import OptimizerFactory, Updater
from penstock.weights.store import VersionStore
from penstock.weights.waves import WaveWeights


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, the same on every rank (see `penstock.runtime.pipeline.Pipeline`)."""

    loss: LossFunction | Mapping[int, LossFunction]
    optimizer: OptimizerFactory
    rate: Callable[[int], float] | None
    divisor: float
    policy: Policy
    recompute: Recompute
    seed: int
    precision: torch.dtype | None
    average: float | None
    slicing: Slicing
    correction: Correction | None
    delays: BlockDelays
    divergence: Divergence | None = None
    combine: Combine = REDUCE
    width: int = 1
    backward_delays: BlockDelays | None = None

    def __post_init__(self) -> None:
        """Make sure that the average can be kept."""
        if self.average is not None and not 0 < self.average < 1:
            raise ConfigError(f"average must be a decay between 0 and 1, such as 0.999; got {self.average}")
        if self.average is not None and self.combine.apart:
            raise ConfigError(
                f"average={self.average} and combine={self.combine.kind} do not go together: each pipeline would "
                "average weights of its own; leave one of them out"
            )


class RankState:
    """What one rank of the grid has.

    Args:
        key: which.
        proof: of the schedule.
        blocks: those of each of its stages, by name; lazy ones are made here.
        ties: what stages share.
        inside: what blocks of one stage share (name of a parameter -> name of the one that it is the same as).
        recipe: how it is trained.
        recorder: takes down what happens.
        stop: the request to end a run, shared by all ranks of this process.
    """

    def __init__(
        self,
        key: RankKey,
        proof: Proof,
        blocks: Mapping[Stage, Mapping[str, Any]],
        ties: Sequence[Tie],
        inside: Mapping[str, str],
        recipe: Recipe,
        recorder: Recorder,
        stop: StopRequest,
    ) -> None:
        self.key, self.recorder, self.slicing, self.stop = key, recorder, recipe.slicing, stop
        self.snapshots: list[ref[Snapshot]] = []  # that somebody may still have
        self._proof, self._recipe, self._ties, self._inside = proof, recipe, ties, inside
        delay = RULES[proof.schedule.rule].bases - 1
        self.decisions = Decisions(
            recipe.policy, recipe.divisor, delay, recipe.divergence, recipe.combine, key.pipeline, stop
        )
        self.stages = {
            stage: self._make_stage(stage, {name: _made(block) for name, block in blocks[stage].items()})
            for stage in proof.schedule.on_rank(key.rank)
        }
        fixed = sum(tensor.nbytes for stage in self.stages.values() for tensor in stage.module.fixed)
        recorder.hold("frozen parameters and buffers", fixed)

    def _make_stage(self, stage: Stage, blocks: dict[str, Any]) -> StageRuntime:
        recipe, schedule = self._recipe, self._proof.schedule
        share_inside(blocks, self._inside)
        where = f"stage {stage.name} on rank {stage.rank}"
        ways = ways_of(schedule, stage)
        if schedule.slices > 1:
            check_blocks(blocks, where)
        for delays in (recipe.delays, recipe.backward_delays):
            if delays is not None:
                delays.check_trained(blocks)
        loss = self._loss_of(stage) if ways.has_loss else None
        module = StageModule(blocks, loss, where, recipe.seed, recipe.precision, bool(ways.outputs))
        if module.trained and stage.index in schedule.frozen:
            raise ConfigError(
                f"{where} is frozen in the schedule, but {next(iter(module.trained))} wants gradients; set "
                "requires_grad=False on its parameters"
            )
        store: VersionStore | None = None
        corrector: Corrector | None = None
        updater, facts, low, rule = None, self._proof.stages[stage], recipe.precision, RULES[schedule.rule]
        apart = rule.update is Update.APART
        if module.trained:
            check_real(rule, module.trained, where)
            if low is None:
                store = VersionStore(module.trained, facts.buffers, where, facts.copies)
            else:
                store = MixedStore(module.trained, facts.versions, facts.gradients, low, where, apart, facts.copies)
            corrector = self._make_corrector(stage, store, recipe.correction)
            self._hold_estimate(stage, store, corrector)
            rotates, begin = self._rotates(stage, corrector), None if corrector is None else corrector.begin
            updater = Updater(
                recipe.optimizer, store.layout, store.master, rotates, _rate(recipe.rate, corrector), begin
            )
            if rule.provisional and not apart:
                updater.check_undoable()
        ties = [tie for tie in self._ties if stage.index in tie.stages]
        average = None
        if recipe.average is not None and store is not None:
            average = Buffer(store.layout, f"average of {where}")
            average.load(store.master.views)
        decay = recipe.average or 0.0
        older = None if store is None else _older_versions(module, store, recipe.delays, recipe.backward_delays)
        reading = Reading()
        if older is not None and recipe.backward_delays is not None:
            check_real_delays(module.trained, where)
        if store is not None and updater is not None:
            reading = _reading(rule, store, updater, corrector, older, recipe.backward_delays)
        graphs = self._make_graphs(stage, module, store, reading, older)
        place = self.key.pipeline * schedule.directions + stage.direction
        runtime = StageRuntime(stage, module, store, updater, reading, graphs, ties, average, decay, place, apart=apart)
        runtime.corrector, runtime.older = corrector, older
        if recipe.combine.apart and store is not None and updater is not None:
            common = recipe.combine, recipe.width, self.key.pipeline, store
            waves = recipe.combine.kind == "wsp"
            runtime.agreement = WaveWeights(*common, stage.name) if waves else Agreement(*common, updater)
        runtime.restore()  # from here on the modules' parameters live in the store's memory, not beside it
        return runtime

    def _make_graphs(
        self,
        stage: Stage,
        module: StageModule,
        store: VersionStore | None,
        reading: Reading,
        older: OlderVersions | None = None,
    ) -> Graphs:
        recipe, schedule = self._recipe, self._proof.schedule
        parts = parts_to_recompute(list(module.blocks), recipe.recompute, stage.index in schedule.recomputed)
        hold = partial(self.recorder.change, "activations")
        ops = {p.op for a in schedule.programs[stage.rank].period for p in passes(a) if p.stage == stage}
        storages = set() if store is None else store.storages | (set() if older is None else older.storages)
        halved, parks = _halved(schedule, stage, any(ways_of(schedule, stage).returns)), Op.OFFLOAD in ops
        keeps = schedule.segment_before(stage.index) is None
        return Graphs(module, storages, recipe.divisor, parts, halved, parks, hold, reading, keeps)

    def _hold_estimate(self, stage: Stage, store: VersionStore, corrector: Corrector | None) -> None:
        """Room for estimates, where they are not made tensor by tensor: of what is read to run forwards, or is cast."""
        recipe, again = self._recipe, stage.index in self._proof.schedule.recomputed
        whole = recipe.precision is not None or recipe.recompute == "block" or again
        store.hold_estimate(whole and corrector is not None and corrector.motion is not None)

    def _make_corrector(self, stage: Stage, store: VersionStore, correction: Correction | None) -> Corrector | None:
        if correction is None:
            return None
        corrector = correction.on(store.layout, _place(self._proof, stage))
        corrector.name = correction.name
        return corrector

    def _rotates(self, stage: Stage, corrector: Corrector | None) -> bool:
        """Whether updates take a scratch: to write the new version beside the old one, or to tell how weights move."""
        apart = RULES[self._proof.schedule.rule].update is Update.APART
        watches = corrector is not None and corrector.watches
        return apart or watches or (self._recipe.precision is None and self._proof.stages[stage].versions > 1)

    def check_switch(self, proof: Proof, correction: Correction | None) -> None:
        """Make sure that `switch` will do.

        Raises:
            CapabilityError: an optimizer cannot take back what the schedule may have it take back, or does not go with
                the correction.
        """
        rule = RULES[proof.schedule.rule]
        for place, stage in self.stages.items():
            if stage.updater is None or stage.updater.optimizer is None:
                continue
            if rule.provisional and rule.update is not Update.APART:
                stage.updater.check_undoable()
            if correction is not None:
                correction.on(Layout({}), _place(proof, place)).check(stage.updater.optimizer)
            check_real(rule, stage.module.trained, stage.module.where)

    def switch(self, proof: Proof, keeps_older: bool, correction: Correction | None) -> None:
        """Go on under another schedule with the same stages, with nothing in flight.

        Buffers that it does not take are freed, those that it takes besides are made; what optimizers remember stays
        where it is.

        Args:
            proof: of the schedule.
            keeps_older: the version before the newest stays as well, where there is one.
            correction: of the method; it begins without knowing how weights move.
        """
        self._proof, rule = proof, RULES[proof.schedule.rule]
        self.decisions.delay = rule.bases - 1
        for place, stage in self.stages.items():
            stage.apart = rule.update is Update.APART
            stage.corrector = None
            if stage.store is not None and stage.updater is not None:
                newest = stage.store.newest
                stage.updater.follow(stage.store.master)
                stage.store.resize(proof.stages[place], {newest, newest - 1} if keeps_older else {newest})
                if isinstance(stage.store, MixedStore):
                    stage.store.step_apart(stage.apart)
                corrector = stage.corrector = self._make_corrector(place, stage.store, correction)
                self._hold_estimate(place, stage.store, corrector)
                if corrector is not None:
                    corrector.began = stage.updater.updates
                rate = _rate(self._recipe.rate, corrector)
                stage.updater.correct(rate, None if corrector is None else corrector.begin)
                stage.updater.prepare(stage.store.layout, self._rotates(place, corrector))
                stage.reading = _reading(rule, stage.store, stage.updater, corrector)
            stage.graphs = self._make_graphs(place, stage.module, stage.store, stage.reading)
            stage.restore()

    def _loss_of(self, stage: Stage) -> LossFunction:
        given = self._recipe.loss
        if not isinstance(given, Mapping):
            return given
        if stage.index not in given:
            raise ConfigError(
                f"loss: stage {stage.index} has a loss of its own, but the dict has one only for {list(given)}"
            )
        return given[stage.index]

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here, whose loss is reported."""
        return any(stage.index == self._proof.schedule.num_stages - 1 for stage in self.stages)

    @contextmanager
    def evaluating(self, averaged: bool = False, version: int | None = None) -> Iterator[None]:
        """Meanwhile evaluations read a version of the weights, the newest if None, or with `averaged` their average.

        Where parallel pipelines have a model in common, beside their own weights, they read that.
        """
        stages = list(self.stages.values())
        for stage in stages:
            stage.averaged, stage.evaluated = stage.evaluated_leaves(averaged), version
        try:
            yield
        finally:
            for stage in stages:
                stage.averaged = stage.evaluated = None


def _place(proof: Proof, stage: Stage) -> StagePlace:
    schedule, where = proof.schedule, f"stage {stage.name} on rank {stage.rank}"
    return StagePlace(stage.index, schedule.num_stages, schedule.microbatches, proof.stages[stage].delay.forward, where)


def _reading(
    rule: VersionRule,
    store: VersionStore,
    updater: Updater,
    corrector: Corrector | None,
    older: OlderVersions | None = None,
    backward_delays: BlockDelays | None = None,
) -> Reading:
    """How the passes of a stage find their weights."""
    if rule.rebinds:
        kind = Estimating if store.estimates else Rebinding
        return kind(store, corrector, rule.recompute is Source.NEWEST)
    if older is not None and backward_delays is not None:
        return Rereading(store, updater, older)
    return OfForward(store, updater, corrector, older)


def _rate(base: Callable[[int], float] | None, corrector: Corrector | None) -> Callable[[int], float] | None:
    """Rates as the user wants them, times those of a correction."""
    if corrector is None:
        return base
    return lambda updates: (1.0 if base is None else base(updates)) * corrector.rate(max(updates - corrector.began, 0))


def _halved(schedule: Schedule, stage: Stage, sends: bool) -> Callable[[Piece], bool]:
    """Of which microbatches (and slices) a stage runs the backward in two halves.

    Not where the second half follows at once, and the first one finds nothing to send (`sends` is false): one walk
    through the activations is shorter than two.
    """
    m, actions = schedule.microbatches, [p for a in schedule.programs[stage.rank].period for p in passes(a)]
    pairs = zip([None, *actions], actions, strict=False)
    units = [
        late.unit
        for early, late in pairs
        if late.stage == stage
        and late.op is Op.W
        and (sends or early is None or (early.op, early.stage, early.unit) != (Op.I, stage, late.unit))
    ]
    halved = {(k % m, unit.slice[0] if unit.slice else 0) for unit in units for k in unit.microbatches}
    return lambda key: (key[0] % m, key[1]) in halved


def _older_versions(
    module: StageModule, store: VersionStore, delays: BlockDelays, backward: BlockDelays | None
) -> OlderVersions | None:
    """Room for the versions that passes of a stage read late; None where they read none."""
    forward, late = (None if d is None else d.by_parameter(module.trained) for d in (delays, backward))
    assert forward is not None
    if not any((*forward.values(), *(late or {}).values())):
        return None
    return OlderVersions(store.versions[store.newest].views, forward, module.where, late)


def _made(block: Any) -> Any:
    return block.make() if isinstance(block, LazyBlock) else block
