"""Makespan, bubble, activations and messages of the basic methods, against their closed forms."""

from dataclasses import replace

import pytest

from penstock.schedule.build import prove
from penstock.schedule.lowering.lower import lower
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.message_counts import count_messages
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

STAGES = [1, 2, 3, 5]
SIZES = [1, 2, 4, 9]
TIMES = [(1, 1, 1), (10, 12, 7)]

sweep = pytest.mark.parametrize("m", SIZES)
deep = pytest.mark.parametrize("p", STAGES)
timed = pytest.mark.parametrize("times", TIMES)
flushed = pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager"])


def run(schedule, times, batches=1, latency=0.0):
    return simulate_schedule(schedule, Costs.uniform(schedule, *times, latency=latency), batches)


@flushed
@deep
@sweep
@timed
def test_flushed_methods(method, p, m, times):
    """All three take (m+p-1)(F+B); fewer microbatches than stages included."""
    f, b = times[0], times[1] + times[2]
    result = run(make_schedule(method, p, m), times)
    assert result.bubble.makespan == (m + p - 1) * (f + b)
    assert result.bubble.ideal == m * (f + b)
    assert result.bubble.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert result.bubble.bubble_of_ideal == pytest.approx((p - 1) / m)
    assert result.bubble.rank_span == (m + p - 1) * (f + b)  # rank 0 begins first and ends last
    assert result.messages == 2 * m * (p - 1)


@deep
@sweep
@timed
def test_gpipe_takes_as_long_when_its_last_microbatch_comes_back_first(p, m, times):
    def reversed_gpipe(stages, microbatches):
        return [[f"F{k}" for k in range(microbatches)] + [f"B{k}" for k in reversed(range(microbatches))]] * stages

    assert run(prove(reversed_gpipe, p, m).schedule, times).bubble.makespan == (m + p - 1) * sum(times)


@flushed
@deep
def test_flushed_batches_repeat(method, p):
    result = run(make_schedule(method, p, 4), (1, 1, 1), batches=3)
    assert result.bubble.makespan == 3 * 3 * (4 + p - 1)
    assert result.messages == 3 * 2 * 4 * (p - 1)


@deep
@sweep
@pytest.mark.parametrize(
    ("method", "in_flight"),
    [
        ("gpipe", lambda p, r, m: m),
        ("1f1b", lambda p, r, m: min(m, p - r)),
        ("eager", lambda p, r, m: min(m, 2 * (p - r) - 1)),
        ("sequential", lambda p, r, m: 1),
    ],
)
def test_simulated_activations_equal_the_formula(method, in_flight, p, m):
    """The simulator counts while it plays, the proof counts without times; both must find the paper's figure."""
    result = run(make_schedule(method, p, m), (1, 1, 1))
    assert list(result.activations) == [in_flight(p, r, m) for r in range(p)]
    assert result.timeline.peak("activations") == list(result.activations)


@deep
@sweep
def test_sequential_uses_one_rank_at_a_time(p, m):
    result = run(make_schedule("sequential", p, m), (1, 1, 1))
    assert result.bubble.makespan == 3 * p * m
    assert result.bubble.bubble == pytest.approx(1 - 1 / p)


@deep
@timed
@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_2bw_drained_after_some_batches(p, times, more, batches):
    """M = T*m microbatches in one go: utilisation M/(M+p-1)."""
    m = max(1, p - 1) + more
    result = run(make_schedule("2bw", p, m), times, batches)
    total = batches * m
    assert result.bubble.makespan == (total + p - 1) * sum(times)
    assert 1 - result.bubble.bubble == pytest.approx(total / (total + p - 1))
    assert result.messages == 2 * total * (p - 1)


@deep
@pytest.mark.parametrize("method", ["2bw", "stash", "vertical-sync", "newest"])
def test_endless_methods_have_no_bubble_in_the_long_run(method, p):
    schedule = make_schedule(method, p, p)
    assert steady_bubble(lower(schedule), Costs.uniform(schedule), 3) == pytest.approx(0, abs=1e-12)


