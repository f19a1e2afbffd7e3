"""Pipelines of one number per stage, in plain floats, whose stages run the passes of a given order, as they can.

Stage s makes tanh(w x) of x, the loss is (y - 1)^2 / 2. A pass has what there is at its time: no table of versions, no
formula of delays, no autograd. The stages, with their updates, are those of `asynchronous`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from support.scalar_pipelines import SKIPPED, Stage

Pass = tuple[str, tuple[int, ...]]
"""F, R (a forward again) or B, and the microbatches, counted from the beginning of the span."""


def nf1b(s: int, d: int, m: int, batches: int, ahead: int | None = None) -> list[Pass]:
    """Whole batches in the place of 1F1B's microbatches: forwards of each microbatch, one backward for all."""
    ahead = min(d - 1 - s if ahead is None else ahead, batches)
    forwards = [[("F", (b * m + k,)) for k in range(m)] for b in range(batches)]
    row: list[Pass] = [one for batch in forwards[:ahead] for one in batch]
    for b in range(batches):
        row += forwards[ahead + b] if ahead + b < batches else []
        row.append(("B", tuple(range(b * m, (b + 1) * m))))
    return row


def two_groups(s: int, d: int, m: int, batches: int) -> list[Pass]:
    """WPipe: in the first half, the forwards of the next batch come before the backwards of this one."""
    forwards = [[("F", (b * m + k,)) for k in range(m)] for b in range(batches)]
    backwards = [[("B", (b * m + k,)) for k in range(m)] for b in range(batches)]
    if s >= d // 2:
        return [one for pair in zip(forwards, backwards, strict=True) for batch in pair for one in batch]
    rows = [forwards[0], *(x for b in range(1, batches) for x in (forwards[b], backwards[b - 1])), backwards[-1]]
    return [one for row in rows for one in row]


def with_recompute(row: Sequence[Pass], early: int) -> list[Pass]:
    """An R for every B: so many Bs before its own, or as soon as its forward has run."""
    backwards = [units for op, units in row if op == "B"]
    result: list[Pass] = []
    seen = again = done = 0
    for op, units in row:
        if op == "B":
            while again < len(backwards) and again <= done + early and backwards[again][-1] < seen:
                result.append(("R", backwards[again]))
                again += 1
            done += 1
        result.append((op, units))
        seen += op == "F"
    return result


class Play:
    """One span.

    Args:
        stages: with their weights.
        xs: the input of every microbatch.
        m: microbatches to an update.
        first: the number of the first batch.
        segment: so many stages in a row keep one input for their Rs, that of the first one.
    """

    def __init__(self, stages: Sequence[Stage], xs: Sequence[float], m: int, first: int, segment: int = 1) -> None:
        self.stages, self.m, self.first, self.segment = stages, m, first, segment
        d = len(stages)
        self.inputs: list[dict[int, float]] = [dict(enumerate(xs)), *({} for _ in range(d))]
        self.again: list[dict[int, float]] = [{} for _ in range(d + 1)]
        self.kept: list[dict[int, tuple[float, float]]] = [{} for _ in range(d)]  # input and output of what goes back
        self.slopes: list[dict[int, float]] = [{} for _ in range(d + 1)]
        self.sums = [0.0] * d
        for stage in stages:
            stage.backwards = 0

    def go(self, rows: Sequence[Sequence[Pass]]) -> None:
        """Play these passes."""
        todo = [list(row) for row in rows]
        while any(todo):
            before = sum(map(len, todo))
            for s, row in enumerate(todo):
                while row and self.ready(s, *row[0]):
                    op, units = row.pop(0)
                    for g in units:
                        {"F": self.forward, "R": self.rerun, "B": self.backward}[op](s, g)
            assert sum(map(len, todo)) < before, "the order goes round in a circle"

    def ready(self, s: int, op: str, units: tuple[int, ...]) -> bool:
        where = {"F": self.inputs[s], "R": self.source(s), "B": self.slopes[s + 1]}[op]
        return all(g in where for g in units)

    def source(self, s: int) -> dict[int, float]:
        """Whence an R gets its input."""
        return self.again[s] if s % self.segment else self.inputs[s]

    def forward(self, s: int, g: int) -> None:
        stage, x = self.stages[s], self.inputs[s][g]
        stage.partial = 0.0 if self.first + stage.backwards // self.m == SKIPPED else self.sums[s] / self.m
        stage.read[g], stage.born[g] = stage.ahead(g), len(stage.history) - 1
        self.inputs[s + 1][g] = y = math.tanh(stage.read[g] * x)
        self.kept[s][g] = x, y
        if s == len(self.stages) - 1:
            self.slopes[-1][g] = y - 1.0

    def rerun(self, s: int, g: int) -> None:
        stage: Any = self.stages[s]
        x = self.source(s)[g]
        self.again[s + 1][g] = y = math.tanh(stage.reread(g) * x)
        self.kept[s][g] = x, y
        if s == len(self.stages) - 1:
            self.slopes[-1][g] = y - 1.0

    def backward(self, s: int, g: int) -> None:
        stage, (x, y) = self.stages[s], self.kept[s][g]
        slope = self.slopes[s + 1][g] * (1 - y * y)
        self.slopes[s][g] = slope * stage.back(g)
        self.sums[s] += slope * x
        stage.backwards = g + 1
        if g % self.m == self.m - 1:
            stage.step(None if self.first + g // self.m == SKIPPED else self.sums[s] / self.m)
            self.sums[s] = 0.0
