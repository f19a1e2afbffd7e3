"""The methods that plans by simulation try: which stages their ranks hold, and what they need of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.schedule.methods.find_method import find_method


class PlannedMethod(NamedTuple):
    """A method with the options of its order.

    Attributes:
        name: a row of the method table, with the number of chunks where that is a choice.
        chunks: stages on each rank.
        folded: they lie on a V, so that rank r has the stages r and, from the end, r; otherwise they go round.
        halved: backwards come in two halves.
    """

    name: str
    chunks: int = 1
    folded: bool = False
    halved: bool = False

    @property
    def row(self) -> str:
        """The row of the method table."""
        return self.name.partition(":")[0]

    @property
    def options(self) -> dict[str, int]:
        """Of its order, where they are not what the method has anyway."""
        return {"chunks": self.chunks} if ":" in self.name else {}

    @property
    def rule(self) -> str:
        """Its version rule."""
        return find_method(self.row).rule

    @property
    def flushes(self) -> bool:
        """Whether no weights are read late."""
        return self.rule == "flush"

    def ranks(self, depth: int) -> tuple[int, ...]:
        """Return the rank of each stage of a pipeline with so many ranks."""
        if self.folded:
            return (*range(depth), *reversed(range(depth)))
        return tuple(range(depth)) * self.chunks


_USUAL = tuple(map(PlannedMethod, ("1f1b", "eager", "gpipe", "2bw", "2bw-eager")))
_OTHERS = (
    PlannedMethod("zb-h1", halved=True),
    PlannedMethod("zb-h2", halved=True),
    PlannedMethod("zb-v", 2, folded=True, halved=True),
    PlannedMethod("v-half", 2, folded=True, halved=True),
    PlannedMethod("v-min", 2, folded=True, halved=True),
    PlannedMethod("zb-interleaved:chunks=2", 2, halved=True),
    *(PlannedMethod(f"{name}:chunks={n}", n) for name in ("interleaved", "breadth-first") for n in (2, 4)),
)

PLANNED: Mapping[str, PlannedMethod] = MappingProxyType({each.name: each for each in (*_USUAL, *_OTHERS)})
"""All by their names, in the order in which they are tried."""

USUAL = tuple(each.name for each in _USUAL)
"""Those with one stage on each rank whose backward is one pass: the best plan of each is found."""

METHODS = tuple(PLANNED)
"""All names."""
