"""Count the activations in flight on every rank, and the most held at once."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import reduce
from math import lcm

from penstock.schedule.ir.absolute_actions import existing
from penstock.schedule.ir.op_table import OPS
from penstock.schedule.ir.schedule import Action, Schedule


class MicrobatchCount(Fraction):
    """A number of microbatches, exactly; shown as people write numbers."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return 3 for 3, 5.5 for 11/2."""
        return f"{float(self):.12g}"


class Activations:
    """Counts the activations that each rank holds, in units of 1 / `scale` microbatches on the rank's whole share.

    Args:
        schedule: the schedule.
        left: the part of a microbatch's activations that is kept between I and W; by default all.

    Attributes:
        held, peak: what each rank holds now, and has held at most.
    """

    def __init__(self, schedule: Schedule, left: Fraction = Fraction(1)) -> None:
        self.scale = reduce(lcm, schedule.chunks.values(), 1) * schedule.slices * left.denominator
        self._left = left
        self.held = [0] * schedule.ranks
        self.peak = [0] * schedule.ranks
        self._schedule = schedule
        self._changes: dict[tuple[object, ...], tuple[int, int]] = {}

    def change(self, action: Action) -> tuple[int, int]:
        """Return the activations an action allocates at its start (>= 0), and the change at its end (<= 0)."""
        op, stage, (_, count, piece, kind, _), _, parts, peer, _ = action
        if parts:
            changes = [self.change(p) for p in parts]
            return sum(taken for taken, _ in changes), sum(freed for _, freed in changes)
        key = (op, stage, count, piece, kind, peer)
        if key not in self._changes:
            amount = self.scale // self._schedule.chunks[stage] * count // (piece[1] if piece else 1)
            self._changes[key] = OPS[op].memory(action, self._schedule, amount, int(amount * self._left))
        return self._changes[key]

    def add(self, rank: int, amount: int) -> int:
        """Add `amount` activations (negative: free them) and return the number held afterwards."""
        self.held[rank] = held = self.held[rank] + amount
        if held > self.peak[rank]:
            self.peak[rank] = held
        return held

    def peaks(self) -> tuple[Fraction, ...]:
        """Return the most held on each rank, in microbatches on its whole share."""
        return tuple(MicrobatchCount(peak, self.scale) for peak in self.peak)

    def copy(self) -> Activations:
        """Return an independent copy."""
        twin = Activations(self._schedule, self._left)
        twin.held, twin.peak, twin._changes = list(self.held), list(self.peak), self._changes
        return twin


def most_activations(schedule: Schedule, batches: int, left: Fraction = Fraction(1)) -> tuple[Fraction, ...]:
    """The most that each rank holds in a span of up to `batches` batches, in microbatches on its whole share.

    What a rank holds depends on the order of its own actions only, not on when they run. If no version is rejected and
    `batches` is beyond the first batch that repeats (`Proof.steady_from`), that is so in a span of any length.

    Args:
        schedule: whose.
        batches: the longest span.
        left: what of a microbatch's activations is left between I and W.
    """
    found = Activations(schedule, left)

    def play(actions: Iterable[Action], rank: int, t: int) -> None:
        for action in actions:
            there = existing(action, t, schedule.microbatches)
            for amount in found.change(there) if there is not None else ():
                found.add(rank, amount)

    for rank, program in enumerate(schedule.programs):
        for t in range(batches):
            play(program.period, rank, t)
            held = found.held[rank]
            play(program.epilogue, rank, t + 1)
            found.held[rank] = held
    return found.peaks()
