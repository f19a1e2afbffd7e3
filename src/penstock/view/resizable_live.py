"""A live display that leaves nothing behind when its terminal becomes narrower."""

from __future__ import annotations

from math import ceil
from typing import Any

from rich.console import ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment


class ResizableLive(Live):
    """A live display that knows how many rows a terminal which has become narrower wraps it to.

    `rich.live.Live` goes back as many rows as it has written lines. Where lines have been wrapped since, that is too
    few, and the first of them would stay on the screen with every change of the width.
    """

    def __init__(self, *places: Any, **options: Any) -> None:
        self._widths: list[int] = []  # of the lines that it has written last
        super().__init__(*places, **options)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Clear the rows that wrapped lines take besides, before `Live` clears one row per line and draws again."""
        drawn = super().process_renderables(renderables)
        if not self.console.is_interactive:
            return drawn
        width, height = self.console.size
        more = sum(ceil(line / width) - 1 for line in self._widths if line)
        lines = self.console.render_lines(self.get_renderable(), pad=False)
        self._widths = [Segment.get_line_length(line) for line in lines[:height]]
        up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
        return [Control(ControlType.CARRIAGE_RETURN, *up * more), *drawn] if more else drawn
