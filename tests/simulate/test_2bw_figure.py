"""PipeDream-2BW's Figure 2, slot by slot: d = 4, m = 4, forwards of 1, backwards of 2, no communication.

The paper counts workers, inputs and slots from 1: rank = worker - 1, microbatch = input - 1, slot t is [t - 1, t]. It
draws worker 1's fourth forward late, at 9; as soon as possible it runs at 3, and every backward stays where it is.
"""

from itertools import pairwise

import pytest

from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule

BATCHES = 5
PROOF = prove("2bw", 4, 4)
COSTS = Costs.uniform(PROOF.schedule)
RUN = simulate_schedule(PROOF, COSTS, BATCHES)
WORK = {(i.rank + 1, i.what, i.label): i for i in RUN.timeline.intervals}


def interval(worker, what, number):
    found = WORK[worker, what, f"{what}{number - 1}"]
    return found.start, found.end


@pytest.mark.parametrize(("worker", "start"), [(4, 13), (3, 15), (2, 17), (1, 19)])
def test_the_fourth_backward_bears_the_first_new_weights(worker, start):
    assert interval(worker, "B", 4) == (start, start + 2)


@pytest.mark.parametrize("worker", [1, 2, 3, 4])
def test_steady_period_is_three_without_idle_time(worker):
    """From its first backward to its last forward a worker never waits, and each microbatch takes 3."""
    work = sorted((i.start, i.end) for (w, what, _), i in WORK.items() if w == worker and what in "FB")
    first_backward = interval(worker, "B", 1)[0]
    last_forward = interval(worker, "F", 4 * BATCHES)[1]
    steady = [(a, b) for a, b in work if first_backward <= a and b <= last_forward]
    assert all(before[1] == after[0] for before, after in pairwise(steady))
    for number in range(2, 4 * BATCHES + 1):
        assert interval(worker, "B", number)[0] - interval(worker, "B", number - 1)[0] == 3


def test_input_7_on_worker_3_reads_old_weights_while_new_ones_are_there():
    """Slot 21, the paper's example: B4 of worker 3 ended at 17, and still input 7 must use W(0)."""
    assert interval(3, "F", 7) == (20, 21)
    assert interval(3, "B", 4)[1] == 17
    assert WORK[3, "F", "F6"].version == 0


@pytest.mark.parametrize("worker", [1, 2, 3, 4])
@pytest.mark.parametrize(("inputs", "label"), [(range(1, 9), 0), (range(9, 13), 4), (range(13, 17), 8)])
def test_versions_by_the_last_input_folded_in(worker, inputs, label):
    """W^(4), after the batch of inputs 1 to 4, is version 1 here."""
    for number in inputs:
        for what in "FB":
            assert WORK[worker, what, f"{what}{number - 1}"].version == label // 4


def test_never_more_than_two_versions():
    assert RUN.versions == (2, 2, 2, 2)


def test_makespan_is_that_of_one_long_pipeline():
    assert RUN.bubble.makespan == 3 * (4 * BATCHES + 3)


def test_the_only_idle_time_is_fill_and_drain():
    assert steady_bubble(PROOF.lowered, COSTS, BATCHES) == pytest.approx(0, abs=1e-12)
