"""Copies of activations to the host's memory and back on the machine model: beside the passes, one after the other.

A rank has one lane for them. An OFFLOAD without a peer begins when all actions before it have ended, a FETCH when it is
reached, both when the copy before has ended; neither holds up the rank. Of what comes later only the first action on
the microbatch behind its FETCH (a backward, a recompute) waits for the copy. So copies cost time but cannot block.
"""

from __future__ import annotations

import copy

from penstock.schedule.ir.ops import OPS, Lane
from penstock.schedule.ir.schedule import Action, Kind, Op, Stage, passes

_Key = tuple[Stage, int, int]
"""Stage, microbatch of the span, and slice."""


class HostCopies:
    """Those that are under way.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._free = [0.0] * ranks
        self._back: dict[_Key, float] = {}  # when what was fetched is there, until it is used

    def issue(self, rank: int, action: Action, offset: int, now: float, duration: float) -> tuple[float, float]:
        """Issue an OFFLOAD or FETCH; returns when it starts and ends.

        Args:
            rank: whose.
            action: with relative numbers.
            offset: what they are relative to, in microbatches.
            now: when the rank issues it.
            duration: of the copy.
        """
        start = max(now, self._free[rank])
        end = self._free[rank] = start + duration
        if action.op is Op.FETCH:
            self._back.update(dict.fromkeys(_keys(action, offset), end))
        return start, end

    def done(self, action: Action, offset: int) -> float:
        """Return when all that an action uses is back."""
        if not self._back:
            return 0.0
        used = [key for p in passes(action) if p.unit.kind is Kind.TRAIN for key in _keys(p, offset)]
        return max([self._back.pop(key, 0.0) for key in used], default=0.0)

    def times(self) -> list[float]:
        """Return when lanes are free and copies end, in one order."""
        return [*self._free, *(self._back[key] for key in sorted(self._back))]

    def copy(self) -> HostCopies:
        """Return an independent twin."""
        twin = copy.copy(self)
        twin._free, twin._back = list(self._free), dict(self._back)
        return twin


def is_host_copy(action: Action) -> bool:
    """Return whether an action copies activations to the host's memory, or back."""
    return not action.parts and action.peer is None and OPS[action.op].lane is Lane.COPY


def _keys(action: Action, offset: int) -> list[_Key]:
    piece = action.unit.slice[0] if action.unit.slice else 0
    return [(action.stage, number + offset, piece) for number in action.unit.microbatches]
