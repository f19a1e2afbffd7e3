"""The generator of the campaign of faults: a case is a function of its number and the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from campaigns.faults.job import HOSTS, LOCAL
from campaigns.faults.kinds import KINDS, Kind, When
from campaigns.faults.shapes import LARGE, SHAPES, Shape

STARTING = 2.0  # seconds in which workers that have been forked start, roughly
_LARGE = 20  # one of so many cases has six or eight processes


@dataclass(frozen=True)
class Moment:
    """When a fault happens.

    Attributes:
        lines: of the metrics, after which `delay` begins; None to begin when all workers have been started.
        saving: it begins when a checkpoint is being written after that.
        delay: seconds.
    """

    when: When
    lines: int | None
    delay: float
    saving: bool = False

    def __str__(self) -> str:
        since = "start" if self.lines is None else f"line {self.lines}" + (", at a checkpoint" if self.saving else "")
        return f"{since} + {self.delay:.3f} s"


@dataclass(frozen=True)
class Case:
    """One case: a kind of fault, in what run, to whom, and when."""

    number: int
    kind: Kind
    shape: Shape
    rank: int
    moment: Moment

    def __str__(self) -> str:
        return f"{self.number}: {self.kind.name} (rank {self.rank}), {self.shape.name}, {self.moment}"


def draw(number: int, seed: int, again: int = 0) -> Case:
    """The case of a number; `again` draws another moment and rank of it.

    All kinds come once, in an order that the seed shuffles, before any of them comes again.
    """
    kinds = list(KINDS)
    random.Random(f"{seed}/{number // len(kinds)}").shuffle(kinds)
    kind = kinds[number % len(kinds)]
    dice = random.Random(f"{seed}/{number}")
    large = kind.launcher == LOCAL and number % _LARGE == _LARGE // 2
    fitting = [
        s
        for s in (LARGE if large else SHAPES)
        if (kind.launcher != HOSTS or s.workers % 2 == 0)
        and not (
            kind.drains and s.method == "stash"
        )  # a drain changes what its next batches read (docs/design.md, sec. 6)
    ]
    shape = dice.choice(fitting)
    if kind.damage is not None or kind.launcher != LOCAL:  # two checkpoints must have been written
        shape = replace(shape, patience=None)
    dice = random.Random(f"{seed}/{number}/{again}")
    when = dice.choice(kind.when) if kind.damage is None else "steady"
    return Case(number, kind, shape, dice.randrange(shape.workers), _moment(dice, shape, when, kind))


def _moment(dice: random.Random, shape: Shape, when: When, kind: Kind) -> Moment:
    if when == "start":
        return Moment(when, None, dice.uniform(0, STARTING))
    if when == "ending":
        return Moment(when, shape.lines - 10, dice.uniform(0, 0.5))
    least = 2 * 2 * shape.every + 6 if kind.damage is not None else 1
    lines = dice.randint(least, shape.lines - (25 if kind.damage is not None or kind.launcher != LOCAL else 15))
    return Moment(when, lines, dice.uniform(0, 0.03), saving=when == "saving")
