"""Counts the messages of a schedule of arrays, and the buffers that they need."""

from __future__ import annotations

import numpy as np

from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.array_schedules.array_receives import PlacedReceives
from penstock.schedule.compiled.instruction_arrays import Flags

_Placed = list[PlacedReceives]


def messages_sent(lowered: ArrayLowered, counted: Flags, batches: int) -> int:
    """Return how many messages are sent in a span of so many batches, on the routes that are counted."""
    count, m = 0, lowered.schedule.microbatches
    for number, part in enumerate(lowered.lowering.parts):
        first = part.first[part.sends >= 0][counted[part.sends[part.sends >= 0]]]
        begun = -(first // m)
        count += int((batches >= begun).sum() if number else np.maximum(batches - np.maximum(begun, 0), 0).sum())
    return count


def most_received(lowered: ArrayLowered, batches: int) -> list[int]:
    """Return the most messages that each rank has posted a RECV for and not used yet, in a span of so many batches."""
    of_rank: list[tuple[_Placed, _Placed]] = [([], []) for _ in range(lowered.schedule.ranks)]
    for number, receives in enumerate(lowered.receives):
        for lane, placed in receives.items():
            of_rank[lane.target][number].append(placed)
    return [_most_on(lowered, rank, placed, batches) for rank, placed in enumerate(of_rank)]


def _most_on(lowered: ArrayLowered, rank: int, placed: tuple[_Placed, _Placed], batches: int) -> int:
    actions = [part.of_rank(rank) for part in lowered.lowering.parts]
    held, most, m = 0, 0, lowered.schedule.microbatches
    for t in range(-1, batches + 1):
        number, ahead = int(t == batches), [False] * (t >= 0) + [True] * (t + 1 < batches)
        part = actions[number]
        change = np.zeros(len(part.cls) + 1, dtype=np.int64)  # before each action
        for receives in placed[number]:
            there = np.isin(receives.ahead, ahead) & (receives.first + t * m >= 0)
            change += np.bincount(receives.place[there], minlength=len(change))
        if t >= 0:
            change[1:] -= (part.takes >= 0) & part.there(t, m)
        now = held + np.cumsum(change)
        held, most = int(now[-1]), max(most, int(now.max()))
    return most
