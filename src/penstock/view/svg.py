"""Draw timelines as SVG, as papers do: a row per rank, a box per action with the number of its microbatch.

Colour tells operations apart, shade the chunks of a rank or the two directions, hatching the versions of the weights
that are read. Passes that run together share a box. Where weights are gathered, each rank has a lane below its row
for what its network does, a box per gather or sum with the number of its stage. Long timelines are wrapped into
bands, wide enough that numbers can be read, and very long ones shortened in the middle.
"""

from __future__ import annotations

import html
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.timeline import Interval, Timeline
from penstock.view.plurals import counted
from penstock.view.timeline_labels import (
    COPIES,
    NETWORK,
    OPERATIONS,
    SENT,
    Places,
    lanes_beside,
    operations,
    parts_of,
    round_step,
    unit_of,
    versions_read,
)

ROW, GAP, LEFT, RIGHT, TOP, AXIS = 26, 5, 56, 12, 52, 22
NET, NET_GAP = 14, 1
"""Heights of the network's lane of a rank, and of the space above it."""
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
SMALLEST, LARGEST = 10.0, 12.0
"""Sizes of numbers in boxes, in pixels."""
DIGIT = 0.64
"""The width of a digit, in font sizes: that of wide fonts."""
_PADDING = 3.0  # pixels beside a number, both sides together
_WIDEST = 30.0  # pixels that suffice for the shortest passes
_NARROWEST = 560  # width of a drawing, for its title and legend
_SNAP = 0.04  # part of a band by which its ends may move so as to cut few boxes
_ROWS = 48  # the most rows of a drawing, over all bands; at least two bands are drawn
_FITTING = 0.95  # share of the passes whose numbers must fit
_SAMPLE, _HEIGHT, _LINE = 18, 14, 22
_SIZE, _LETTER = 11.5, 0.54  # font size, and the width of a letter in font sizes
Colour = tuple[int, int, int]
_RANGES: dict[str, tuple[Colour, Colour, Colour]] = {  # darkest and lightest shade, and the one that stands alone
    "F": ((20, 70, 140), (146, 190, 240), (47, 103, 172)),
    "B": ((64, 168, 118), (188, 228, 202), (122, 200, 160)),
    "I": ((206, 104, 40), (250, 196, 156), (236, 150, 100)),
    "W": ((228, 200, 50), (253, 243, 176), (245, 226, 110)),
    "R": ((120, 62, 140), (214, 178, 226), (140, 84, 160)),
    "GATHER": ((178, 70, 118), (244, 190, 212), (228, 148, 182)),
    "REDUCE": ((112, 78, 48), (220, 196, 170), (122, 88, 58)),
}
_OTHER: tuple[Colour, Colour, Colour] = ((110, 110, 110), (210, 210, 210), (160, 160, 160))
_INK: Colour = (26, 26, 26)
UPDATE, IDLE, INK, PALE = "#b3261e", "#f0f0f0", "#1a1a1a", "#555555"
OUTLINE = f"stroke='{INK}' stroke-opacity='0.45' stroke-width='0.7'"
PATTERNS = 4
"""The number of patterns; versions that are this far apart share one."""


class Band(NamedTuple):
    """A part of the time, drawn as a row per rank.

    Attributes:
        start, end: times.
        y: of its first row, in pixels.
    """

    start: float
    end: float
    y: float


def timeline_svg(timeline: Timeline, title: str, width: int = 1000) -> str:
    """Return a timeline as a complete SVG document.

    Args:
        timeline: a simulated or measured timeline.
        title: title above the drawing.
        width: width in pixels, at most; long timelines are wrapped.
    """
    return _SvgDrawing(timeline, width).document(title)


def number_width(text: str, size: float) -> float:
    """Return the width of a number in pixels; what follows a colon is a subscript of two thirds of its size."""
    number, _, piece = text.partition(":")
    return DIGIT * size * (len(number) + 2 / 3 * len(piece))


