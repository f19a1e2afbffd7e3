"""What a pipeline consists of, built from its plan: ranks, transports, spans and the engine that runs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.all_gather_json import gather_json
from penstock.comm.collective.clock_sync import common_origin
from penstock.comm.collective.polling_choice import choose_polling, cores_of_this_rank
from penstock.comm.communicators import holders_of
from penstock.comm.core.gloo_threads import GlooThreads
from penstock.comm.core.rank_grid import Holder, RankGrid
from penstock.comm.core.tagged_group import Tag
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.device_mesh import groups_of_holders
from penstock.comm.p2p.transport import Channel
from penstock.comm.transports import Transports, choose_transports
from penstock.errors import ConfigError
from penstock.partition.blocks import Blocks, deal
from penstock.partition.tied import KnownSharing, Tie
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.span_runner import Spans
from penstock.runtime.engine.span_setup import SpanSetup
from penstock.runtime.in_flight.adapted_in_flight import Adaptations
from penstock.runtime.plan.capabilities import idle_options
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.setup.same_weights import check_equal
from penstock.runtime.setup.shared_plan import share_evaluation
from penstock.runtime.setup.tensor_division import check_division
from penstock.runtime.update.stop_request import StopRequest
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.stage.blocks.loss import LossFunction
from penstock.stage.checks.remotely_trained_modules import HeldElsewhere
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.optim.optimizer_factory import OptimizerFactory
from penstock.weights.update_hooks import UpdateHooks

_LOG = logging.getLogger(__name__)


class BuiltPipeline:
    """The part of `Pipeline` that the others work on: what was built of a plan.

    Attributes:
        schedule: the present one.
        proof: of it.
        parts: the names of the blocks of each stage.
        grid: all ranks, and which of them are in this process.
        delays, backward_delays: by how many updates the weights that each block reads are late by choice.
        combine: how parallel pipelines agree.
        timeout: seconds after which a missing message is an error during a run.
    """

    def _build(
        self,
        plan: PipelinePlan,
        grid: RankGrid,
        blocks: Blocks,
        named: Mapping[str, Any],
        loss: LossFunction | Mapping[int, LossFunction],
        optimizer: OptimizerFactory,
    ) -> None:
        """Build the ranks of this process and their communicators."""
        self._given, self.grid = (blocks, named), grid
        parallel, timeout = plan.options.data_parallel, plan.options.run.timeout
        self._plan, self.proof, self.schedule, self.parts = plan, plan.proof, plan.schedule, plan.parts
        self.timeout, self.combine = timeout, parallel.combine
        self.delays, self.backward_delays = plan.delays.by_block, (plan.backward_delays or plan.delays).by_block
        holders = holders_of(self.schedule, parallel.width).values()
        alike = groups_of_holders(self.grid, holders, parallel.mesh) if parallel.fast else {}
        self._held = HeldElsewhere(named, blocks_here(plan, self.grid))
        self._ranks = make_ranks(named, plan, self.grid, loss, optimizer)
        self._adaptations = Adaptations(plan.options.microbatches.in_flight_bytes)
        self._held.built()
        self._sharing = KnownSharing(named, plan.parts)
        self._hooks = UpdateHooks()
        for stage in {stage.key.index: stage for stage in self._by_place()}.values():
            if isinstance(stage.weights, TrainedWeights):
                stage.weights.hooks = self._hooks
        evaluation = share_evaluation(self.schedule, self.grid)
        self._transports = self._choose_transports()
        self._transports.prepare(Channel.TRAINING, self.proof.lowered)
        self._transports.prepare(Channel.EVALUATION, evaluation.lowered)
        cores = cores_of_this_rank(self.grid.control)
        setup = SpanSetup(
            self.grid,
            self._ranks,
            self.proof,
            evaluation,
            self._transports,
            alike,
            timeout,
            plan.options.precision.kernels,
            GlooThreads(cores),
            parallel.combine,
            choose_polling(plan.options.run.waits, cores),
            plan.options.staleness.correction,
            plan.options.microbatches.dims,
        )
        self._spans = Spans(setup, self._held)
        self._engine = Engine(setup, self._spans)
        if self.grid.everyone is None or not dist.get_rank(self.grid.everyone):
            self._tell_idle(plan)

    def _tell_idle(self, plan: PipelinePlan) -> None:
        """Say in the log which options find nothing to act on."""
        asked = plan.given if isinstance(plan.given, ScheduleRequest) else None
        devices = {stage.module.device for stage in self.stages.values()}
        processes = 1 if self.grid.everyone is None else dist.get_world_size(self.grid.everyone)
        trained = (s.weights for s in self.stages.values() if isinstance(s.weights, TrainedWeights))
        made = [weights.updater.optimizer for weights in trained if weights.updater.optimizer is not None]
        for said in idle_options(plan.schedule, plan.options, asked, devices, processes, self._given[1].values(), made):
            _LOG.warning(said)

    def _choose_transports(self) -> Transports:
        return choose_transports(self.grid, {stage.module.device for stage in self.stages.values()})

    @property
    def stages(self) -> dict[Stage, StageRuntime]:
        """The stages in this process; of the first pipeline, where it holds several."""
        first = self._ranks[0].key.pipeline
        return {n: stage for state in self._ranks if state.key.pipeline == first for n, stage in state.stages.items()}

    def _by_place(self) -> list[StageRuntime]:
        """The stages in this process, of several copies of one the first last."""
        return sorted(self.stages.values(), key=lambda stage: -stage.place)


def make_ranks(
    named: Mapping[str, Any],
    plan: PipelinePlan,
    grid: RankGrid,
    loss: LossFunction | Mapping[int, LossFunction],
    optimizer: OptimizerFactory,
) -> list[RankState]:
    """Build the ranks of this process; weights that stages and pipelines share are made equal.

    Args:
        named: the blocks of the model; lazy ones are made here where they are needed.
        plan: of the pipeline.
        grid: all ranks.
        loss, optimizer: as of `penstock.runtime.pipeline.Pipeline`.

    Raises:
        ConfigError: blocks are not what the plan takes them for, or do not begin alike everywhere.
        CapabilityError: an optimizer cannot step a stage.
        TransportError: a peer is dead.
    """
    origin = time.perf_counter() if grid.group is None else common_origin(grid.control)
    here = [(key.pipeline, stage) for key in grid.local for stage in plan.schedule.on_rank(key.rank)]
    dealt = deal(named, plan.parts, here)
    stop = StopRequest()
    ranks = [
        RankState(key, plan, dealt[key.pipeline], loss, optimizer, Recorder(row, origin), stop, grid.tensor)
        for key, row in zip(grid.local, grid.global_ranks, strict=True)
    ]
    check_division(grid, (stage for state in ranks for stage in state.stages.values()))
    equalise(plan.ties, plan.schedule, grid, ranks)
    check_equal(plan.schedule, grid, ranks)
    return ranks


def blocks_here(plan: PipelinePlan, grid: RankGrid) -> list[str]:
    """Return the names of the blocks that this process trains."""
    stages = {stage.index for key in grid.local for stage in plan.schedule.on_rank(key.rank)}
    return [name for index in sorted(stages) for name in plan.parts[index]]


def equalise(ties: Sequence[Tie], schedule: Schedule, grid: RankGrid, ranks: Sequence[RankState]) -> None:
    """Give all copies of tied parameters the values that the first stage has; all processes call this together.

    Raises:
        ConfigError: their shapes differ, a stage does not train one of them, or their optimizers are not the same.
        TransportError: a peer is dead.
    """
    for tie in ties:
        here = {Holder(w.key.pipeline, n): w.stages[n] for w in ranks for n in w.stages if n.index in tie.stages}
        found: list[tuple[int, Any, Any]] = [
            (h.stage.index, _shapes(tie, h.stage.index, stage), _steppers(tie, h.stage.index, stage))
            for h, stage in here.items()
        ]
        if grid.group is not None:
            parts = gather_json(found, "comparing shared parameters", grid.control)
            found = [(index, shapes, steppers) for part in parts for index, shapes, steppers in part]
        for index, shapes, steppers in found:
            if isinstance(shapes, str):
                raise ConfigError(shapes)
            if shapes != found[0][1]:
                raise ConfigError(
                    f"{', '.join(tie.names_at(index))} of stage {index} have shapes {shapes}, of stage {found[0][0]} "
                    f"{found[0][1]}; what is one parameter has one shape"
                )
            _check_alike(tie, (found[0][0], index), (found[0][2], steppers))
        first, *others = tie.stages
        for pipeline, place, index in product(grid.pipelines, range(schedule.directions), others):
            if (first, place) not in schedule.stage_at:
                continue
            source, target = (Holder(pipeline, schedule.stage_at[c, place]) for c in (first, index))
            _copy(tie, source, target, here, grid)
            other = here.get(target)
            if other is not None and isinstance(other.weights, TrainedWeights):
                other.weights.store.refresh()


def _shapes(tie: Tie, index: int, stage: StageRuntime) -> list[list[int]] | str:
    """Return the shapes of tied parameters on a stage, or the error message there, which all ranks are to raise."""
    try:
        return [list(view.shape) for view in _values(tie, index, stage)]
    except ConfigError as error:
        return str(error)


def _steppers(tie: Tie, index: int, stage: StageRuntime) -> list[dict[str, str]]:
    """Return, for each tied parameter on a stage, the optimizer that steps it and its settings, as text."""
    weights = stage.weights
    if not isinstance(weights, TrainedWeights) or weights.updater.optimizer is None:
        return []
    found, parameters = [], weights.updater.parameters
    for name in (name for name in tie.names_at(index) if name in parameters):
        groups = weights.updater.optimizer.param_groups
        group = next((each for each in groups if any(p is parameters[name] for p in each["params"])), {})
        settings = {key: repr(value) for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
        found.append({"optimizer": weights.updater.stepper(name), **settings})
    return found


def _check_alike(tie: Tie, stages: tuple[int, int], steppers: tuple[Sequence[Any], Sequence[Any]]) -> None:
    """Make sure that copies of tied parameters are stepped alike on two stages, as they would not stay equal else.

    Raises:
        ConfigError: they are not.
    """
    for *names, first, second in zip(*map(tie.names_at, stages), *steppers, strict=False):
        key = next((key for key in {**first, **second} if first.get(key) != second.get(key)), None)
        if key is not None:
            raise ConfigError(
                f"{names[0]} of stage {stages[0]} and {names[1]} of stage {stages[1]} are one parameter, but stepped "
                f"with {key} {first.get(key)} and {second.get(key)}, so they would not stay equal; give both names to "
                "the same optimizer, in groups with the same settings"
            )


def _values(tie: Tie, index: int, stage: StageRuntime) -> list[Tensor]:
    """Return the present values of tied parameters on a stage.

    Raises:
        ConfigError: the stage does not train one of them.
    """
    names, trained = tie.names_at(index), stage.module.tensors.trained
    missing = [name for name in names if name not in trained]
    if missing or not isinstance(stage.weights, TrainedWeights):
        raise ConfigError(f"tied: {stage.module.where} trains no parameter {missing[0] if missing else names[0]!r}")
    views = stage.weights.store.master.views
    return [views[name] for name in names]


def _copy(tie: Tie, source: Holder, target: Holder, here: Mapping[Holder, StageRuntime], grid: RankGrid) -> None:
    """Copy tied parameters from the first stage to another one, within this process or between two."""
    owner, other = here.get(source), here.get(target)
    first, index = source.stage.index, target.stage.index
    with torch.no_grad():
        if owner is not None and other is not None:
            for mine, theirs in zip(_values(tie, first, owner), _values(tie, index, other), strict=True):
                theirs.copy_(mine)
        elif owner is not None:
            for mine in _values(tie, first, owner):
                dist.send(mine.cpu(), group=grid.control, tag=Tag.INITIAL_WEIGHTS, group_dst=grid.process(target))
        elif other is not None:
            for theirs in _values(tie, index, other):
                received = torch.empty(theirs.shape, dtype=theirs.dtype)
                dist.recv(received, group=grid.control, tag=Tag.INITIAL_WEIGHTS, group_src=grid.process(source))
                theirs.copy_(received)
