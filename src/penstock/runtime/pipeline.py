"""The engine: a model cut into stages, trained by a proven schedule, on one pipeline or several parallel ones.

Without a process group all ranks run in this process, in turns; with one, each rank is a process. Both give the same
numbers, bit for bit.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import CapabilityError, ConfigError, PenstockError, TransportError
from penstock.runtime.blocks import Blocks, cut_blocks, named_blocks
from penstock.runtime.clock import common_origin
from penstock.runtime.collective import gather_json
from penstock.runtime.drive import Run, drive_all, drive_one
from penstock.runtime.executor import Executor, Report
from penstock.runtime.links import holders_of, link
from penstock.runtime.mesh import from_mesh, groups_of_holders
from penstock.runtime.nccl import LaneGroups, lane_groups
from penstock.runtime.node import NodeRuntime
from penstock.runtime.offer import check_offered, proven
from penstock.runtime.precision import Precision, low_precision
from penstock.runtime.recompute import Recompute
from penstock.runtime.recorder import Recorder, merge_recordings
from penstock.runtime.reduction import Reduce, is_fast
from penstock.runtime.sharing import check_equal, equalise
from penstock.runtime.source import Batches, Source
from penstock.runtime.stage import LossFunction
from penstock.runtime.team import Team, backends
from penstock.runtime.ties import find_ties
from penstock.runtime.worker import Recipe, Worker
from penstock.schedule.check import Proof, check
from penstock.schedule.ir import Node, Schedule
from penstock.schedule.nodespec import node_specs
from penstock.schedule.orders.forward_only import forward_only
from penstock.schedule.versions import RULES, apply_rule
from penstock.timeline import Timeline
from penstock.weights.decision import Decision, LossScale, Policy
from penstock.weights.update import OptimizerFactory

_FAILED = -1


class Pipeline:
    """A model in training.

    Args:
        blocks: the model as a list (or dict) of modules or functions, each taking what the one before returned; a
            `LazyBlock` is made only where it is needed.
        schedule: what `make_schedule`, `prove` or `check` returned.
        loss: (output, target) -> (sum, weight), or a scalar; used on the last stage.
        optimizer: named parameters -> optimizer, called once per stage. A parameter that a batch does not use counts as
            one with a gradient of zero (plain torch would skip it), so momentum and weight decay act on it.
        rate: update ordinal -> factor on the optimizer's learning rates.
        divisor: c, about the loss weight of a batch (a count of tokens, say); gradients are accumulated over c and
            corrected by c / N at the update, so that every cut, m and method takes the mean over the batch. The number
            of microbatches of a batch if None; in low precision the nearest power of two is taken.
        clip: the largest global norm of the gradient of a batch's mean loss; larger ones are scaled down to it, as
            `torch.nn.utils.clip_grad_norm_` does, whatever the order and the version rule. With it, or with
            `loss_scale`, a gradient that is not finite skips the update, and the next version is a copy.
        loss_scale: how the loss is scaled for backward.
        recompute: which forwards are run again instead of keeping what their backward needs: "none"; "block", each
            block just before its backward; or "stage", whole stages, in actions of their own (R), which run while the
            gradient is still on its way. The same numbers, random ones and buffers included.
        seed: of the random numbers that blocks draw (`penstock.runtime.randomness`).
        width: w, parallel pipelines that hold the same weights; each takes its m of the w * m microbatches of a batch,
            and gradients are added while the passes go on. Reports are of one pipeline's part, decisions
            (`Report.decided`) of the whole batch. 1, or that of the mesh, if None.
        reduce: how the gradients of parallel pipelines are added: "ordered", in the order of the pipelines, the same
            bits as in one process; or "fast", between processes by torch's all_reduce, on the groups of the mesh along
            its width or on one made for each stage. All pipelines still get the same bits. Two get those of "ordered";
            with more a sum may differ from the ordered one by (w - 1) eps times the sum of the magnitudes.
        precision: what passes compute in: "fp32", as the parameters are, or "bf16" or "fp16". Parameters in float32 are
            then cast once per version, and floating-point inputs of the first stage; there is one master copy in
            float32, and gradients accumulate in float32. fp16 comes with a dynamic loss scale unless one is given.
        tied: name of a parameter -> that of the one it is the same as, such as {"head.weight": "embedding.weight"},
            where blocks are made lazily; modules that hold one parameter are seen to do so. Stages that share one hold
            a copy each, which stay equal, and it counts once in the norm; its optimizer must treat all copies alike.
        balance: blocks per stage; balanced by cost if None.
        group: a process group with one process per rank, the ranks of a pipeline next to each other; None to run all
            ranks in this process. Pipelines whose runs overlap in time need a group each, or they take each other's
            messages. Over gloo models are on the CPU. Over NCCL (tested over gloo only so far) the group is the whole
            job, `torch.cuda.set_device` has been called, and blocks and batches are on that device.
        mesh: a device mesh with dimensions ("width", "depth") or ("width", "depth", "inner"), of which inner must be 1
            so far. Its ranks are those of the group (of the whole job, if there is no group) in the same order, as
            `init_device_mesh` lays them out. With reduce="fast" its groups along the width belong to a run while that
            is under way.
        timeout: seconds after which a missing message is an error; between runs, where all ranks meet, the group's own
            time-out counts.

    Raises:
        ConfigError: model, schedule and group do not fit.
        CapabilityError: the runtime does not offer the schedule's operations, or the optimizer cannot step a stage.
    """

    def __init__(
        self,
        blocks: Blocks,
        schedule: Schedule | Proof,
        *,
        loss: LossFunction,
        optimizer: OptimizerFactory,
        rate: Callable[[int], float] | None = None,
        divisor: float | None = None,
        clip: float | None = None,
        loss_scale: LossScale | None = None,
        recompute: Recompute = "none",
        seed: int = 0,
        width: int | None = None,
        reduce: Reduce = "ordered",
        precision: Precision = "fp32",
        tied: Mapping[str, str] | None = None,
        balance: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float = 300.0,
    ) -> None:
        low = low_precision(precision)
        policy = Policy(clip, loss_scale or (LossScale() if precision == "fp16" else None))
        fast = is_fast(reduce)
        named, plain = named_blocks(blocks), proven(schedule)
        if mesh is not None:
            width, group = from_mesh(mesh, width, plain.schedule.ranks, group)
        width = 1 if width is None else width
        self.parts = cut_blocks(named, plain.schedule.cuts, balance)
        ties, inside = find_ties(named, self.parts, tied or {})
        self.proof = proven(
            plain,
            decides=policy.decides or width != 1,
            reduces=width != 1,
            recompute=recompute,
            tied={cut for tie in ties for cut in tie.cuts},
        )
        self.schedule = self.proof.schedule
        check_offered(self.schedule)
        self.team = Team(width, self.schedule.ranks, group)
        holders = holders_of(self.schedule, width).values()
        self._holder_groups = groups_of_holders(self.team, holders, mesh) if fast else {}
        self.timeout = timeout
        if divisor is None:
            divisor = width * self.schedule.microbatches
        if not divisor > 0:
            raise ConfigError(f"divisor must be positive, got {divisor}")
        if low is not None:  # so that the gradient of a loss in low precision, S / c, is not rounded
            divisor = 2.0 ** round(math.log2(divisor))
        recipe = Recipe(loss, optimizer, rate, float(divisor), policy, recompute, seed, low)
        self.batches = 0
        self._broken: BaseException | None = None
        self._running = self._abandoned = False
        self._source: Source | None = None
        origin = time.perf_counter() if group is None else common_origin(self.team.control)
        models = {r: named if r == self.team.replicas[0] else copy.deepcopy(named) for r in self.team.replicas}
        self._workers = [
            Worker(seat, self.proof, models[seat.replica], self.parts, ties, inside, recipe, Recorder(row, origin))
            for seat, row in zip(self.team.seats, self.team.workers, strict=True)
        ]
        equalise(ties, self.team, self._workers)
        check_equal(self.team, self._workers)
        self._lane_groups = self._make_lane_groups()
        if self._lane_groups and ties:
            raise CapabilityError("parameters that stages share are offered over gloo so far, not over NCCL")

    def _make_lane_groups(self) -> list[LaneGroups]:
        """Communicators for tensors, where they travel over NCCL."""
        group, control = self.team.group, self.team.control
        if group is None or control is None or not _needs_nccl(group, self.nodes.values()):
            return []
        if self.team.width > 1:
            raise CapabilityError("parallel pipelines are offered over gloo so far, not over NCCL")
        return lane_groups(self.proof.lowered.lanes, control, "nccl")

    @property
    def nodes(self) -> dict[Node, NodeRuntime]:
        """The stages in this process; of the first pipeline, where it holds several."""
        first = self._workers[0].seat.replica
        return {n: node for worker in self._workers if worker.seat.replica == first for n, node in worker.nodes.items()}

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, batches: Batches) -> Iterator[Report]:
        """Train on batches; a batch is a sequence of pairs (input, target), m for each of the parallel pipelines.

        Losses arrive while later microbatches are under way, so this is an iterator of reports, one per batch, in
        order, on every rank. It ends when the data ends or `stop` was called, with the pipeline drained. Leaving the
        loop early drains it, too: all batches that have entered are finished. Where stages decide together (with
        `clip`, `loss_scale` or `width`), any rank may leave or stop, and the others end after the same batch. Else the
        first stage decides between processes: let all ranks leave after the same batch, or they train on until the
        first one does.

        Raises:
            PenstockError: a message did not arrive, the data differ, weights were rewritten under a reader; also what
                the model itself raises. The pipeline is broken then.
        """
        older = -1 if self.batches and RULES[self.schedule.rule].bases == 2 else 0
        yield from self._span(self.proof, batches, older, training=True)

    def evaluate(self, batches: Batches) -> tuple[float, float] | None:
        """The weighted mean loss on batches, with the newest weights, and its weight, on all ranks.

        Returns:
            None if the weight is zero.
        """
        order = forward_only(self.schedule.cuts, self.schedule.microbatches)
        schedule = apply_rule(order, RULES["frozen"], self.schedule.microbatches, "evaluation")
        stages = [node.stage for worker in self._workers for node in worker.nodes.values()]
        modules = [m for stage in stages for block in stage.modules for m in block.modules()]
        modes = [(module, module.training) for module in modules]
        for module in modules:
            module.training = False
        try:
            reports = list(self._span(check(schedule), batches, 0, training=False))
        finally:
            for module, mode in modes:
                module.training = mode
        found = [[r.loss * r.weight, r.weight] for r in reports if r.loss is not None and r.weight]
        if self.team.group is not None:
            gathered = gather_json(found, "gathering the losses of an evaluation", self.team.control)
            found = [pair for part in gathered for pair in part]
        weight = math.fsum(w for _, w in found)
        return (math.fsum(total for total, _ in found) / weight, weight) if weight else None

    def stop(self) -> None:
        """Let the run end after the batches that have been announced.

        Where stages decide together, any rank may ask for it. Else the rank with the first stage decides between
        processes, and elsewhere this does nothing.
        """
        self._ask_to_stop(self._source)

    def _ask_to_stop(self, source: Source | None) -> None:
        for worker in self._workers:
            worker.decisions.stopping = True
        if source is not None and (self.team.group is None or self.team.width == 1):
            source.stopped = True

    def abandon(self) -> None:
        """Do not finish what is under way when the loop is left: this rank has failed, and the job is to end."""
        self._abandoned = True

    def _span(self, proof: Proof, batches: Batches, older: int, training: bool) -> Iterator[Report]:
        if self._broken is not None:
            raise PenstockError("the pipeline broke in an earlier run and cannot go on") from self._broken
        if self._running:
            raise PenstockError("a run or an evaluation of this pipeline is under way; end it first")
        if training and not torch.is_grad_enabled():
            raise ConfigError("training needs gradients, but run() was called under torch.no_grad()")
        for worker in self._workers:
            worker.decisions.stopping = False
            for node in worker.nodes.values():
                node.refresh()
        source = self._source = self._make_source(batches)
        if not self._agree_to_start(source):
            return
        executors = self._executors(proof)
        reports = self._drive([executor.run(source, self.batches, older) for executor in executors], training)
        count, self._running = 0, True
        try:
            try:
                for report in reports:
                    count += 1
                    yield report
            except GeneratorExit:  # the caller has left the loop: finish what is under way
                if not self._abandoned:
                    self._ask_to_stop(source)
                    unseen = list(reports)
                    count += len(unseen)
                    self._reporting.decisions.give_back([d for report in unseen for d in report.decided])
                else:
                    self._broken = PenstockError("the run was abandoned")
                raise
        except GeneratorExit:
            raise
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._end_span(executors, count if training else 0)

    def _end_span(self, executors: Sequence[Executor], batches: int) -> None:
        self._running = False
        for executor in executors:
            executor.links.close()
        if self._broken is None:
            self.batches += batches
            for worker in self._workers:
                for node in worker.nodes.values():
                    node.restore()

    def _make_source(self, batches: Batches) -> Source:
        edges = {node.cut for node in self.nodes} & {0, self.schedule.cuts - 1}
        team = self.team
        return Source(batches, self.schedule.microbatches, team.width, len(edges), len(team.replicas))

    def _agree_to_start(self, source: Source) -> bool:
        """Whether there is a first batch; the first stage of each pipeline knows."""
        if self.team.group is None:
            return source.has(0)
        first = self.schedule.node_at[0, 0].rank
        flag, failure = None, None
        if self.team.seats[0].rank == first:
            try:
                flag = int(source.has(0))
            except Exception as error:  # the others must hear of it before it is raised here
                flag, failure = _FAILED, error
        try:
            flags = gather_json(flag, "agreeing to start", self.team.control)
        except TransportError as error:
            self._broken = error
            raise
        if failure is not None:
            raise failure
        if _FAILED in flags:
            rank = flags.index(_FAILED)
            raise TransportError(f"rank {rank}, which holds the first stage, could not read the first batch")
        return all(flag != 0 for flag in flags)

    def _executors(self, proof: Proof) -> list[Executor]:
        specs = node_specs(proof.schedule, older=0)
        links = link(self.team, proof.lowered, specs, self._lane_groups, self._holder_groups)
        holders = holders_of(proof.schedule, self.team.width)
        return [
            Executor(
                worker,
                proof.lowered,
                {spec.node: spec for spec in specs if spec.node.rank == worker.seat.rank},
                holders,
                links[worker.seat],
            )
            for worker in self._workers
        ]

    def _drive(self, runs: list[Run], training: bool) -> Iterator[Report]:
        """The reports: those of the last stage where it is here; of one pipeline in training, of all in evaluation."""
        if self.team.group is not None:
            return drive_one(runs[0], self.timeout)
        last = self.schedule.node_at[self.schedule.cuts - 1, 0].rank
        replicas = 1 if training else self.team.width
        return drive_all(runs, [replica * self.team.depth + last for replica in range(replicas)])

    # --- looking at it ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the stages in this process, newest version, by canonical name.

        They share the pipeline's memory, in which the next updates write other versions and gradients: clone what is
        to outlive the next batch.
        """
        state: dict[str, Tensor] = {}
        for node in self.nodes.values():
            state.update(node.stage.state())
            if node.store is not None:  # in the middle of a run another version may be bound
                state.update(node.store.newest_tensors())
        return state

    def decided(self) -> tuple[Decision, ...]:
        """The updates made or skipped since the last report: after a run, those that it made when it drained."""
        return self._reporting.decisions.news()

    @property
    def _reporting(self) -> Worker:
        """Whose reports are passed on."""
        last = self.schedule.node_at[self.schedule.cuts - 1, 0].rank
        return self._workers[last if self.team.group is None else 0]

    def optimizers(self) -> dict[Node, torch.optim.Optimizer]:
        """The optimizers of the stages in this process; of the first pipeline, where it holds several."""
        return {
            node: runtime.updater.optimizer
            for node, runtime in self.nodes.items()
            if runtime.updater is not None and runtime.updater.optimizer is not None
        }

    def live_bytes(self) -> dict[int, dict[str, int]]:
        """Per rank of this process, what its live bytes are for, now. Ranks count through all pipelines."""
        return {worker.recorder.rank: dict(worker.recorder.live) for worker in self._workers}

    def peak_bytes(self) -> dict[int, dict[str, int]]:
        """Per rank of this process, the most bytes of each kind, and of all kinds together ("total")."""
        recorders = [worker.recorder for worker in self._workers]
        return {recorder.rank: {**recorder.peak, "total": recorder.peak_total} for recorder in recorders}

    def busy_seconds(self) -> dict[int, float]:
        """Per rank of this process, time spent on work so far."""
        return {worker.recorder.rank: worker.recorder.busy for worker in self._workers}

    def timeline(self) -> Timeline:
        """What every rank did and held; between processes a collective call, which all ranks make together."""
        parts = [worker.recorder.recording() for worker in self._workers]
        if self.team.group is not None:
            gathered = gather_json(parts, "gathering the timeline", self.team.control)
            parts = [part for others in gathered for part in others]
        return merge_recordings(parts, self.team.width * self.team.depth)


def _needs_nccl(group: dist.ProcessGroup, nodes: Iterable[NodeRuntime]) -> bool:
    """Whether tensors travel over NCCL: it is there, and this rank does not compute on the CPU."""
    devices = {tensor.device.type for node in nodes for tensor in node.stage.state().values()}
    return backends(group).get("cuda") == "nccl" and "cpu" not in devices
