"""The times of actions where nothing has been measured."""

from __future__ import annotations

from penstock.schedule.ir.schedule import Action, Op

_UNITS = {Op.F: 1.0, Op.R: 1.0, Op.REDO: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def unit_time(action: Action) -> float:
    """Return the time of an action where nothing is known: 1 of a forward, 2 of a backward, 1 of each half of it.

    All else takes none. A pass over one of k slices takes the k-th part, a fused action as long as its parts.
    """
    if action.parts:
        return sum(unit_time(part) for part in action.parts)
    amount = action.unit.count / (action.unit.slice[1] if action.unit.slice else 1)
    return _UNITS.get(action.op, 0.0) * amount
