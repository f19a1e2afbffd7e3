"""One rank of one pipeline: its stages, its record, its part in decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

from penstock.comm.core.devices import device_clock, side_stream
from penstock.comm.core.rank_grid import RankKey
from penstock.comm.core.tensor_group import TensorGroup
from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.rank.snapshot import Snapshot
from penstock.runtime.setup.schedule_fitter import ScheduleFitter
from penstock.runtime.setup.stage_builder import StageBuilder
from penstock.runtime.update.decisions import Decisions
from penstock.runtime.update.stop_request import StopRequest
from penstock.schedule.ir.schedule import Stage
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.proof.proof import Proof
from penstock.stage.blocks.loss import LossFunction
from penstock.weights.corrections.base import Correction
from penstock.weights.optim.optimizer_factory import OptimizerFactory


class RankState:
    """The stages of one rank of the grid, and everything that they share there.

    Args:
        key: the rank.
        plan: of the pipeline, the same on every rank.
        blocks: those of each of its stages, by name; lazy ones are made here.
        loss, optimizer: as of `penstock.runtime.pipeline.Pipeline`.
        recorder: takes down what happens.
        stop: the request to end a run, shared by all ranks of this process.
        tensor: the processes that share the stages of this one.
    """

    def __init__(
        self,
        key: RankKey,
        plan: PipelinePlan,
        blocks: Mapping[Stage, Mapping[str, Any]],
        loss: LossFunction | Mapping[int, LossFunction],
        optimizer: OptimizerFactory,
        recorder: Recorder,
        stop: StopRequest,
        tensor: TensorGroup,
    ) -> None:
        options = plan.options
        self.key, self.options, self.recorder, self.stop = key, options, recorder, stop
        self.snapshots: list[ref[Snapshot]] = []  # that somebody may still have
        self._last = plan.schedule.num_stages - 1
        self.decisions = Decisions(
            options.policy,
            plan.divisor,
            RULES[plan.schedule.rule].delay,
            options.update.divergence,
            options.data_parallel.combine,
            key.pipeline,
            stop,
            counts=tensor.counts,
        )
        self._plan, builder = plan, StageBuilder(key, plan, loss, optimizer, recorder, tensor)
        self.stages = {stage: builder.build(stage, blocks[stage]) for stage in plan.schedule.on_rank(key.rank)}
        devices = [stage.module.device for stage in self.stages.values()]
        recorder.use_clock(next(filter(None, map(device_clock, devices)), None))
        self.side = next(filter(None, map(side_stream, devices)), None)  # on which snapshots are copied
        fixed = sum(tensor.nbytes for stage in self.stages.values() for tensor in stage.module.tensors.fixed)
        recorder.hold("frozen parameters and buffers", fixed)

    def check_switch(self, proof: Proof, correction: Correction | None) -> None:
        """Make sure that `switch` will do.

        Raises:
            CapabilityError: an optimizer cannot take back what the schedule may have it take back, or does not go with
                the correction.
        """
        fitter = ScheduleFitter(self._plan, proof, correction, self.recorder)
        for stage in self.stages.values():
            fitter.check(stage.key, stage.module, stage.weights)

    def switch(self, proof: Proof, older: int, correction: Correction | None) -> None:
        """Go on under another schedule with the same stages, with nothing in flight (`ScheduleFitter.refit`).

        Args:
            proof: of the schedule.
            older: how many versions before the newest stay as well.
            correction: of the method.
        """
        self.decisions.delay = RULES[proof.schedule.rule].delay
        fitter = ScheduleFitter(self._plan, proof, correction, self.recorder)
        for stage in self.stages.values():
            fitter.refit(stage, older=older)

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here, whose loss is reported."""
        return any(stage.index == self._last for stage in self.stages)

    @contextmanager
    def evaluating(
        self, averaged: bool = False, version: int | None = None, *, predicts: bool = False
    ) -> Iterator[None]:
        """Meanwhile evaluations read a version of the weights, the newest if None, or with `averaged` their average.

        Where parallel pipelines have a model in common, beside their own weights, they read that.
        With `predicts` they keep what the last stage returns, and compute no loss.
        """
        stages = list(self.stages.values())
        for stage in stages:
            stage.passes.averaged, stage.passes.evaluated = stage.evaluated_leaves(averaged), version
            stage.passes.predicted = {} if predicts else None
        try:
            yield
        finally:
            for stage in stages:
                stage.passes.averaged = stage.passes.evaluated = stage.passes.predicted = None
