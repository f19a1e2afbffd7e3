"""Draw curves as SVG for pages: lines with bands, a legend, a few ticks; without scripts or external files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.view.svg import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#666666")
"""The colour-blind safe palette of Okabe and Ito, and two more."""
_DASHES = ("", "7 3", "2 3", "10 3 2 3", "14 4", "4 2 1 2", "1 4", "10 2 2 2 2 2")
"""One solid line; dashed ones let equal ones below show through."""
_MARKS = (  # around the origin: circle, square, triangles, diamond
    "M-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0",
    "M-2.4 -2.4h4.8v4.8h-4.8z",
    "M-3 2.4h6l-3 -5.4z",
    "M-3.2 0l3.2 -3.2 3.2 3.2 -3.2 3.2z",
    "M-3 -2.4h6l-3 5.4z",
)
_MARKED = 30  # points of a curve whose points are marked; more are only small dots
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 44
_LETTER = 6.4  # pixels of a letter, at most
_FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    Attributes:
        label: name in the legend; not listed if empty.
        points: x, y, and the ends of the band around it, all finite.
        style: number of its colour and dashes; curves that belong together have the same.
        ends: True if the run ended early, which a cross marks.
    """

    label: str
    points: Sequence[tuple[float, float, float, float]]
    style: int
    ends: bool = False

    @property
    def colour(self) -> str:
        """The colour of the line and its band."""
        return COLOURS[self.style % len(COLOURS)]


def plot_svg(
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    log_x: bool = False,
    width: int = 372,
    height: int = 190,
) -> str:
    """Return a plot as an SVG element.

    Args:
        curves: the curves; those without points are left out.
        title, x_label, y_label: labels.
        log, log_x: use a logarithmic y or x axis, for which all values must be positive.
        width: in pixels.
        height: of the space between the axes; title, legend and labels add to it.
    """
    drawn = [curve for curve in curves if curve.points]
    frame = _Frame(drawn, log, log_x, width, height)
    parts = [
        f"<svg viewBox='0 0 {width} {frame.height}' width='{width}' height='{frame.height}' role='img' "
        f"aria-label='{escape(title, quote=True)}'>",
        f"<text x='8' y='18' {_FONT} font-size='13' font-weight='600' fill='#222'>{escape(title)}</text>",
    ]
    if not drawn:
        return "".join([*parts, f"<text x='8' y='60' {_FONT} font-size='12' fill='#666'>nothing to show</text></svg>"])
    parts += [*frame.axes(x_label, y_label), *map(frame.band, drawn), *map(frame.line, drawn), *frame.legend()]
    return "\n".join([*parts, "</svg>"])


def plot_document(curves: Sequence[Curve], title: str, x_label: str, y_label: str) -> str:
    """Return a plot with logarithmic axes as a complete SVG document, for files of their own."""
    drawn = plot_svg(curves, title, x_label, y_label, log=True, log_x=True, width=640, height=320)
    return drawn.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' ", 1)


