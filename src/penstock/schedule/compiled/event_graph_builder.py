"""Builds the graph of a span (`penstock.schedule.compiled.graph`) from the programs of all ranks.

What an event waits for depends on no time, so it can be found before any cost is known. The rules are those of
`penstock.schedule.machine`, whose interpreter never branches on a time either:

    messages     Lanes are first in, first out, so the k-th SEND of a lane meets its k-th RECV, whatever anything costs.
    windows      The k-th SEND of a lane is posted once the (k - w)-th has arrived. Messages of a lane arrive in their
                 order, so this one is the last of those that must have.
    parked       A RECV of parked activations waits for a buffer: for that of the earliest message, in the order of the
                 lane, which an action before it takes and for which no earlier RECV has waited. As messages arrive in
                 their order, it is the first buffer to be free, too.
    fused pairs  are one action; which of the two runs first is the schedule's choice, not the machine's.
    collectives  A lane of collectives keeps the order in which its ranks issue them, which must be one.
    host copies  The lane of a rank keeps their order, too; none holds up the rank, and one action waits for each that
                 brings something back.

What is not covered raises `NotCompiledError`, and the object machine has to play it: collectives whose order differs
between ranks, or whose results a rank may use at times that depend on the order of play (a DECIDE that waits for a
REDUCE and is awaited by a VALIDATE), and spans that do not end, of which the object machine says why.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.schedule.compiled.collective_events import Chain, Joins, JointEvents, NotCompiledError
from penstock.schedule.compiled.graph import NEVER, OWN, ROOM, START, TRANSFER, WAIT, CopyLane, EventGraph
from penstock.schedule.compiled.instruction_arrays import (
    ACT,
    COPY,
    RECEIVE,
    SEND,
    Code,
    CodedSchedule,
    CostClasses,
    Flags,
    Numbers,
    Unrolled,
)
from penstock.schedule.ir.absolute_actions import existing
from penstock.schedule.ir.schedule import Action, Kind, Op, Payload
from penstock.schedule.machine.lane_state import TAKEN

_UNITS = 1 << 40  # more than there are microbatches: a message is numbered route * _UNITS + microbatch
_GRAPHS = {Op.F: 1, Op.B: -1, Op.I: -1, Op.OFFLOAD: -1, Op.FETCH: 1}


def unrolled(
    code: CodedSchedule, rank: int, batches: int, rejected: Collection[int] = (), drained: bool = True
) -> Unrolled:
    """Return what a rank does in a span.

    Args:
        code: the schedule.
        rank: whose program.
        batches: length of the span.
        rejected: batches whose update is made again.
        drained: whether the span ends; else it is the beginning of a longer one.
    """
    period, epilogue, repaired = code.programs[rank]
    m, parts = code.schedule.microbatches, list[Unrolled]()
    for t in range(-1, batches):
        part = (repaired or period) if t > 0 and t - 1 in rejected else period
        parts.append(_present(part, t, m, code.classes, more=t + 1 < batches or not drained))
    if drained:
        parts.append(_present(epilogue, batches, m, code.classes, more=False))
    starts = np.cumsum([0, *(len(present.kind) for present in parts)])
    for present, start in zip(parts, starts, strict=False):
        present.needs[:, 0] += start
        present.accepts[:, 0] += start
        present.uses[:, 0] += start
    return Unrolled(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _present(code: Code, t: int, m: int, classes: CostClasses, more: bool) -> Unrolled:
    """Return what of a part exists in the period of batch t."""
    first = code.first + np.where(code.on_batch, t, t * m)
    there = first >= 0
    if t < 0:
        there &= code.ahead
    elif not more:
        there &= ~code.ahead
    what = code.what
    if code.rare and t >= 0:
        there, what = there.copy(), what.copy()
        for entry, action in code.rare.items():
            found = existing(action, t, m)
            there[entry] = found is not None
            if found is not None:
                what[entry] = classes.of(found)
    places = np.cumsum(there) - 1

    def shifted(rows: Numbers) -> Numbers:
        rows = rows[there[rows[:, 0]] & (rows[:, 2] + t * m >= 0)]
        return np.stack([places[rows[:, 0]], rows[:, 1], rows[:, 2] + t * m], axis=1)

    uses = code.uses[there[code.uses[:, 0]] & (code.uses[:, 4] <= t)]
    uses = np.stack([places[uses[:, 0]], uses[:, 1], uses[:, 2], uses[:, 3] + t], axis=1)
    return Unrolled(code.kind[there], what[there], first[there], shifted(code.needs), shifted(code.accepts), uses)


def graph_of(
    code: CodedSchedule,
    batches: int,
    rejected: Collection[int] = (),
    transfers: bool = False,
    drained: bool = True,
) -> EventGraph:
    """Return the graph of a span.

    Args:
        code: the schedule.
        batches: length of the span.
        rejected: batches whose update is made again.
        transfers: whether messages occupy their lane for some time.
        drained: whether the span ends; else it is the beginning of a longer one.

    Raises:
        NotCompiledError: the object machine has to play it.
    """
    ranks = [unrolled(code, rank, batches, rejected, drained) for rank in range(code.schedule.ranks)]
    lanes = _Lanes(code, ranks)
    joins = Joins(code, ranks, lanes.messages)
    copies = CopyLanes(code, ranks, joins.first_free)
    waits = [np.concatenate(both) for both in zip(joins.waits, copies.waits, strict=True)]
    chains = [_Chain(code, *each, lanes) for each in zip(ranks, waits, strict=True)]
    if (lanes.identities[0] != lanes.identities[1])[lanes.identities.min(axis=0) >= 0].any():
        raise NotCompiledError("the two ends of a lane use different orders")
    firsts = np.cumsum([2, *(chain.length for chain in chains)])
    posted, ready = (np.full(copies.first_free, NEVER, dtype=np.int64) for _ in "ab")
    posted[START] = ready[START] = START
    for chain, first in zip(chains, firsts, strict=False):
        chain.place_messages(first, posted, ready)
    joint = JointEvents(joins, chains, firsts, posted, ready)
    copied = copies.events(chains, firsts, int(firsts[-1]) + sum(map(len, joint.cls)), posted, ready)
    cls = [np.array([WAIT, WAIT]), *(chain.cls for chain in chains), *joint.cls, *(each[0] for each in copied)]
    message = [np.array([START, NEVER]), *(chain.message for chain in chains), *joint.message]
    message += [each[1] for each in copied]
    stops = np.cumsum([2, *map(len, cls[1:])])
    lane = np.zeros(copies.first_free, dtype=np.int32)
    lane[2 : lanes.messages] = np.repeat(1 + np.arange(len(code.lanes)), np.diff(lanes.bases))
    met = np.where((posted != NEVER) & (ready != NEVER), lane, 0)
    graph = EventGraph(
        code.classes,
        np.concatenate(cls).astype(np.int32),
        np.concatenate(message).astype(np.int32),
        posted.astype(np.int32),
        ready.astype(np.int32),
        lane,
        stops,
        len(ranks),
        met,
        copies.used,
    )
    return _with_transfers(graph, lanes.bases) if transfers else graph


class _Lanes:
    """The messages of every lane: their numbers follow one another in the order in which they are sent.

    Attributes:
        bases: of each lane, its first message; and one past the last.
        messages: one past the last message.
    """

    def __init__(self, code: CodedSchedule, ranks: Sequence[Unrolled]) -> None:
        self.code, count = code, len(code.lanes)
        most = np.zeros(count, dtype=np.int64)
        for kind in (SEND, RECEIVE):
            counts = np.zeros(count, dtype=np.int64)
            for span in ranks:
                counts += np.bincount(code.lane_of_route[span.what[span.kind == kind]], minlength=count)
            most = np.maximum(most, counts)
        self.bases = 2 + np.concatenate([[0], np.cumsum(most)])
        self.messages = int(self.bases[-1])
        self.parks = np.array([lane.payload is Payload.PARKED for lane in code.lanes], dtype=bool)
        self.identities = np.full((2, self.messages), -1)

    def numbered(self, span: Unrolled, kind: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return the entries of SENDs or RECVs, their lanes, and their places on these."""
        entries = np.flatnonzero(span.kind == kind)
        lanes = self.code.lane_of_route[span.what[entries]]
        places = np.empty(len(entries), dtype=np.int64)
        for lane in np.unique(lanes):
            here = lanes == lane
            places[here] = np.arange(here.sum())
        numbers = self.bases[lanes] + places
        self.identities[int(kind == SEND), numbers] = span.what[entries].astype(np.int64) * _UNITS + span.first[entries]
        return entries, lanes, places


