"""Room for full-size gradients on a rank of a sharded schedule.

The schedule may limit those that a rank has at once to k places. A backward that begins one takes a place, which is
free again when the REDUCE of that gradient has ended; places are taken in the order in which their REDUCEs were issued,
so the n-th gradient of a rank waits for the (n - k)-th REDUCE. (A rank whose places are all taken by gradients that it
has not reduced yet waits for ever.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.schedule.ir.schedule import Action, Op, Stage, passes

ADDING = (Op.B, Op.I, Op.W)
"""Passes that add to a gradient."""


@dataclass
class GradientRoom:
    """The places of a rank for full-size gradients.

    Attributes:
        begun: stage and batch of those that backwards add to.
        freed: of the places that no backward adds to, in the order in which they are taken again: the gradient whose
            REDUCE frees it, and when that ends (None while other ranks have not joined it).
    """

    begun: set[tuple[Stage, int]]
    freed: deque[tuple[tuple[Stage, int] | None, float | None]]

    @classmethod
    def of(cls, places: int) -> GradientRoom:
        """Return room of which nothing is taken."""
        return cls(set(), deque([(None, 0.0)] * places))

    def new(self, action: Action, t: int, microbatches: int) -> set[tuple[Stage, int]]:
        """Return the gradients that an action in the period of batch t begins."""
        return {
            key
            for p in passes(action)
            if p.op in ADDING and (key := (p.stage, t + p.unit.first // microbatches)) not in self.begun
        }

    def has(self, places: int) -> bool:
        """Whether it is known when so many places are free."""
        return places <= len(self.freed) and all(self.freed[i][1] is not None for i in range(places))

    def take(self, gradients: set[tuple[Stage, int]]) -> float:
        """Begin gradients for which there is room; returns when there is."""
        self.begun |= gradients
        return max(self.freed.popleft()[1] or 0.0 for _ in gradients)

    def reduce(self, gradient: tuple[Stage, int]) -> None:
        """Issue the REDUCE of a gradient, which may be a part of it."""
        if gradient in self.begun:
            self.begun.remove(gradient)
            self.freed.append((gradient, None))

    def ends(self, gradient: tuple[Stage, int], end: float) -> None:
        """Note when the REDUCE of a gradient ends."""
        self.freed = deque((key, end if key == gradient and at is None else at) for key, at in self.freed)

    def copy(self) -> GradientRoom:
        """An independent twin."""
        return GradientRoom(set(self.begun), self.freed.copy())
