"""Limits on the size of schedules, far above what is of use, so that a mistyped number is refused at once."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.checks import check_whole
from penstock.errors import ConfigError

MOST_STAGES = 1 << 14
MOST_MICROBATCHES = 1 << 16
MOST_BATCHES = 10**12
"""Of a run."""
_MOST_UNITS = 1 << 20  # stages x microbatches
_MOST_OPTION = 10**6
_MULTIPLY = ("chunks", "slices", "waves", "pairs")  # options of which there are so many more stages or units


def check_sizes(name: str, stages: int, microbatches: int, options: Mapping[str, object]) -> None:
    """Refuse sizes of which a schedule would take longer to make than anyone waits.

    Args:
        name: of the order, for messages.
        stages, microbatches: whole numbers.
        options: of the order.

    Raises:
        ConfigError: which number is too large.
    """
    check_whole(f"{name}: stages", stages, most=MOST_STAGES)
    check_whole(f"{name}: microbatches", microbatches, most=MOST_MICROBATCHES)
    units, factors = stages * microbatches, ""
    for what, value in options.items():
        if isinstance(value, int):
            check_whole(f"{name}: {what}", value, min(value, 0), _MOST_OPTION)
            if what in _MULTIPLY:
                units, factors = units * max(value, 1), f"{factors} x {value} {what}"
    if units > _MOST_UNITS:
        raise ConfigError(
            f"{name}: {stages} stages x {microbatches} microbatches{factors} are {units:,} units; a schedule has at "
            f"most {_MOST_UNITS:,}"
        )
