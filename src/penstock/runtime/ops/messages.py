"""SEND and RECV, and the messages that passes need."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.comm.core.wait import Wait
from penstock.runtime.ops.bound import Bound, BoundAction, Turn
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.machine.instructions import Instruction, Message


class Send(Bound):
    """Posts a SEND; waits first while too many are outstanding on its lane."""

    reports_first = False  # what a forward has made leaves before the caller gets a report

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

    def run(self, t: int) -> Iterator[Wait] | None:
        """Post it."""
        return self._inbox.post(self._first + t * self._stride)


class _Need:
    """A message that an action consumes, bound to its inbox."""

    def __init__(self, message: Message, span: RankSpan) -> None:
        self._inbox = span.mailbox.inbox(message.route)
        self._first, self._m = message.first, span.schedule.microbatches
        self._offset = message.first // self._m

    def arrived(self, t: int) -> bool:
        return self._inbox.arrived(self._first + t * self._m)

    def wait(self, t: int, what: object) -> Iterator[Wait]:
        yield from self._inbox.wait(self._first + t * self._m, what)

    def collect(self, t: int, start: int, what: object) -> None:
        self._inbox.collect(self._first + t * self._m, start + t + self._offset, what)


class Consumer(BoundAction):
    """An action that consumes messages: it waits until they are there and lays them ready."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        self._needs = [_Need(message, span) for message in (*instruction.needs, *instruction.awaits)]

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it at once where everything is there."""
        turn = self.turn(t)
        if self._must_wait(turn):
            return self._run_later(turn)
        for need in self._needs:
            if not need.arrived(t):
                return self._run_later(turn)
        self._collect_and_act(turn)
        return None

    def _must_wait(self, turn: Turn) -> bool:  # noqa: ARG002
        """Return whether something else may have to be waited for; `before` does."""
        return False

    def before(self, turn: Turn) -> Iterator[Wait]:  # noqa: ARG002
        """Do what comes before the messages are waited for."""
        return iter(())

    def _run_later(self, turn: Turn) -> Iterator[Wait]:
        if self._must_wait(turn):
            yield from self.before(turn)
        for need in self._needs:
            yield from need.wait(turn.t, turn)
        self._collect_and_act(turn)

    def _collect_and_act(self, turn: Turn) -> None:
        for need in self._needs:
            need.collect(turn.t, self._span.start, turn)
        self.act(turn)
