"""What a pipeline consists of, built from its plan: ranks, transports, spans and the engine that runs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from penstock.comm.collective.control_plane import choose_polling, common_origin, cores_of_this_rank
from penstock.comm.communicators import holders_of
from penstock.comm.core.gloo_threads import GlooThreads
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.device_mesh import groups_of_holders
from penstock.comm.p2p.transport import Channel
from penstock.comm.transports import Transports, choose_transports
from penstock.partition.blocks import Blocks, deal
from penstock.partition.tied import KnownSharing
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.span_runner import Spans
from penstock.runtime.engine.span_setup import SpanSetup
from penstock.runtime.plan.adapted_in_flight import Adaptations
from penstock.runtime.plan.capabilities import idle_options
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.setup.same_weights import check_equal
from penstock.runtime.setup.shared_plan import share_evaluation
from penstock.runtime.setup.stage_builder import check_division
from penstock.runtime.setup.tied_weights_broadcast import equalise
from penstock.runtime.update.stop_request import StopRequest
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Stage
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
