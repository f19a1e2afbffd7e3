"""The cuts into stages of which the slowest one is fastest: the dynamic program that planners have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.layer_row import Floats

State = tuple[int, ...]
"""What later stages have to know of those before them, such as the devices that these use."""
Moves = Callable[[State], Iterable[tuple[State, Floats]]]
"""Yields what one more stage may do to a state, with the seconds of the stage by (begin, end)."""


class _Move(NamedTuple):
    """A move of one stage from a state: by the end of the stage, its best begin, and the slowest stage up to there."""

    state: State
    begins: npt.NDArray[np.intp]
    seconds: Floats


class CutProgram:
    """Cuts a model, of which each place is the begin or the end of stages, into one more stage at a time.

    Attributes:
        least: seconds of the slowest stage so far, by state and by the place that has been reached.
    """

    def __init__(self, places: int, state: State = ()) -> None:
        start = np.full(places, np.inf)
        start[0] = 0.0
        self.least: dict[State, Floats] = {state: start}
        self._stages = list[dict[State, list[_Move]]]()

    def add_stage(self, moves: Moves) -> None:
        """Find the least seconds with one more stage."""
        found: dict[State, list[_Move]] = {}
        for state in sorted(self.least, reverse=True):
            for following, times in moves(state):
                through = np.maximum(self.least[state][:, None], times)
                found.setdefault(following, []).append(_Move(state, through.argmin(axis=0), through.min(axis=0)))
        self.least = {state: np.minimum.reduce([each.seconds for each in several]) for state, several in found.items()}
        self._stages.append(found)

    def add_stage_anyhow(self, times: Floats) -> None:
        """Do the same where a stage takes as long whatever those before it are."""
        self.add_stage(lambda state: [(state, times)])

    def trace(self, state: State) -> tuple[list[int], list[State]]:
        """Return where the stages of the best cut begin and the last one ends, and the states after them.

        Of equal ones those from larger states, then those from earlier places are the best.
        """
        cuts, states = [len(self.least[state]) - 1], list[State]()
        for found in reversed(self._stages):
            states.insert(0, state)
            end = cuts[0]
            best = min(found[state], key=lambda each: each.seconds[end])
            state = best.state
            cuts.insert(0, int(best.begins[end]))
        return cuts, states
