"""One rank at work: it runs its instructions in order and yields where it has to wait.

The executor is a generator. It yields a `Wait` when it needs a message that is not there, and a `Report` when the loss
of a batch is known; whoever drives it (one process for all ranks, or one process each) decides how to wait. It plays
the schedule's own books (`penstock.schedule.nodestate`) along: they tell which versions are alive, and refuse at once
whatever the proof would have refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.errors import DataError
from penstock.runtime.decisions import Evaluated
from penstock.runtime.graphs import Loss, Microbatch
from penstock.runtime.keeping import Keeping
from penstock.runtime.links import Links
from penstock.runtime.mailbox import Mailbox
from penstock.runtime.node import NodeRuntime
from penstock.runtime.parcel import Header, Parcel, detached
from penstock.runtime.precision import cast
from penstock.runtime.randomness import Draw
from penstock.runtime.reduction import Holder
from penstock.runtime.snapshot import Saving
from penstock.runtime.source import Sample, Source
from penstock.runtime.updates import Updates
from penstock.runtime.waiting import Wait
from penstock.runtime.worker import Worker
from penstock.schedule.ir import Action, Kind, Node, Op, Payload, existing
from penstock.schedule.lowered import Instruction, Lowered, Message
from penstock.schedule.nodespec import NodeSpec
from penstock.schedule.nodestate import NodeState
from penstock.timeline import Interval, Waiting
from penstock.weights.decision import Decision

NO_GRADIENTS: tuple[bool, ...] = ()
NO_SAMPLE = Sample(None, None, 0)


@dataclass(frozen=True)
class Report:
    """What became of one batch.

    Attributes:
        batch: its number since the start of training.
        loss: the weighted mean over this pipeline's part of the batch; None on ranks without the last stage, and where
            the weight is zero.
        weight: the sum of the loss weights; None on ranks without the last stage.
        seconds: when it was known, since the pipeline was made.
        decided: the updates that were made or skipped on this rank since the last report; they lag behind the losses.
        evaluated: the evaluations that have become known since, on ranks that know (all, where stages decide together,
            else that of the last stage).
    """

    batch: int
    loss: float | None
    weight: float | None
    seconds: float
    decided: tuple[Decision, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()


class Executor:
    """Runs one rank.

    Args:
        worker: its stages, its record, its part in decisions.
        lowered: the schedule with its messages.
        specs: what the books of each node on this rank need to know.
        holders: of each cut, all nodes of all parallel pipelines that hold it.
        links: to the others.
    """

    def __init__(
        self,
        worker: Worker,
        lowered: Lowered,
        specs: dict[Node, NodeSpec],
        holders: Mapping[int, tuple[Holder, ...]],
        links: Links,
    ) -> None:
        self.lowered, self.specs, self.nodes, self.links = lowered, specs, worker.nodes, links
        self.replica, self.rank = worker.seat
        self.recorder, self.decisions = worker.recorder, worker.decisions
        self.mailbox = Mailbox(self.rank, lowered, links.transport, self.recorder)
        self.updates = Updates(self.replica, holders, links.reducer, links.council, self.decisions, self.recorder)
        self.m, self._held = lowered.schedule.microbatches, worker.snapshots
        self._books: dict[Node, NodeState] = {}
        self._forwards: dict[int, int] = {}
        self._losses: dict[int, list[Loss]] = {}
        self._weights: dict[int, float] = {}  # N of each batch, once known here
        self._sums: dict[int, Loss] = {}  # of each batch that stages have not decided on
        self._admitted: dict[int, int] = {}
        self._report: Report | None = None
        self._start = 0
        self._more = True
        self._at_border: Callable[[int], Iterator[Wait]] | None = None
        self._keeping = self._keep(None)

    def close(self) -> None:
        """Stop whatever runs in the background."""
        self.links.close()

    def run(
        self,
        source: Source,
        start: int,
        older: int,
        at_border: Callable[[int], Iterator[Wait]] | None = None,
        saving: Saving | None = None,
    ) -> Iterator[Wait | Report]:
        """Run one span of at least one batch, from an empty pipeline to an empty pipeline.

        Args:
            source: the data; the first stage asks it whether batches follow.
            start: number of the span's first batch since the start of training.
            older: 0, or -1 where batch 0 of the span reads the version before the newest.
            at_border: what to do before the first forward of a batch, given its number since the start of training.
            saving: snapshots to take on the way.
        """
        self._start, self._at_border = start, at_border
        self._keeping = self._keep(saving)
        self._books = {node: NodeState(replace(spec, older=older)) for node, spec in self.specs.items()}
        program, t = self.lowered.programs[self.rank], 0
        for instruction in program.period:
            if instruction.ahead:  # what the period before the first one would have posted
                yield from self._instruct(instruction, -1, source)
        while True:
            for instruction in program.period:
                if not instruction.ahead or self._more:  # the first forward of the batch tells whether more follow
                    yield from self._instruct(instruction, t, source)
            t += 1
            if not self._more:
                break
        for books in self._books.values():
            books.drain(t)
        for instruction in program.epilogue:
            yield from self._instruct(instruction, t, source)
        yield from self._pending_report()
        yield from self.mailbox.flush()

    def _keep(self, saving: Saving | None) -> Keeping:
        return Keeping(saving, self._start, self.replica, self.decisions, self.recorder, self._held)

    def _instruct(self, instruction: Instruction, t: int, source: Source) -> Iterator[Wait | Report]:
        action, route, needs, _ = instruction
        if existing(action, t, self.m) is None:
            return
        first = action.unit.first + t * (1 if action.unit.kind is Kind.BATCH else self.m)
        if action.op is not Op.SEND:
            yield from self._pending_report()
        if action.op is Op.F and not action.unit.first:
            yield from self._begin(action.node, self._start + t)
        if action.op is Op.RECV:
            self.mailbox.receive(Message(route, first))
        elif action.op is Op.SEND:
            yield from self.mailbox.send(Message(route, first))
        else:
            parcels: list[Parcel] = []
            for message in needs:
                wanted = Message(message.route, message.first + t * self.m)
                what = f"{self._name(action.node)}, {action.op}{first}"
                batch = self._start + wanted.first // self.m
                parcels.append((yield from self.mailbox.collect(wanted, batch, what)))
            if action.op is Op.STEP:
                yield from self.updates.wait(action.node, self._start + first, f"STEP{first}")
            self._act(action, t, first, parcels, source)
            if action.op is Op.F:
                self._note_forward(action, first)

    def _begin(self, node: Node, batch: int) -> Iterator[Wait]:
        """What comes before the first forward of a batch on a node."""
        self._keeping.before_forward(self.nodes[node], batch)
        if self._at_border is not None:
            yield from self._at_border(batch)

    # --- actions ----------------------------------------------------------------------------------------------------

    def _act(self, action: Action, t: int, first: int, parcels: list[Parcel], source: Source) -> None:
        """Run one action that is not a message, in the books and in fact."""
        node, books = self.nodes[action.node], self._books[action.node]
        start, label = self.recorder.now(), f"{action.op}{'e' if action.unit.kind is Kind.EVAL else ''}{first}"
        self.recorder.doing = f"{self._name(action.node)}, {label}"
        try:
            books.apply(action, t, self._admitted)
            match action.op:
                case Op.F:
                    sample, more = self._read(node, first, source)
                    start = self.recorder.now()
                    self._forward(node, action, t, first, parcels, sample, more)
                case Op.B:
                    self._backward(node, first, parcels)
                case Op.R:
                    node.recompute(first, self._version(action, t, books))
                case Op.REDUCE:
                    self.updates.reduce(node, self._start + first)
                case Op.TIE:
                    self.updates.tie(node, self._start + first)
                case Op.DECIDE:
                    self.updates.hand_in(node, self._start + first, self._sums.pop(self._start + first, None))
                case Op.STEP:
                    weight = self._weights.pop(self._start + first)
                    decision = self.updates.step(node, self._start + first, weight, books.rotated)
                    source.stopped |= decision.stop
                    self._keeping.after_step(node, self._start + first + 1)
                case _:
                    raise AssertionError(f"the runtime does not offer {action.op}")
        except Exception as error:
            error.add_note(f"raised by {label} of {node.stage.where}")
            raise
        if node.store is not None and books.spec.share:
            node.store.retain(v + self._start for v in books.versions)
        self._hold_bytes(action.op)
        batch = self._start + (first if action.unit.kind is Kind.BATCH else first // self.m)
        if action.unit.kind is Kind.EVAL:
            batch = -1  # evaluation is no batch of the training
        version = batch + 1 if action.op is Op.STEP else self._version(action, t, books)
        cut, replica, _ = action.node
        end, rank, what = self.recorder.now(), self.recorder.rank, action.op.value
        place = (cut, replica, batch, version, "", -1 if action.unit.kind is Kind.BATCH else first)
        self.recorder.add(Interval(rank, "compute", start, end, what, label, *place, self.recorder.span))

    def _name(self, node: Node) -> str:
        """Rank (counted through all pipelines) and stage, for messages."""
        return f"rank {self.recorder.rank}, stage {node.name}"

    def _version(self, action: Action, t: int, books: NodeState) -> int:
        """The version an action reads, counted from the start of training; -1 where the schedule names none."""
        if action.reads is None:
            return -1
        return self._start + max(action.reads.versions[0] + t, books.spec.older)

    def _read(self, node: NodeRuntime, k: int, source: Source) -> tuple[Sample, bool]:
        """Take a microbatch where data enters, and whether another batch follows; that is no work."""
        first = node.node.cut == 0
        if not first and not node.has_loss:
            return NO_SAMPLE, False
        start = self.recorder.now()
        sample, more = source.sample(self.replica, k), first and source.follows(k // self.m + 1)
        rank, end, label = self.recorder.rank, self.recorder.now(), f"read sample {k}"
        self.recorder.add(Interval(rank, "compute", start, end, Waiting.DATA, label, node.node.cut, cause="the data"))
        return sample, more

    def _forward(
        self, node: NodeRuntime, action: Action, t: int, k: int, parcels: list[Parcel], sample: Sample, more: bool
    ) -> None:
        batch, cut = self._start + k // self.m, node.node.cut
        if cut == 0:
            value, wants = cast(sample.input, node.stage.precision), NO_GRADIENTS
            header = Header(batch, k, more, sample.checksum)
        else:
            header, value, wants = parcels[0].header, parcels[0].tree, parcels[0].wants_gradient
            if node.has_loss and header.checksum != sample.checksum:
                raise DataError(
                    f"microbatch {k} (batch {batch}) is not the same on the first and the last stage; every rank must "
                    "see the same samples in the same order"
                )
        self._more = header.more
        if action.unit.kind is Kind.EVAL:
            output, loss = node.evaluate(Microbatch(k, Draw(-1, k), sample.target), value)
        else:
            scale = self.decisions.scale(batch) if node.has_loss else 1.0
            microbatch = Microbatch(k, Draw(batch, self.replica * self.m + k % self.m), sample.target, scale)
            output, loss = node.forward(microbatch, value, wants, self._version(action, t, self._books[action.node]))
        if loss is not None:
            self._losses.setdefault(batch, []).append(loss)
        else:
            tree, asks = detached(output)
            self.mailbox.put(Payload.ACTIVATION, node.node, Parcel(header, tree, asks))

    def _backward(self, node: NodeRuntime, k: int, parcels: list[Parcel]) -> None:
        batch = self._start + k // self.m
        if parcels and not math.isnan(parcels[0].header.weight):
            self._weights[batch] = parcels[0].header.weight
        gradients = node.backward(k, batch, parcels[0].tree if parcels else None)
        if node.node.cut > 0:
            # The weight of a batch is known to the last stage before its last backward, so it rides on gradients.
            header = Header(batch, k, self._more, weight=self._weights.get(batch, math.nan))
            self.mailbox.put(Payload.GRADIENT, node.node, Parcel(header, gradients))

    def _note_forward(self, action: Action, k: int) -> None:
        """Make the report of a batch once its last forward on this rank is done."""
        batch = self._start + k // self.m
        self._forwards[batch] = self._forwards.get(batch, 0) + action.unit.count
        if self._forwards[batch] < self.m * len(self.nodes):
            return
        del self._forwards[batch]
        losses, loss, weight = self._losses.pop(batch, None), None, None
        if losses is not None:
            total, weight = sum(item.total for item in losses), sum(item.weight for item in losses)
            loss = total / weight if weight else None
        if action.unit.kind is Kind.EVAL:
            self._report = Report(batch, loss, weight, self.recorder.now())
            return
        if weight is not None:
            self._weights[batch] = weight
            if self.specs[action.node].decides:
                self._sums[batch] = Loss(total, weight)
        news, evaluated = self.decisions.news(), self.decisions.evaluated()
        self._report = Report(batch, loss, weight, self.recorder.now(), news, evaluated)

    def _pending_report(self) -> Iterator[Report]:
        """Hand the report out only when what the forward made is on its way: the caller may take any time with it."""
        if self._report is not None:
            report, self._report = self._report, None
            start = self.recorder.now()
            yield report
            rank, end, label = self.recorder.rank, self.recorder.now(), f"report of batch {report.batch}"
            self.recorder.add(Interval(rank, "compute", start, end, Waiting.CALLER, label, cause="the caller"))

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _hold_bytes(self, op: Op) -> None:
        """Take down what the parameter-sized memory of this rank is used for."""
        self._keeping.record()
        totals: dict[str, int] = {}
        for node in self.nodes.values():
            for role, nbytes in node.bytes_by_role().items():
                totals[role] = totals.get(role, 0) + nbytes
            if op is Op.STEP and node.updater is not None:
                totals["optimizer"] = totals.get("optimizer", 0) + node.updater.nbytes
        for role, nbytes in totals.items():
            self.recorder.hold(role, nbytes)
