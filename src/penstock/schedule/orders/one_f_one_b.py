"""1F1B: after a warm-up of forwards, one forward and one backward in turn.

The family has one knob: the microbatches in flight on rank r of p (`in_flight`), one more than the forwards of its
warm-up, which it runs ahead of its backwards.

    p - r            plain: DAPPLE's P_A (Fan et al., arXiv 2007.01045), PipeDream-Flush (arXiv 2006.09503, sec. 3.2).
    2 (p - r) - 1    eager: DAPPLE's P_B, which hides latencies of up to half of a forward and a backward.

p=3, m=4, plain:
    r0: F0 F1 F2 B0 F3 B1 B2 B3
    r1: F0 F1 B0 F2 B1 F3 B2 B3
    r2: F0 B0 F1 B1 F2 B2 F3 B3

Endless (PipeDream, PipeDream-2BW): no drain between batches. The period of batch t holds its m forwards, and each
forward is followed by the backward of the microbatch `warm-up` places earlier, which may be of batch t-1:
    r0: F0 B-2 F1 B-1 F2 B0 F3 B1, and to drain B-2 B-1

Fine-grained (PipeMare, arXiv 1910.05124): in every slot a stage runs one forward and one backward, as hardware does
with a stage on each small unit. From 1 on, microbatch j passes stage i of P forward in slot j + i - 1 and backward in
slot j + 2P - i: a warm-up of 2 (p - 1 - r) + 1. A rank runs its passes one after the other, here a slot's forward
first; it reads weights without the slot's own update, and so its delay is 2 (P - i) + 1 microbatches, exactly. Where a
slot's backward comes first it is 2 (P - i), that of pipelined backpropagation (Kosson et al., arXiv 2003.11666), and
the order is endless eager 1F1B.
"""

import numpy as np

from penstock.schedule.ir.arrays import ActionArrays, ArrayOrder, B, F, Numbers, ProgramArrays
from penstock.schedule.ir.in_flight_option import InFlight, in_flight_on
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.schedule import straight


def one_f_one_b(stages: int, microbatches: int, *, in_flight: InFlight | None = None) -> Order:
    """Run 1F1B, flushed after each batch.

    Args:
        stages: p, the ranks.
        microbatches: m.
        in_flight: microbatches in flight on the first rank, or on each (`in_flight_on`); p - r if None.
    """
    ahead = _warm_ups(stages, in_flight)
    return ArrayOrder.of([_flushed(rank, ahead[rank], microbatches) for rank in range(stages)], straight(stages))


def eager_1f1b(stages: int, microbatches: int) -> Order:
    """Run eager 1F1B (DAPPLE's P_B), flushed after each batch."""
    return one_f_one_b(stages, microbatches, in_flight=2 * stages - 1)


def endless_1f1b(stages: int, microbatches: int, *, in_flight: InFlight | None = None) -> Order:
    """Run 1F1B without flushes.

    Args:
        stages: p, the ranks.
        microbatches: m.
        in_flight: microbatches in flight on the first rank, or on each (`in_flight_on`); p - r if None.
    """
    return _endless(stages, microbatches, _warm_ups(stages, in_flight))


def endless_eager_1f1b(stages: int, microbatches: int) -> Order:
    """Run eager 1F1B without flushes."""
    return endless_1f1b(stages, microbatches, in_flight=2 * stages - 1)


def fine_grained(stages: int, microbatches: int) -> Order:
    """Run PipeMare's own order, a forward and a backward of each stage in every slot, without flushes."""
    return _endless(stages, microbatches, [2 * (stages - 1 - rank) + 1 for rank in range(stages)])


def _warm_ups(stages: int, in_flight: InFlight | None) -> list[int]:
    return [number - 1 for number in in_flight_on(stages, stages if in_flight is None else in_flight)]


def _flushed(stage: int, warm_up: int, microbatches: int) -> ProgramArrays:
    k = np.arange(microbatches + warm_up)
    passes = _in_turns(stage, k, k - warm_up)
    return ProgramArrays(passes[(passes.first >= 0) & (passes.first < microbatches)])


def _endless(stages: int, microbatches: int, ahead: list[int]) -> Order:
    k = np.arange(microbatches)
    programs = [
        ProgramArrays(_in_turns(stage, k, k - warm_up), ActionArrays.of(B, stage, np.arange(-warm_up, 0)))
        for stage, warm_up in enumerate(ahead)
    ]
    return ArrayOrder.of(programs, straight(stages))


def _in_turns(stage: int, forwards: Numbers, backwards: Numbers) -> ActionArrays:
    """Return a forward and a backward in turn."""
    return ActionArrays.of([F, B], stage, np.stack([forwards, backwards], axis=1))
