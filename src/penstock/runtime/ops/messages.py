"""SEND and RECV, and the messages that passes need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.comm.core.ticket import Wait
from penstock.comm.p2p.mailbox import Inbox, ParkedInbox
from penstock.runtime.ops.bound import Bound, BoundAction, Turn
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.machine.instructions import Instruction


class Send(Bound):
    """Posts a SEND; waits first while too many are outstanding on its lane."""

    report_lag = None  # what a forward has made leaves before the caller gets a report

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        self._outbox = span.mailbox.outbox(instruction.route)

    def run(self, t: int) -> Iterator[Wait] | None:
        """Post it."""
        return self._outbox.send(self._first + t * self._stride)


class Receive(Bound):
    """Posts a RECV; waits first while parked activations that have not come take all buffers of its lane."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        self._inbox = span.mailbox.inbox(instruction.route)
        if not isinstance(self._inbox, ParkedInbox):  # it takes no time, and a gradient may follow
            self.report_lag = None

    def run(self, t: int) -> Iterator[Wait] | None:
        """Post it."""
        return self._inbox.post(self._first + t * self._stride)


class _Need(NamedTuple):
    """A message that an action consumes.

    Attributes:
        inbox: in which it arrives.
        first: its first microbatch in batch 0.
        batch: its batch in batch 0: another one where it is made for a later one.
    """

    inbox: Inbox
    first: int
    batch: int


class Consumer(BoundAction):
    """An action that consumes messages: it waits until they are there and lays them ready."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        messages = (*instruction.needs, *instruction.awaits)
        self._needs = [_Need(span.mailbox.inbox(each.route), each.first, each.first // self._m) for each in messages]

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it at once where everything is there."""
        turn, k = self.turn(t), t * self._m
        for inbox, first, _ in self._needs:
            if not inbox.arrived(first + k):
                return self._run_later(turn)
        self._collect_and_act(turn)
        return None

    def _run_later(self, turn: Turn) -> Iterator[Wait]:
        k = turn.t * self._m
        for inbox, first, _ in self._needs:
            yield from inbox.wait(first + k, turn)
        self._collect_and_act(turn)

    def _collect_and_act(self, turn: Turn) -> None:
        k, period = turn.t * self._m, self._span.start + turn.t
        for inbox, first, batch in self._needs:
            inbox.collect(first + k, period + batch, turn)
        self.act(turn)