def number_of(part: Interval) -> str:
    """Return what stands in a box: its microbatches, and after a colon its slice; on the network its stage."""
    if part.what in NETWORK:
        return str(part.stage)
    return unit_of(part).removeprefix("e").replace("..", "-")


class _SvgDrawing:
    """The layout of a drawing."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self._timeline, self._places, self._beside = timeline, Places(timeline), lanes_beside(timeline)
        beside = [i for lane in self._beside for i in lane.intervals]
        self._start = min([timeline.start, *(i.start for i in beside)])
        self._end = max([timeline.start + timeline.makespan, *(i.end for i in beside)])
        self._pitch = ROW + GAP + len(self._beside) * (NET_GAP + NET)  # from a rank's row to that of the next one
        self._work = sorted((i for i in timeline.work() if i.end > i.start or i.what == "STEP"), key=lambda i: i.start)
        self._passes = [i for i in self._work if i.what != "STEP"]
        room, shortest, needed = width - LEFT - RIGHT, *self._demands()
        borders = self._borders(room / needed)
        longest = max(end - start for start, end in pairwise(borders))
        self._scale = room / longest if len(borders) > 2 else min(room / longest, max(_WIDEST / shortest, needed))
        self._size = min(LARGEST, SMALLEST * self._scale / needed)
        self._left_out, self._bands = self._banded(borders)
        self._seen = [i for i in self._passes if self._visible(i.start, i.end)]
        self._sent = [i for i in beside if self._visible(i.start, i.end)]
        self._lane_of = {id(i): place for place, lane in enumerate(self._beside) for i in lane.intervals}
        self._updates = [i for i in self._work if i.what == "STEP" and self._band_of(i)]
        self._patterns = {version: place % PATTERNS for place, version in enumerate(versions_read(self._seen))}
        self._width = max(LEFT + longest * self._scale + RIGHT, min(width, _NARROWEST))

    def _demands(self) -> tuple[float, float]:
        """Return the length of the shortest passes, and pixels per unit of time with which numbers fit."""
        if not self._passes:
            return 1.0, 1.0
        lengths = sorted(i.end - i.start for i in self._passes)
        needed = sorted(
            (max(number_width(number_of(p), SMALLEST) for p in parts_of(i)) + _PADDING) / (i.end - i.start)
            for i in self._passes
        )
        return lengths[int((1 - _FITTING) * (len(lengths) - 1))], needed[int(_FITTING * (len(needed) - 1) + 0.999)]

    def _borders(self, longest: float) -> list[float]:
        """Return the times at which bands of at most this length begin and end: where few boxes are cut."""
        start, makespan = self._start, self._end - self._start or 1.0
        if makespan <= longest:
            return [start, start + makespan]
        count = int(-(-makespan * (1 + 2 * _SNAP) // longest))
        length, starts, ends = makespan / count, [i.start for i in self._passes], sorted(i.end for i in self._passes)
        borders = [start]
        for place in range(1, count):
            even = start + place * length
            near = starts[bisect_left(starts, even - _SNAP * length) : bisect_right(starts, even + _SNAP * length)]
            cuts = {time: bisect_left(starts, time) - bisect_right(ends, time) for time in near}
            borders.append(min(cuts, key=lambda time: (cuts[time], abs(time - even)), default=even))
        return [*borders, start + makespan]

    def _banded(self, borders: Sequence[float]) -> tuple[tuple[float, float] | None, list[Band]]:
        """Return the times between which bands are left out, or None, and the bands that are drawn."""
        spans, height = list(pairwise(borders)), self._timeline.ranks * self._pitch
        fitting, gap = max(2, _ROWS * (ROW + GAP) // height), None
        if len(spans) > fitting:
            before, after = spans[: (fitting + 1) // 2], spans[-(fitting // 2) :]
            gap, spans = (before[-1][1], after[0][0]), before + after
        bands, y = [], float(TOP)
        for start, end in spans:
            y += AXIS if gap and start == gap[1] else 0
            bands.append(Band(start, end, y))
            y += height + AXIS
        self._bottom = y
        return gap, bands

    # --- drawing ----------------------------------------------------------------------------------------------------

    def document(self, title: str) -> str:
        """Return the whole document."""
        entries = legend_entries([*self._seen, *self._sent, *self._updates], self._places, self._patterns)
        legend, height = place_entries(entries, LEFT, self._bottom + 6, self._width - RIGHT)
        size = f"{self._width:.0f}' height='{height:.0f}"
        bubble = f"bubble {self._timeline.bubble().bubble:.3f} (idle time / total)"
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self._width:.0f} {height:.0f}' width='{size}'>",
            f"<rect width='100%' height='100%' fill='#ffffff'/><g font-family=\"{FONT}\" fill='{INK}'>",
            f"<text x='8' y='20' font-size='14' font-weight='600'>{escape(title)}</text>",
            f"<text x='8' y='38' font-size='11.5' fill='{PALE}'>{bubble}</text>",
            *(self._background(band) for band in self._bands),
            f"<g font-size='{self._size:.1f}' text-anchor='middle' {OUTLINE}>",
            *map(self._action, self._seen),
            *map(self._transfer, self._sent),
            "</g>",
            *map(self._update, self._updates),
            self._gap(),
            *legend,
            "</g></svg>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def _background(self, band: Band) -> str:
        """Draw the names and the idle time of the ranks, and the axis."""
        parts = []
        width = (band.end - band.start) * self._scale
        for rank in range(self._timeline.ranks):
            y = band.y + rank * self._pitch
            parts.append(f"<text x='8' y='{y + 17:g}' font-size='11.5'>rank {rank}</text>")
            parts.append(f"<rect x='{LEFT}' y='{y:g}' width='{width:.1f}' height='{ROW}' fill='{IDLE}'/>")
            y += ROW - NET
            for lane in self._beside:
                y += NET + NET_GAP
                parts.append(f"<text x='8' y='{y + 11:g}' font-size='10' fill='{PALE}'>{lane.name}</text>")
                parts.append(f"<rect x='{LEFT}' y='{y:g}' width='{width:.1f}' height='{NET}' fill='{IDLE}'/>")
        y, step = band.y + self._timeline.ranks * self._pitch + 9, round_step(64 / self._scale)
        first = -(-(band.start - self._start) // step)
        time = first * step
        while time <= band.end - self._start + 1e-9 * step:
            x = LEFT + (time + self._start - band.start) * self._scale
            parts.append(
                f"<text x='{x:.1f}' y='{y:g}' font-size='10' text-anchor='middle' fill='{PALE}'>{time:g}</text>"
            )
            first += 1
            time = first * step
        return "".join(parts)

    def _visible(self, start: float, end: float) -> list[tuple[Band, float, float]]:
        """Return the pieces of a time that are drawn: the band, x and width of each."""
        found = []
        for band in self._bands:
            first, last = max(start, band.start), min(end, band.end)
            if last > first:
                found.append((band, LEFT + (first - band.start) * self._scale, (last - first) * self._scale))
        return found

    def _band_of(self, interval: Interval) -> Band | None:
        """Return the band in which an interval begins, or None."""
        return next((band for band in reversed(self._bands) if band.start <= interval.start <= band.end), None)

    def _action(self, interval: Interval) -> str:
        """Draw a pass, or several that run together, in one group; a band's end may cut it in two."""
        pieces = self._visible(interval.start, interval.end)
        parts = parts_of(interval)
        widest = max(width for _, _, width in pieces)
        drawn = [f"<title>{escape(_describe(interval))}</title>"]
        numbered = False
        for band, x, width in pieces:
            y, height = band.y + interval.rank * self._pitch, ROW / len(parts)
            for place, part in enumerate(parts):
                drawn.append(self._box(part, x, y + place * height, width, height))
                if width == widest and not numbered:
                    drawn.append(self._number(part, x + width / 2, y + (place + 0.5) * height, width, height))
            numbered |= width == widest
            if len(parts) > 1:
                drawn.append(
                    f"<rect x='{x:.1f}' y='{y:g}' width='{width:.1f}' height='{ROW}' fill='none' "
                    f"stroke='{INK}' stroke-opacity='1' stroke-width='1'/>"
                )
        return f"<g class='{escape(interval.what)}'>{''.join(drawn)}</g>"

    def _transfer(self, interval: Interval) -> str:
        """Draw a gather, a sum or a copy in its lane below its rank."""
        drawn = [f"<title>{escape(_describe(interval))}</title>"]
        pieces = self._visible(interval.start, interval.end)
        widest = max(pieces, key=lambda piece: piece[2])
        for piece in pieces:
            band, x, width = piece
            y = band.y + interval.rank * self._pitch + ROW + NET_GAP
            y += self._lane_of[id(interval)] * (NET + NET_GAP)
            drawn.append(self._box(interval, x, y, width, NET))
            if piece == widest:
                drawn.append(self._number(interval, x + width / 2, y + NET / 2, width, NET))
        return f"<g class='{escape(interval.what)}'>{''.join(drawn)}</g>"

    def _box(self, part: Interval, x: float, y: float, width: float, height: float) -> str:
        fill = fill_of(part.what, self._places.shade(part), self._places.shades)
        drawn = box(part.what, fill, x, y, width, height)
        lines = hatch(self._patterns.get(part.version, 0), x, y, width, height)
        if not lines:
            return drawn
        colour, opacity = ("#ffffff", 0.55) if luminance(fill) < 0.3 else (INK, 0.4)
        return drawn + f"<path d='{lines}' stroke='{colour}' stroke-opacity='{opacity}' stroke-width='1.1'/>"

    def _number(self, part: Interval, x: float, y: float, width: float, height: float) -> str:
        text = number_of(part)
        size = min(self._size, height - 1.5)
        if not text or number_width(text, size) > width:
            return ""
        fill = fill_of(part.what, self._places.shade(part), self._places.shades)
        halo = "stroke='none'"
        if self._patterns.get(part.version):
            halo = (
                f"stroke='{css(fill)}' stroke-width='3' stroke-opacity='1' stroke-linejoin='round' paint-order='stroke'"
            )
        smaller = "" if size == self._size else f" font-size='{size:.1f}'"
        number, _, piece = text.partition(":")
        sub = f"<tspan font-size='{size * 2 / 3:.1f}' dy='2.5'>{piece}</tspan>" if piece else ""
        return (
            f"<text x='{x:.1f}' y='{y + 0.36 * size:.1f}' fill='{text_on(fill)}'{smaller} {halo}>"
            f"{escape(number)}{sub}</text>"
        )

    def _update(self, step: Interval) -> str:
        """Draw an update: a bar between two boxes with a mark above it."""
        band = self._band_of(step)
        assert band is not None
        x, y = LEFT + (step.start - band.start) * self._scale, band.y + step.rank * self._pitch
        width = max((min(step.end, band.end) - step.start) * self._scale, 2.4)
        return (
            f"<g class='STEP' fill='{UPDATE}' stroke='#ffffff' stroke-width='0.6'>"
            f"<title>{escape(_describe(step))}</title>"
            f"<rect x='{x - 1.2:.1f}' y='{y - 1:g}' width='{width:.1f}' height='{ROW + 3}'/>"
            f"<path d='M{x - 5:.1f} {y - 4:g}h10l-5 6z'/></g>"
        )

    def _gap(self) -> str:
        """Say what is left out in the middle."""
        if self._left_out is None:
            return ""
        start, end = self._left_out
        passes, updates = len(self._passes) - len(self._seen), len(self._work) - len(self._passes) - len(self._updates)
        said = counted(passes, "pass") + (f" and {counted(updates, 'update')}" if updates else "")
        y = next(band.y for band in self._bands if band.start == end) - 10
        first, last = (time - self._start for time in (start, end))
        return (
            f"<text x='{LEFT}' y='{y:g}' font-size='12' font-weight='600'>⋯ left out, time {first:.4g} to {last:.4g}: "
            f"{said} ⋯</text>"
        )


