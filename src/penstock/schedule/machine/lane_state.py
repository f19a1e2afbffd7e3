"""The state of lanes while a schedule is played: what is posted, what is under way, which buffers are free.

A rank also has one lane for copies to the host's memory and back, beside its passes. An OFFLOAD or FETCH without a
peer, a SWAPIN or SWAPOUT begins when all actions before it have ended, and the copy before it, too; none holds up the
rank. Of what comes later only the first action on the microbatch behind its FETCH (a backward, a recompute) waits for
the copy, and the STEP behind a SWAPIN. So copies cost time but cannot block.
"""

from __future__ import annotations

import copy
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, Kind, Op, Stage, passes
from penstock.schedule.machine.instructions import Message

Relative = Callable[[Iterable[Message]], tuple[Message, ...]]
"""Counts microbatches from the border of a batch."""


@dataclass
class LaneState:
    """One lane.

    Most messages are consumed by an action that waits for them, and RECVs stand where a buffer is free by then. Parked
    activations are taken as soon as they come, so there a RECV may have to wait for a buffer.

    Attributes:
        window: messages that may be outstanding on either side.
        parks: it carries parked activations.
        sends, recvs: posted and not matched yet, with the times.
        sent, completed: how many sends.
        recent: completion times of the last `window` sends.
        held: buffers of parked activations that are posted and not taken.
        taking: parked activations that will be taken when they come.
        freed: when buffers were freed that no RECV uses again yet, in order.
        free: since when it has nothing to transfer.
    """

    window: int
    parks: bool
    sends: deque[tuple[Message, float]] = field(default_factory=deque)
    recvs: deque[tuple[Message, float]] = field(default_factory=deque)
    sent: int = 0
    completed: int = 0
    recent: deque[float] = field(default_factory=deque)
    held: int = 0
    taking: set[Message] = field(default_factory=set)
    freed: list[float] = field(default_factory=list)
    free: float = 0.0

    def copy(self) -> LaneState:
        """Return an independent lane in the same state."""
        return replace(
            self,
            sends=self.sends.copy(),
            recvs=self.recvs.copy(),
            recent=self.recent.copy(),
            taking=self.taking.copy(),
            freed=self.freed.copy(),
        )

    def room_to_send(self) -> float | None:
        """Return since when another SEND may be posted; None while too many are outstanding."""
        if self.sent - self.completed >= self.window:
            return None
        return self.recent[self.sent - self.window - self.completed] if self.sent >= self.window else 0.0

    def room_to_receive(self) -> float | None:
        """Return since when another RECV may be posted; None while all buffers wait for what has not come yet."""
        if self.held >= self.window:
            return None
        return self.freed[0] if self.held + len(self.freed) >= self.window else 0.0

    def posts_receive(self) -> None:
        """Note that a RECV of parked activations takes a buffer."""
        if self.held + len(self.freed) >= self.window:
            del self.freed[0]
        self.held += 1

    def completes_send(self, time: float) -> None:
        """Note that a SEND has met its RECV and arrives at `time`."""
        self.completed += 1
        self.recent.append(time)
        if len(self.recent) > self.window:
            self.recent.popleft()

    def take(self, message: Message, arrived: float | None) -> None:
        """Take parked activations, now or when they come."""
        self.taking.add(message)
        if arrived is not None:
            self.arrive(message, arrived)

    def arrive(self, message: Message, time: float) -> None:
        """Note that a message is there; its buffer is free if it is to be taken."""
        if message in self.taking:
            self.taking.discard(message)
            self.held -= 1
            insort(self.freed, time)

    def state(self, relative: Relative) -> object:
        """Return what is under way, with microbatches counted from the border of a batch."""
        posted = [relative(m for m, _ in found) for found in (self.sends, self.recvs)]
        return *posted, self.sent - self.completed  # what is held and taken follows from where the receiver stands

    def times(self) -> list[float]:
        """Return the times of all that `state` tells."""
        return (
            [time for _, time in (*self.sends, *self.recvs)]
            + [*self.recent, *self.freed]
            + [self.free] * bool(self.free)
        )


_Key = tuple[Stage, int, int]
"""Stage, microbatch of the span, and slice; of an optimizer state the batch, and -1."""
TAKEN = frozenset({Op.FETCH, Op.SWAPIN})
"""Copies that bring something back."""


class HostCopies:
    """The copies that are under way, on the lanes of all ranks.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._free = [0.0] * ranks
        self._back: dict[_Key, float] = {}  # when what was fetched is there, until it is used

    def issue(
        self, rank: int, action: Action, t: int, microbatches: int, now: float, duration: float
    ) -> tuple[float, float]:
        """Issue a copy; returns when it starts and ends.

        Args:
            rank: whose.
            action: with relative numbers.
            t: the batch that they are relative to.
            microbatches: of a batch.
            now: when the rank issues it.
            duration: of the copy.
        """
        start = max(now, self._free[rank])
        end = self._free[rank] = start + duration
        if action.op in TAKEN:
            self._back.update(dict.fromkeys(_keys(action, t, microbatches), end))
        return start, end

    def done(self, action: Action, t: int, microbatches: int) -> float:
        """Return when all that an action uses is back."""
        if not self._back:
            return 0.0
        users = [p for p in passes(action) if p.unit.kind is Kind.TRAIN or p.op is Op.STEP]
        used = [key for p in users for key in _keys(p, t, microbatches)]
        return max([self._back.pop(key, 0.0) for key in used], default=0.0)

    def times(self) -> list[float]:
        """Return when lanes are free and copies end, in one order."""
        used = [free for free in self._free if free]  # a lane that is never used does not move with the others
        return [*used, *(self._back[key] for key in sorted(self._back))]

    def copy(self) -> HostCopies:
        """Return an independent twin."""
        twin = copy.copy(self)
        twin._free, twin._back = list(self._free), dict(self._back)
        return twin


def is_host_copy(action: Action) -> bool:
    """Return whether an action copies something to the host's memory, or back."""
    return not action.parts and action.peer is None and OPS[action.op].lane is Lane.COPY


def _keys(action: Action, t: int, microbatches: int) -> list[_Key]:
    if action.unit.kind is Kind.BATCH:
        return [(action.stage, action.unit.first + t, -1)]
    piece = action.unit.slice[0] if action.unit.slice else 0
    return [(action.stage, number + t * microbatches, piece) for number in action.unit.microbatches]
