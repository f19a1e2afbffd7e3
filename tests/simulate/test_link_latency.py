"""Links of different latency: closed forms, what a message takes, and what is refused."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest

from penstock.errors import ConfigError
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.ir.schedule import Op, Unit
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.message_lanes import latency_between
from penstock.simulate.auto_in_flight import choose_in_flight
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.order_options_from_costs import with_search_options
from penstock.simulate.play import play
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

LINKS = (0.25, 2.0, 0.5)


@pytest.mark.parametrize("m", [1, 4, 9])
def test_a_batch_of_gpipe_takes_each_link_twice(m):
    """Stages alike: 3 (m + p - 1) for passes of 1 and 2, and every link there and back."""
    costs = Costs((StageCost(1, 1, 1),) * 4, LINKS)
    assert simulate_schedule(make_schedule("gpipe", 4, m), costs).bubble.makespan == 3 * (m + 3) + 2 * sum(LINKS)


@pytest.mark.parametrize("name", ["1f1b", "2bw", "interleaved", "zb-v", "chimera", "bpipe", "stash"])
def test_links_that_are_alike_are_one_latency(name):
    proof = prove(name, 4, 8)
    one = Costs.uniform(proof.schedule, latency=0.3)
    several = replace(one, latency=(0.3,) * 3)
    assert simulate_schedule(proof, one, 2).figures() == simulate_schedule(proof, several, 2).figures()


def test_a_message_takes_its_own_link():
    """Also back, and from the last rank to the first one: there the slowest of all counts."""
    proof = prove("interleaved", 4, 8)
    timeline, _ = play(lower(proof.schedule, window=100), Costs.uniform(proof.schedule, latency=LINKS), 1)
    sent = [each for each in timeline.intervals if each.what == "SEND"]
    assert {(min(e.rank, e.peer), max(e.rank, e.peer)) for e in sent} == {(0, 1), (1, 2), (2, 3), (0, 3)}
    least = {}
    for each in sent:
        ends = tuple(sorted((each.rank, each.peer)))
        least[ends] = min(least.get(ends, math.inf), each.end - each.start)
    assert least == {(0, 1): 0.25, (1, 2): 2.0, (2, 3): 0.5, (0, 3): 2.0}


def test_latency_of_ranks_that_are_no_neighbours():
    for one, other in itertools.product(range(4), repeat=2):
        wanted = max(LINKS[min(one, other) : max(one, other)], default=0.0)
        assert latency_between(LINKS, one, other) == wanted
        assert latency_between(7.0, one, other) == 7.0


def test_a_decision_takes_the_slowest_link_twice():
    schedule = prove("1f1b", 4, 8, decides=True).schedule
    decide = next(a for a in schedule.programs[0].period if a.op is Op.DECIDE)
    assert Costs.uniform(schedule, latency=LINKS).duration(decide) == 4.0
    assert Unit(0) != decide.unit


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_in_flight_auto_is_the_least_for_links_that_differ(method):
    """Simulated: with the numbers that are chosen no rank waits in a long run, with one fewer on any rank it does."""
    costs, request = Costs((StageCost(1, 1, 0),) * 4, (0.25, 1.5, 0.0)), ScheduleRequest(method, 4, 24)
    asked, choice = choose_in_flight(replace(request, options={"in_flight": "auto"}), costs)
    numbers = asked.options["in_flight"]
    # w(s) = w(s + 1) + 1 + ceil(2 c / T), as stages are alike: 1, + 1, + 1 + 2, + 1 + 1
    assert tuple(numbers) == choice.asked == (7, 5, 2, 1)

    def batch(given):
        found = replace(request, options={"in_flight": given}).prove()
        short, long = (simulate_schedule(found, costs, n).bubble.makespan for n in (4, 6))
        return (long - short) / 2

    least = batch(numbers)
    if method == "2bw":
        assert least == 24 * 2
    for rank in range(3):
        fewer = tuple(n - (r == rank) for r, n in enumerate(numbers))
        if list(fewer) == sorted(fewer, reverse=True):
            assert batch(fewer) > least


def test_orders_are_searched_for_the_mean_of_links():
    costs = Costs((StageCost(1.0, 1.0, 1.0),) * 4, (0.5, 1.0, 3.0))
    found = with_search_options("zb-auto", None, {}, costs, 4)
    assert Fraction(found["hop"], found["forward"]) == Fraction(3, 2)


@pytest.mark.parametrize("latency", [(1.0,), (1.0,) * 4, ()])
def test_other_numbers_of_links_are_refused(latency):
    schedule = make_schedule("1f1b", 4, 8)
    with pytest.raises(ConfigError, match=f"4 ranks have 3 links between neighbours, latencies of {len(latency)} are"):
        simulate_schedule(schedule, Costs((StageCost(1, 1, 1),) * 4, latency))


def test_a_message_beyond_the_last_link_is_refused():
    with pytest.raises(ConfigError, match="goes to or from rank 3, but latencies of 2 links are given"):
        play(lower(make_schedule("1f1b", 4, 8)), Costs((StageCost(1, 1, 1),) * 4, (1.0, 2.0)), 1)


@pytest.mark.parametrize("latency", [(-1.0, 1.0, 1.0), (1.0, math.nan, 1.0), ("1", 1.0, 1.0), (True, 1.0, 1.0)])
def test_latencies_that_are_no_times_are_refused(latency):
    with pytest.raises(ConfigError, match="latency must have numbers from 0 to"):
        Costs((StageCost(1, 1, 1),) * 4, latency)


def test_costs_say_their_links():
    assert "latency=(0.25, 2.0, 0.5)" in repr(Costs((StageCost(1, 1, 1),) * 4, LINKS))
