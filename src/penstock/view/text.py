"""Draw timelines as text: a row per rank, a cell per action.

    rank 0 |F0⁰|F1⁰|F2⁰|F3⁰|·······|B0⁰   |F4⁰|B1⁰   |
    rank 1 |···|F0⁰|F1⁰|F2⁰|B0⁰    |...

Where more than one version of the weights is read, a superscript names it. Dots are idle time; a double bar (┃) marks
an update. Long timelines are wrapped into blocks, and very long ones shortened in the middle.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

from rich.text import Text

from penstock.timeline import Interval, Timeline
from penstock.view.plurals import counted
from penstock.view.timeline_labels import (
    COPIES,
    NETWORK,
    OPERATIONS,
    Places,
    lanes_beside,
    operations,
    parts_of,
    round_step,
    unit_in_words,
    unit_of,
    versions_read,
)

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_STYLES = {
    "F": ("white on dodger_blue3", "black on sky_blue1"),
    "B": ("black on spring_green3", "black on dark_sea_green2"),
    "I": ("black on dark_orange", "black on light_salmon1"),
    "W": ("black on gold3", "black on khaki1"),
    "R": ("white on dark_magenta", "black on plum2"),
    "GATHER": ("white on deep_pink4", "black on pink1"),
    "REDUCE": ("white on orange4", "black on tan"),
}
_IDLE, _BAR, _UPDATE, _LEFT_OUT = "·", "|", "┃", "⋯"
_RED = "bold red"
_JOINED = "\N{NO-BREAK SPACE}"
_LONGEST = 20_000  # columns, beyond which the scale is reduced and labels are cut
_LEAST = 20  # columns of a block
_SLACK = 12  # columns by which a block may be shorter than others, so as to end between two cells


_Span = tuple[int, int]
"""The first column of a block, and the one after it."""


def superscript(number: int) -> str:
    """Format a number in superscript digits."""
    return str(number).translate(_SUPERSCRIPTS)


def wrap_schedule(text: str, width: int) -> str:
    """Wrap a schedule in its text form; continuation lines are indented to the first action, and no action is split."""
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r"\w+ \d+: |", line)
        indent = " " * (head.end() if head else 0)
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def draw_timeline(timeline: Timeline, width: int = 120, lines: int | None = None, *, legend: bool = False) -> Text:
    """Draw the compute lanes of a timeline.

    Args:
        timeline: a simulated or measured timeline.
        width: number of columns to wrap at.
        lines: about how many lines, of which at least two blocks are drawn; what does not fit is left out in the middle
            and counted, if it is more than a block. None for no limit.
        legend: explain the signs of the drawing below it.
    """
    if not any(i.end > i.start for i in timeline.work()):
        return Text("(nothing ran)")
    drawing = _TextDrawing(timeline, width)
    blocks, rest = drawing.blocks(lines)
    drawn = drawing.drawn(blocks, rest)
    if legend:
        explained = drawing.legend([*blocks, *rest])
        filled = textwrap.fill(explained, width, break_on_hyphens=False).replace(_JOINED, " ")
        drawn.append(f"\n{filled}\n", style="dim")
    return drawn


def _operations_explained(work: Sequence[Interval]) -> Iterator[str]:
    """Yield the operations in words; one of each kind of unit (microbatch, slice, several at once) as an example."""
    passes = [p for i in work if i.what != "STEP" for p in parts_of(i)]
    explained = set()
    for op in operations(work):
        kinds: dict[str, Interval] = {}
        for part in passes:
            if part.what == op:
                kinds.setdefault(unit_of(part).strip("0123456789"), part)  # what is left: "", "..", ":", "e"
        news = [part for kind, part in kinds.items() if kind not in explained]
        explained |= set(kinds)
        name = OPERATIONS.get(op, op.lower())
        examples = [f"{op}{unit_of(part)} {name} of {unit_in_words(part)}" for part in news]
        yield " and ".join(examples) or f"{op} {name}"


@dataclass
class _Row:
    """The cells of a rank, or of a lane beside it.

    Attributes:
        head: its name.
        characters, styles: of every column.
        cells: first columns of the cells.
        labels: first column of every label, and the one after it; passes that run together have one each.
        updates: columns of updates.
    """

    head: str
    characters: list[str]
    styles: list[str]
    cells: list[int] = field(default_factory=list)
    labels: list[_Span] = field(default_factory=list)
    updates: set[int] = field(default_factory=set)


class _TextDrawing:
    """The cells of all ranks, to be cut into blocks."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        work = [i for i in timeline.work() if i.end > i.start and i.what != "STEP"]
        self._timeline, self._places, self._beside = timeline, Places(timeline), lanes_beside(timeline)
        self._versioned = len(versions_read(work)) > 1
        beside = [i for lane in self._beside for i in lane.intervals]
        self._origin = min([timeline.start, *(i.start for i in beside)])
        self._makespan = max([timeline.start + timeline.makespan, *(i.end for i in beside)]) - self._origin
        needed = ((len("+".join(self._labels(i, self._versioned))) + 1) / (i.end - i.start) for i in work)
        widest = max(needed, default=math.inf)
        self._scale = min(widest, _LONGEST / self._makespan)
        self._columns = round(self._makespan * self._scale) + 1
        self._rows = [row for rank in range(timeline.ranks) for row in self._rows_of(rank)]
        self._head = max(len(row.head) for row in self._rows) + 1
        self._width = max(width - self._head, _LEAST)

    def blocks(self, lines: int | None) -> tuple[list[_Span], list[_Span]]:
        """Return the columns of all blocks; or, if they take more lines, those of the first and of the last ones."""
        blocks = list(self._blocks())
        fitting = len(blocks) if lines is None else max(2, lines // (len(self._rows) + 2))
        if len(blocks) <= fitting + 1:
            return blocks, []
        return blocks[: (fitting + 1) // 2], blocks[-(fitting // 2) :]

    def drawn(self, blocks: Sequence[_Span], rest: Sequence[_Span]) -> Text:
        """Return blocks, and what is left out between them and the rest."""
        gap = [self._left_out(blocks[-1][1], rest[0][0])] if rest else []
        return Text("\n").join([*(self._block(*b) for b in blocks), *gap, *(self._block(*b) for b in rest)])

    def legend(self, blocks: Sequence[_Span]) -> str:
        """Return what the signs of blocks stand for."""
        work = [i for i in self._timeline.work() if any(self._touches(i, *block) for block in blocks)]
        places, versions = self._places, versions_read(work)
        said = [", ".join(_operations_explained(work))]
        if places.chunks > 1:
            last = ascii_lowercase[min(places.chunks, 26) - 1]
            said.append(f"a {'and' if places.chunks == 2 else '..'} {last}: chunks of a rank")
        if places.directions > 1:
            said.append("> and <: pipelines down and up the ranks")
        said += [f"{'+'.join(p.what for p in i.parts)}: run together" for i in work if i.parts][:1]
        if self._versioned:
            said.append("superscript: version of the weights that is read")
        elif versions:
            said.append(f"all read version {versions[0]} of the weights")
        heads = [lane.head for lane in self._beside]
        said += [f"net: network; G{_JOINED}gather, S{_JOINED}sum of gradients"] if "net" in heads else []
        up, down = COPIES["OFFLOAD"], COPIES["FETCH"]
        said += [f"host: copies; {up}{_JOINED}to its memory, {down}{_JOINED}back"] if "host" in heads else []
        said += [f"{_UPDATE}{_JOINED}update"] if any(i.what == "STEP" for i in work) else []
        idle = any(_IDLE in row.characters[start:end] for row in self._rows for start, end in blocks)
        return "; ".join([*said, f"{_IDLE}{_JOINED}idle"] if idle else said)

    def _touches(self, interval: Interval, start: int, end: int) -> bool:
        first, last = self._column(interval.start), self._column(interval.end)
        return first < end and max(last, first + 1) > start

    def _column(self, time: float) -> int:
        return round((time - self._origin) * self._scale)

    def _blocks(self) -> Iterator[_Span]:
        """Yield first and last columns of the blocks: about even, and where few labels and cells are cut."""
        cut = [0] * (self._columns + 1)  # labels that a block would cut if it ended before this column
        begun = [0] * (self._columns + 1)  # cells that begin in this column
        for row in self._rows:
            for first in row.cells:
                begun[first] += 1
            for first, end in row.labels:
                for column in range(first + 1, end):
                    cut[column] += 1
        start = 0
        while start < self._columns:
            left = self._columns - start
            even = start + -(-left // -(-left // self._width))  # where this block ends if all are of one length
            latest = min(start + self._width, self._columns)
            ends = range(latest, max(even - _SLACK, start), -1)
            if min(cut[column] for column in ends):
                ends = range(latest, start + self._width // 2, -1)
            end = min(ends, key=lambda column: (cut[column], -begun[column], abs(column - even)))
            end = self._columns if left <= self._width else end
            yield start, end
            start = end

    def _block(self, start: int, end: int) -> Text:
        block = Text()
        for row in self._rows:
            block.append(row.head.ljust(self._head), style="bold")
            for text, style in _runs(row.characters[start:end], row.styles[start:end]):
                block.append(text, style=style)
            block.append("\n")
        block.append(self._axis(start, end), style="dim")
        return block.append("\n")

    def _left_out(self, start: int, end: int) -> Text:
        """Say what is left out between two columns: all that would begin there."""
        passes = sum(start <= first < end for row in self._rows if row.head.startswith("rank") for first in row.cells)
        updates = sum(start <= column < end for row in self._rows for column in row.updates)
        times = f"time {start / self._scale:.4g} to {end / self._scale:.4g}"
        said = f"{counted(passes, 'pass')} and {counted(updates, 'update')}" if updates else counted(passes, "pass")
        return Text(f"{'':{self._head}}{_LEFT_OUT} left out, {times}: {said} {_LEFT_OUT}\n", style="bold")

    def _rows_of(self, rank: int) -> Iterator[_Row]:
        """Yield the row of a rank, and those of its lanes beside it, such as the network if anything is gathered."""
        yield self._row(f"rank {rank}", [i for i in self._timeline.intervals if i.rank == rank and i.is_work])
        for lane in self._beside:
            yield self._row(f"{lane.head} {rank}", [i for i in lane.intervals if i.rank == rank])

    def _row(self, head: str, intervals: Sequence[Interval]) -> _Row:
        columns = self._columns
        row = _Row(head, [_IDLE] * columns, ["dim"] * columns)
        for interval in intervals:
            first, last = self._column(interval.start), self._column(interval.end)
            if interval.what == "STEP":
                row.updates.add(first)
                row.characters[first:last] = [_UPDATE] * (last - first)
                row.styles[first:last] = [_RED] * (last - first)
            elif first < last:
                text = self._cell(interval, last - first)
                row.characters[first:last] = list(text.ljust(last - first))
                row.styles[first:last] = self._cell_styles(interval, text, last - first)
                row.cells.append(first)
                row.labels += [(first + m.start(), first + m.end()) for m in re.finditer(r"\+?[^+]*[^+ ]", text)]
            if first < last and row.characters[last] == _IDLE:
                row.characters[last], row.styles[last] = _BAR, ""
        for place in row.updates:
            row.characters[place], row.styles[place] = _UPDATE, _RED
        return row

    def _cell_styles(self, interval: Interval, text: str, columns: int) -> list[str]:
        """Return the colours of a cell; passes that run together share it."""
        first, *others = map(self._style, parts_of(interval))
        half = text.find("+") if others else -1
        return [first] * columns if half < 0 else [first] * half + [others[0]] * (columns - half)

    def _style(self, part: Interval) -> str:
        """Return the colour of an action: by operation; shaded by chunk or direction, or else by version."""
        shade = self._places.shade(part) if self._places.shades > 1 else max(part.version, 0)
        return _STYLES.get(part.what, ("reverse", "reverse"))[shade % 2]

    def _labels(self, interval: Interval, versioned: bool) -> list[str]:
        """Return operation, unit, chunk and direction of each pass, and with `versioned` what it reads."""
        return [
            (NETWORK.get(part.what) or COPIES.get(part.what, part.what) + unit_of(part))
            + self._places.mark(part)
            + (superscript(part.version) if versioned and part.version >= 0 else "")
            for part in parts_of(interval)
        ]

    def _cell(self, interval: Interval, columns: int) -> str:
        """Fit a label into a number of columns, without its bar, its version or its number if there is no room."""
        labels = self._labels(interval, self._versioned)
        whole, bare = "+".join(labels), "+".join(self._labels(interval, False))
        halves = (_BAR + labels[0]).ljust(columns // 2) + "".join(f"+{label}" for label in labels[1:])
        sign = (NETWORK | COPIES).get(interval.what, interval.what)
        fitting = (text for text in (halves, _BAR + whole, whole, bare, sign) if len(text) <= columns)
        return next(fitting, sign[:columns]).rstrip()

    def _axis(self, start: int, end: int) -> str:
        """Return the times below a block, at most one every 12 columns, and none beyond the width."""
        head, scale = self._head, self._scale
        step = round_step(12 / scale)
        line = "time".ljust(head) + " " * (end - start)
        for time in (k * step for k in range(int(self._makespan / step) + 2)):
            column = round(time * scale)
            text = f"{time:g}"
            if start <= column and column + len(text) <= end:
                place = head + column - start
                line = line[:place] + text + line[place + len(text) :]
        return line.rstrip()


def _runs(characters: list[str], styles: list[str]) -> Iterator[tuple[str, str]]:
    """Yield runs of neighbouring characters with the same style."""
    start = 0
    for i in range(1, len(characters) + 1):
        if i == len(characters) or styles[i] != styles[start]:
            yield "".join(characters[start:i]), styles[start]
            start = i
