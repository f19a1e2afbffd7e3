"""A table that is made as wide as a terminal has room for: columns are left out as a whole, and no number is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.view.tables import UNBOUNDED

_WORDS = ("kind", "method", "planner", "limited by", "layers", "recompute", "pass", "work", "ways")  # aligned left
_WRAPPED, _LONGEST_WORD = "layers", 30


@dataclass(frozen=True)
class FittedTable:
    """Columns of text with a title.

    Attributes:
        title: above the table.
        cells: by heading, from the top.
        least_needed: headings of columns that may be left out, those that go first in front.
    """

    title: str
    cells: Mapping[str, Sequence[str]]
    least_needed: Sequence[str] = ()

    def fitted(self, width: int) -> Iterator[RenderableType]:
        """Yield the table with the columns that fit, and what was left out.

        Args:
            width: of the terminal in characters.
        """
        shown, left_out = list(self.cells), list[str]()
        for heading in self.least_needed:
            if _least_width(self._table(shown)) <= width:
                break
            if heading in shown:
                shown.remove(heading)
                left_out.append(heading)
        yield Text(self.title, "italic")
        yield self._table(shown)
        if left_out:
            yield Text(f"Left out at this width: {', '.join(left_out)} (--json has all).")

    def _least(self, heading: str) -> int:
        """Return the least width of a column: of the one that may be wrapped its longest word, up to a limit."""
        cells = [heading, *self.cells[heading]]
        if heading != _WRAPPED:
            return max(map(len, cells))
        return min(max(len(word) for cell in cells for word in cell.split()), _LONGEST_WORD)

    def _table(self, headings: Sequence[str]) -> Table:
        """Return the table with some columns; all but those of words are aligned right."""
        table = Table(box=None)
        for heading in headings:
            table.add_column(
                heading,
                justify="left" if heading in _WORDS else "right",
                no_wrap=heading != _WRAPPED,
                min_width=self._least(heading),
            )
        for row in zip(*(self.cells[heading] for heading in headings), strict=True):
            table.add_row(*map(Text, row))
        return table


def _least_width(table: Table) -> int:
    """Return the width that a table needs if the column that may be wrapped is."""
    return Console(width=UNBOUNDED).measure(table).minimum
