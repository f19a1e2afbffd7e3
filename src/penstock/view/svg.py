"""Draw timelines as SVG: a row per rank, colour by operation, shade by the version read."""

from __future__ import annotations

from html import escape

from penstock.timeline import Interval, Timeline

_COLOURS = {  # a light and a dark shade, for even and odd versions
    "F": ("#9ec5fe", "#4a90e2"),
    "B": ("#a3d9a5", "#4caf72"),
    "I": ("#a3d9a5", "#4caf72"),
    "W": ("#ffe08a", "#e6b422"),
    "R": ("#d9b3ff", "#a56cd9"),
}
_ROW, _GAP, _LEFT, _TOP = 26, 6, 62, 28
_FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


def timeline_svg(timeline: Timeline, title: str, width: int = 1000) -> str:
    """Return a timeline as a complete SVG document.

    Args:
        timeline: a simulated or measured timeline.
        title: title above the drawing.
        width: width in pixels.
    """
    origin, makespan = timeline.start, timeline.makespan or 1.0
    scale = (width - _LEFT - 12) / makespan
    height = _TOP + timeline.ranks * (_ROW + _GAP) + 24
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        f"<text x='8' y='18' {_FONT} font-size='13' font-weight='600' fill='#222'>{escape(title)}</text>",
    ]
    for rank in range(timeline.ranks):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f"<text x='8' y='{y + 17}' {_FONT} font-size='12' fill='#222'>rank {rank}</text>")
        parts.append(f"<rect x='{_LEFT}' y='{y}' width='{makespan * scale:.1f}' height='{_ROW}' fill='#f1f1f1'/>")
    updates: list[str] = []
    for interval in timeline.intervals:
        if interval.is_work:
            x, span = _LEFT + (interval.start - origin) * scale, (interval.end - interval.start) * scale
            (updates if interval.what == "STEP" else parts).append(_box(interval, x, span))
    parts += [*updates, _axis(makespan, scale, height), "</svg>"]
    return "\n".join(parts) + "\n"


def _box(interval: Interval, x: float, span: float) -> str:
    y = _TOP + interval.rank * (_ROW + _GAP)
    if interval.what == "STEP":
        return f"<rect x='{x - 1.2:.1f}' y='{y - 3}' width='{max(span, 2.4):.1f}' height='{_ROW + 6}' fill='#c0392b'/>"
    fill = _COLOURS.get(interval.what, ("#cccccc", "#999999"))[max(interval.version, 0) % 2]
    box = (
        f"<rect x='{x:.1f}' y='{y}' width='{span:.1f}' height='{_ROW}' fill='{fill}' stroke='#ffffff' "
        f"stroke-width='0.8'><title>{escape(_describe(interval))}</title></rect>"
    )
    if span < 7 * len(interval.label):
        return box
    version = ""
    if interval.version >= 0 and span > 7 * (len(interval.label) + 2):
        version = f"<tspan font-size='8' dy='-4'>{interval.version}</tspan>"
    return box + (
        f"<text x='{x + span / 2:.1f}' y='{y + 17}' {_FONT} font-size='11' text-anchor='middle' fill='#111'>"
        f"{escape(interval.label)}{version}</text>"
    )


def _describe(interval: Interval) -> str:
    version = f", version {interval.version}" if interval.version >= 0 else ""
    return f"{interval.label}, stage {interval.stage}{version}, {interval.start:g} to {interval.end:g}"


def _axis(makespan: float, scale: float, height: int) -> str:
    step = makespan / 10
    magnitude = 10 ** len(str(int(step))) / 10 if step >= 1 else step
    step = max(round(step / magnitude) * magnitude, magnitude)
    ticks = [k * step for k in range(int(makespan / step) + 1)]
    return "".join(
        f"<text x='{_LEFT + t * scale:.1f}' y='{height - 8}' {_FONT} font-size='10' text-anchor='middle' fill='#666'>"
        f"{t:g}</text>"
        for t in ticks
    )