def test_the_bubble_of_one_more_batch_depends_on_how_full_the_pipeline_is():
    """Stages of 3, 6 and 3: the second batch adds 4 to the makespan, each later one what the slow stage needs, 6."""
    schedule = make_schedule("stash", 3, 1)
    costs = Costs((StageCost(1, 2, 0), StageCost(2, 4, 0), StageCost(1, 2, 0)))
    bubbles = [steady_bubble(lower(schedule), costs, batches) for batches in (1, 2, 5)]
    assert bubbles == pytest.approx([1 - 12 / (3 * 4), 1 - 12 / (3 * 6), 1 - 12 / (3 * 6)], abs=1e-12)


@deep
def test_flush_has_its_bubble_in_the_long_run_too(p):
    schedule = make_schedule("1f1b", p, 4)
    bubble = steady_bubble(lower(schedule), Costs.uniform(schedule), 3)
    assert bubble == pytest.approx((p - 1) / (4 + p - 1), abs=1e-12)


@pytest.mark.parametrize(
    "stages",
    [[(1, 2), (2, 4), (1, 2), (1, 2)], [(3, 5), (1, 1)], [(1, 4), (2, 2), (4, 1)], [(2, 2)], [(1, 1), (5, 1), (1, 5)]],
)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_gpipe_with_unequal_stages(stages, m):
    """Sum of the forwards and (m-1) times the slowest, then the same for the backwards."""
    forwards, backwards = zip(*stages, strict=True)
    costs = Costs(tuple(StageCost(f, b, 0) for f, b in stages))
    makespan = sum(forwards) + (m - 1) * max(forwards) + sum(backwards) + (m - 1) * max(backwards)
    assert simulate_schedule(make_schedule("gpipe", len(stages), m), costs).bubble.makespan == makespan


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
@pytest.mark.parametrize("method", ["2bw", "stash", "1f1b"])
def test_the_slowest_stage_sets_the_pace(method, slow):
    """In an endless order each further batch costs what the slowest stage works on it, a flush adds its bubble."""
    costs = Costs(tuple(StageCost(1 + (s == slow), 1 + (s == slow), 1 + (s == slow)) for s in range(4)))
    schedule = make_schedule(method, 4, 8)
    spans = [simulate_schedule(schedule, costs, batches).bubble.makespan for batches in (4, 5)]
    if method == "1f1b":
        assert spans[1] - spans[0] > 6 * 8
    else:
        assert spans[1] - spans[0] == 6 * 8


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("c", [0.25, 0.5])
def test_latency_law(p, c):
    """Plain 1F1B pays 2c for about every microbatch; GPipe and eager 1F1B pay it once per hop."""
    for m in (max(1, p - 1), p, p + 1, 2 * p + 1, 3 * p, 5 * p):
        ideal = 3 * (m + p - 1)
        law = ideal + 2 * c * ((p - 1) + (m - 1) * (p - 1) // p)
        assert run(make_schedule("1f1b", p, m), (1, 1, 1), latency=c).bubble.makespan == law
        for method in ("gpipe", "eager"):
            assert run(make_schedule(method, p, m), (1, 1, 1), latency=c).bubble.makespan == ideal + 2 * c * (p - 1)


def test_updates_take_time_on_their_rank():
    """One STEP of 5 per batch and rank: behind the last backward, and in the way of the next batch's first forward."""
    schedule = make_schedule("1f1b", 3, 4)
    costs = Costs.uniform(schedule, step=5.0)
    assert simulate_schedule(schedule, costs).bubble.makespan == 3 * (4 + 2) + 5
    assert simulate_schedule(schedule, costs).bubble.ideal == 3 * 4 + 5


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash", "vertical-sync"])
def test_each_microbatch_crosses_each_border_twice(method: str, batches: int) -> None:
    """However many batches there are, also where a period holds passes of the batch before."""
    schedule = make_schedule(method, 3, 4)
    wanted = 2 * (3 - 1) * 4 * batches
    for each in (schedule, replace(schedule)):  # as arrays where it is one, and as actions
        assert count_messages(lower(each), batches) == (wanted, float(wanted))
