"""Draw timelines as text: a row per rank, a cell per action, the version read as a superscript.

    rank 0 |F0⁰|F1⁰|F2⁰|F3⁰|·······|B0⁰   |F4⁰|B1⁰   |
    rank 1 |···|F0⁰|F1⁰|F2⁰|B0⁰    |...

Dots are idle time; a double bar (┃) marks an update. Long timelines are wrapped into blocks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from rich.text import Text

from penstock.timeline import Interval, Timeline

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_STYLES = {
    "F": ("white on blue", "white on dodger_blue3"),
    "B": ("black on green", "black on dark_sea_green4"),
    "I": ("black on green", "black on dark_sea_green4"),
    "W": ("black on yellow", "black on gold3"),
    "R": ("white on magenta", "white on purple"),
}
_IDLE, _BAR, _UPDATE = "·", "|", "┃"
_LONGEST = 20_000  # columns, beyond which the scale is reduced and labels are cut


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


def draw_timeline(timeline: Timeline, width: int = 120) -> Text:
    """Draw the compute lanes of a timeline.

    Args:
        timeline: a simulated or measured timeline.
        width: number of columns to wrap at.
    """
    work = [i for i in timeline.work() if i.end > i.start]
    if not work:
        return Text("(nothing ran)")
    origin, makespan = timeline.start, timeline.makespan
    scale = min(max((len(_label(i)) + 1) / (i.end - i.start) for i in work), _LONGEST / makespan)
    columns = round(makespan * scale) + 1
    rows = [_row(timeline, rank, origin, scale, columns) for rank in range(timeline.ranks)]
    head = len(f"rank {timeline.ranks - 1} ")
    drawing = Text()
    for start in range(0, columns, max(width - head, 20)):
        end = min(start + max(width - head, 20), columns)
        if start:
            drawing.append("\n")
        for rank, row in enumerate(rows):
            drawing.append(f"rank {rank}".ljust(head), style="bold")
            drawing.append_text(row[start:end])
            drawing.append("\n")
        drawing.append(_axis(head, start, end, scale, makespan), style="dim")
        drawing.append("\n")
    return drawing


def _row(timeline: Timeline, rank: int, origin: float, scale: float, columns: int) -> Text:
    characters, styles = [_IDLE] * columns, ["dim"] * columns
    updates = set()
    for interval in timeline.intervals:
        if interval.rank != rank or not interval.is_work:
            continue
        first, last = (round((time - origin) * scale) for time in (interval.start, interval.end))
        if interval.what == "STEP":
            updates.add(first)
        if first == last:
            continue
        text = _cell(interval, last - first)
        style = _STYLES.get(interval.what, ("reverse", "reverse"))[max(interval.version, 0) % 2]
        characters[first:last] = list(text)
        styles[first:last] = [style] * (last - first)
        if characters[last] == _IDLE:
            characters[last], styles[last] = _BAR, ""
    for place in updates:
        characters[place], styles[place] = _UPDATE, "bold red"
    row = Text()
    for run, style in _runs(characters, styles):
        row.append(run, style=style)
    return row


def _runs(characters: list[str], styles: list[str]) -> Iterator[tuple[str, str]]:
    """Yield runs of neighbouring characters with the same style."""
    start = 0
    for i in range(1, len(characters) + 1):
        if i == len(characters) or styles[i] != styles[start]:
            yield "".join(characters[start:i]), styles[start]
            start = i


def _label(interval: Interval) -> str:
    return interval.label + (superscript(interval.version) if interval.version >= 0 else "")


def _cell(interval: Interval, columns: int) -> str:
    """Fit a label into a number of columns, without its bar, or its version, if there is no room for all of it."""
    label = _label(interval)
    fitting = next((text for text in (_BAR + label, label, interval.label) if len(text) <= columns), interval.label)
    return fitting.ljust(columns)[:columns]


def _axis(head: int, start: int, end: int, scale: float, makespan: float) -> str:
    """Return the times below a block, at most one every 12 columns, and none beyond the width."""
    step = _round_step(12 / scale)
    line = "time".ljust(head) + " " * (end - start)
    times = [k * step for k in range(int(makespan / step) + 2)]
    for time in times:
        column = round(time * scale)
        text = f"{time:g}"
        if start <= column and column + len(text) <= end:
            place = head + column - start
            line = line[:place] + text + line[place + len(text) :]
    return line.rstrip()


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 1.0
    while power > least:
        power /= 10
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10
