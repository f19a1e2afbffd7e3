"""Counts the messages that a schedule sends, and the buffers that they need."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

import numpy as np

from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.array_schedules.array_message_counts import messages_sent, most_received
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.machine.instructions import Lowered

_COUNTED = (Payload.ACTIVATION, Payload.GRADIENT, Payload.RECOMPUTE)


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
