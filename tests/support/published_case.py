"""A published figure beside what Penstock computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A published figure.

    Attributes:
        what: it says.
        source: where it stands; "derived" if it follows from formulas of the paper.
        expected: the figure.
        obtained: computes ours; None if the figure cannot be tried.
        tolerance: relative.
        why: it does not reproduce, or what was fitted.
        open: it is known not to reproduce.
        long: computing it takes about a second.
    """

    what: str
    source: str
    expected: float
    obtained: Callable[[], float] | None
    tolerance: float = 5e-3
    why: str = ""
    open: bool = False
    long: bool = False
