"""Builds the stages of a rank: their blocks, their weights, and what updates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.comm.core.devices import find_device, side_stream
from penstock.comm.core.rank_grid import RankKey
from penstock.comm.core.tensor_group import TensorGroup
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.stage_routes import neighbors_of
from penstock.errors import ConfigError
from penstock.partition.aliased_parameters import check_shared_memory
from penstock.partition.blocks import LazyBlock, check_shapes, check_values
from penstock.partition.emulated_delays import BlockDelays
from penstock.partition.replay.model_stages import ModelStage
from penstock.partition.replay.units import name_in_model
from penstock.partition.sequence_slices import check_sliceable
from penstock.partition.tied import Tie, share_inside
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.schedule_fitter import ScheduleFitter, steps_apart
from penstock.runtime.setup.sharded_weights import average_of, divide_updates, make_sharded_store
from penstock.runtime.setup.tensor_division import check_steps_parts, divide_stage
from penstock.schedule.ir.schedule import Stage
from penstock.schedule.ir.sharding import Level
from penstock.stage.blocks.loss import LossFunction
from penstock.stage.blocks.module import StageModule
from penstock.stage.blocks.precision_casts import check_casts
from penstock.stage.chosen_backward_delays import check_real_delays
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
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
        plan: of its pipeline.
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
        self._key, self._plan, self._loss = key, plan, loss
        self._optimizer = _by_names_in_model(optimizer) if callable(optimizer) else optimizer
        self._options, self._low, self._recorder = plan.options, plan.options.precision.low, recorder
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
        plan, correction = self._plan, self._options.staleness.correction
        module = self._make_module(stage, {name: self._made(name, block) for name, block in blocks.items()})
        ties = [tie for tie in plan.ties if stage.index in tie.stages]
        weights = self._make_weights(stage, module, ties) if module.tensors.trained else StageWeights()
        warn_of_scale(module.tensors.trained, self._options.precision.divisor)
        fitter = ScheduleFitter(plan, plan.proof, correction, self._recorder)
        fitter.check(stage, module, weights)
        passes = fitter.fit(stage, module, weights)
        place = self._key.pipeline * plan.schedule.directions + stage.direction
        runtime = StageRuntime(stage, module, weights, passes, ties, place)
        runtime.restore()  # from here on the modules' parameters live in the store's memory, not beside it
        return runtime

    def _made(self, name: str, block: Any) -> Any:
        made = block
        if isinstance(block, LazyBlock):
            made = block.make()
            check_shapes(f"block {name!r}", made)
        if not isinstance(made, nn.Module):
            return made
        if self._device is None or self._device.type != "meta":
            if isinstance(made, ModelStage):
                made.give_values(self._options.run.seed)
            check_values(name, made)
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
        alone = schedule.microbatches == self._options.data_parallel.width == 1 and not isinstance(self._loss, Mapping)
        module = StageModule(blocks, loss, where, self._options, hands_on, self._device, alone)
        module.division = division
        self._options.precision.kernels.check_device(module.device)
        check_casts({**module.tensors.trained, **module.tensors.frozen()}, self._options.precision, where)
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
        # The fit to a schedule says whether it rotates.
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
            reads_late=any(any(each.by_block.values()) for each in (plan.delays, plan.backward_delays) if each),
            agreement=self._make_agreement(stage, store, updater),
        )

    def _make_store(self, stage: Stage, module: StageModule) -> VersionStore:
        proof, low = self._plan.proof, self._low
        facts, apart, level = proof.stages[stage], steps_apart(proof), proof.schedule.sharding.level
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


def _by_names_in_model(make: OptimizerFactory) -> OptimizerFactory:
    """Return a factory that gives parameters the names that a whole model has for them."""

    def made(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        return make([(name_in_model(name), parameter) for name, parameter in named])

    if (undone := getattr(make, "undone", None)) is not None:
        made.undone = undone  # type: ignore[attr-defined]  # as `Updater` asks for it
    return made


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
