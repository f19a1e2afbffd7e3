"""Arrows of a trace, from the pass that makes a message, over its transfer, to the pass that takes it.

In the Chrome trace event format an arrow is a chain of flow events with one category, name and id: `s` at its start,
`t` at a step, `f` at its end (with `bp: "e"`, so that it, too, belongs to the slice around it and not to the next one).
Each is bound to the slice of its process and thread that is open at its time. A slice without duration is never open,
so arrows pass over it; and times must not decrease along an arrow, although the clocks of two ranks agree only so well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.schedule.ir.schedule import Op, Payload
from penstock.timeline import Interval
from penstock.view.drawing.timeline_labels import parts_of, pieces_of, unit_of

_ENDS: dict[str, tuple[tuple[Op, ...], tuple[Op, ...]]] = {  # what makes a message, and what takes it
    Payload.ACTIVATION: ((Op.F,), (Op.F,)),
    Payload.GRADIENT: ((Op.B, Op.I), (Op.B, Op.I)),
    Payload.RECOMPUTE: ((Op.R,), (Op.R,)),
    Payload.REPAIR: ((Op.REDO,), (Op.REDO,)),
    Payload.PARKED: ((Op.OFFLOAD, Op.RETURN), (Op.HOLD, Op.FETCH)),
}
_SHORTEST = 0.01  # microseconds: what lasts less has no room for an event, as traces count in nanoseconds
_INSET = 1.0  # microseconds from the border of a slice to an event in it
_APART = 0.002  # microseconds between two events of an arrow, at least


class Slice(NamedTuple):
    """An interval where a trace shows it.

    Attributes:
        interval: what is shown.
        tid: the thread.
        start, end: in microseconds.
    """

    interval: Interval
    tid: int
    start: float
    end: float


def arrow_events(slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """Yield the flow events of the arrows of all messages."""
    passes = _Passes(slices)
    messages = [found for found in slices if found.interval.what == Op.SEND]
    for number, message in enumerate(messages):
        stops = [passes.maker(message), message, passes.taker(message)]
        chain = [stop for stop in stops if stop is not None and stop.end - stop.start >= _SHORTEST]
        times = _times(chain)
        if len(chain) < 2 or len(times) < len(chain):
            continue
        phases = ["s", *["t"] * (len(chain) - 2), "f"]
        name = message.interval.label.split()[0]
        for stop, time, phase in zip(chain, times, phases, strict=True):
            place = {"pid": stop.interval.rank, "tid": stop.tid, "ts": time}
            event = {"ph": phase, "name": name, "cat": "message", "id": number, **place}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _times(chain: Sequence[Slice]) -> list[float]:
    """Return a time within every slice, none earlier than the one before; fewer where that is impossible."""
    times: list[float] = []
    for place, (_, _, start, end) in enumerate(chain):
        inset = min(_INSET, (end - start) / 2)
        time = end - inset if place == 0 and chain[0].interval.what != Op.SEND else start + inset
        time = max(time, times[-1] + _APART) if times else time
        if time > end - _SHORTEST / 4:
            break
        times.append(time)
    return times


class _Passes:
    """Finds the passes that make and take messages."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._found: defaultdict[tuple[int, int, str, tuple[int, int]], list[tuple[Interval, Slice]]] = defaultdict(
            list
        )
        for found in slices:
            if found.interval.what != Op.SEND:
                for part in parts_of(found.interval):
                    for piece in pieces_of(unit_of(part)) if part.microbatch >= 0 else ():
                        self._found[part.span, part.rank, part.what, piece].append((part, found))

    def maker(self, message: Slice) -> Slice | None:
        """Return the pass directly after which the message was posted: the last one of its unit before that."""
        sent = message.interval
        earlier = [found for part, found in self._of(sent, sent.rank, 0) if part.end <= sent.start]
        return max(earlier, key=lambda found: found.end, default=None)

    def taker(self, message: Slice) -> Slice | None:
        """Return the pass at the stage that receives the message."""
        sent = message.interval
        place = sent.stage, sent.direction
        there = (found for part, found in self._of(sent, sent.peer, 1) if (part.stage, part.direction) == place)
        return next(there, None)

    def _of(self, sent: Interval, rank: int, end: int) -> Iterator[tuple[Interval, Slice]]:
        """Yield the passes of a rank that may stand at one end of a message."""
        payload, unit = sent.label.split()
        piece = pieces_of(unit)[0]
        for op in _ENDS[payload][end]:
            yield from self._found.get((sent.span, rank, op.value, piece), ())
