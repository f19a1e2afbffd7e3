"""Building, proving and simulating stay linear: counted in calls of Python functions, never in time."""

import sys
from functools import partial

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.lowering.lower import lower
from penstock.schedule.orders import ORDERS
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.apply_version_rule import apply_rule
from penstock.simulate.costs import Costs
from penstock.simulate.play import play
from support.schedules import make_schedule


def calls(function):
    """How many functions, Python's and built-in, are called while `function` runs."""
    count = 0

    def tally(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def slow_play(method, stages, microbatches, batches=1):
    lowered = lower(make_schedule(method, stages, microbatches))
    costs = Costs.uniform(lowered.schedule, latency=0.1)
    return lambda: play(lowered, costs, batches)


WORK = {
    "prove": lambda method, p, m: lambda: prove(method, p, m),
    "play": slow_play,
    "print": lambda method, p, m: partial(str, make_schedule(method, p, m)),
    "parse": lambda method, p, m: partial(parse_schedule, str(make_schedule(method, p, m))),
}


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
@pytest.mark.parametrize("what", WORK)
def test_twice_the_microbatches_twice_the_work(what, method):
    small, large = (calls(WORK[what](method, 4, m)) for m in (24, 48))
    assert large <= 2.1 * small


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("what", WORK)
def test_twice_the_stages_twice_the_work(what, method):
    """At equal m: what a rank does must not depend on how many others there are."""
    small, large = (calls(WORK[what](method, p, 16)) for p in (6, 12))
    assert large <= 2.3 * small


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_twice_the_batches_twice_the_work(method):
    small, large = (calls(slow_play(method, 4, 10, batches)) for batches in (4, 8))
    assert large <= 2.1 * small


@pytest.mark.parametrize("method", ["1f1b", "2bw", "gpipe"])
def test_a_waiting_rank_is_not_polled(method):
    """Per instruction of the span a bounded number of calls, however long the ranks wait for each other."""
    p, m = 8, 32
    lowered = lower(make_schedule(method, p, m))
    instructions = sum(len(program.period) for program in lowered.programs)
    stages = Costs.uniform(lowered.schedule, 1, 1, 1).stages
    slow = Costs((*stages[:-1], Costs.uniform(lowered.schedule, 50, 50, 50).stages[0]), latency=25.0)
    assert calls(lambda: play(lowered, slow, 1)) <= 30 * instructions


def test_a_large_schedule_is_played_once():
    """Without the proof: 16 ranks, 256 microbatches, each action and each message in the timeline once."""
    p, m = 16, 256
    lowered = lower(apply_rule(ORDERS["1f1b"](p, m), RULES["flush"], m, "1f1b"))
    timeline, activations = play(lowered, Costs.uniform(lowered.schedule), 1)
    assert len(timeline.work()) == 2 * p * m + p
    assert len(timeline.intervals) == 2 * p * m + p + 2 * (p - 1) * m
    assert list(activations) == [p - rank for rank in range(p)]
