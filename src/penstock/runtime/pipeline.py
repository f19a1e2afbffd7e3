"""`Pipeline`: a model divided into stages and trained by a proven schedule, on one pipeline or several.

Without a process group all ranks run in this process, in turns; with one, each rank is a process. Both give the same
numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.gather import gather_json
from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.recorder import merge_recordings
from penstock.comm.mesh import from_mesh, groups_of_holders
from penstock.comm.p2p.transport import Channel
from penstock.comm.transports import Transports, choose_transports
from penstock.errors import ConfigError
from penstock.partition.blocks import Blocks, named_blocks
from penstock.proven_schedule import ProvenSchedule
from penstock.runtime.engine import Engine
from penstock.runtime.execute.evaluation import Evaluating, check_every
from penstock.runtime.full_state import gather_state, with_all_names
from penstock.runtime.plan.method_choice import correction_by, request_of
from penstock.runtime.plan.options import (
    DataParallel,
    Partition,
    PipelineOptions,
    Precision,
    Recompute,
    RunOptions,
    Staleness,
    UpdateOptions,
)
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.plan.requirements import schedule_of
from penstock.runtime.rank.batch_source import Batches
from penstock.runtime.rank.reports import Report
from penstock.runtime.rank.snapshot import SavedState, Saving, Snapshot, check_names, check_pipelines, restore
from penstock.runtime.setup.assemble import make_ranks
from penstock.runtime.update.divergence import Divergence, Trouble
from penstock.runtime.update.events import Evaluated
from penstock.schedule.build import ScheduleRequest, prove_evaluation
from penstock.schedule.ir.rules import RULES
from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.schedule.methods.choice import MethodChoice
from penstock.schedule.proof.check import Proof
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.stage.module import LossFunction
from penstock.stage.precision import PrecisionName
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.stage_weights import TrainedWeights
from penstock.timeline import Timeline
from penstock.weights.corrections.base import Correction
from penstock.weights.decision import Decision
from penstock.weights.optim.lr_schedulers import SchedulerFactory
from penstock.weights.optim.updater import OptimizerFactory
from penstock.weights.waves import WaveWeights


class Pipeline:
    """A model in training.

    Args:
        blocks: the model as a list (or dict) of modules or functions, each taking what the one before returned; a
            `LazyBlock` is made only where it is needed.
        schedule: what `make_schedule`, `check` or `load_schedule` returned; or a method in place of it, with what
            follows.
        method: its name, such as "2bw" (`penstock methods` lists them), or what `penstock.method` returned.
        stages: d, the number of stages (of a method that places several on a rank, of ranks); as many as the group has
            ranks for each pipeline if None.
        microbatches: m, into which each batch is split, for each of the parallel pipelines.
        loss: (output, target) -> the mean over the samples of a microbatch, as torch's losses return it; or (sum,
            weight), such as the sum over tokens and their number. Either way an update takes the mean over the whole
            batch, however it is divided: a mean is weighted by the number of samples, the length of the target's first
            dimension (or the output's, if the target has none). Used on the last stage, and on others to which no
            gradient comes back. All sums are added, divided by the weight of the last stage's. A dict gives each its
            own, by the number of its stage. Reports are of the last stage's.
        optimizer: named parameters -> optimizer, called once per stage. A parameter that a batch does not use counts as
            one with a gradient of zero (plain torch would skip it), so momentum and weight decay act on it.
        lr_schedule, lr_scheduler, max_grad_norm, ema_decay, divergence: from the gradient of a batch to an update
            (`penstock.runtime.plan.options.UpdateOptions`).
        precision: "fp32", "bf16" or "fp16"; or a `Precision`, with a loss scale of its own.
        recompute: "none", "block" or "stage": forwards that are run again to save memory; or a `Recompute`.
        data_parallel: the number of parallel pipelines; or a `DataParallel`, which says how they agree.
        staleness: what is done about weights that are read late, such as `PipeMare(reschedule=500)`, where a method
            does not bring it; or a `Staleness`, with delays of one's own choice.
        partition: the number of blocks of each stage; or a `Partition`, which also tells of tied parameters and of
            slices of sequences. Blocks are balanced by cost if None.
        seed: of the random numbers that blocks draw.
        group: a process group with one process per rank, the ranks of a pipeline next to each other; None to run all
            ranks in this process. Pipelines whose runs overlap in time need a group each, or they take each other's
            messages. Over gloo models are on the CPU. Over NCCL (tested over gloo only so far) the group is the whole
            job, `torch.cuda.set_device` has been called, and blocks and batches are on that device.
        timeout: seconds after which a missing message is an error; between runs, where all ranks meet, the group's own
            time-out counts.

    Raises:
        ConfigError: model, schedule and group do not fit.
        CapabilityError: the runtime does not offer the schedule's operations, or the optimizer cannot step a stage.
    """

    def __init__(
        self,
        blocks: Blocks,
        schedule: Schedule | Proof | None = None,
        *,
        method: str | MethodChoice | None = None,
        stages: int | None = None,
        microbatches: int | None = None,
        loss: LossFunction | Mapping[int, LossFunction],
        optimizer: OptimizerFactory,
        lr_schedule: Callable[[int], float] | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        precision: PrecisionName | Precision = "fp32",
        recompute: RecomputeMode | Recompute = "none",
        data_parallel: int | DataParallel = 1,
        staleness: Correction | Staleness | None = None,
        partition: Sequence[int] | Partition | None = None,
        divergence: Divergence | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
    ) -> None:
        named = named_blocks(blocks)
        options = PipelineOptions(
            data_parallel if isinstance(data_parallel, DataParallel) else DataParallel(data_parallel),
            precision if isinstance(precision, Precision) else Precision(precision),
            recompute if isinstance(recompute, Recompute) else Recompute(recompute),
            staleness if isinstance(staleness, Staleness) else Staleness(staleness),
            partition if isinstance(partition, Partition) else Partition(partition),
            UpdateOptions(max_grad_norm, lr_schedule, lr_scheduler, ema_decay, divergence),
            RunOptions(seed, timeout),
        )
        mesh = options.data_parallel.mesh
        request: Schedule | Proof | ScheduleRequest
        if method is None and schedule is not None:
            if stages is not None or microbatches is not None:
                raise ConfigError("a schedule has its stages and microbatches; leave stages and microbatches out")
            request = schedule
            if isinstance(schedule, ProvenSchedule) and schedule.chosen and options.staleness.correction is None:
                options = options.changed(correction=correction_by(schedule.chosen))
        elif method is not None and schedule is None:
            if options.staleness.correction is not None:
                raise ConfigError("a method brings its correction: method=penstock.method(name, option=...)")
            width = options.data_parallel.width
            request, correction = request_of(method, stages, microbatches, width, group, mesh)
            options = options.changed(correction=correction)
        else:
            raise ConfigError("give a schedule or a method, such as method='2bw', stages=4, microbatches=8; not both")
        width, group = from_mesh(mesh, options.data_parallel.width, schedule_of(request).ranks, group)
        plan = PipelinePlan.make(named, request, options.changed(width=width))
        self._build(plan, named, loss, optimizer, group)

    def _build(
        self,
        plan: PipelinePlan,
        named: Mapping[str, Any],
        loss: LossFunction | Mapping[int, LossFunction],
        optimizer: OptimizerFactory,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Build the ranks of this process and their communicators."""
        parallel, timeout = plan.options.data_parallel, plan.options.run.timeout
        self._plan, self.proof, self.schedule, self.parts = plan, plan.proof, plan.schedule, plan.parts
        self.timeout, self.combine = timeout, parallel.combine
        self.delays, self.backward_delays = plan.delays.by_block, (plan.backward_delays or plan.delays).by_block
        self.grid = RankGrid(parallel.width, self.schedule.ranks, group, timeout)
        holders = holders_of(self.schedule, parallel.width).values()
        alike = groups_of_holders(self.grid, holders, parallel.mesh, timeout) if parallel.fast else {}
        self._ranks = make_ranks(named, plan, self.grid, loss, optimizer)
        evaluation, self._transports = prove_evaluation(self.schedule), self._choose_transports()
        self._transports.prepare(Channel.TRAINING, self.proof.lowered.lanes)
        self._transports.prepare(Channel.EVALUATION, evaluation.lowered.lanes)
        self._engine = Engine(
            self.grid, self._ranks, self.proof, evaluation, self._transports, alike, timeout, parallel.combine
        )

    def _choose_transports(self) -> Transports:
        devices = {tensor.device.type for stage in self.stages.values() for tensor in stage.module.state().values()}
        return choose_transports(self.grid, devices, ties=bool(self._plan.ties))

    def __repr__(self) -> str:
        """Return the schedule and how far training is."""
        width = f"{self.grid.width} pipelines, " if self.grid.width > 1 else ""
        return f"<Pipeline of {self.schedule!r}: {width}{self.batches} batches trained>"

    @property
    def stages(self) -> dict[Stage, StageRuntime]:
        """The stages in this process; of the first pipeline, where it holds several."""
        first = self._ranks[0].key.pipeline
        return {n: stage for state in self._ranks if state.key.pipeline == first for n, stage in state.stages.items()}

    # --- running ----------------------------------------------------------------------------------------------------

    def run(
        self, batches: Batches, *, save: Saving | None = None, evaluate: Evaluating | None = None
    ) -> Iterator[Report]:
        """Train on batches: pairs (inputs, targets), as a DataLoader yields them, which are split into microbatches.

        A pair is split along the first dimension into m microbatches for each of the parallel pipelines; a list of that
        many pairs (input, target) is taken as it is.

        Losses arrive while later microbatches are under way, so this is an iterator of reports, one per batch, in
        order, on every rank. It ends when the data ends or `stop` was called, with the pipeline drained. Leaving the
        loop early drains it, too: all batches that have entered are finished. Where stages decide together (with
        `max_grad_norm`, a loss scale or parallel pipelines), any rank may leave or stop, and the others end after the
        same batch. Else the first stage decides between processes: let all ranks leave after the same batch, or they
        train on until the first one does.

        Snapshots and evaluations do not drain the pipeline where all stages have one newest version between two
        batches: with rules flush and double-buffer. With the others it is drained for them, which with stash and
        vertical-sync changes what the next batches read; so it is, and does, with every rule where `combine` is "wsp".

        Args:
            batches: the data.
            save: snapshots to take on the way.
            evaluate: evaluations to make on the way; what they find comes with the reports.

        Raises:
            DataError: a batch cannot be divided. As with whatever else the data's iterator raises, all batches before
                it have been trained on and reported by then, and the pipeline is as good as after any run.
            PenstockError: a message did not arrive, the data differ, weights were rewritten under a reader; also what
                the model itself raises. The pipeline is broken then.
        """
        if save is not None:
            check_every("save", save.every)
        if evaluate is not None:
            check_every("evaluate", evaluate.every)
            if self.combine.apart and evaluate.every % self.combine.every:
                raise ConfigError(
                    f"evaluate: every is {evaluate.every}, but pipelines meet every {self.combine.every} batches, and "
                    "in between each has weights of its own; evaluate every multiple of it"
                )
        yield from self._engine.train(batches, save, evaluate)

    def evaluate(self, batches: Batches, *, averaged: bool = False) -> tuple[float, float] | None:
        """Return the weighted mean loss on batches with the newest weights, and its weight, on all ranks.

        Args:
            batches: the data.
            averaged: read the averaged weights.

        Returns:
            None if the weight is zero.
        """
        total, weight = self._engine.evaluate(batches, averaged)
        return (total / weight, weight) if weight else None

    def stop(self) -> None:
        """End the run after the batches that have been announced.

        Where stages decide together, any rank may ask for it. Else the rank with the first stage decides between
        processes, and elsewhere this does nothing.
        """
        self._engine.ask_to_stop()

    def abandon(self) -> None:
        """Do not finish the batches in flight when the loop is left: this rank has failed, and the job is to end."""
        self._engine.abandon()

    def snapshots(self) -> list[Snapshot]:
        """Take a snapshot of every stage in this process, between two runs; `load` continues from it."""
        return self._engine.snapshots()

    def load(self, saved: SavedState) -> None:
        """Continue where snapshots of all stages were taken, bit for bit; also from another depth, width or method.

        Another method begins with the newest weights; one with double-buffered weights that finds no older ones begins
        with the newest twice, as after a synchronous span.

        Raises:
            CheckpointError: something is missing, or of another shape, or of a block that the model does not have.
        """
        self._engine.check_idle()
        check_names(saved, [n for part in self.parts for n in part])
        check_pipelines(saved, self.combine, self.grid.width)
        older = RULES[self.schedule.rule].bases == 2 and any(name.startswith("older/") for name in saved.names)
        try:
            for state in self._ranks:
                for stage in state.stages.values():
                    restore(stage, saved, older, self.delays)
                key = state.decisions.key if state.decisions.key in saved.facts else "decisions"
                state.decisions.load(int(saved.facts["batch"]), saved.facts[key])
                for stage in state.stages.values():
                    stage.weights.decided(state.decisions.mean)
        except BaseException as error:
            self._engine.break_off(error)  # half of it may have been loaded
            raise
        self._engine.batches, self._engine.keeps_older = int(saved.facts["batch"]), older

    @property
    def batches(self) -> int:
        """The number of batches trained on."""
        return self._engine.batches

    # --- another method ---------------------------------------------------------------------------------------------

    def switch(
        self,
        schedule: Schedule | Proof,
        *,
        correction: Correction | None = None,
        evaluate: Evaluating | None = None,
    ) -> None:
        """Continue under another schedule, between two runs; between processes all ranks call this together.

        Stages, weights and the state of optimizers stay where they are. The next run begins as after a synchronous
        one: every pass of it reads the newest weights or what comes of them; double buffering begins with them twice,
        unless the method before was double-buffered, too. Parameter-sized buffers that the schedule does not take are
        freed, and those that it takes besides are made (`live_bytes` tells of both once a run has begun).

        Args:
            schedule: what `make_schedule`, `check` or `load_schedule` returned.
            correction: of its method; the one before is over, and one that comes back begins anew.
            evaluate: the evaluations of the runs before and after. Each rule has its own border for that of a version,
                and one that would fall between the two is made now.

        Raises:
            ConfigError: the schedule has other stages, or other ranks for them, or takes other batches; or ranks were
                given different schedules.
            CapabilityError: the runtime does not offer it, or the optimizer cannot step in it.
        """
        self._engine.check_idle()
        self._continue(self._plan.followed_by(schedule, correction).prove(), evaluate)

    def _continue(self, plan: PipelinePlan, evaluate: Evaluating | None) -> None:
        """Continue under a plan that may follow the present one."""
        self._engine.check_idle()
        proof, correction = plan.proof, plan.options.staleness.correction
        for state in self._ranks:
            state.check_switch(proof, correction)
        if self.grid.group is not None:
            name = f"{proof.schedule.name} ({proof.schedule.rule})" + ("" if correction is None else f", {correction}")
            told = gather_json(name, "agreeing on another method", self.grid.control)
            if len(set(told)) > 1:
                raise ConfigError(f"ranks were given different schedules to go on with: {', '.join(told)}")
        self._transports.prepare(Channel.TRAINING, proof.lowered.lanes)
        self._plan, self.proof, self.schedule = plan, proof, proof.schedule
        self._engine.switch(proof, correction, evaluate)

    def look_out(self, first: float = 0) -> None:
        """Watch for divergence from batch `first` on, and forget what was found before; infinity ends the watch.

        Between two runs; all ranks call this together.
        """
        self._engine.check_idle()
        for state in self._ranks:
            state.decisions.detector.watch_from(first)

    @property
    def trouble(self) -> Trouble | None:
        """The first batch since `look_out` that has shown a divergence; None if none has.

        All ranks hear of the same one, but not at once. It is part of every snapshot that is taken afterwards.
        """
        return self._engine.reporter.decisions.detector.trouble

    def is_finite(self) -> bool:
        """Whether the newest weights of the stages in this process, and what optimizers remember, are numbers."""
        return all(stage.weights.is_finite() for state in self._ranks for stage in state.stages.values())

    # --- looking at it ----------------------------------------------------------------------------------------------

    def full_state_dict(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model, which the unsplit model's `load_state_dict` takes.

        Between two runs; all ranks call this together, and rank 0 gets it, on the CPU; the others get an empty dict.
        Names are those of the blocks and of what is in them: with blocks ``{"transformer.h.0": ..., "lm_head": ...}``
        those of a model that has them there. Shared parameters come under each of their names. Of several pipelines
        it is the first one's, or of the model that they have in common.

        Args:
            averaged: the averaged weights.

        Raises:
            PenstockError: a run is under way.
            TransportError: a peer is dead, or did not call this in time.
        """
        self._engine.check_idle()
        stages = [stage for key, stage in self.stages.items() if key.direction == 0]  # others hold copies of them
        return gather_state(with_all_names(self._state_of(stages, averaged), stages), self.grid)

    def state_dict(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of the stages in this process, newest or averaged, by canonical name.

        Where parallel pipelines have a model in common beside their own weights (`combine`), parameters are those of
        that model, which begins anew from what has been written into the weights of all pipelines between two runs. Of
        two directions the buffers are those of the first, where both are here, as evaluations read them.
        The tensors share the pipeline's memory, in which the next updates write other versions and gradients: clone
        what is to outlive the next batch. What is written into them between two runs is where the next one begins: in
        one process others that hold the same weights take it over; write the same in all processes that do.
        """
        return self._state_of(sorted(self.stages.values(), key=lambda stage: -stage.place), averaged)

    def _state_of(self, stages: Iterable[StageRuntime], averaged: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for stage in stages:
            if stage.weights.agreement is not None and self._engine.at_rest:
                stage.refresh()
            state.update(stage.module.state())
            state.update(stage.weights.newest_tensors())  # in the middle of a run another version may be bound
            state.update(stage.weights.presented(averaged))
        return state

    def lags(self) -> dict[str, dict[int, list[int]]]:
        """Return after how many waves stages here have added the updates of others, where `combine` does not choose it.

        By "pipeline/stage", batch after which a wave has ended, and pipeline, since the start of training (snapshots
        have it). What all processes have taken down together is a lag for `Combine`, and makes the same run again.
        """
        agreements = [stage.weights.agreement for state in self._ranks for stage in state.stages.values()]
        return {
            waves.place: dict(waves.record) for waves in agreements if isinstance(waves, WaveWeights) and waves.record
        }

    def decided(self) -> tuple[Decision, ...]:
        """The updates made or skipped since the last report: after a run, those that it made when it drained."""
        return self._engine.reporter.decisions.events.take_decided()

    def evaluated(self) -> tuple[Evaluated, ...]:
        """The evaluations that have become known since the last report."""
        return self._engine.reporter.decisions.events.take_evaluated()

    @property
    def evaluations(self) -> tuple[Evaluated, ...]:
        """All that evaluations in runs have found since the start of training, where stages decide together.

        They are part of a snapshot: those that were known when the update before it was made.
        """
        return tuple(self._engine.reporter.decisions.events.evaluations)

    def optimizers(self) -> dict[Stage, torch.optim.Optimizer]:
        """The optimizers of the stages in this process; of the first pipeline, where it holds several."""
        return {
            stage: runtime.weights.updater.optimizer
            for stage, runtime in self.stages.items()
            if isinstance(runtime.weights, TrainedWeights) and runtime.weights.updater.optimizer is not None
        }

    @property
    def doing(self) -> str:
        """The action that the rank of this process runs, or what it waits for."""
        return self._engine.reporter.recorder.doing

    def live_bytes(self) -> dict[int, dict[str, int]]:
        """Return live bytes by purpose, per rank of this process. Ranks count through all pipelines."""
        return {state.recorder.rank: dict(state.recorder.live) for state in self._ranks}

    def peak_bytes(self) -> dict[int, dict[str, int]]:
        """Return peak bytes by purpose, and of all together ("total"), per rank of this process."""
        recorders = [state.recorder for state in self._ranks]
        return {recorder.rank: {**recorder.peak, "total": recorder.peak_total} for recorder in recorders}

    def busy_seconds(self) -> dict[int, float]:
        """Return the seconds of work so far, per rank of this process."""
        return {state.recorder.rank: state.recorder.busy for state in self._ranks}

    def timeline(self) -> Timeline:
        """Return the timeline of all ranks; between processes a collective call, which all ranks make together."""
        parts = [state.recorder.recording() for state in self._ranks]
        if self.grid.group is not None:
            gathered = gather_json(parts, "gathering the timeline", self.grid.control)
            parts = [part for others in gathered for part in others]
        return merge_recordings(parts, self.grid.width * self.grid.depth)


def pipeline_of(
    plan: PipelinePlan,
    blocks: Blocks,
    loss: LossFunction | Mapping[int, LossFunction],
    optimizer: OptimizerFactory,
    group: dist.ProcessGroup | None = None,
) -> Pipeline:
    """The pipeline of a plan, of which nothing is checked again.

    Args:
        plan: made of the same blocks.
        blocks, loss, optimizer, group: as of `Pipeline`.

    Raises:
        ConfigError: the group has another size, or blocks are not what the plan takes them for.
        CapabilityError: the optimizer cannot step a stage.
    """
    pipeline = Pipeline.__new__(Pipeline)
    pipeline._build(plan, named_blocks(blocks), loss, optimizer, group)
    return pipeline


def continue_under(pipeline: Pipeline, plan: PipelinePlan, evaluate: Evaluating | None = None) -> None:
    """Let a pipeline go on under another plan of it, as `Pipeline.switch` does, without checking the plan again.

    Args:
        pipeline: whose run is over.
        plan: of the same blocks, proven; its present one follows it, or is followed by it.
        evaluate: as of `Pipeline.switch`.

    Raises:
        ConfigError: ranks were given different plans.
        CapabilityError: the optimizer cannot step under it.
    """
    pipeline._continue(plan, evaluate)
