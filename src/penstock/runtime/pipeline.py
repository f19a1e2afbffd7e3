"""The engine: a model cut into stages, trained by a proven schedule.

Without a process group all ranks run in this process, in turns; with one, each rank is a process. Both give the same
numbers, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, TransportError
from penstock.runtime.blocks import Blocks, LazyBlock, check_untied, cut_blocks, named_blocks
from penstock.runtime.clock import common_origin
from penstock.runtime.collective import broadcast_number, gather_json
from penstock.runtime.distributed import GlooTransport
from penstock.runtime.drive import drive_all, drive_one
from penstock.runtime.executor import Executor, Report, Wait
from penstock.runtime.local import LocalTransport
from penstock.runtime.nccl import LaneGroups, NcclTransport, lane_groups
from penstock.runtime.node import NodeRuntime
from penstock.runtime.offer import check_offered
from penstock.runtime.recorder import Recorder, merge_recordings
from penstock.runtime.source import Batches, Source
from penstock.runtime.stage import LossFunction, Stage
from penstock.runtime.transport import Transport
from penstock.schedule.check import Proof, check
from penstock.schedule.ir import Node, Schedule
from penstock.schedule.lowered import Lowered
from penstock.schedule.nodespec import node_specs
from penstock.schedule.orders.forward_only import forward_only
from penstock.schedule.versions import RULES, apply_rule
from penstock.timeline import Timeline
from penstock.weights.store import VersionStore
from penstock.weights.update import OptimizerFactory, Updater

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
            corrected by c / N at the update, so that every cut, m and method takes the mean over the batch. m if None.
        balance: blocks per stage; balanced by cost if None.
        group: a process group with one process per rank; None to run all ranks in this process. Pipelines whose runs
            overlap in time need a group each, or they take each other's messages. Over gloo models are on the CPU.
            Over NCCL (tested over gloo only so far) the group is the whole job, `torch.cuda.set_device` has been
            called, and blocks and batches are on that device.
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
        balance: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
    ) -> None:
        if not isinstance(schedule, Schedule | Proof):
            raise ConfigError(f"schedule must come from make_schedule, prove or check, not {schedule!r:.80}")
        self.proof = schedule if isinstance(schedule, Proof) else check(schedule)
        self.schedule = self.proof.schedule
        check_offered(self.schedule)
        self.group, self.timeout = group, timeout
        ranks = self.schedule.ranks
        if group is not None and dist.get_world_size(group) != ranks:
            raise ConfigError(f"the schedule has {ranks} ranks, the process group {dist.get_world_size(group)}")
        self.ranks = range(ranks) if group is None else (dist.get_rank(group),)
        self.control = _control_group(group)
        named = named_blocks(blocks)
        self.parts = cut_blocks(named, self.schedule.cuts, balance)
        check_untied(named, self.parts)
        self._loss, self._optimizer, self._rate = loss, optimizer, rate
        self._divisor = float(divisor if divisor is not None else self.schedule.microbatches)
        if not self._divisor > 0:
            raise ConfigError(f"divisor must be positive, got {divisor}")
        self.batches = 0
        self._broken: BaseException | None = None
        self._running = self._abandoned = False
        origin = time.perf_counter() if group is None else common_origin(self.control)
        self._recorders = {rank: Recorder(rank, origin) for rank in self.ranks}
        self.nodes = {node: self._make_node(node, named) for node in self.schedule.nodes if node.rank in self.ranks}
        for rank, recorder in self._recorders.items():
            fixed = sum(t.nbytes for n in self.schedule.on_rank(rank) for t in self.nodes[n].stage.fixed)
            recorder.hold("frozen parameters and buffers", fixed)
        self._source: Source | None = None
        self._lane_groups: LaneGroups = {}
        if group is not None and self.control is not None and _needs_nccl(group, self.nodes.values()):
            self._lane_groups = lane_groups(self.proof.lowered.lanes, self.control, "nccl")

    def _make_node(self, node: Node, named: dict[str, Any]) -> NodeRuntime:
        made = {
            name: named[name].make() if isinstance(named[name], LazyBlock) else named[name]
            for name in self.parts[node.cut]
        }
        where = f"stage {node.name} on rank {node.rank}"
        stage = Stage(made, self._loss if node.cut == self.schedule.cuts - 1 else None, where)
        store, updater = None, None
        if stage.trained:
            store = VersionStore(stage.trained, self.proof.nodes[node].buffers, where)
            rotates = self.proof.nodes[node].versions > 1
            updater = Updater(self._optimizer, store.layout, store.versions[0], rotates, self._rate)
        runtime = NodeRuntime(node, stage, store, updater, self._divisor)
        runtime.restore()  # from here on the modules' parameters live in the store's memory, not beside it
        return runtime

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, batches: Batches) -> Iterator[Report]:
        """Train on batches; a batch is a sequence of m pairs (input, target).

        Losses arrive while later microbatches are under way, so this is an iterator of reports, one per batch, in
        order, on every rank. It ends when the data ends or `stop` was called, with the pipeline drained. Leaving the
        loop early drains it, too: all batches that have entered are finished. Between processes the first stage
        decides: let all ranks leave after the same batch, or they train on until the first one does.

        Raises:
            PenstockError: a message did not arrive, the data differ, weights were rewritten under a reader; also what
                the model itself raises. The pipeline is broken then.
        """
        older = -1 if self.batches and RULES[self.schedule.rule].bases == 2 else 0
        yield from self._span(self.proof, batches, older, training=True)

    def evaluate(self, batches: Batches) -> tuple[float, float] | None:
        """The weighted mean loss on batches, with the newest weights, and its weight; None without the last stage."""
        order = forward_only(self.schedule.cuts, self.schedule.microbatches)
        schedule = apply_rule(order, RULES["frozen"], self.schedule.microbatches, "evaluation")
        modules = [m for node in self.nodes.values() for block in node.stage.modules for m in block.modules()]
        modes = [(module, module.training) for module in modules]
        for module in modules:
            module.training = False
        try:
            reports = list(self._span(check(schedule), batches, 0, training=False))
        finally:
            for module, mode in modes:
                module.training = mode
        known = [(r.loss * r.weight, r.weight) for r in reports if r.loss is not None and r.weight]
        weight = sum(w for _, w in known)
        return (sum(total for total, _ in known) / weight, weight) if weight else None

    def stop(self) -> None:
        """Let the run end after the batches that have been announced.

        Between processes the rank with the first stage decides, and elsewhere this does nothing; a loop that stops on
        the loss, which only the last stage knows, tells all ranks and leaves on each after the same batch.
        """
        if self._source is not None:
            self._source.stopped = True

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
        edges = {n.cut for n in self.nodes} & {0, self.schedule.cuts - 1}
        source = self._source = Source(batches, self.schedule.microbatches, readers=len(edges))
        if not self._agree_to_start(source):
            return
        executors = self._executors(proof)
        reports = self._drive([executor.run(source, self.batches, older) for executor in executors])
        count, self._running = 0, True
        try:
            try:
                for report in reports:
                    count += 1
                    yield report
            except GeneratorExit:  # the caller has left the loop: finish what is under way
                if not self._abandoned:
                    source.stopped = True
                    count += sum(1 for _ in reports)
                else:
                    self._broken = PenstockError("the run was abandoned")
                raise
        except GeneratorExit:
            raise
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._running = False
            for executor in executors:
                executor.transport.close()
            if self._broken is None:
                self.batches += count if training else 0
                for node in self.nodes.values():
                    node.restore()

    def _agree_to_start(self, source: Source) -> bool:
        """Whether there is a first batch; the first stage knows."""
        first = self.schedule.node_at[0, 0].rank
        if self.group is None:
            return source.has(0)
        flag, failure = 0, None
        if first in self.ranks:
            try:
                flag = int(source.has(0))
            except Exception as error:  # the others must hear of it before it is raised here
                flag, failure = _FAILED, error
        try:
            flag = broadcast_number(flag, first, "agreeing to start", self.control)
        except TransportError as error:
            self._broken = error
            raise
        if failure is not None:
            raise failure
        if flag == _FAILED:
            raise TransportError(f"rank {first}, which holds the first stage, could not read the first batch")
        return bool(flag)

    def _executors(self, proof: Proof) -> list[Executor]:
        specs = {spec.node: spec for spec in node_specs(proof.schedule, older=0)}
        local = LocalTransport()
        executors = []
        for rank in self.ranks:
            transport = local if self.group is None else self._make_transport(rank, proof.lowered)
            here = proof.schedule.on_rank(rank)
            nodes = {node: self.nodes[node] for node in here}
            rank_specs = {node: specs[node] for node in here}
            executors.append(Executor(rank, proof.lowered, rank_specs, nodes, transport, self._recorders[rank]))
        return executors

    def _make_transport(self, rank: int, lowered: Lowered) -> Transport:
        """Lanes to the other processes: all over gloo, or tensors over NCCL."""
        if not self._lane_groups:
            return GlooTransport(rank, lowered.lanes, lowered.window, self.control)
        assert self.control is not None
        device = torch.device("cuda", torch.cuda.current_device())
        return NcclTransport(rank, self._lane_groups, lowered.window, self.control, device)

    def _drive(self, runs: list[Iterator[Wait | Report]]) -> Iterator[Report]:
        if self.group is not None:
            return drive_one(runs[0], self.timeout)
        return drive_all(runs, reporting=self.schedule.node_at[self.schedule.cuts - 1, 0].rank)

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
                state.update(node.store.tensors(node.store.newest))
        return state

    def optimizers(self) -> dict[Node, torch.optim.Optimizer]:
        """The optimizers of the stages in this process."""
        return {
            node: runtime.updater.optimizer
            for node, runtime in self.nodes.items()
            if runtime.updater is not None and runtime.updater.optimizer is not None
        }

    def live_bytes(self) -> dict[int, dict[str, int]]:
        """Per rank of this process, what its live bytes are for, now."""
        return {rank: dict(recorder.live) for rank, recorder in self._recorders.items()}

    def peak_bytes(self) -> dict[int, dict[str, int]]:
        """Per rank of this process, the most bytes of each kind, and of all kinds together ("total")."""
        return {rank: {**r.peak, "total": r.peak_total} for rank, r in self._recorders.items()}

    def busy_seconds(self) -> dict[int, float]:
        """Per rank of this process, time spent on work so far."""
        return {rank: recorder.busy for rank, recorder in self._recorders.items()}

    def timeline(self) -> Timeline:
        """What every rank did and held; between processes a collective call, which all ranks make together."""
        parts = [recorder.recording() for recorder in self._recorders.values()]
        if self.group is not None:
            gathered = gather_json(parts, "gathering the timeline", self.control)
            parts = [part for others in gathered for part in others]
        return merge_recordings(parts, self.schedule.ranks)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Kind of device -> backend, as in {"cpu": "gloo", "cuda": "nccl"}."""
    parts = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (part.partition(":") for part in parts)}


def _control_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group on the CPU for small messages: the given one, or a gloo group of the same ranks."""
    if group is None or _backends(group).get("cpu") == "gloo":
        return group
    made: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
    return made


def _needs_nccl(group: dist.ProcessGroup, nodes: Iterable[NodeRuntime]) -> bool:
    """Whether tensors travel over NCCL: it is there, and this rank does not compute on the CPU."""
    devices = {tensor.device.type for node in nodes for tensor in node.stage.state().values()}
    return _backends(group).get("cuda") == "nccl" and "cpu" not in devices
