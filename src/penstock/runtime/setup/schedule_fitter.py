"""Fits stages to a schedule: the buffers of their weights, how their passes read these, and the graphs of forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.stage_routes import neighbors_of
from penstock.errors import CapabilityError
from penstock.partition.emulated_delays import BlockDelays
from penstock.partition.tied import Tie
from penstock.runtime.plan.plan import PipelinePlan
from penstock.schedule.add_options import halved_units
from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Source, Update, VersionRule
from penstock.schedule.proof.proof import Proof
from penstock.schedule.proof.unsharded_peaks import sums_wait
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.autograd.recompute import parts_to_recompute
from penstock.stage.autograd_graphs import StageGraphs
from penstock.stage.blocks.module import StageModule
from penstock.stage.cuda_graphs.pass_capturer import PassCapturer
from penstock.stage.cuda_graphs.recorder import recorder_on
from penstock.stage.graph_builder import GraphBuilder
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_passes import StagePasses
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.stage.weight_reads import (
    DelayedWeightReads,
    EstimatedWeightReads,
    ForwardWeightReads,
    NewestWeightReads,
    WeightReads,
    check_real,
)
from penstock.weights.corrections.base import Correction, Corrector, StagePlace
from penstock.weights.fully_sharded.full_precision_versions import ExactShardsOfVersions
from penstock.weights.fully_sharded.mixed_versions import MixedShardsOfVersions
from penstock.weights.fully_sharded.one_version import FullyShardedExactStore, FullyShardedMixedStore
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.mixed_store import MixedStore
from penstock.weights.optim.optimizer_adapters import takes_rows
from penstock.weights.optim.step_hooks import HOOKS_ON_ROWS, hooks_take_rows
from penstock.weights.sharded_mixed_store import ShardedMixedStore
from penstock.weights.sharded_store import ShardedStore
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater


class ScheduleFitter:
    """Fits the stages of one rank to one schedule.

    Args:
        plan: of the pipeline, whose options hold for every schedule.
        proof: of the schedule.
        correction: of its method.
        recorder: is told of activations as they come and go.
    """

    def __init__(self, plan: PipelinePlan, proof: Proof, correction: Correction | None, recorder: Recorder) -> None:
        self._plan, self._proof, self._correction = plan, proof, correction
        self._options, self._low = plan.options, plan.options.precision.low
        self._hold = partial(recorder.change, "activations")

    def check(self, stage: Stage, module: StageModule, weights: StageWeights) -> None:
        """Make sure that `fit` will do.

        Raises:
            CapabilityError: an optimizer cannot take back what the schedule may have it take back, or does not go with
                the correction.
        """
        rule = RULES[self._proof.schedule.rule]
        if not isinstance(weights, TrainedWeights) or weights.updater.optimizer is None:
            return
        check_real(rule, module.tensors.trained, module.where)
        if rule.provisional and not steps_apart(self._proof):
            weights.updater.check_undoable()
        if self._correction is not None:
            self._correction.on(Layout({}), self._place(stage)).check(weights.updater.optimizer)

    def fit(self, stage: Stage, module: StageModule, weights: StageWeights) -> StagePasses:
        """Prepare the weights of a stage for the schedule; returns its passes there."""
        reading, storages = WeightReads(), set[int]()
        if isinstance(weights, TrainedWeights):
            store, updater = weights.store, weights.updater
            corrector = weights.corrector = self._make_corrector(stage, weights)
            weights.apart = steps_apart(self._proof)
            store.read_ahead(corrector is not None and corrector.reads_ahead)
            if isinstance(weights, ShardedWeights):
                weights.fit_average()
                fit_sums(weights.store, self._proof, stage, self._low is not None)
            updater.follow(store.own_of(store.master))
            if weights.watch is None:
                weights.watch_writes()
            store.derived.hold_estimate(self._estimates_whole(stage, corrector))
            updater.rates.correct(*(None, None) if corrector is None else (_rate(corrector), corrector.begin))
            updater.prepare(store.own_layout, self._rotates(stage, corrector, updater))
            reading = _reading(RULES[self._proof.schedule.rule], weights, self._plan.backward_delays)
            storages = store.storages | (set() if weights.older is None else weights.older.storages)
        return StagePasses(module, weights, reading, self._make_graphs(stage, module, weights, storages, reading))

    def refit(self, runtime: StageRuntime, *, older: int) -> None:
        """Fit a stage that has run under another schedule, with nothing in flight.

        Buffers that the schedule does not take are freed, those that it takes besides are made; what the optimizer
        remembers stays where it is. The correction begins without knowing how weights move.

        Args:
            runtime: the stage.
            older: how many versions before the newest stay as well.
        """
        weights = runtime.weights
        if isinstance(weights, TrainedWeights):
            weights.corrector, store = None, weights.store
            weights.updater.follow(store.own_of(store.master))
            store.resize(self._proof.stages[runtime.key], range(store.newest - older, store.newest + 1))
            if not older:
                store.forget_older()  # and what passes have read ahead of the newest
            if isinstance(store, MixedStore):
                store.step_apart(steps_apart(self._proof))
        runtime.passes = self.fit(runtime.key, runtime.module, weights)
        runtime.restore()

    def _make_corrector(self, stage: Stage, weights: TrainedWeights) -> Corrector | None:
        if self._correction is None:
            return None
        corrector = self._correction.on(weights.store.layout, self._place(stage))
        corrector.name, corrector.began = self._correction.name, weights.updater.updates
        return corrector

    def _place(self, stage: Stage) -> StagePlace:
        schedule, where = self._proof.schedule, f"stage {stage.name} on rank {stage.rank}"
        delay = self._proof.stages[stage].delay.forward
        return StagePlace(stage.index, schedule.num_stages, schedule.microbatches, delay, where)

    def _make_graphs(
        self, stage: Stage, module: StageModule, weights: StageWeights, storages: set[int], reading: WeightReads
    ) -> StageGraphs:
        schedule = self._proof.schedule
        parts = parts_to_recompute(
            list(module.blocks), self._options.recompute.of(stage.index), stage.index in schedule.recomputed
        )
        ops = {p.op for a in schedule.program(stage.rank).period for p in passes(a) if p.stage == stage}
        halved, parks = _halved(schedule, stage, any(neighbors_of(schedule, stage).returns)), Op.OFFLOAD in ops
        keeps = schedule.segment_before(stage.index) is None
        divisor, hold = self._plan.divisor, self._hold
        builder = GraphBuilder(module, storages, divisor, halved, parks, hold, reading)
        graphs = StageGraphs(module, builder, parts, hold, keeps)
        if self._options.run.cuda_graphs:
            recorder, compute = recorder_on(module.device), partial(builder.compute, tuple(module.blocks))
            graphs.capture_with(PassCapturer(module, recorder, compute, builder.seed, hold, partial(_hooked, weights)))
        return graphs

    def _estimates_whole(self, stage: Stage, corrector: Corrector | None) -> bool:
        """Whether estimates are written to a buffer, not made tensor by tensor: of what forwards read, or is cast."""
        again = self._options.recompute.of(stage.index) == "block" or stage.index in self._proof.schedule.recomputed
        return (self._low is not None or again) and corrector is not None and corrector.motion is not None

    def _rotates(self, stage: Stage, corrector: Corrector | None, updater: Updater) -> bool:
        """Whether updates take a scratch: to write the new version beside the old one, or to tell how weights move."""
        if corrector is not None and corrector.reads_ahead:
            return updater.optimizer is not None and corrector.looks_back(updater.optimizer)
        watches = corrector is not None and corrector.watches
        return steps_apart(self._proof) or watches or (self._low is None and self._proof.stages[stage].versions > 1)


def steps_apart(proof: Proof) -> bool:
    """Whether an update leaves the weights before it as they are, so that it can be taken back."""
    return RULES[proof.schedule.rule].update is Update.APART


def _hooked(weights: StageWeights) -> bool:
    """Whether gradients of a stage go through hooks of the user."""
    return isinstance(weights, TrainedWeights) and bool(weights.store.hooks)


def _reading(rule: VersionRule, weights: TrainedWeights, backward_delays: BlockDelays | None) -> WeightReads:
    """How the passes of a stage find their weights."""
    store, updater, corrector, older = weights.store, weights.updater, weights.corrector, weights.older
    if rule.rebinds:
        kind = EstimatedWeightReads if store.derived.holds_estimate else NewestWeightReads
        return kind(store, corrector, rule.recompute is Source.NEWEST)
    if older is not None and backward_delays is not None:
        return DelayedWeightReads(store, updater, older)
    return ForwardWeightReads(store, updater, corrector, older)


def _rate(corrector: Corrector) -> Callable[[int], float]:
    """The factor of a correction on rates; it counts updates from where its method began."""
    return lambda updates: corrector.rate(max(updates - corrector.began, 0))


def _halved(schedule: Schedule, stage: Stage, sends: bool) -> Callable[[Piece], bool] | None:
    """Of which microbatches (and slices) a stage runs the backward in two halves."""
    m, halved = schedule.microbatches, halved_units(schedule, stage, sends)
    return (lambda key: (key[0] % m, key[1]) in halved) if halved else None


def make_sharded_store(
    module: StageModule, stage: Stage, proof: Proof, width: int, pipeline: int, low: torch.dtype | None
) -> ShardedStore:
    """Make the store of a stage.

    Args:
        module: its blocks.
        stage: which.
        proof: of a sharded schedule.
        width, pipeline: the number of pipelines, and which of them this is.
        low: the precision of passes, if not that of the weights.
    """
    members = holders_of(proof.schedule, width)[stage.index]
    holders, place = len(members), members.index(Holder(pipeline, stage))
    level, facts, where = proof.schedule.sharding.level, proof.stages[stage], module.where
    overlapping = RULES[proof.schedule.rule].update is Update.ROTATE
    if low is not None:
        kind = ShardedMixedStore
        if level is Level.FULL:
            kind = MixedShardsOfVersions if overlapping else FullyShardedMixedStore
        return kind(module.tensors.trained, facts, where, level, holders, place, low, module.tensors.full)
    if level is not Level.FULL:
        return ShardedStore(module.tensors.trained, facts.buffers, where, level, holders, place)
    if overlapping:
        return ExactShardsOfVersions(module.tensors.trained, facts.buffers, where, holders, place)
    return FullyShardedExactStore(module.tensors.trained, where, holders, place)


def divide_updates(store: ShardedStore, updater: Updater, ties: Sequence[Tie], stage: Stage) -> None:
    """Let an optimizer step the own rows, or whole parameters where it needs these.

    Args:
        store: of the stage.
        updater: has the optimizer.
        ties: parameters that other stages share.
        stage: which.

    Raises:
        CapabilityError: it cannot.
    """
    if updater.optimizer is None:
        return
    if not hooks_take_rows(updater.optimizer):
        raise CapabilityError(f"{store.where}: {updater.name} {HOOKS_ON_ROWS}")
    whole = not takes_rows(updater.optimizer)
    store.divide(whole=whole)
    if ties and whole and store.splits_gradients:  # else every holder has the sums of all parameters
        raise CapabilityError(
            f"{store.where} shares {ties[0].names_at(stage.index)[0]} with another stage, which may have the sum of "
            f"its gradient on another rank, as {updater.name} has to step whole parameters; take sharding=optimizer, "
            "with which every rank has all sums, or untie them"
        )
    updater.divide(store.shards, store.own_of(store.master))


def fit_sums(store: ShardedStore, proof: Proof, stage: Stage, low_precision: bool) -> None:
    """Decide where sums of gradients wait for their update, under a schedule."""
    period = proof.schedule.program(stage.rank).period
    parts = sum(action.op is Op.REDUCE and action.stage == stage for action in period)
    store.keep_sums_apart(sums_wait(proof.schedule, stage.rank, low_precision), max(parts, 1))


def average_of(store: VersionStore, where: str) -> Buffer:
    """Return room for an average of the weights, which begins with them."""
    average = Buffer(store.layout, f"average of {where}")
    average.load(store.master.views)
    return average
