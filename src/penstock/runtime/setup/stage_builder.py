"""Builds the stages of a rank, and fits them to another schedule between two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from penstock.comm.core.devices import find_device
from penstock.comm.core.host_copy_stream import side_stream
from penstock.comm.core.rank_grid import RankKey
from penstock.comm.core.tensor_group import TensorGroup
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.stage_routes import neighbors_of
from penstock.errors import ConfigError
from penstock.partition.aliased_parameters import check_shared_memory
from penstock.partition.blocks import LazyBlock, check_shapes
from penstock.partition.emulated_delays import BlockDelays
from penstock.partition.sequence_slices import check_sliceable
from penstock.partition.tied import Tie, share_inside
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.sharded_weights import (
    average_of,
    divide_updates,
    fit_sums,
    make_sharded_store,
)
from penstock.runtime.setup.tensor_division import check_steps_parts, divide_stage
from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Source, Update, VersionRule
from penstock.schedule.proof.proof import Proof
from penstock.schedule.split_backward_microbatches import halved_units
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.autograd.recompute import parts_to_recompute
from penstock.stage.autograd_graphs import StageGraphs
from penstock.stage.blocks.loss import LossFunction
from penstock.stage.blocks.module import StageModule
from penstock.stage.chosen_backward_delays import DelayedWeightReads, check_real_delays
from penstock.stage.cuda_graphs.pass_capturer import PassCapturer
from penstock.stage.cuda_graphs.recorder import recorder_on
from penstock.stage.graph_builder import GraphBuilder
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_passes import StagePasses
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.stage.weight_reads import ForwardWeightReads, WeightReads
from penstock.stage.weight_reads_newest import EstimatedWeightReads, NewestWeightReads, check_real
from penstock.weights.corrections.base import Correction, Corrector, StagePlace
from penstock.weights.memory.buffers import Layout
from penstock.weights.memory.emulated_delay_buffers import OlderVersions
from penstock.weights.memory.user_parameter_hooks import warn_of_scale
from penstock.weights.mixed_store import MixedStore
from penstock.weights.optim.optimizer_factory import OptimizerFactory
from penstock.weights.replica_averaging import Agreement
from penstock.weights.sharded_store import ShardedStore
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater
from penstock.weights.wave_synchronous_updates import WaveWeights


class StageBuilder:
    """Builds the stages of one rank.

    Args:
        key: the rank.
        plan: of its pipeline; its options hold for every schedule, its proof and its correction until `refit`.
        loss: on the last stage, and on others to which no gradient comes back; a dict by the number of the stage.
        optimizer: makes the optimizer of a stage.
        recorder: is told of activations as they come and go.
        tensor: the processes that share the stages of this one.
    """

    def __init__(
        self,
        key: RankKey,
        plan: PipelinePlan,
        loss: LossFunction | Mapping[int, LossFunction],
        optimizer: OptimizerFactory,
        recorder: Recorder,
        tensor: TensorGroup,
    ) -> None:
        self._tensor = tensor
        self._key, self._plan, self._loss, self._optimizer = key, plan, loss, optimizer
        self._options, self._low = plan.options, plan.options.precision.low
        self._hold = partial(recorder.change, "activations")
        wanted = plan.options.run.device
        self._device = None if wanted is None else find_device(wanted)

    def build(self, stage: Stage, blocks: Mapping[str, Any]) -> StageRuntime:
        """A stage, ready to run under the schedule of the plan.

        Args:
            stage: which.
            blocks: its blocks, by name; lazy ones are made here, and all are moved to the device of the rank.

        Raises:
            ConfigError: its blocks are not what the plan takes them for.
            CapabilityError: its optimizer cannot step it.
        """
        plan, proof, correction = self._plan, self._plan.proof, self._options.staleness.correction
        module = self._make_module(stage, {name: self._made(name, block) for name, block in blocks.items()})
        ties = [tie for tie in plan.ties if stage.index in tie.stages]
        weights = self._make_weights(stage, module, ties) if module.tensors.trained else StageWeights()
        warn_of_scale(module.tensors.trained, self._options.precision.divisor)
        self._check(stage, module, weights, proof, correction)
        passes = self._fit(stage, module, weights, proof, correction)
        place = self._key.pipeline * plan.schedule.directions + stage.direction
        runtime = StageRuntime(stage, module, weights, passes, ties, place)
        runtime.restore()  # from here on the modules' parameters live in the store's memory, not beside it
        return runtime

    def check_refit(self, runtime: StageRuntime, proof: Proof, correction: Correction | None) -> None:
        """Make sure that `refit` will do.

        Raises:
            CapabilityError: an optimizer cannot take back what the schedule may have it take back, or does not go with
                the correction.
        """
        self._check(runtime.key, runtime.module, runtime.weights, proof, correction)

    def refit(self, runtime: StageRuntime, proof: Proof, correction: Correction | None, *, older: int) -> None:
        """Fit a stage to another schedule, with nothing in flight.

        Buffers that the schedule does not take are freed, those that it takes besides are made; what the optimizer
        remembers stays where it is.

        Args:
            runtime: the stage.
            proof: of the schedule.
            correction: of its method; it begins without knowing how weights move.
            older: how many versions before the newest stay as well.
        """
        weights = runtime.weights
        if isinstance(weights, TrainedWeights):
            weights.corrector, store = None, weights.store
            weights.updater.follow(store.own_of(store.master))
            store.resize(proof.stages[runtime.key], range(store.newest - older, store.newest + 1))
            if isinstance(store, MixedStore):
                store.step_apart(_steps_apart(proof))
        runtime.passes = self._fit(runtime.key, runtime.module, weights, proof, correction)
        runtime.restore()

    # --- what a stage has whatever its schedule -----------------------------------------------------------------------

    def _made(self, name: str, block: Any) -> Any:
        made = block
        if isinstance(block, LazyBlock):
            made = block.make()
            check_shapes(name, made)
        if not isinstance(made, nn.Module):
            return made
        if self._options.run.compile:
            made.compile(dynamic=False)
        return made if self._device is None else made.to(self._device)

    def _make_module(self, stage: Stage, blocks: dict[str, Any]) -> StageModule:
        plan, schedule = self._plan, self._plan.schedule
        where = f"stage {stage.name} on rank {stage.rank}"
        division = divide_stage(blocks, plan, self._tensor)
        share_inside(blocks, plan.inside, dict.fromkeys(name for part in plan.parts for name in part) | blocks)
        check_shared_memory(blocks)  # lazy ones have not been there to be looked into before
        ways = neighbors_of(schedule, stage)
        if schedule.slices > 1:
            check_sliceable(blocks, where)
        for delays in (plan.delays, plan.backward_delays):
            if delays is not None:
                delays.check_trained(blocks)
        loss = self._loss_of(stage) if ways.has_loss else None
        hands_on = bool(ways.outputs)
        module = StageModule(blocks, loss, where, self._options, hands_on, self._device, plan.shared_buffers)
        module.division = division
        self._options.precision.kernels.check_device(module.device)
        if module.tensors.trained and stage.index in schedule.frozen:
            raise ConfigError(
                f"{where} is frozen in the schedule, but {next(iter(module.tensors.trained))} wants gradients; set "
                "requires_grad=False on its parameters"
            )
        return module

    def _loss_of(self, stage: Stage) -> LossFunction:
        given = self._loss
        if not isinstance(given, Mapping):
            return given
        if stage.index not in given:
            raise ConfigError(
                f"loss: stage {stage.index} has a loss of its own, but the dict has one only for {list(given)}"
            )
        return given[stage.index]

    def _make_weights(self, stage: Stage, module: StageModule, ties: Sequence[Tie]) -> TrainedWeights:
        plan, update = self._plan, self._options.update
        store = self._make_store(stage, module)
        older = _older_versions(module, store, plan.delays, plan.backward_delays)
        if older is not None and plan.backward_delays is not None:
            check_real_delays(module.tensors.trained, module.where)
        # `_fit` says whether it rotates.
        updater = Updater(self._optimizer, store.layout, store.master, rotates=False, scheduler=update.lr_scheduler)
        kind: type[TrainedWeights] = TrainedWeights
        if isinstance(store, ShardedStore):
            kind = ShardedWeights
            divide_updates(store, updater, ties, stage)
        if module.division.splits and updater.optimizer is not None:
            check_steps_parts(updater.optimizer)
        if (away := self._options.run.offload_optimizer) != "none":
            updater.offload(away == "pieces", side_stream(module.device))
        elsewhere = {name for tie in ties for name in tie.names_at(stage.index) if tie.stages[0] != stage.index}
        if module.division.index:  # the first tensor rank counts what all have
            elsewhere |= module.tensors.trained.keys() - module.division.splits.keys()
        return kind(
            store,
            updater,
            update,
            average=None if update.ema_decay is None else average_of(store, module.where),
            counted_elsewhere=elsewhere,
            older=older,
            agreement=self._make_agreement(stage, store, updater),
        )

    def _make_store(self, stage: Stage, module: StageModule) -> VersionStore:
        proof, low = self._plan.proof, self._low
        facts, apart, level = proof.stages[stage], _steps_apart(proof), proof.schedule.sharding.level
        if level is not Level.NONE:
            where = self._options.data_parallel.width, self._key.pipeline
            return make_sharded_store(module, stage, proof, *where, low)
        if low is None:
            return VersionStore(module.tensors.trained, facts.buffers, module.where, facts.copies)
        numbers = facts.versions, facts.gradients
        return MixedStore(module.tensors.trained, *numbers, low, module.where, apart, facts.copies, module.tensors.full)

    def _make_agreement(self, stage: Stage, store: VersionStore, updater: Updater) -> Agreement | WaveWeights | None:
        parallel = self._options.data_parallel
        if not parallel.combine.apart:
            return None
        common = parallel.combine, parallel.width, self._key.pipeline, store
        waves = parallel.combine.kind == "wsp"
        return WaveWeights(*common, stage.name) if waves else Agreement(*common, updater)

    # --- what it has because of its schedule --------------------------------------------------------------------------

    def _check(
        self, stage: Stage, module: StageModule, weights: StageWeights, proof: Proof, correction: Correction | None
    ) -> None:
        """Make sure that `_fit` will do."""
        rule = RULES[proof.schedule.rule]
        if not isinstance(weights, TrainedWeights) or weights.updater.optimizer is None:
            return
        check_real(rule, module.tensors.trained, module.where)
        if rule.provisional and not _steps_apart(proof):
            weights.updater.check_undoable()
        if correction is not None:
            correction.on(Layout({}), _place(proof, stage)).check(weights.updater.optimizer)

    def _fit(
        self, stage: Stage, module: StageModule, weights: StageWeights, proof: Proof, correction: Correction | None
    ) -> StagePasses:
        """Prepare the weights for a schedule; returns the passes under it."""
        reading, storages = WeightReads(), set[int]()
        if isinstance(weights, TrainedWeights):
            store, updater = weights.store, weights.updater
            corrector = weights.corrector = self._make_corrector(stage, weights, proof, correction)
            weights.apart = _steps_apart(proof)
            store.read_ahead(corrector is not None and corrector.reads_ahead)
            if isinstance(weights, ShardedWeights):
                weights.fit_average()
                fit_sums(weights.store, proof, stage, self._low is not None)
            updater.follow(store.own_of(store.master))
            if store.reads_ahead:
                weights.watch_writes()
            store.derived.hold_estimate(self._estimates_whole(stage, proof, corrector))
            updater.rates.correct(*(None, None) if corrector is None else (_rate(corrector), corrector.begin))
            updater.prepare(store.own_layout, self._rotates(stage, proof, corrector, updater))
            reading = _reading(RULES[proof.schedule.rule], weights, self._plan.backward_delays)
            storages = store.storages | (set() if weights.older is None else weights.older.storages)
        graphs = self._make_graphs(stage, module, weights, storages, reading, proof.schedule)
        return StagePasses(module, weights, reading, graphs)

    def _make_corrector(
        self, stage: Stage, weights: TrainedWeights, proof: Proof, correction: Correction | None
    ) -> Corrector | None:
        if correction is None:
            return None
        corrector = correction.on(weights.store.layout, _place(proof, stage))
        corrector.name, corrector.began = correction.name, weights.updater.updates
        return corrector

    def _make_graphs(
        self,
        stage: Stage,
        module: StageModule,
        weights: StageWeights,
        storages: set[int],
        reading: WeightReads,
        schedule: Schedule,
    ) -> StageGraphs:
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

    def _estimates_whole(self, stage: Stage, proof: Proof, corrector: Corrector | None) -> bool:
        """Whether estimates are written to a buffer, not made tensor by tensor: of what forwards read, or is cast."""
        again = self._options.recompute.of(stage.index) == "block" or stage.index in proof.schedule.recomputed
        return (self._low is not None or again) and corrector is not None and corrector.motion is not None

    def _rotates(self, stage: Stage, proof: Proof, corrector: Corrector | None, updater: Updater) -> bool:
        """Whether updates take a scratch: to write the new version beside the old one, or to tell how weights move."""
        if corrector is not None and corrector.reads_ahead:
            return updater.optimizer is not None and corrector.looks_back(updater.optimizer)
        watches = corrector is not None and corrector.watches
        return _steps_apart(proof) or watches or (self._low is None and proof.stages[stage].versions > 1)


def _hooked(weights: StageWeights) -> bool:
    """Whether gradients of a stage go through hooks of the user."""
    return isinstance(weights, TrainedWeights) and bool(weights.store.hooks)


def _steps_apart(proof: Proof) -> bool:
    """Whether an update leaves the weights before it as they are, so that it can be taken back."""
    return RULES[proof.schedule.rule].update is Update.APART


def _place(proof: Proof, stage: Stage) -> StagePlace:
    schedule, where = proof.schedule, f"stage {stage.name} on rank {stage.rank}"
    return StagePlace(stage.index, schedule.num_stages, schedule.microbatches, proof.stages[stage].delay.forward, where)


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


def _older_versions(
    module: StageModule, store: VersionStore, delays: BlockDelays, backward: BlockDelays | None
) -> OlderVersions | None:
    """Room for the versions that passes of a stage read late; None where they read none."""
    forward, late = (
        delays.by_parameter(module.tensors.trained, module.blocks),
        None if backward is None else backward.by_parameter(module.tensors.trained, module.blocks),
    )
    if not any((*forward.values(), *(late or {}).values())):
        return None
    return OlderVersions(store.versions[store.newest].views, forward, module.where, late)
