"""Large schedules: how the play of arrays finds a window, how it goes on and back, and which sizes are refused."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from campaigns.compiled import compare_arrays
from penstock.errors import ConfigError, ScheduleError
from penstock.idle_time import split_time
from penstock.schedule.array_schedules import array_send_windows as windows
from penstock.schedule.array_schedules.array_lowering import ArrayLowering
from penstock.schedule.array_schedules.array_play import ArrayPlay, whole_span
from penstock.schedule.array_schedules.array_span import ArraySpan
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.ir import limits
from penstock.schedule.ir.limits import check_sizes
from penstock.schedule.lowering.send_window_search import WINDOW, least_number, lower_freely
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule


def lowered(method, stages, microbatches, window, **options):
    return ArrayLowering(ScheduleRequest(method, stages, microbatches, options=options).schedule).at(window)


@pytest.mark.long
def test_random_schedules_of_arrays_are_equal_to_the_last_bit():
    random, found = Random(4), []
    while found.count("equal") < 40:
        try:
            found.append(compare_arrays(random))
        except (ScheduleError, ConfigError):
            continue


@pytest.mark.parametrize("guess", range(1, 40))
def test_a_search_finds_the_least_number_from_every_guess(guess):
    for least in range(WINDOW + 1, 31):
        tried = []
        found = least_number(lambda n, tried=tried, least=least: tried.append(n) or n >= least, 30, guess)
        assert found == least
        if guess == least:
            assert len(tried) <= 2


@pytest.mark.parametrize("guess", [0, 5, 10**6])
def test_a_wrong_guess_of_the_window_changes_nothing(guess, monkeypatch):
    schedule = ScheduleRequest("breadth-first", 4, 24).schedule
    wanted = lower_freely(replace(schedule)).window
    assert wanted > 5
    monkeypatch.setattr(windows, "_room_taken", lambda play: guess)
    assert windows.lower_arrays_freely(ArrayLowering(schedule)).window == wanted


@pytest.mark.parametrize(("stages", "m", "group"), [(4, 24, None), (8, 40, None), (3, 50, 20), (6, 31, 16)])
def test_the_guess_of_the_window_is_right(stages, m, group, monkeypatch):
    """So that few spans are played in search of it."""
    guesses = []
    real = windows._room_taken
    monkeypatch.setattr(windows, "_room_taken", lambda play: guesses.append(real(play)) or guesses[-1])
    options = {} if group is None else {"group": group}
    assert [prove("breadth-first", stages, m, options=options).lowered.window] == guesses


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("method", ["2bw", "2bw-eager", "zb-v"])
def test_a_span_goes_on_behind_a_drain_as_if_there_had_been_none(method, window):
    """What a drain adds is taken away again: actions, messages, times, and who has no room yet."""
    its = lowered(method, 4, 7, window)
    count = len(its.lowering.classes.examples)
    durations = np.random.default_rng(1).uniform(0.1, 1.0, (count, 1))
    span = ArraySpan(its, 4)
    play = ArrayPlay(span, durations, np.zeros(1))
    for batches in range(1, 5):
        span.add_period()
        play.run()
        alone = ArrayPlay(whole_span(its, batches), durations, np.zeros(1))
        alone.run()
        before = [array.copy() for array in (span.sources, span._posted, span._ready)]
        with play.drained():
            assert not play.stuck
            ends = play.ends()
        assert all(map(np.array_equal, before, (span.sources, span._posted, span._ready)))
        assert (ends.clocks == alone.ends().clocks).all()
        assert ends.held_up == alone.ends().held_up


def test_a_rank_that_waits_for_ever_is_noticed():
    its = lowered("interleaved", 2, 8, 2, chunks=2)
    play = ArrayPlay(ArraySpan(its, 1), np.ones((len(its.lowering.classes.examples), 1)), np.zeros(1))
    play.span.add_period()
    play.span.sources[play.span.starts[1] + 1] = 1  # the second rank never begins
    play.run()
    assert play.stuck


def test_ends_of_a_lane_in_different_orders_are_refused():
    its = lowered("1f1b", 2, 6, 2)
    (lane, receives), *_ = its.receives[0].items()
    first, own = receives.first.copy(), np.flatnonzero(~receives.ahead)[:2]
    first[own] = first[own[::-1]]
    its.receives[0][lane] = receives._replace(first=first)
    with pytest.raises(NotCompiledError, match="different orders"):
        whole_span(its, 1)


def test_the_table_of_idle_time_takes_no_actions():
    proof = prove("2bw", 3, 5)
    costs = replace(Costs.uniform(proof.schedule), latency=0.3)
    simulation = simulate_schedule(proof, costs, 3)
    split = simulation.time_split
    assert "programs" not in vars(proof.schedule)
    assert split == split_time(simulation.timeline)
    slow = simulate_schedule(proof, replace(costs, transfer=0.2), 3)
    assert slow.time_split == split_time(slow.timeline)


def test_idle_time_before_passes_that_follow_on_others_without_taking_time():
    """What a rank waits for has ended when it begins, and begun then, too: nothing has been under way to it."""
    proof = prove("interleaved", 3, 12, options={"chunks": 3})
    times = [(0.5, 0, 1 / 3, 0.5), (0, 1, 0), (0, 1, 0), (0, 3.7, 1 / 3), (1 / 3, 1, 1 / 3), (8.9, 0, 1 / 3, 1 / 3)]
    times += [(1 / 3, 1, 1, 1 / 3), (0, 0, 0, 8.7), (1 / 3, 1, 1)]
    simulation = simulate_schedule(proof, Costs(tuple(StageCost(*each) for each in times)), 3)
    assert simulation.time_split == split_time(simulation.timeline)


def test_sizes_are_allowed_as_far_as_arrays_go():
    for options in ({}, {"chunks": 2}):
        check_sizes("name", 1024, 4096, options, in_arrays=True)
        with pytest.raises(ConfigError, match="are 4,194,304 units; a schedule has at most 1,048,576"):
            check_sizes("name", 1024, 4096, {})
    with pytest.raises(ConfigError, match="are 4,198,400 units; a schedule has at most 4,194,304"):
        check_sizes("name", 1025, 4096, {}, in_arrays=True)
    with pytest.raises(ConfigError, match="x 3 chunks are 12,582,912 units; a schedule has at most 8,388,608"):
        check_sizes("name", 1024, 4096, {"chunks": 3}, in_arrays=True)


def test_actions_of_a_schedule_that_is_too_large_for_them_are_refused(monkeypatch):
    """It is proven and simulated all the same."""
    monkeypatch.setattr(limits, "_MOST_UNITS", 20)
    proof = prove("1f1b", 4, 6)
    assert simulate_schedule(proof, Costs.uniform(proof.schedule)).time_split.makespan == 27.0
    with pytest.raises(ConfigError, match="4 stages x 6 microbatches are 24 units; .* at most 20"):
        str(proof.schedule)
    for other in ({"rule": "stash"}, {"decides": True}, {"order": "gpipe"}):
        with pytest.raises(ConfigError, match="at most 20"):
            prove("1f1b", 4, 6, **other)