class _Frame:
    """The axes of a plot, and the mapping from values to pixels.

    Attributes:
        height: of the whole plot, in pixels.
    """

    def __init__(self, curves: Sequence[Curve], log: bool, log_x: bool, width: int, height: int) -> None:
        self._log, self._log_x, self._width = log, log_x, width
        self._names = _names(curves, width)
        self._top = max((y for *_, y in self._names), default=_TOP - 10) + 12
        self.height = self._top + height + _BOTTOM
        values = [point[0] for curve in curves for point in curve.points]
        self._whole = all(value == round(value) for value in values)  # such as numbers of updates or stages
        xs = [_scaled(value, log_x) for value in values] or [0.0]
        ys = [_scaled(y, log) for curve in curves for point in curve.points for y in point[1:]] or [0.0]
        self._x0, self._x1 = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 0.5, max(xs) + 0.5)
        low, high = min(ys), max(ys)
        margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
        self._y0, self._y1 = low - margin, high + margin

    def _x(self, x: float) -> float:
        return _LEFT + (_scaled(x, self._log_x) - self._x0) / (self._x1 - self._x0) * (self._width - _LEFT - _RIGHT)

    def _y(self, y: float) -> float:
        share = (_scaled(y, self._log) - self._y0) / (self._y1 - self._y0)
        return self.height - _BOTTOM - share * (self.height - self._top - _BOTTOM)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Draw ticks with grid lines, and the labels of the axes."""
        left, right, bottom = _LEFT, self._width - _RIGHT, self.height - _BOTTOM
        parts, edge = [], -math.inf
        for tick in _ticks(self._x0, self._x1, self._log_x, whole=self._whole):
            half = _LETTER / 2 * len(_short(tick))
            x = min(self._x(tick), self._width - half)
            if x - half > edge:
                parts.append(_text(x, bottom + 16, _short(tick), "middle"))
                edge = x + half + _LETTER
        for tick in _ticks(self._y0, self._y1, self._log):
            y = self._y(tick)
            parts.append(f"<path d='M{left} {y:.1f}H{right}' stroke='#e4e4e4'/>")
            parts.append(_text(left - 6, y + 4, _short(tick), "end"))
        parts.append(f"<path d='M{left} {self._top}V{bottom}H{right}' stroke='#888' fill='none'/>")
        parts.append(_text((left + right) / 2, self.height - 10, x_label, "middle"))
        middle = (self._top + bottom) / 2
        turned = f" transform='rotate(-90 14 {middle:.1f})'"
        return [*parts, _text(14, middle, y_label, "middle", turned)]

    def band(self, curve: Curve) -> str:
        """Draw the band of a curve."""
        if all(low == high for _, _, low, high in curve.points):
            return ""
        there = [f"{self._x(x):.1f},{self._y(high):.1f}" for x, _, _, high in curve.points]
        back = [f"{self._x(x):.1f},{self._y(low):.1f}" for x, _, low, _ in reversed(curve.points)]
        return f"<polygon points='{' '.join(there + back)}' fill='{curve.colour}' fill-opacity='0.15'/>"

    def line(self, curve: Curve) -> str:
        """Draw the line of a curve."""
        points = [(self._x(x), self._y(y)) for x, y, _, _ in curve.points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts = [f"<polyline points='{drawn}' fill='none' stroke='{curve.colour}' stroke-width='1.8'{_dashed(curve)}/>"]
        mark = f"d='{_mark(curve)}'" if len(points) <= _MARKED else "d='M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0'"
        parts += [
            f"<path {mark} transform='translate({px:.1f} {py:.1f})' fill='{curve.colour}'><title>"
            f"{escape(curve.label)}: {y:.5g} at {_short(x)}</title></path>"
            for (px, py), (x, y, _, _) in zip(points, curve.points, strict=True)
        ]
        if curve.ends:
            x, y = points[-1]
            parts.append(
                f"<path d='M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8' stroke='{curve.colour}' stroke-width='2.2'/>"
            )
        return "".join(parts)

    def legend(self) -> list[str]:
        """Draw the names of the curves between title and plot."""
        parts = []
        for curve, x, y in self._names:
            parts.append(f"<path d='M{x:.1f} {y}h24' stroke='{curve.colour}' stroke-width='2'{_dashed(curve)}/>")
            place = f"transform='translate({x + 12:.1f} {y})'"
            parts.append(f"<path d='{_mark(curve)}' {place} fill='{curve.colour}'/>")
            parts.append(_text(x + 29, y + 4, curve.label, "start"))
        return parts


def _mark(curve: Curve) -> str:
    return _MARKS[curve.style % len(_MARKS)]


def _dashed(curve: Curve) -> str:
    dashes = _DASHES[(curve.style + curve.style // len(COLOURS)) % len(_DASHES)]
    return f" stroke-dasharray='{dashes}'" if dashes else ""


def _names(curves: Sequence[Curve], width: int) -> list[tuple[Curve, float, int]]:
    """Return the positions of the names of curves, in as many rows as they need."""
    places, x, y = [], float(_LEFT), _TOP
    for curve in curves:
        if curve.label:
            size = 44 + _LETTER * len(curve.label)
            if x > _LEFT and x + size > width:
                x, y = float(_LEFT), y + 16
            places.append((curve, x, y))
            x += size
    return places


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='11' text-anchor='{anchor}' fill='#444'{more}>"
        f"{escape(text)}</text>"
    )


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _ticks(low: float, high: float, log: bool = False, *, whole: bool = False) -> list[float]:
    """Return about five round numbers between two others, which are logarithms if `log`; only `whole` ones if asked."""
    if log and high - low > 0.7:
        steps = (1, 2, 5) if high - low < 3 else (1,)
        powers = range(math.floor(low), math.ceil(high) + 1)
        return [s * 10.0**p for p in powers for s in steps if low - 1e-9 <= math.log10(s * 10.0**p) <= high + 1e-9]
    if log:
        low, high = 10**low, 10**high
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 6)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """Format a number briefly, as in `600k`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"
