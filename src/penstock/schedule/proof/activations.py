"""Activations in flight on every rank: what actions take and give back, and the most that is held at once."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import lcm

from penstock.schedule.ir.ops import OPS
from penstock.schedule.ir.schedule import Action, Schedule


class Activations:
    """A running count, in 1 / `scale` microbatches on a rank's whole share.

    Args:
        schedule: whose.
        left: what of a microbatch's activations is left between I and W; everything, unless told otherwise.

    Attributes:
        held, peak: per rank.
    """

    def __init__(self, schedule: Schedule, left: Fraction = Fraction(1)) -> None:
        self.scale = reduce(lcm, schedule.chunks.values(), 1) * schedule.slices * left.denominator
        self._left = left
        self.held = [0] * schedule.ranks
        self.peak = [0] * schedule.ranks
        self._schedule = schedule
        self._changes: dict[tuple[object, ...], tuple[int, int]] = {}

    def change(self, action: Action) -> tuple[int, int]:
        """What an action takes at its start (at least 0), and what it changes at its end (at most 0)."""
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
        """Take (or give back) activations; returns what is held then."""
        self.held[rank] = held = self.held[rank] + amount
        if held > self.peak[rank]:
            self.peak[rank] = held
        return held

    def peaks(self) -> tuple[Fraction, ...]:
        """The most held on each rank, in microbatches on its whole share."""
        return tuple(Fraction(peak, self.scale) for peak in self.peak)

    def copy(self) -> Activations:
        """An independent twin."""
        twin = Activations(self._schedule, self._left)
        twin.held, twin.peak, twin._changes = list(self.held), list(self.peak), self._changes
        return twin