def _describe(interval: Interval) -> str:
    """Return what the box of an action shows when it is pointed at."""
    parts = [
        f"{part.label}, stage {part.stage}"
        + (f", {'creates' if part.what == 'STEP' else 'reads'} version {part.version}" if part.version >= 0 else "")
        for part in parts_of(interval)
    ]
    return f"{' with '.join(parts)}, {interval.start:g} to {interval.end:g}"


class Entry(NamedTuple):
    """One line of a legend.

    Attributes:
        width: of the sample, in pixels.
        sample: SVG of the sample, with its upper left corner at (0, 0).
        text: what it stands for.
    """

    width: int
    sample: str
    text: str


def legend_entries(work: Sequence[Interval], places: Places, patterns: Mapping[int, int]) -> list[Entry]:
    """Return the entries for all marks of a drawing.

    Args:
        work: what is drawn, transfers of the network and copies to the host among it.
        places: tells the stages of a rank apart.
        patterns: the pattern of each version that is read.
    """
    passes = [part for i in work if i.what != "STEP" and i.what not in SENT for part in parts_of(i)]
    sent = [i for i in work if i.what in SENT]
    entries = []
    for op in [*operations(work), *(op for op in (*SENT, *COPIES) if any(i.what == op for i in work))]:
        used = sorted({places.shade(part) for part in (sent if op in SENT else passes) if part.what == op})
        boxes = [box(op, fill_of(op, s, places.shades), n * _SAMPLE, 0, _SAMPLE, _HEIGHT) for n, s in enumerate(used)]
        words = SENT.get(op) or OPERATIONS.get(op, op.lower())
        entries.append(Entry(_SAMPLE * len(used), "".join(boxes), words))
    names = places.shade_names()
    if names:
        entries.append(Entry(0, "", f"shades, dark to light: {'; '.join(names)}"))
    fused = next((i for i in work if i.parts), None)
    if fused is not None:
        height = _HEIGHT / len(fused.parts)
        halves = [
            box(p.what, fill_of(p.what, places.shade(p), places.shades), 0, place * height, _SAMPLE, height)
            for place, p in enumerate(fused.parts)
        ]
        outline = f"<rect width='{_SAMPLE}' height='{_HEIGHT}' fill='none' stroke='{INK}'/>"
        entries.append(Entry(_SAMPLE, "".join(halves) + outline, "run together"))
    entries += _versions(patterns)
    if any(i.what == "STEP" for i in work):
        bar = f"<g fill='{UPDATE}'><rect x='4' y='0' width='2.4' height='{_HEIGHT}'/><path d='M0 -2h10l-5 6z'/></g>"
        entries.append(Entry(11, bar, "update"))
    entries.append(Entry(_SAMPLE, _swatch(IDLE), "idle"))
    units = {unit_of(part).strip("0123456789") for part in passes}
    what = ["number: microbatch"]
    what += ["subscript: slice of its sequence"] if ":" in units else []
    what += ["a-b: microbatches a to b together"] if ".." in units else []
    what += ["in an evaluation"] if "e" in units else []
    what += ["on the network: stage"] if sent else []
    return [*entries, Entry(0, "", ", ".join(what))]