class _Chain:
    """The events of one rank.

    Args:
        code: the schedule.
        span: what the rank does.
        beside: rows of (entry, message) of what it waits for beside messages of lanes.
        lanes: of messages.

    Attributes:
        cls, message: of its events, the start of the chain among them.
        after: per entry, the last event of the chain when the rank has gone past it.
    """

    def __init__(self, code: CodedSchedule, span: Unrolled, beside: Numbers, lanes: _Lanes) -> None:
        window, bases = code.window, lanes.bases
        sends, send_lanes, sent = lanes.numbered(span, SEND)
        receives, receive_lanes, received = lanes.numbered(span, RECEIVE)
        self._sent, self._received = (sends, bases[send_lanes] + sent), (receives, bases[receive_lanes] + received)
        needs = self._found(span, span.needs)
        accepts = self._found(span, span.accepts)
        full = sent >= window
        rooms = np.stack([sends[full], self._sent[1][full] - window], axis=1)
        parked = lanes.parks[receive_lanes]
        if parked.any():
            held = self._buffers(receives[parked], receive_lanes[parked], received[parked], accepts, bases, window)
            rooms = np.concatenate([rooms, held])
        waits = np.concatenate([needs, beside, rooms])
        waits = waits[np.argsort(waits[:, 0], kind="stable")]
        entries = waits[:, 0]
        each = np.bincount(entries, minlength=len(span.kind))
        counts = np.where(span.kind == ACT, np.maximum(each, 1), each)
        self.after = np.cumsum(counts)
        self.length = 1 + int(counts.sum())
        self.cls, self.message = np.full(self.length, WAIT), np.full(self.length, START)
        acts = span.kind == ACT
        self.cls[self.after[acts]] = OWN + span.what[acts]
        self.cls[self.after[rooms[:, 0]]] = ROOM
        place = np.arange(len(entries)) - (np.cumsum(each) - each)[entries]
        self.message[self.after[entries] - each[entries] + 1 + place] = waits[:, 1]

    def _found(self, span: Unrolled, rows: Numbers) -> Numbers:
        """Replace routes and microbatches by messages.

        Raises:
            NotCompiledError: no RECV is posted for one.
        """
        if not len(rows):
            return np.empty((0, 2), dtype=np.int64)
        entries, messages = self._received
        posted = span.what[entries].astype(np.int64) * _UNITS + span.first[entries]
        wanted = rows[:, 1] * _UNITS + rows[:, 2]
        order = np.argsort(posted)
        if not len(order):
            raise NotCompiledError("nobody receives a message that is wanted")
        places = np.minimum(np.searchsorted(posted, wanted, sorter=order), len(order) - 1)
        if (posted[order[places]] != wanted).any():
            raise NotCompiledError("nobody receives a message that is wanted")
        return np.stack([rows[:, 0], messages[order[places]]], axis=1)

    @staticmethod
    def _buffers(
        receives: Numbers, lanes: Numbers, places: Numbers, accepts: Numbers, bases: Numbers, window: int
    ) -> Numbers:
        """Return, for each RECV that has to find a buffer free, the message that has been in it."""
        events = [
            (int(entry), int(lane), int(place)) for entry, lane, place in zip(receives, lanes, places, strict=True)
        ]
        of_lane = np.searchsorted(bases, accepts[:, 1], side="right") - 1
        events += [(int(entry), int(lane), -int(k)) for (entry, k), lane in zip(accepts, of_lane, strict=True)]
        taken: dict[int, list[int]] = {}
        found = []
        for entry, lane, what in sorted(events):
            buffers = taken.setdefault(lane, [])
            if what < 0:
                heapq.heappush(buffers, -what)
            elif what >= window:
                if not buffers:
                    raise NotCompiledError("a RECV waits for a buffer that is never free")
                found.append((entry, heapq.heappop(buffers)))
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def place_messages(self, first: int, posted: Numbers, ready: Numbers) -> None:
        """Note where messages are posted, given the first event of the chain."""
        for events, (entries, messages) in ((posted, self._sent), (ready, self._received)):
            events[messages] = first + self.after[entries]


