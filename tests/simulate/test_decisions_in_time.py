"""What decisions cost: nothing while they fit into the slack of double-buffered weights, and their wait where not."""

import pytest

from penstock.schedule.build import prove
from penstock.schedule.proof.check import check
from penstock.schedule.transforms.batch_ops import with_decisions, with_reductions
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule


def steady(method, depth, m, latency, decides):
    proof = prove(method, depth, m, decides=decides)
    costs = Costs.uniform(proof.schedule, 1.0, 1.0, 1.0, latency=latency)
    return steady_bubble(proof.lowered, costs, proof.steady_from + 2)


def makespan(method, depth, m, latency, decides, batches):
    proof = prove(method, depth, m, decides=decides)
    costs = Costs.uniform(proof.schedule, 1.0, 1.0, 1.0, latency=latency)
    return simulate_schedule(proof, costs, batches).bubble.makespan


@pytest.mark.parametrize(("depth", "m"), [(2, 2), (2, 5), (4, 4), (4, 7), (8, 8), (8, 12)])
def test_2bw_decides_in_its_slack(depth, m):
    """From m = d on nobody waits for decisions, but for the last ones, when the pipeline drains."""
    assert steady("2bw", depth, m, 0.0, True) == pytest.approx(steady("2bw", depth, m, 0.0, False), abs=1e-12)
    for latency in (0.05, 0.1):
        plain, deciding = (makespan("2bw", depth, m, latency, decides, 6) for decides in (False, True))
        assert plain <= deciding <= plain + 2 * latency + 1e-9


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_3bw_has_no_bubble_with_half_as_many_microbatches_as_stages(depth):
    """Also where it decides; 1f1b with as many is idle for nearly two thirds of the time."""
    m = depth // 2
    for decides in (False, True):
        assert steady("3bw", depth, m, 0.0, decides) == pytest.approx(0.0, abs=1e-12)
    assert steady("1f1b", depth, m, 0.0, False) == pytest.approx((depth - 1) / (m + depth - 1))


@pytest.mark.parametrize(("depth", "m"), [(2, 2), (2, 4), (4, 4), (4, 6), (8, 8)])
def test_reductions_fit_into_the_slack_and_late_ones_are_priced(depth, m):
    """The stall is zero while a stage's reduction fits into m - d + 1 slots of a forward and a backward."""
    schedule = with_decisions(with_reductions(make_schedule("2bw", depth, m), everywhere=True))
    proof = check(schedule)

    def bubble(collective):
        uniform = Costs.uniform(schedule, 1.0, 1.0, 1.0)
        return steady_bubble(proof.lowered, Costs(uniform.stages, collective=collective), proof.steady_from + 2)

    slack = 3.0 * (m - depth + 1)
    assert bubble(slack) == pytest.approx(bubble(0.0), abs=1e-12)
    assert bubble(slack + 1) > bubble(0.0) + 0.01


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_flushed_batch_waits_for_its_decision(depth, batches):
    """Every stage steps two hops after the first stage's last backward."""
    latency = 0.25
    plain, deciding = (makespan("1f1b", depth, depth + 1, latency, decides, batches) for decides in (False, True))
    assert deciding == pytest.approx(plain + batches * 2 * latency)


@pytest.mark.parametrize("method", ["zb-h2", "zb-auto"])
@pytest.mark.parametrize(("depth", "m"), [(2, 6), (4, 12), (8, 24)])
def test_post_validation_takes_the_last_bubble_of_zero_bubble(method, depth, m):
    """Every rank begins and ends a batch at another time, so a batch that waits for a decision loses p - 1 slots."""
    assert steady(method, depth, m, 0.0, True) == pytest.approx((depth - 1) / (3 * m + depth - 1))
    assert steady(f"{method}-post", depth, m, 0.0, True) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("depth", "m"), [(2, 6), (4, 12), (8, 24)])
def test_a_rejected_version_costs_the_forwards_that_have_read_it(depth, m):
    """The first rank repeats 2 p - 1 forwards, and everybody else waits for that or does the same.

    It gains p - 1 slots otherwise: where about half of all batches are clipped, or more, zb-h2 without it is faster.
    """
    proof = prove("zb-h2-post", depth, m, decides=True)
    costs = Costs.uniform(proof.schedule)
    accepted, rejected = (simulate_schedule(proof, costs, 6, batches) for batches in ((), (1, 3)))
    assert rejected.bubble.makespan - accepted.bubble.makespan == pytest.approx(2 * (2 * depth - 1))
    redone = [i for i in rejected.timeline.intervals if i.what == "REDO"]
    assert len(redone) == 2 * sum(2 * (depth - rank) - 1 for rank in range(depth))
    assert {i.batch for i in redone} == {2, 4}