def _versions(patterns: Mapping[int, int]) -> list[Entry]:
    """Return the entries for the versions of the weights."""
    if len(patterns) < 2:
        return [Entry(0, "", f"all read version {version} of the weights") for version in patterns]
    entries = []
    for pattern in range(PATTERNS):
        versions = [str(version) for version, own in patterns.items() if own == pattern]
        if versions:
            lines = hatch(pattern, 0, 0, _SAMPLE, _HEIGHT)
            path = f"<path d='{lines}' stroke='{INK}' stroke-opacity='0.6' stroke-width='1.1'/>" if lines else ""
            shown = versions if len(versions) < 5 else [*versions[:3], "..", versions[-1]]
            text = f"reads version{'s' * (len(versions) > 1)} {', '.join(shown)} of the weights"
            entries.append(Entry(_SAMPLE, _swatch("#ffffff") + path, text))
    return entries


def _swatch(fill: str) -> str:
    return f"<rect width='{_SAMPLE}' height='{_HEIGHT}' fill='{fill}'/>"


def place_entries(entries: Sequence[Entry], left: float, top: float, right: float) -> tuple[list[str], float]:
    """Place entries in lines.

    Args:
        entries: the entries.
        left, top, right: borders of the legend, in pixels.

    Returns:
        SVG of every entry, and the y below the last line.
    """
    parts, x, y = [], left, top
    for width, sample, text in entries:
        size = (width + 6 if width else 0) + _LETTER * _SIZE * len(text)
        if x > left and x + size > right:
            x, y = left, y + _LINE
        shift = width + 6 if width else 0
        parts.append(
            f"<g class='legend' transform='translate({x:.1f} {y:g})'><g {OUTLINE}>{sample}</g>"
            f"<text x='{shift}' y='11' font-size='{_SIZE}'>{escape(text)}</text></g>"
        )
        x += size + 20
    return parts, y + _LINE + 4


