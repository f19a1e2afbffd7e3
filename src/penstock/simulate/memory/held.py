"""What a rank holds, counted by kind, and the combinations that no other one exceeds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np

Blockwise = bool | Collection[int]
"""Of which stages blocks are recomputed one by one: of all, of none, or of some, by index."""


def is_blockwise(blockwise: Blockwise, stage: int) -> bool:
    """Return whether the blocks of a stage are recomputed one by one."""
    return blockwise if isinstance(blockwise, bool) else stage in blockwise


def slice_number(piece: tuple[int, int] | None) -> int:
    """Return the number of a slice of a sequence; 0 of whole ones."""
    return piece[0] if piece else 0


class HeldKind(StrEnum):
    """What is held.

    The graphs of one microbatch on a stage, from forward to backward, are `GRAPH`, or `HALVED` where the backward comes
    in two halves, which leave `LATE` between them. Where blocks are recomputed, a forward holds `FORWARD` (`_HALVED`)
    for a while, then `SAVED`, and its backward `BACKWARD`. Where a stage is, its forward leaves `INPUT`.
    """

    GRAPH = "graph"
    HALVED = "halved graph"
    LATE = "between halves"
    FORWARD = "in a forward"
    FORWARD_HALVED = "in a halved forward"
    BACKWARD = "in a backward"
    BACKWARD_HALVED = "in a halved backward"
    SAVED = "inputs of blocks"
    INPUT = "input of the stage"
    MOVED = "moved activations"  # of a graph of `stage`: on their way to another rank and back, and there
    LEFT = "left of a graph"  # whose activations have been moved
    MOVED_HALVED = "moved activations of a halved graph"
    LEFT_HALVED = "left of a halved graph"
    OUTPUT = "output"  # a message from `stage` to `peer`
    GRADIENT = "gradient"  # a message from `stage` to `peer`
    OPTIMIZER = "optimizer"
    BEFORE = "optimizer before"  # a copy of what the optimizer remembers, while an update may be taken back
    SCRATCH = "scratch"
    WHOLE = "weights between runs"  # of which rows are there always
    GATHERED = "gathered weights"  # of one version
    FULL_GRADIENT = "full-size gradient"  # where it is there for a while only
    SUM = "rows of a sum"  # from the first backward of a batch to its update
    OLDER = "older version"  # than the newest, or its rows
    PASSING = "sums over pipelines"  # while these meet
    WAVE = "wave"  # of updates, of all pipelines
    SNAPSHOT = "snapshot"  # of what is trained
    SHARE = "share of a snapshot"  # of what is trained, of a further copy of a stage that divides its state
    OLDER_COPY = "older version of a snapshot"  # the second one; or of what is not whole yet
    BUFFERS = "module buffers of a snapshot"
    FROZEN = "frozen parameters of a snapshot"

    __hash__ = str.__hash__  # an enum's own is a call of Python, and kinds are looked up at every change


class Held(NamedTuple):
    """One kind of thing that is held: of a stage, by its index, for messages of two, and of a slice of a sequence."""

    kind: HeldKind
    stage: int
    peer: int = -1
    slice: int = 0


Combination = frozenset[tuple[Held, int]]
"""What is held at one moment: how many of each."""


class Holdings:
    """What one rank holds, over time."""

    def __init__(self) -> None:
        self._places: dict[Held, int] = {}
        self._now: list[int] = []  # by place
        self._rising = False
        self._seen: set[tuple[int, ...]] = set()

    def __getitem__(self, what: Held) -> int:
        """Return how many of something it holds now."""
        return self._now[self._places[what]] if what in self._places else 0

    def change(self, what: Held, count: int) -> None:
        """Hold more or, negative, less of something."""
        if not count:
            return
        if count < 0 and self._rising:
            self._note()
        self._rising = count > 0
        place = self._places.get(what)
        if place is None:
            place = self._places[what] = len(self._now)
            self._now.append(0)
        self._now[place] += count
        assert self._now[place] >= 0, f"less than nothing is held of {what}"

    def largest(self) -> tuple[Combination, ...]:
        """Return the combinations that have been held, without those that another one exceeds or equals in all."""
        self._note()
        found, size = list[list[int]](), len(self._now)
        seen = np.array([each + (0,) * (size - len(each)) for each in self._seen])
        seen = seen[np.argsort(-seen.sum(axis=1), kind="stable")]
        while len(seen):  # the first one has the largest sum, so no other one exceeds it
            found.append(seen[0].tolist())
            seen = seen[(seen > seen[0]).any(axis=1)]
        return tuple(frozenset((w, n) for w, n in zip(self._places, each, strict=True) if n) for each in found)

    def _note(self) -> None:
        self._seen.add(tuple(self._now))


def most_bytes(combinations: Iterable[Combination], sizes: Mapping[Held, int]) -> int:
    """Return the most bytes that any of the combinations takes.

    Args:
        combinations: of a rank.
        sizes: bytes of one of each; what is not there takes none.
    """
    return max((sum(sizes.get(what, 0) * count for what, count in each) for each in combinations), default=0)
