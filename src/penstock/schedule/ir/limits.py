"""Limits on the size of schedules, far above what is of use, so that a mistyped number is refused at once."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.checks import check_whole
from penstock.errors import ConfigError

MOST_STAGES = 1 << 14
MOST_MICROBATCHES = 1 << 16
MOST_BATCHES = 10**12
"""Of a run."""
MOST_COST = 1e15
"""Units of time, bytes or bytes in a unit of time: a sum of so much and 1 still differs from it."""
_MOST_UNITS = 1 << 20  # stages x microbatches, and chunks or slices, of schedules whose actions are objects
_MOST_IN_ARRAYS = 1 << 23  # of those that are arrays
_MOST_PAIRS = 1 << 22  # of stages and microbatches, in these
_MOST_OPTION = 10**6
_MULTIPLY = ("chunks", "slices", "waves", "pairs")  # options of which there are so many more stages or units


def check_sizes(
    name: str, stages: int, microbatches: int, options: Mapping[str, object], in_arrays: bool = False
) -> None:
    """Refuse sizes of which a schedule would take longer to make than anyone waits, or more memory than most have.

    Args:
        name: of the order, for messages.
        stages, microbatches: whole numbers.
        options: of the order.
        in_arrays: whether the order is made as arrays; 1,024 stages with 4,096 microbatches take half a minute then.

    Raises:
        ConfigError: which number is too large.
    """
    check_whole(f"{name}: stages", stages, most=MOST_STAGES)
    check_whole(f"{name}: microbatches", microbatches, most=MOST_MICROBATCHES)
    units, factors = stages * microbatches, ""
    if in_arrays and units > _MOST_PAIRS:
        raise _too_large(name, stages, microbatches, factors, units, _MOST_PAIRS)
    for what, value in options.items():
        if isinstance(value, int):
            check_whole(f"{name}: {what}", value, min(value, 0), _MOST_OPTION)
            if what in _MULTIPLY:
                units, factors = units * max(value, 1), f"{factors} x {value} {what}"
    most = _MOST_IN_ARRAYS if in_arrays else _MOST_UNITS
    if units > most:
        raise _too_large(name, stages, microbatches, factors, units, most)


def check_actions(name: str, stages: int, microbatches: int) -> None:
    """Refuse to make an object for each action of a schedule of arrays that is too large for that.

    Raises:
        ConfigError: it is.
    """
    units = stages * microbatches
    if units > _MOST_UNITS:
        raise ConfigError(
            f"{name}: {stages} stages x {microbatches} microbatches are {units:,} units; so many can be proven and "
            f"simulated under the rules flush and double-buffer only. Where every action is looked at (drawings, runs, "
            f"other rules, recomputes, decisions, shards) a schedule has at most {_MOST_UNITS:,}"
        )


def _too_large(name: str, stages: int, microbatches: int, factors: str, units: int, most: int) -> ConfigError:
    return ConfigError(
        f"{name}: {stages} stages x {microbatches} microbatches{factors} are {units:,} units; a schedule has at "
        f"most {most:,}"
    )
