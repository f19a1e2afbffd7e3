"""The legend of an SVG timeline: a sample and a few words for every mark that the drawing has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.timeline import Interval
from penstock.view.drawing.svg_marks import IDLE, INK, OUTLINE, PATTERNS, UPDATE, box, escape, fill_of, hatch
from penstock.view.drawing.timeline_labels import COPIES, OPERATIONS, SENT, Places, operations, parts_of, unit_of

_SAMPLE, _HEIGHT, _LINE = 18, 14, 22
_SIZE, _LETTER = 11.5, 0.54  # font size, and the width of a letter in font sizes


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
