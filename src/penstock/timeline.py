"""Timelines: what happened when, predicted or measured, and the one definition of bubble.

A `Timeline` holds intervals per rank and lane, and how memory changed over time. Simulator and runtime make the same
type, so everything that reads one (drawings, traces, tables, comparisons) reads both. Times are in the unit of the
costs (simulated) or in seconds since the run began (measured).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.schedule.ir.op_table import Lane


class Waiting(StrEnum):
    """Reasons for which a rank does no work."""

    MESSAGE = "wait"  # for a message
    POST = "post"  # handing a message to the transport
    ROOM = "room"  # until a peer has received an earlier message, so that the next may be posted
    DATA = "data"  # reading samples
    CONTROL = "control"  # for other ranks, in a sum of gradients or a global decision
    COPY = "copy"  # what comes back from the memory of the host
    CALLER = "caller"  # the caller of the pipeline is handling the report of a batch


_WAITING = frozenset(Waiting)
_COMPUTE = Lane.COMPUTE.value


class Interval(NamedTuple):
    """One operation or wait that occupied a lane for some time.

    Attributes:
        rank: the rank.
        lane: "compute", or the name of a transfer lane such as "activation 0>1".
        start, end: times.
        what: the operation, or a `Waiting`.
        label: what to print, such as "F3"; of a message "activation 3".
        stage, direction: the stage; of a message, the one that receives it.
        batch: the batch it belongs to, counted from the start of training; -1 where none.
        version: the weight version read or created; -1 where none.
        cause: for a wait, the peer and action waited for.
        microbatch: the microbatch of a pass or message, counted from the start of the span; -1 where none.
        span: the span of a pass or message; runs and evaluations are counted together from 0.
        peer: the rank at the other end of a message, or of a wait for one; -1 where none.
        parts: the passes that run together, each with the times of the whole; only in simulated timelines.
    """

    rank: int
    lane: str
    start: float
    end: float
    what: str
    label: str
    stage: int = 0
    direction: int = 0
    batch: int = -1
    version: int = -1
    cause: str = ""
    microbatch: int = -1
    span: int = 0
    peer: int = -1
    parts: tuple[Interval, ...] = ()

    @property
    def is_work(self) -> bool:
        """True if the rank's compute lane was busy with an operation rather than waiting."""
        return self.lane == _COMPUTE and self.what not in _WAITING


class Total(NamedTuple):
    """How often a rank did something, and for how many seconds altogether."""

    times: int
    seconds: float


@dataclass
class Timeline:
    """What each rank did when, and how much memory it held: of a measured run, or of a simulated one.

    Attributes:
        ranks: the number of ranks.
        intervals: every action and every wait, with its rank, start and end.
        memory: per rank and kind, (time, amount held from then on): activations in units of one microbatch on the
            rank's whole share when simulated, bytes of each kind when measured.
        unit: of times.
        since: intervals that began before this time were dropped, as a long measured run keeps only its end.
        totals: per rank and operation or `Waiting` of the compute lane, over the whole of a measured run, dropped
            intervals included.
    """

    ranks: int
    intervals: list[Interval] = field(default_factory=list)
    memory: dict[tuple[int, str], list[tuple[float, float]]] = field(default_factory=dict)
    unit: str = "s"
    since: float = 0.0
    totals: dict[tuple[int, str], Total] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return its size."""
        return f"<Timeline of {self.ranks} ranks: {len(self.intervals)} intervals>"

    def work(self, rank: int | None = None) -> list[Interval]:
        """Return the busy intervals of the compute lane, of one rank or of all."""
        return [i for i in self.intervals if i.is_work and (rank is None or i.rank == rank)]

    @property
    def start(self) -> float:
        """The time at which the first work began."""
        return min((i.start for i in self.intervals if i.is_work), default=0.0)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end of work on any rank."""
        return max((i.end for i in self.intervals if i.is_work), default=0.0) - self.start

    def bubble(self) -> Bubble:
        """Measure how much of the makespan the ranks were idle."""
        busy, spans = [0.0] * self.ranks, [0.0] * self.ranks
        first: dict[int, float] = {}
        last: dict[int, float] = defaultdict(float)
        for i in self.intervals:
            if i.is_work:
                busy[i.rank] += i.end - i.start
                first[i.rank] = min(first.get(i.rank, i.start), i.start)
                last[i.rank] = max(last[i.rank], i.end)
        for rank, begin in first.items():
            spans[rank] = last[rank] - begin
        return Bubble(self.makespan, max(spans, default=0.0), tuple(busy))

    def peak(self, kind: str) -> list[float]:
        """Return per rank the most memory of one kind that was live at once."""
        return [max((a for _, a in self.memory.get((rank, kind), ())), default=0.0) for rank in range(self.ranks)]


@dataclass(frozen=True, repr=False)
class Bubble:
    """How much of a timeline ranks stand idle, by the definitions of docs/design.md, section 3.

    Attributes:
        makespan: time from the first start to the last end on any rank.
        rank_span: the longest time from the first start to the last end on one rank.
        busy: working time per rank.
    """

    makespan: float
    rank_span: float
    busy: tuple[float, ...]

    def __repr__(self) -> str:
        """Return the figure that has the name, and the makespan."""
        return f"<Bubble of {self.bubble:.4f}: makespan {self.makespan:g} on {len(self.busy)} ranks>"

    @property
    def ideal(self) -> float:
        """Busy time of the busiest rank: no order can be faster."""
        return max(self.busy, default=0.0)

    @property
    def bubble(self) -> float:
        """Sum of idle over ranks, divided by ranks times makespan."""
        total = len(self.busy) * self.makespan
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """(makespan - ideal) / ideal, the figure of Megatron's papers."""
        return self.makespan / self.ideal - 1 if self.ideal else 0.0

    @property
    def rank_span_bubble(self) -> float:
        """1 - ideal / rank_span, the figure of the zero-bubble papers."""
        return 1 - self.ideal / self.rank_span if self.rank_span else 0.0
