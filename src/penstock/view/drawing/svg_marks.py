"""Colours, boxes and patterns of SVG timelines.

A colour for each operation, and a shade of it for each chunk or direction. Colours differ in lightness; where shades
overlap in grey, or for people who do not see all colours, a line along an edge tells the halves of a backward from
other passes, and dashes tell recomputes. A pattern of lines for each version of the weights.
"""

from __future__ import annotations

import html

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
