"""The choices that make a sum of tables as small as can be, each table of one choice or of two.

As PaSE's dynamic program: choices are decided one by one, in an order in which each leaves a small dependent set, the
undecided ones that share a table with it. For every combination of these its best value is kept, and what that costs
is a table of them. A chain needs no set of more than one, however long it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.layer_row import Floats

MOST_CELLS = 20_000_000
"""Of a table; where one would be larger, `least_sum` gives up."""


class _Costs(NamedTuple):
    """Costs of choices.

    Attributes:
        of: the choices, ascending, one for each axis.
        values: what each combination costs.
    """

    of: tuple[int, ...]
    values: Floats


class _Decided(NamedTuple):
    """A choice that was decided.

    Attributes:
        number: of the choice.
        by: the choices that it depends on.
        best: its value, for each combination of these.
    """

    number: int
    by: tuple[int, ...]
    best: npt.NDArray[np.intp]


def least_sum(own: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]) -> list[int]:
    """Return the value of each choice with the least sum.

    Args:
        own: what each value of each choice costs.
        pairs: what pairs of values cost, by two numbers of choices, the smaller one first.

    Raises:
        OverflowError: a table would have more than `MOST_CELLS` cells.
    """
    tables = [
        [_Costs((number,), values)] for number, values in enumerate(own)
    ]  # those of each choice, and of later ones
    near: list[set[int]] = [set() for _ in own]
    for (a, b), values in pairs.items():
        near[a].add(b)
        near[b].add(a)
        tables[a].append(_Costs((a, b), values))
        tables[b].append(tables[a][-1])
    sizes, left, decided = [len(values) for values in own], set(range(len(own))), list[_Decided]()
    cells = {number: _cells(sizes, number, near) for number in left}
    while left:
        number = min(left, key=lambda each: (cells[each], each))
        if cells[number] > MOST_CELLS:
            raise OverflowError
        rest = _decide(number, tables, sizes, decided)
        left.remove(number)
        for other in rest.of:
            near[other] |= set(rest.of) - {other}
            near[other].discard(number)
            tables[other] = [*(table for table in tables[other] if number not in table.of), rest]
        for other in rest.of:
            cells[other] = _cells(sizes, other, near)
    chosen = [0] * len(own)
    for each in reversed(decided):
        chosen[each.number] = int(each.best[tuple(chosen[other] for other in each.by)])
    return chosen


def _cells(sizes: Sequence[int], number: int, near: Sequence[set[int]]) -> int:
    """Return how many cells the table has with which a choice is decided."""
    found = sizes[number]
    for other in near[number]:
        found *= sizes[other]
    return found


def _decide(number: int, tables: Sequence[list[_Costs]], sizes: Sequence[int], decided: list[_Decided]) -> _Costs:
    """Decide a choice; return what its best value costs."""
    of = tuple(sorted({each for table in tables[number] for each in table.of}))
    total = np.zeros([sizes[each] for each in of])
    for table in tables[number]:
        total += table.values.reshape([sizes[each] if each in table.of else 1 for each in of])
    axis, by = of.index(number), tuple(each for each in of if each != number)
    decided.append(_Decided(number, by, np.asarray(total.argmin(axis=axis))))
    return _Costs(by, np.asarray(total.min(axis=axis)))
