"""One rank at work: it runs its instructions in order and yields where it has to wait.

The executor is a generator. It yields a `Wait` when it needs a message that is not there, and a `Report` when the loss
of a batch is known; whoever drives it (one process for all ranks, or one process each) decides how to wait. It plays
the schedule's own books (`penstock.schedule.nodestate`) along: they tell which versions are alive, and refuse at once
whatever the proof would have refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.errors import DataError, TransportError
from penstock.runtime.node import Loss, NodeRuntime
from penstock.runtime.parcel import Header, Parcel, detached
from penstock.runtime.recorder import Recorder
from penstock.runtime.source import Sample, Source
from penstock.runtime.transport import Ticket, Transport
from penstock.schedule.ir import Action, Kind, Node, Op, Payload, existing
from penstock.schedule.lowered import Instruction, LaneKey, Lowered, Message
from penstock.schedule.nodespec import NodeSpec
from penstock.schedule.nodestate import NodeState
from penstock.timeline import Interval

NO_GRADIENTS: tuple[bool, ...] = ()
NO_SAMPLE = Sample(None, None, 0)


class Wait(NamedTuple):
    """The rank needs `ticket` before it can go on with `what`."""

    ticket: Ticket
    what: str


@dataclass(frozen=True)
class Report:
    """What became of one batch.

    Attributes:
        batch: its number since the start of training.
        loss: the weighted mean over the batch; None on ranks without the last stage, and where the weight is zero.
        weight: the sum of the loss weights; None on ranks without the last stage.
        seconds: when it was known, since the pipeline was made.
    """

    batch: int
    loss: float | None
    weight: float | None
    seconds: float


class _Sending(NamedTuple):
    """A posted SEND."""

    ticket: Ticket
    nbytes: int
    label: str
    posted: float


class Executor:
    """Runs one rank.

    Args:
        rank: which.
        lowered: the schedule with its messages.
        specs: what the books of each node on this rank need to know.
        nodes: the stages on this rank.
        transport: moves messages.
        recorder: takes down what happens.
    """

    def __init__(
        self,
        rank: int,
        lowered: Lowered,
        specs: dict[Node, NodeSpec],
        nodes: dict[Node, NodeRuntime],
        transport: Transport,
        recorder: Recorder,
    ) -> None:
        self.rank, self.lowered, self.specs, self.nodes = rank, lowered, specs, nodes
        self.transport, self.recorder = transport, recorder
        self.m = lowered.schedule.microbatches
        self._last_cut = lowered.schedule.cuts - 1
        self._lanes = [route.lane for route in lowered.routes]
        self._books: dict[Node, NodeState] = {}
        self._posted: dict[Message, Ticket] = {}
        self._sending: dict[LaneKey, deque[_Sending]] = {}
        self._outbox: dict[tuple[Payload, Node, int], Parcel] = {}
        self._forwards: dict[int, int] = {}
        self._losses: dict[int, list[Loss]] = {}
        self._weights: dict[int, float] = {}  # N of each batch, once known here
        self._admitted: dict[int, int] = {}
        self._report: Report | None = None
        self._start = 0
        self._more = True

    def run(self, source: Source, start: int, older: int) -> Iterator[Wait | Report]:
        """Run one span of at least one batch, from an empty pipeline to an empty pipeline.

        Args:
            source: the data; the first stage asks it whether batches follow.
            start: number of the span's first batch since the start of training.
            older: 0, or -1 where batch 0 of the span reads the version before the newest.
        """
        self._start = start
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
        for queue in self._sending.values():
            while queue:
                yield from self._complete_send(queue)

    def _instruct(self, instruction: Instruction, t: int, source: Source) -> Iterator[Wait | Report]:
        action, route, needs, _ = instruction
        if existing(action, t, self.m) is None:
            return
        first = action.unit.first + t * (1 if action.unit.kind is Kind.BATCH else self.m)
        if action.op is not Op.SEND:
            yield from self._pending_report()
        if action.op is Op.RECV:
            ticket = self._posted[Message(route, first)] = self.transport.receive(self._lanes[route])
            self.recorder.change("messages", ticket.nbytes)
        elif action.op is Op.SEND:
            yield from self._send(route, first)
        else:
            parcels: list[Parcel] = []
            for message in needs:
                wanted = Message(message.route, message.first + t * self.m)
                parcels.append((yield from self._collect(wanted, action, first)))
            self._act(action, t, first, parcels, source)
            if action.op is Op.F:
                self._note_forward(action, first)

    # --- actions ----------------------------------------------------------------------------------------------------

    def _act(self, action: Action, t: int, first: int, parcels: list[Parcel], source: Source) -> None:
        """Run one action that is not a message, in the books and in fact."""
        node, books = self.nodes[action.node], self._books[action.node]
        start, label = self.recorder.now(), f"{action.op}{'e' if action.unit.kind is Kind.EVAL else ''}{first}"
        try:
            books.apply(action, t, self._admitted)
            match action.op:
                case Op.F:
                    self._forward(node, action, t, first, parcels, source)
                case Op.B:
                    self._backward(node, first, parcels)
                case Op.STEP:
                    self._step(node, books, first)
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
        end = self.recorder.now()
        what = action.op.value
        self.recorder.add(Interval(self.rank, "compute", start, end, what, label, cut, replica, batch, version))

    def _version(self, action: Action, t: int, books: NodeState) -> int:
        """The version an action reads, counted from the start of training; -1 where the schedule names none."""
        if action.reads is None:
            return -1
        return self._start + max(action.reads.versions[0] + t, books.spec.older)

    def _forward(
        self, node: NodeRuntime, action: Action, t: int, k: int, parcels: list[Parcel], source: Source
    ) -> None:
        batch, cut = self._start + k // self.m, node.node.cut
        has_loss = cut == self._last_cut
        sample = source.sample(k) if cut == 0 or has_loss else NO_SAMPLE
        if cut == 0:
            value, wants = sample.input, NO_GRADIENTS
            header = Header(batch, k, source.follows(k // self.m + 1), sample.checksum)
        else:
            header, value, wants = parcels[0].header, parcels[0].tree, parcels[0].wants_gradient
            if has_loss and header.checksum != sample.checksum:
                raise DataError(
                    f"microbatch {k} (batch {batch}) is not the same on the first and the last stage; every rank must "
                    "see the same samples in the same order"
                )
        self._more = header.more
        if action.unit.kind is Kind.EVAL:
            output, loss = node.evaluate(value, sample.target, has_loss)
        else:
            version = self._version(action, t, self._books[action.node])
            output, loss = node.forward(k, value, wants, version, sample.target, has_loss)
            self.recorder.change("activations", node.flights[k].nbytes)
        if loss is not None:
            losses = self._losses.setdefault(batch, [])
            losses.append(loss)
            if len(losses) == self.m:
                self._weights[batch] = sum(item.weight for item in losses)
        else:
            tree, asks = detached(output)
            self._outbox[Payload.ACTIVATION, node.node, k] = Parcel(header, tree, asks)

    def _backward(self, node: NodeRuntime, k: int, parcels: list[Parcel]) -> None:
        batch = self._start + k // self.m
        nbytes = node.flights[k].nbytes
        if parcels and not math.isnan(parcels[0].header.weight):
            self._weights[batch] = parcels[0].header.weight
        gradients = node.backward(k, batch, parcels[0].tree if parcels else None)
        self.recorder.change("activations", -nbytes)
        if node.node.cut > 0:
            # The weight of a batch is known to the last stage before its last backward, so it rides on gradients.
            header = Header(batch, k, self._more, weight=self._weights.get(batch, math.nan))
            self._outbox[Payload.GRADIENT, node.node, k] = Parcel(header, gradients)

    def _step(self, node: NodeRuntime, books: NodeState, batch: int) -> None:
        weight = self._weights.pop(self._start + batch)
        node.step(self._start + batch, weight, keeps_old=books.rotated)

    def _note_forward(self, action: Action, k: int) -> None:
        """Make the report of a batch once its last forward on this rank is done."""
        batch = self._start + k // self.m
        self._forwards[batch] = self._forwards.get(batch, 0) + action.unit.count
        if self._forwards[batch] < self.m * len(self.nodes):
            return
        del self._forwards[batch]
        losses = self._losses.pop(batch, None)
        if losses is None:
            self._report = Report(batch, None, None, self.recorder.now())
        else:
            total, weight = sum(item.total for item in losses), sum(item.weight for item in losses)
            self._report = Report(batch, total / weight if weight else None, weight, self.recorder.now())

    def _pending_report(self) -> Iterator[Report]:
        """Hand the report out only when what the forward made is on its way: the caller may take any time with it."""
        if self._report is not None:
            report, self._report = self._report, None
            yield report

    # --- messages ---------------------------------------------------------------------------------------------------

    def _collect(self, message: Message, action: Action, first: int) -> Generator[Wait, None, Parcel]:
        """Wait for a message that `action` needs; returns its parcel."""
        route = self.lowered.routes[message.route]
        what = f"rank {self.rank}, stage {action.node.name}, {action.op}{first}"
        ticket = self._posted.pop(message)
        yield from self._await(ticket, what, f"rank {route.source.rank}: {route.payload} {message.first}")
        parcel, ticket.parcel = ticket.parcel, None  # who waits for the ticket keeps it longer than the parcel lives
        assert parcel is not None
        self.recorder.change("messages", -ticket.nbytes)
        if parcel.on_use is not None:
            parcel.on_use()
        expected = (self._start + message.first // self.m, message.first)
        if (parcel.header.batch, parcel.header.first) != expected:
            raise TransportError(
                f"{what}: expected the {route.payload} of microbatch {message.first} (batch {expected[0]}) from rank "
                f"{route.source.rank}, got that of microbatch {parcel.header.first} (batch {parcel.header.batch})"
            )
        return parcel

    def _await(self, ticket: Ticket, what: str, cause: str) -> Iterator[Wait]:
        if not ticket.done:
            start = self.recorder.now()
            yield Wait(ticket, what)
            end = self.recorder.now()
            self.recorder.add(Interval(self.rank, "compute", start, end, "wait", f"wait for {cause}", cause=cause))
        ticket.check(what)

    def _send(self, route_index: int, first: int) -> Iterator[Wait]:
        route = self.lowered.routes[route_index]
        queue = self._sending.setdefault(route.lane, deque())
        while queue and (queue[0].ticket.done or len(queue) >= self.lowered.window):
            yield from self._complete_send(queue)
        parcel = self._outbox.pop((route.payload, route.source, first))
        nbytes = parcel.nbytes
        self.recorder.change("messages", nbytes)
        posted = self.recorder.now()
        ticket = self.transport.send(route.lane, parcel)
        queue.append(_Sending(ticket, nbytes, f"{route.payload} {first}", posted))

    def _complete_send(self, queue: deque[_Sending]) -> Iterator[Wait]:
        ticket, nbytes, label, posted = queue[0]
        lane = ticket.lane
        yield from self._await(ticket, f"rank {self.rank}, sending {label}", f"rank {lane.target}: to take {label}")
        queue.popleft()
        self.recorder.change("messages", -nbytes)
        name = f"{lane.payload} {lane.source}>{lane.target}"
        self.recorder.add(Interval(self.rank, name, posted, self.recorder.at(ticket.done_at), "SEND", label))

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _hold_bytes(self, op: Op) -> None:
        """Take down what the parameter-sized memory of this rank is used for."""
        totals: dict[str, int] = {}
        for node in self.nodes.values():
            if node.store is not None:
                for role, nbytes in node.store.bytes_by_role().items():
                    totals[role] = totals.get(role, 0) + nbytes
            if op is Op.STEP and node.updater is not None:
                totals["optimizer"] = totals.get("optimizer", 0) + node.updater.nbytes
        for role, nbytes in totals.items():
            self.recorder.hold(role, nbytes)
