"""Books that are replayed say what books say that are played."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ScheduleError
from penstock.runtime.rank.live_version_tracker import Effect, StageBooks
from penstock.schedule.add_options import extend
from penstock.schedule.build import prove, smallest_microbatches
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.schedule import Action, Copy, Op, Schedule, split_fused
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.table import METHODS
from penstock.schedule.stage_state.stage_constants import StageSpec, stage_specs
from penstock.schedule.stage_state.stage_state import StageState
from penstock.schedule.text_parser import parse_schedule
from support.schedules import make_schedule

SHORT, BATCHES = 5, 24  # of spans; every method repeats within the first half of long ones
SHOWN = [name for name, method in METHODS.items() if not RULES[method.rule].provisional]


class Counting(StageState):
    """Books that count what is played."""

    played = 0

    def apply(self, action: Action, t: int, admitted: dict[int, int]) -> None:
        type(self).played += 1
        super().apply(action, t, admitted)


def actions_of(schedule: Schedule, spec: StageSpec) -> tuple[list[Action], list[Action]]:
    """The period and the epilogue of a stage."""
    program = schedule.programs[spec.stage.rank]
    period, epilogue = (
        [a for a in split_fused(part) if a.stage == spec.stage] for part in (program.period, program.epilogue)
    )
    return period, epilogue


def play(schedule: Schedule, spec: StageSpec, batches: int) -> tuple[int, int]:
    """Play a span in both books and compare them after every action; returns the actions, and those played."""
    m, (period, epilogue) = schedule.microbatches, actions_of(schedule, spec)
    books, truth, count = StageBooks(spec, repeats=True), StageState(spec), 0
    Counting.played = 0
    for t in range(batches + 1):
        if t == batches:
            books.drain(t)
            truth.drain(t)
        for action in epilogue if t == batches else period:
            if t < since(action.unit, m):
                continue
            first = action.unit.first + t * m
            reads = action.reads
            truth.apply(action, t, {} if reads is None else {first: max(reads.versions[0] + t, spec.older)})
            compare(books.apply(action, t, first), truth, t, m)
            if batches == SHORT and t < batches:
                assert truth.shifted(3).state(t + 3) == truth.state(t)
            count += 1
    return count, Counting.played


def compare(effect: Effect, truth: StageState, t: int, m: int) -> None:
    assert {v + t for v in effect.versions} == truth.versions.alive
    assert {Copy(c.label, c.first + t * m) for c in effect.copies} == set(truth.copies)
    if effect.action.op is Op.STEP:  # which alone asks
        assert effect.rotated == truth.rotated


def play_all(schedule: Schedule) -> None:
    """All stages, in spans that end before anything repeats, and in those that end later."""
    for older in range(0, -RULES[schedule.rule].delay - 1, -1):
        for spec in stage_specs(schedule, older):
            for batches in (1, SHORT, BATCHES):
                count, played = play(schedule, spec, batches)
            assert played < 0.75 * count


@pytest.fixture(autouse=True)
def _counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.rank.live_version_tracker.StageState", Counting)


@pytest.mark.parametrize("method", SHOWN)
def test_replayed_books_are_those_that_are_played(method: str) -> None:
    play_all(make_schedule(method, 4, smallest_microbatches(method, 4) or 4))


def test_replayed_books_of_recomputed_gathered_and_parked_stages() -> None:
    play_all(extend(prove("stash", 4, 2), recomputes=True).schedule)
    play_all(parse_schedule((Path(__file__).parents[1] / "golden" / "breadth_first.txt").read_text()))
    play_all(make_schedule("bpipe", 4, 8))


def test_another_action_than_in_the_period_before() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    (spec, _) = stage_specs(schedule, 0)
    period, _ = actions_of(schedule, spec)
    books = StageBooks(spec, repeats=True)
    for t in range(4):
        for action in period:
            books.apply(action, t, action.unit.first + 2 * t)
    with pytest.raises(ScheduleError, match="is not the same as the one before"):
        books.apply(period[1], 4, 8)
    with pytest.raises(ScheduleError, match="ended without it"):
        books.drain(5)
    for action in period:
        books.apply(action, 4, action.unit.first + 8)
    with pytest.raises(ScheduleError, match="is not the same as the one before"):
        books.apply(period[-1], 4, 8)


def test_a_period_that_may_differ_is_played_each_time() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    (spec, _) = stage_specs(schedule, 0)
    period, _ = actions_of(schedule, spec)
    books = StageBooks(spec, repeats=False)
    for t in range(4):
        for action in period:
            books.apply(action, t, action.unit.first + 2 * t)
    with pytest.raises(ScheduleError, match="has no forward in flight"):
        books.apply(period[-2], 4, 8)