def _with_transfers(graph: EventGraph, bases: Numbers) -> EventGraph:
    """Let the messages of every lane occupy it one after the other."""
    cls, message, stops = [graph.cls], [graph.message], [graph.chains]
    posted, ready, total = graph.posted.copy(), graph.ready.copy(), len(graph.posted)
    event = len(graph.cls)
    for first, end in pairwise(bases.tolist()):
        count = end - first
        cls.append(np.array([WAIT, *[TRANSFER] * count], dtype=np.int32))
        message.append(np.concatenate([[START], np.arange(total + first - 2, total + end - 2)]).astype(np.int32))
        posted[first:end] = ready[first:end] = np.arange(event + 1, event + 1 + count)
        event += 1 + count
        stops.append(np.array([event]))
    raw = slice(2, int(bases[-1]))
    none = np.zeros(int(bases[-1]) - 2, dtype=np.int32)
    met = graph.met.copy()
    met[raw] = 0
    return EventGraph(
        graph.classes,
        np.concatenate(cls),
        np.concatenate(message),
        np.concatenate([posted, graph.posted[raw]]),
        np.concatenate([ready, graph.ready[raw]]),
        np.concatenate([graph.lane, none]),
        np.concatenate(stops),
        graph.ranks,
        np.concatenate([met, graph.met[raw]]),
        graph.copies,
    )


