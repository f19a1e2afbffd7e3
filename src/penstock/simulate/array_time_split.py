"""Where the time of a simulated span of arrays goes: `penstock.idle_time.split_time` without a timeline.

In such a span a rank waits for a message before a pass, and before a STEP for room; a microbatch takes the same way as
any other, through all stages and back. So all idle intervals of a rank are looked at together. Sums are taken in the
same order, and all numbers are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.idle_time import Idle, TimeSplit
from penstock.schedule.array_schedules.array_play import ArrayPlay
from penstock.schedule.compiled.evaluate import Times
from penstock.schedule.compiled.instruction_arrays import Flags, Numbers
from penstock.schedule.ir.arrays import OPERATIONS, B, F, I
from penstock.timeline import Bubble

_FILL, _DRAIN, _IMBALANCE, _COMMUNICATION, _DATA, _CONTROL, _COPY, _ENGINE = range(len(Idle._fields))
_NOBODY = -1


def split_array_time(play: ArrayPlay, bubble: Bubble) -> TimeSplit:
    """Split the time of every rank into work, and idle time by cause.

    Args:
        play: of a whole span, for one cost.
        bubble: its busy times.
    """
    ranks = _actions(play)
    sections, ways = _Sections(ranks), _Ways(play, ranks)
    start = min((float(actions.begin[0]) for actions in ranks if len(actions.begin)), default=0.0)
    end = max((float(actions.end[-1]) for actions in ranks if len(actions.end)), default=start)
    idle = []
    for rank, actions in enumerate(ranks):
        causes, times = _Gaps(rank, actions, sections, ways, (start, end)).split()
        idle.append(Idle(*np.bincount(causes, times, minlength=len(Idle._fields)).tolist()))
    return TimeSplit(bubble.makespan, bubble.busy, tuple(idle))


class _RankActions(NamedTuple):
    """What a rank does in a span, in order.

    Attributes:
        op: places in `OPERATIONS`.
        stage: the stages.
        k: microbatches, counted from the start of the span; -1 of STEPs.
        begin, end: times.
    """

    op: Numbers
    stage: Numbers
    k: Numbers
    begin: Times
    end: Times

    @property
    def turns(self) -> Flags:
        """Which are backwards whose results travel."""
        found: Flags = (self.op == B) | (self.op == I)
        return found


def _actions(play: ArrayPlay) -> list[_RankActions]:
    examples, found = play.span.lowered.lowering.classes.examples, []
    op = np.array([OPERATIONS.index(action.op) for action in examples])
    stage = np.array([action.stage.index for action in examples])
    for rank in range(play.span.ranks):
        cls, microbatches = play.span.actions(rank)
        begin, end = play.intervals(rank)
        there = np.flatnonzero(cls)
        kinds = cls[there] - 1
        found.append(_RankActions(op[kinds], stage[kinds], microbatches[there], begin[there], end[there]))
    return found


class _Sections:
    """The sections of a span, numbered in the order of time.

    Attributes:
        of: the section of each microbatch.
        start, end: first start and last end of the passes of each.
        forwards: forwards by rank and section.
        alternate: the sections in which some rank runs a forward after a backward.
    """

    def __init__(self, ranks: Sequence[_RankActions]) -> None:
        count = max((int(actions.k.max(initial=-1)) for actions in ranks), default=-1) + 1
        starts, ends = np.full(count, np.inf), np.full(count, -np.inf)
        for actions in ranks:
            passes = actions.k >= 0
            np.minimum.at(starts, actions.k[passes], actions.begin[passes])
            np.maximum.at(ends, actions.k[passes], actions.end[passes])
        order = np.lexsort((ends, starts))
        until = np.maximum.accumulate(ends[order])
        new = np.append(True, starts[order][1:] >= until[:-1])[:count]
        self.of = np.empty(count, dtype=np.int64)
        self.of[order] = np.cumsum(new) - 1
        firsts = np.flatnonzero(new)
        self.start, self.end = starts[order][firsts], until[np.append(firsts[1:], count) - 1]
        self.forwards = np.zeros((len(ranks), len(firsts)), dtype=np.int64)
        self.alternate = np.zeros(len(firsts), dtype=bool)
        for rank, actions in enumerate(ranks):
            here, forwards = self.of_actions(actions), actions.op == F
            self.forwards[rank] = np.bincount(here[forwards], minlength=len(firsts))
            turned = _last(actions.turns)  # the last backward up to each
            after = forwards & (turned >= 0)
            self.alternate[here[after & (here[turned] == here)]] = True

    def of_actions(self, actions: _RankActions) -> Numbers:
        """Return the sections of actions; `_NOBODY` for STEPs."""
        found: Numbers = np.where(actions.k >= 0, self.of[actions.k], _NOBODY)
        return found


class _Ways:
    """The ways of all microbatches through the stages and back."""

    def __init__(self, play: ArrayPlay, ranks: Sequence[_RankActions]) -> None:
        stages = play.span.lowered.schedule.stages
        count = max((int(actions.k.max(initial=-1)) for actions in ranks), default=-1) + 1
        self._begin, self._end = (np.full((count, 2 * len(stages)), np.inf) for _ in "be")
        for actions in ranks:
            forth, turns = actions.op == F, actions.turns
            place = np.where(forth, actions.stage, 2 * len(stages) - 1 - actions.stage)
            travels = forth | turns
            where = actions.k[travels], place[travels]
            self._begin[where], self._end[where] = actions.begin[travels], actions.end[travels]
        forth = np.array([stage.rank for stage in sorted(stages, key=lambda stage: stage.index)])
        self._rank = np.concatenate([forth, forth[::-1]])
        changes = np.append(False, self._rank[1:] != self._rank[:-1])
        # The last place before each on another rank.
        self._other = np.maximum.accumulate(np.where(changes, np.arange(len(changes)), 0)) - 1

    def made(self, rank: int, k: Numbers, begin: Times) -> Times:
        """Return when what another rank did last for microbatches, before a rank goes on, has ended, or infinity."""
        low, high = np.zeros_like(k), np.full_like(k, self._begin.shape[1])
        while (low < high).any():  # how many passes of the microbatch have begun before
            middle = (low + high) // 2
            earlier = (low < high) & (self._begin[k, np.minimum(middle, self._begin.shape[1] - 1)] < begin)
            low, high = np.where(earlier, middle + 1, low), np.where(earlier, high, np.minimum(middle, high))
        last = low - 1
        last = np.where((last >= 0) & (self._rank[last] == rank), self._other[last], last)
        return np.where(last >= 0, self._end[k, last], np.inf)


class _Gaps:
    """The idle intervals of a rank, a row for each; attributes as of `penstock.idle_time._Gap`."""

    def __init__(
        self, rank: int, actions: _RankActions, sections: _Sections, ways: _Ways, limits: tuple[float, float]
    ) -> None:
        count, sections_ = len(actions.op), sections.of_actions(actions)
        start, end = np.append(limits[0], actions.end), np.append(actions.begin, limits[1])
        gaps = np.flatnonzero(end > start)
        self.start, self.end = start[gaps], end[gaps]
        passes = np.append(sections_ >= 0, False)
        behind = np.append(-1, _last(passes[:-1]))[gaps]  # the last pass before
        ahead = count - np.append(-1, _last(passes[:-1][::-1]))[::-1][gaps] - 1  # the first one behind
        sections_ = np.append(sections_, _NOBODY)
        self.before, self.after = np.where(behind >= 0, sections_[behind], _NOBODY), sections_[ahead]
        entered = np.flatnonzero(sections_ >= 0)
        entered = entered[np.append(True, np.diff(sections_[entered]) != 0)[: len(entered)]]
        since = entered[np.maximum(np.searchsorted(entered, behind, side="right") - 1, 0)] if len(entered) else behind
        turned, run = (_up_to(which, gaps) - _up_to(which, since) for which in (actions.turns, actions.op == F))
        known = behind >= 0
        self.first = np.append(actions.turns, False)[gaps] & ~(known & (turned > 0))
        self.spent = known & sections.alternate[self.before] & (run == sections.forwards[rank][self.before])
        self.waits, self.steps = passes[gaps], (gaps < count) & ~passes[gaps]
        self.made = np.full(len(gaps), np.inf)
        waiting = np.flatnonzero(self.waits)
        self.made[waiting] = ways.made(rank, actions.k[gaps[waiting]], actions.begin[gaps[waiting]])
        self.empty = np.where(known, sections.end[self.before], -np.inf)
        self.begun = np.where(self.after >= 0, sections.start[self.after], -np.inf)

    def split(self) -> tuple[Numbers, Times]:
        """Return the causes of the parts of all intervals that have one each, and how long they are."""
        changes = [np.clip(each, self.start, self.end) for each in (self.made, self.empty, self.begun)]
        times = np.sort(np.stack([self.start, self.end, *changes], axis=1), axis=1)
        time = times[:, :-1]
        border = self.before != self.after
        causes = [
            (_COMMUNICATION, self._each(self.waits) & (time >= self.made[:, None])),
            (_DRAIN, self._each(border) & (time < self.empty[:, None])),
            (_DRAIN, self._each(border & (self.after < 0))),
            (_FILL, self._each(border) & (self._each(self.waits) | (time >= self.begun[:, None]))),
            (_ENGINE, self._each(border)),
            (_COMMUNICATION, self._each(self.steps)),
            (_ENGINE, self._each(~self.waits)),
            (_FILL, self._each(self.first)),
            (_DRAIN, self._each(self.spent)),
        ]
        found = np.select([which for _, which in causes], [cause for cause, _ in causes], _IMBALANCE)
        return found.ravel(), np.diff(times, axis=1).ravel()

    def _each(self, which: Flags) -> Flags:
        return np.broadcast_to(which[:, None], (len(which), 4))


def _last(which: Flags) -> Numbers:
    """Return the place of the last one up to each place; -1 where there is none."""
    found: Numbers = np.maximum.accumulate(np.where(which, np.arange(len(which)), -1))
    return found


def _up_to(which: Flags, places: Numbers) -> Numbers:
    """Return how many there are before places."""
    found: Numbers = np.append(0, np.cumsum(which))[places]
    return found