# Colours, boxes and patterns of SVG timelines.
#
# A colour for each operation, and a shade of it for each chunk or direction. Colours differ in lightness; where shades
# overlap in grey, or for people who do not see all colours, a line along an edge tells the halves of a backward from
# other passes, and dashes tell recomputes. A pattern of lines for each version of the weights.


def fill_of(op: str, shade: int, shades: int) -> Colour:
    """Return the colour of an operation in a shade, of so many."""
    dark, light, alone = _RANGES.get(op, _OTHER)
    if shades < 2:
        return alone
    place = shade / (shades - 1)
    red, green, blue = (round(d + place * (b - d)) for d, b in zip(dark, light, strict=True))
    return red, green, blue


def text_on(fill: Colour) -> str:
    """Return the dark or the white ink, whichever contrasts more with a colour."""
    light, dark = luminance(fill) + 0.05, luminance(_INK) + 0.05
    return INK if light / dark > 1.05 / light else "#ffffff"


def luminance(colour: Colour) -> float:
    """Return the relative luminance of a colour, from 0 for black to 1 for white."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def css(colour: Colour) -> str:
    """Format a colour for SVG."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def box(op: str, fill: Colour, x: float, y: float, width: float, height: float) -> str:
    """Return the box of an operation: dashed if a recompute, with a line above (I) or below (W) if half a backward."""
    dashes = " stroke-dasharray='3 2' stroke-opacity='1'" if op == "R" else ""
    drawn = f"<rect x='{x:.1f}' y='{y:g}' width='{width:.1f}' height='{height:g}' fill='{css(fill)}'{dashes}/>"
    if op not in ("I", "W"):
        return drawn
    line = f"x='{x:.1f}' y='{y if op == 'I' else y + height - 2.5:g}' width='{width:.1f}' height='2.5'"
    return drawn + f"<rect {line} fill='{INK}' fill-opacity='0.75' stroke='none'/>"


def hatch(pattern: int, x: float, y: float, width: float, height: float) -> str:
    """Return the path of the lines of a pattern within a box; empty for pattern 0.

    Lines of neighbouring boxes meet, as they go by the coordinates of the drawing.
    """
    step = 7.0
    lines = []
    if pattern % 2:  # rising: x + y = c
        c = -(-(x + y) // step) * step
        while c < x + width + y + height:
            x0, x1 = max(x, c - y - height), min(x + width, c - y)
            lines.append(f"M{x0:.1f} {c - x0:.1f}L{x1:.1f} {c - x1:.1f}")
            c += step
    if pattern >= 2:  # falling: x - y = c
        c = -(-(x - y - height) // step) * step
        while c < x + width - y:
            x0, x1 = max(x, c + y), min(x + width, c + y + height)
            lines.append(f"M{x0:.1f} {x0 - c:.1f}L{x1:.1f} {x1 - c:.1f}")
            c += step
    return "".join(lines)


def escape(text: str, quote: bool = True) -> str:
    """Return text as it stands in SVG and HTML; XML has no place for control characters, which become visible."""
    return html.escape("".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text), quote)
