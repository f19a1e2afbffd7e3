"""The cuts into stages of which the slowest one is fastest: the dynamic program that planners have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from penstock.plan.stages.layer_row import Floats

State = tuple[int, ...]
"""What later stages have to know of those before them, such as the devices that these use."""
Moves = Callable[[State], Iterable[tuple[State, Floats]]]
"""Yields what one more stage may do to a state, with the seconds of the stage by (begin, end)."""


class CutProgram:
    """Cuts a model, of which each place is the begin or the end of stages, into one more stage at a time.

    Attributes:
        least: seconds of the slowest stage so far, by state and by the place that has been reached.
    """

    def __init__(self, places: int, state: State = ()) -> None:
        start = np.full(places, np.inf)
        start[0] = 0.0
        self.least: dict[State, Floats] = {state: start}
        self._trails = list[dict[State, list[tuple[State, int]]]]()

    def add_stage(self, moves: Moves) -> None:
        """Find the least seconds with one more stage; of equal ones those from larger states, then earlier places."""
        least, trail = dict[State, Floats](), dict[State, list[tuple[State, int]]]()
        for state in sorted(self.least, reverse=True):
            for following, times in moves(state):
                through = np.maximum(self.least[state][:, None], times)
                begins, ends = through.argmin(axis=0).tolist(), through.min(axis=0)
                known = least.setdefault(following, np.full_like(ends, np.inf))
                origins = trail.setdefault(following, [(state, 0)] * len(ends))
                for place in np.flatnonzero(ends < known):
                    known[place], origins[place] = ends[place], (state, begins[place])
        self.least = least
        self._trails.append(trail)

    def trace(self, state: State) -> tuple[list[int], list[State]]:
        """Return where the stages of the best cut begin and the last one ends, and the states after them."""
        cuts, states = [len(self.least[state]) - 1], list[State]()
        for trail in reversed(self._trails):
            states.insert(0, state)
            state, begin = trail[state][cuts[0]]
            cuts.insert(0, begin)
        return cuts, states
