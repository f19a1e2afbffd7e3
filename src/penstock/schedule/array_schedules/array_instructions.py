"""The actions of a schedule of arrays, and their instructions with RECVs and SENDs among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.schedule.array_schedules.array_receives import PlacedReceives
from penstock.schedule.compiled.instruction_arrays import ACT, RECEIVE, SEND, Code, Flags, Numbers
from penstock.schedule.machine.instructions import LaneKey


class PartActions(NamedTuple):
    """The actions of all ranks in their periods, or in their epilogues: those of a rank behind those of the one before.

    Attributes:
        starts: of each rank, the first action; and one past the last.
        cls: their classes.
        first: the microbatch of a pass, the batch of a STEP.
        steps: whether they are STEPs.
        takes, sends: the route of the message that each takes, and of the one that it sends; -1 for none.
    """

    starts: Numbers
    cls: Numbers
    first: Numbers
    steps: Flags
    takes: Numbers
    sends: Numbers

    def of_rank(self, rank: int) -> PartActions:
        """Return those of one rank."""
        here = slice(self.starts[rank], self.starts[rank + 1])
        starts = np.array([0, here.stop - here.start])
        cls, first, steps, takes, sends = self.cls[here], self.first[here], self.steps[here], self.takes, self.sends
        return PartActions(starts, cls, first, steps, takes[here], sends[here])

    def there(self, t: int, m: int) -> Flags:
        """Return which of them exist in the period of batch t, given the microbatches of a batch."""
        return self.first + np.where(self.steps, t, t * m) >= 0


def codes(
    parts: Sequence[PartActions], receives: Sequence[Mapping[LaneKey, PlacedReceives]], lanes: Sequence[LaneKey]
) -> list[tuple[Code, Code, None]]:
    """Return the programs of all ranks, given the actions and the RECVs of periods and epilogues."""
    programs = []
    for rank in range(len(parts[0].starts) - 1):
        here = [lane for lane in lanes if lane.target == rank]
        period, epilogue = (
            _code(part.of_rank(rank), [placed[lane] for lane in here if lane in placed])
            for part, placed in zip(parts, receives, strict=True)
        )
        programs.append((period, epilogue, None))
    return programs


def _code(actions: PartActions, placed: list[PlacedReceives]) -> Code:
    """Merge the RECVs before each action and the SEND behind it into a part of a rank's program."""
    places, routes, firsts, early = (
        np.concatenate([each[i] for each in placed]) if placed else np.empty(0, dtype=np.int64) for i in range(4)
    )
    order = np.argsort(places, kind="stable")
    places, routes, firsts, early = places[order], routes[order], firsts[order], early[order].astype(bool)
    sends, count = actions.sends, len(actions.cls)
    sending = np.flatnonzero(sends >= 0)
    before = np.cumsum(np.bincount(places, minlength=count)) if count else np.empty(0, dtype=np.int64)
    sent = np.cumsum(sends >= 0)
    acts = np.arange(count) + before + sent - (sends >= 0)
    receives = np.arange(len(places)) + places + (sent[places] - (sends[places] >= 0))
    total = count + len(places) + len(sending)
    kind, what = np.full(total, ACT, dtype=np.int8), np.empty(total, dtype=np.int32)
    first, ahead, on_batch = (
        np.empty(total, dtype=np.int64),
        np.zeros(total, dtype=bool),
        np.zeros(total, dtype=bool),
    )
    kind[receives], what[receives], first[receives], ahead[receives] = RECEIVE, routes, firsts, early
    what[acts], first[acts] = actions.cls, actions.first
    on_batch[acts] = actions.steps
    behind = acts[sending] + 1
    kind[behind], what[behind], first[behind] = SEND, sends[sending], actions.first[sending]
    taking = np.flatnonzero(actions.takes >= 0)
    needs = np.stack([acts[taking], actions.takes[taking], actions.first[taking]], axis=1).astype(np.int64)
    return Code(kind, what, first, on_batch, ahead, needs, np.empty((0, 3), int), np.empty((0, 5), int))
