"""Counts the messages that a schedule sends, and the buffers that they need."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

import numpy as np

from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.array_schedules.array_receives import PlacedReceives
from penstock.schedule.compiled.instruction_arrays import Flags
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.machine.instructions import Lowered

_COUNTED = (Payload.ACTIVATION, Payload.GRADIENT, Payload.RECOMPUTE)
_Placed = list[PlacedReceives]


def count_messages(lowered: Lowered, batches: int, payloads: Collection[Payload] = _COUNTED) -> tuple[int, float]:
    """Count the sends of activations (also of recomputed ones) and gradients, and what they carry.

    What they carry counts in outputs of a stage for one microbatch, of which a slice is a part.

    Args:
        lowered: the schedule.
        batches: of the span, in which no update is rejected.
        payloads: what else to count instead.
    """
    m, count, volume = lowered.schedule.microbatches, 0, Fraction(0)
    if isinstance(lowered, ArrayLowered):
        counted = np.array([route.payload in payloads for route in lowered.routes], dtype=bool)
        count = messages_sent(lowered, counted, batches)
        return count, float(count)  # of whole microbatches
    for program in lowered.programs:
        for part, instructions in enumerate(program[:2]):
            for action in (i.action for i in instructions):
                if action.op is Op.SEND and action.payload in payloads:
                    begun = since(action.unit, m)
                    times = max(batches - max(begun, 0), 0) if part == 0 else int(batches >= begun)
                    count += times
                    volume += Fraction(times * action.unit.count, action.unit.slice[1] if action.unit.slice else 1)
    return count, float(volume)


def receive_buffers(lowered: Lowered, batches: int) -> tuple[float, ...]:
    """Find, per rank, how much it has received or made room for and not used yet, at most.

    It counts in outputs of a stage for one microbatch.

    RECVs and passes follow each other in the order of the program, so no times are needed.
    """
    if isinstance(lowered, ArrayLowered):
        return tuple(map(float, most_received(lowered, batches)))
    sizes = [route.count / (route.slice[1] if route.slice else 1) for route in lowered.routes]
    m, peaks = lowered.schedule.microbatches, []
    for program in lowered.programs:
        held = peak = 0.0
        played = [
            (t, i)
            for t in range(-1, batches)
            for i in program.period
            if (t + 1 < batches if i.ahead else t >= 0)  # what is posted ahead is for the next batch
        ]
        for t, (action, route, needs, *_) in [*played, *((batches, i) for i in program.epilogue)]:
            if action.op is Op.RECV and action.unit.first + t * m >= 0:
                held += sizes[route]
                peak = max(peak, held)
            held -= sum(sizes[need.route] for need in needs if need.first + t * m >= 0)
        peaks.append(peak)
    return tuple(peaks)


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
