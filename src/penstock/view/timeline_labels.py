"""What drawings show of a timeline: operations, units, versions that are read, chunks and directions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from string import ascii_lowercase
from typing import NamedTuple

from penstock.schedule.ir.op_table import Lane
from penstock.timeline import Interval, Timeline

OPERATIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
    "R": "recompute",
    "REDO": "forward again, after a rejected update",
    "PREDICT": "weights predicted",
    "VALIDATE": "update decided on",
    "OFFLOAD": "activations moved away",
    "FETCH": "activations moved back",
    "SWAPIN": "optimizer state brought from the host",
    "SWAPOUT": "optimizer state moved back there",
    "HOLD": "activations of another rank taken",
    "RETURN": "activations of another rank returned",
}
"""Words for the operations that a compute lane may show, in the order of legends."""

NETWORK = {"GATHER": "G", "REDUCE": "S"}
"""Signs of what a lane of the network shows."""

SENT = {"GATHER": "weights gathered", "REDUCE": "gradients summed"}
"""Words for it, in the order of legends."""

_ONCE_PER_BATCH = {
    "REDUCE": SENT["REDUCE"],
    "TIE": "gradients of shared parameters summed",
    "DECIDE": "decision of all stages on the update",
    "STEP": "update",
    "AVERAGE": "weights averaged",
    "GATHER": SENT["GATHER"],
    "RELEASE": "gathered weights freed",
}

WORK = OPERATIONS | _ONCE_PER_BATCH
"""Words for all that a rank may do, as tables for people list it."""

COPIES = {"OFFLOAD": "↑", "FETCH": "↓", "SWAPOUT": "↑", "SWAPIN": "↓"}
"""Signs of what a lane of copies to the host's memory, and back, shows."""

_ORDINALS = ("first", "second", "third", "fourth")


class Places:
    """Tells the stages of a rank apart: by chunk (where a rank holds several) and by direction (where there are two).

    Of several pipelines in each direction, even ones go down; microbatches tell them apart.

    Attributes:
        chunks: the most stages of one direction on a rank.
        directions: 2 where some pipelines go down and others up, else 1.
    """

    def __init__(self, timeline: Timeline) -> None:
        held: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for interval in timeline.work():
            for part in parts_of(interval):
                held[part.rank, part.direction].add(part.stage)
        self._held = {place: sorted(stages) for place, stages in held.items()}
        self.chunks = max(map(len, held.values()), default=1)
        self.directions = 1 if (1 + max((direction for _, direction in held), default=0)) % 2 else 2

    def mark(self, part: Interval) -> str:
        """Return what follows the number of a pass in text: a, b, ... for its chunk, > or < for its direction."""
        stages = self._held[part.rank, part.direction]
        chunk = ascii_lowercase[stages.index(part.stage) % 26] if len(stages) > 1 else ""
        return chunk + ("><"[part.direction % 2] if self.directions > 1 else "")

    def shade(self, part: Interval) -> int:
        """Return the number of a pass's shade, of `shades`; chunks of one direction have neighbouring ones."""
        chunk = self._held[part.rank, part.direction].index(part.stage)
        return (part.direction % 2) * self.chunks + chunk if self.directions > 1 else chunk

    @property
    def shades(self) -> int:
        """The number of shades that tell all stages of a rank apart."""
        return self.chunks * self.directions

    def shade_names(self) -> list[str]:
        """Return what each shade stands for; nothing where there is only one."""
        chunks = [f"{_ORDINALS[c] if c < len(_ORDINALS) else f'{c + 1}th'} chunk" for c in range(self.chunks)]
        if self.directions == 1:
            return chunks if self.chunks > 1 else []
        ways = ("down", "up")
        return [f"{way}, {chunk}" for way in ways for chunk in chunks] if self.chunks > 1 else list(ways)


class LaneBeside(NamedTuple):
    """What every rank has beside its passes.

    Attributes:
        head, name: short and long name.
        intervals: of all ranks.
    """

    head: str
    name: str
    intervals: list[Interval]


def lanes_beside(timeline: Timeline) -> list[LaneBeside]:
    """Return the lanes that are drawn below the passes of each rank; none where nothing is on them."""
    copies = [i for i in timeline.intervals if i.what in COPIES and i.end > i.start and i.lane == Lane.COPY.value]
    lanes = (LaneBeside("net", "network", network_of(timeline)), LaneBeside("host", "host", copies))
    return [lane for lane in lanes if lane.intervals]


def network_of(timeline: Timeline) -> list[Interval]:
    """Return what occupies the network of parallel pipelines: gathers and sums, if weights are gathered at all."""
    found = [i for i in timeline.intervals if i.what in NETWORK and i.end > i.start and not i.is_work]
    return found if any(i.what == "GATHER" for i in found) else []


def parts_of(interval: Interval) -> tuple[Interval, ...]:
    """Return the passes that run together in an interval, or the interval itself."""
    return interval.parts or (interval,)


def unit_of(part: Interval) -> str:
    """Return the unit of an action as drawings show it: `3`, `0..3`, `1:0` for a slice, or `e3` in an evaluation."""
    return part.label.removeprefix(part.what).partition("/")[0]


def pieces_of(unit: str) -> list[tuple[int, int]]:
    """Return the (microbatch, slice) pairs of a unit."""
    number, _, place = unit.removeprefix("e").partition("/")[0].partition(":")
    first, _, last = number.partition("..")
    return [(k, int(place or 0)) for k in range(int(first), int(last or first) + 1)]


def unit_in_words(part: Interval) -> str:
    """Return the unit of an action as legends explain it."""
    unit, _, slices = part.label.removeprefix(part.what).removeprefix("e").partition("/")
    number, _, place = unit.partition(":")
    first, several, last = number.partition("..")
    words = f"microbatches {first} to {last} together" if several else f"microbatch {number}"
    if place:
        words += f", slice {place} of {slices}"
    return words + (" of an evaluation" if part.label.startswith(f"{part.what}e") else "")


def versions_read(intervals: Iterable[Interval]) -> list[int]:
    """Return the versions of the weights that passes read, in order."""
    return sorted(
        {p.version for i in intervals if i.is_work and i.what != "STEP" for p in parts_of(i) if p.version >= 0}
    )


def operations(intervals: Iterable[Interval]) -> list[str]:
    """Return the operations that occupy compute lanes, without updates, in the order of legends."""
    found = {p.what for i in intervals if i.is_work and i.what != "STEP" and i.end > i.start for p in parts_of(i)}
    return sorted(found, key=lambda op: (list(OPERATIONS).index(op) if op in OPERATIONS else len(OPERATIONS), op))


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 1.0
    while power > least:
        power /= 10
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
