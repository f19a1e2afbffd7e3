"""Counts the messages that a schedule sends, and the buffers that they need."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

import numpy as np

from penstock.schedule.compiled.array_lowering import ArrayLowered
from penstock.schedule.compiled.event_graph_builder import unrolled
from penstock.schedule.compiled.instruction_arrays import RECEIVE, SEND, Code, Flags, Unrolled
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
        count = sum(_sends(each, counted, batches, m) for each in lowered.code.programs)
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
        spans = (unrolled(lowered.code, rank, batches) for rank in range(lowered.schedule.ranks))
        return tuple(map(_most_received, spans))
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


def _sends(program: tuple[Code, Code, Code | None], counted: Flags, batches: int, m: int) -> int:
    count = 0
    for part, code in enumerate(program[:2]):
        assert code is not None
        sends = code.kind == SEND
        begun = -(code.first[sends] // m)[counted[code.what[sends]]]
        count += int((batches >= begun).sum() if part else np.maximum(batches - np.maximum(begun, 0), 0).sum())
    return count


def _most_received(span: Unrolled) -> float:
    used = np.bincount(span.needs[:, 0], minlength=len(span.kind))
    return float(np.cumsum((span.kind == RECEIVE) - used).max(initial=0))
