"""Which cut into stages, and which of its options for each, takes least: a mixed-integer program, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import CapabilityError, ConfigError

MOST_CHOICES = 40_000
_SECONDS = 60.0


class StageChoice(NamedTuple):
    """One option of a stage.

    Attributes:
        stage: its number.
        first, last: its blocks, `last` not included.
        steady: T, seconds per microbatch.
        extra: D, seconds per batch.
    """

    stage: int
    first: int
    last: int
    steady: float
    extra: float


def least_batch(choices: Sequence[StageChoice], blocks: int, depth: int, microbatches: int) -> list[int] | None:
    """Return which choices make the fastest batch, one for each stage; None if no path of them covers all blocks.

    Binary x for each choice; the blocks of a stage begin where those of the stage before end. Minimized is
    (m - 1) t + sum of T x + e with t >= T of each stage and e >= D_i - sum of T before i.

    Args:
        choices: of all stages.
        blocks: in the model.
        depth: stages.
        microbatches: m, of a pipeline.

    Raises:
        CapabilityError: scipy is not installed.
        ConfigError: there are too many choices, or no answer was found in a minute.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
        from scipy.sparse import coo_array  # type: ignore[import-untyped]
    except ImportError:
        raise CapabilityError("planner 'mist' needs scipy; install penstock with the extra 'exact'") from None
    count = len(choices)
    if count > MOST_CHOICES:
        raise ConfigError(f"planner 'mist' has {count:,} choices of stages, more than {MOST_CHOICES:,}; merge layers")
    by_stage: list[list[int]] = [[] for _ in range(depth)]
    for number, choice in enumerate(choices):
        by_stage[choice.stage].append(number)
    table = _Rows()
    if not _paths(table, choices, by_stage, blocks):
        return None
    _times(table, choices, by_stage)
    rows, columns, values = zip(*table.entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(table.low), count + 2)).tocsr()
    found = milp(
        np.array([*(choice.steady for choice in choices), microbatches - 1.0, 1.0]),
        integrality=np.array([1] * count + [0, 0]),
        bounds=Bounds([0.0] * (count + 1) + [-np.inf], [1.0] * count + [np.inf, np.inf]),
        constraints=LinearConstraint(matrix, table.low, table.high),
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-9},
    )
    if found.status == 2:
        return None
    if found.x is None or found.status != 0:
        raise ConfigError(f"planner 'mist' found no answer in {_SECONDS:g} s ({found.message}); merge layers")
    return [max(own, key=lambda n: found.x[n]) for own in by_stage]


class _Rows:
    """Linear constraints.

    Attributes:
        entries: (row, column, coefficient).
        low, high: bounds of each row.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, cells: Sequence[tuple[int, float]], least: float, most: float = np.inf) -> None:
        """Add a row."""
        self.entries += ((len(self.low), column, value) for column, value in cells)
        self.low.append(least)
        self.high.append(most)


def _paths(table: _Rows, choices: Sequence[StageChoice], by_stage: Sequence[Sequence[int]], blocks: int) -> bool:
    """Add that chosen stages follow each other and cover all blocks; returns False where that cannot be."""
    depth = len(by_stage)
    for at in range(depth + 1):
        for block in range(blocks + 1):
            ends = [(n, 1.0) for n in (by_stage[at - 1] if at else []) if choices[n].last == block]
            begins = [(n, -1.0) for n in (by_stage[at] if at < depth else []) if choices[n].first == block]
            wanted = float((at, block) == (depth, blocks)) - float((at, block) == (0, 0))
            if ends or begins:
                table.add([*ends, *begins], wanted, wanted)
            elif wanted:
                return False
    return True


def _times(table: _Rows, choices: Sequence[StageChoice], by_stage: Sequence[Sequence[int]]) -> None:
    """Add what the slowest stage and the last end are at least."""
    slowest, ending = len(choices), len(choices) + 1
    for at, own in enumerate(by_stage):
        table.add([(slowest, 1.0), *((n, -choices[n].steady) for n in own)], 0.0)
        before = [(n, choices[n].steady) for earlier in by_stage[:at] for n in earlier]
        table.add([(ending, 1.0), *before, *((n, -choices[n].extra) for n in own)], 0.0)