# Copies to the host's memory and back in the graph of a span: the lane of each rank is a chain of its own.
#
# A copy begins when all actions of its rank before it have ended, and the copy before it, too. The first action on what
# is brought back waits for that (`penstock.schedule.machine.lane_state`).


class CopyLanes:
    """Who waits for which copies.

    Args:
        code: the schedule.
        ranks: what each rank does.
        first: the first message that is free; that a copy is issued is one, and that it has been made is one.

    Attributes:
        waits: per rank, rows of (entry, message).
        first_free: one past the last message.
        used: the lanes that carry something, once their events are known.

    Raises:
        NotCompiledError: fused actions use what is copied.
    """

    def __init__(self, code: CodedSchedule, ranks: Sequence[Unrolled], first: int) -> None:
        self._code, self._copies = code, [np.flatnonzero(span.kind == COPY) for span in ranks]
        self._what = [span.what[copies] for span, copies in zip(ranks, self._copies, strict=True)]
        self._firsts = first + 2 * np.cumsum([0, *map(len, self._copies)])
        self.first_free = int(self._firsts[-1])
        if self.first_free > first and any(action.parts for action in code.classes.examples):
            raise NotCompiledError("fused actions may use what is copied to the host's memory and back")
        self._there = list[tuple[list[bool], list[int]]]()
        self.waits = [self._of(rank, span) for rank, span in enumerate(ranks)]
        self.used = list[CopyLane]()

    @cached_property
    def _using(self) -> Flags:
        """Which classes of actions may use what has been brought back."""
        actions = self._code.classes.examples
        return np.array([action.unit.kind is Kind.TRAIN or action.op is Op.STEP for action in actions], dtype=bool)

    def _of(self, rank: int, span: Unrolled) -> Numbers:
        copies, examples = self._copies[rank], self._code.classes.examples
        found, away, there, graphs = list[tuple[int, int]](), list[bool](), list[int](), 0
        if len(copies):
            made = dict(zip(copies.tolist(), range(int(self._firsts[rank]) + 1, self.first_free, 2), strict=False))
            wanted = (span.kind == COPY) | ((span.kind == ACT) & self._using[span.what])
            back: dict[tuple[object, ...], int] = {}
            for entry in np.flatnonzero(wanted).tolist():
                action, first = examples[span.what[entry]], int(span.first[entry])
                graphs += _GRAPHS.get(action.op, 0) * action.unit.count
                if entry in made:
                    away.append(action.op is Op.OFFLOAD)
                    there.append(graphs + away[-1])
                for key in _keys(action, first):
                    if entry not in made:
                        if key in back:
                            found.append((entry, back.pop(key)))
                    elif action.op in TAKEN:
                        back[key] = made[entry]
        self._there.append((away, there))
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def events(
        self, chains: Sequence[Chain], firsts: Numbers, event: int, posted: Numbers, ready: Numbers
    ) -> list[tuple[Numbers, Numbers]]:
        """Return the classes and the messages of the events of each lane that is used.

        Args:
            chains: of the ranks.
            firsts: the first event of each of these.
            event: the first one that is free.
            posted, ready: of all messages, to be filled in.
        """
        found = list[tuple[Numbers, Numbers]]()
        for rank, copies in enumerate(self._copies):
            if not len(copies):
                continue
            issued = self._firsts[rank] + 2 * np.arange(len(copies))
            posted[issued] = ready[issued] = firsts[rank] + chains[rank].after[copies]
            posted[issued + 1] = ready[issued + 1] = event + 1 + np.arange(len(copies))
            away, there = map(np.array, self._there[rank])
            self.used.append(CopyLane(rank, event + 1, away, there))
            found.append((np.concatenate([[WAIT], OWN + self._what[rank]]), np.concatenate([[START], issued])))
            event += 1 + len(copies)
        return found


def _keys(action: Action, first: int) -> list[tuple[object, ...]]:
    """Return what an action copies or uses."""
    if action.unit.kind is Kind.BATCH:
        return [(action.stage, first, -1)]
    return [(action.stage, first + n, action.unit.slice) for n in range(action.unit.count)]
