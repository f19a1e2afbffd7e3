"""Forwards on versions that are not decided on yet, and what follows a rejection: REDO and VALIDATE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.comm.core.ticket import Wait
from penstock.comm.p2p.tensor_message import Header
from penstock.runtime.ops.bound import BoundAction, Turn
from penstock.runtime.ops.messages import Consumer
from penstock.stage.blocks.rng import RngKey
from penstock.stage.in_flight_microbatch import Microbatch


class Draft(NamedTuple):
    """The input of a forward that reads a version not decided on yet."""

    header: Header
    value: Any
    wants: tuple[bool, ...]
    target: Any


class Redo(Consumer):
    """A forward again, on the version that is decided on now (REDO)."""

    def work(self, turn: Turn) -> None:
        """Run it on what forwards before have made again, and lay the output ready."""
        span, runtime, key = self._span, self._runtime, (turn.first, 0)
        header, value, wants, target = self.stage.drafts.pop(key)
        value = self.stage.routes.repaired(key, value)
        scale = span.decisions.scale(turn.batch) if runtime.module.has_loss else 1.0
        draw = RngKey(turn.batch, span.pipeline * self._m + turn.first % self._m)
        microbatch = Microbatch(turn.first, draw, target, scale)
        output, loss, auxiliary = runtime.passes.forward(microbatch, value, wants, turn.version, self.copy(turn))
        header, loss = runtime.passes.beside_loss(key, header, loss, auxiliary)
        if loss is not None and self.stage.is_last:
            span.losses.add(header.batch, key, loss)
        if runtime.module.hands_on:
            self.stage.routes.put_output(header, output, repair=True)


class Validate(BoundAction):
    """The decision of all stages on a provisional version (VALIDATE)."""

    def run(self, t: int) -> Iterator[Wait]:
        """Wait for the decision, tell the books of it, then make the update again if it was another one."""
        turn = self.turn(t)
        yield from self._span.updates.wait(self.action.stage, turn.batch, self.op, turn.label)
        self._span.rejected = self._span.updates.rejects(self.action.stage, turn.batch)
        self.stage.books.reject(self._span.rejected)
        self.act(turn)

    def work(self, turn: Turn) -> None:
        """Settle the update."""
        decision = self._span.updates.validate(self._runtime, turn.batch)
        self._span.reports.decided(decision)
        if not self._span.rejected:
            for stage in self._span.stages.values():
                stage.drafts.clear()
