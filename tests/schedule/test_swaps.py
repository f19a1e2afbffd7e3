"""Optimizer states that come from the host's memory for their updates: where copies stand, what they cost."""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.idle_time import Idle, split_time
from penstock.schedule.add_options import extend
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from penstock.simulate.simulate import simulate_schedule

METHODS = ["1f1b", "gpipe", "2bw", "2bw-ahead", "stash", "zb-h1", "zb-v", "pipemare", "chimera", "bpipe"]
CHUNKS = ["interleaved", "layered", "2bw-layered", "depth-first-full"]


def swapped(method, stages=3, m=6, **more):
    chunks = {"options": {"chunks": 3}} if method in CHUNKS else {}
    plain = ScheduleRequest(method, stages, m, **chunks).prove()
    return extend(plain, swaps=True, **more), plain


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("method", [*METHODS, *CHUNKS])
def test_every_method_is_proven_with_states_away(method, decides):
    """And at most two states of a rank are here at a time, a third one on its way back."""
    proof, plain = swapped(method, 4 if method == "chimera" else 3, 8 if method == "chimera" else 6, decides=decides)
    assert {s: f.delay for s, f in proof.stages.items()} == {s: f.delay for s, f in plain.stages.items()}
    for rank in range(proof.schedule.ranks):
        here, most = 0, 0
        for action in actions_of(proof.schedule, rank, 4):
            here += (action.op is Op.SWAPIN) - (action.op is Op.SWAPOUT)
            most = max(most, here)
        assert here == 0
        assert most == min(2, len(proof.schedule.on_rank(rank)))


def test_copies_stand_around_updates():
    assert str(swapped("1f1b", 2, 2)[0].schedule).splitlines()[4:] == [
        "rank 0: F0^t F1^t B0^t SWAPIN[t] B1^t STEP[t] SWAPOUT[t]",
        "rank 1: F0^t B0^t F1^t SWAPIN[t] B1^t STEP[t] SWAPOUT[t]",
    ]
    assert str(swapped("2bw", 2, 2)[0].schedule).splitlines()[4:] == [
        "rank 0: STEP[t-2] SWAPOUT[t-2] F0^t-1 B-1^t-2 F1^t-1 SWAPIN[t-1] B0^t-1",
        "rank 1: STEP[t-2] SWAPOUT[t-2] F0^t-1 B0^t-1 F1^t-1 SWAPIN[t-1] B1^t-1",
        "drain 0: STEP[t-2] SWAPOUT[t-2] SWAPIN[t-1] B-1^t-2 STEP[t-1] SWAPOUT[t-1]",
        "drain 1: STEP[t-2] SWAPOUT[t-2] SWAPIN[t-1] STEP[t-1] SWAPOUT[t-1]",
    ]


ONE = """
microbatches 2
nodes 0@0
rank 0: F0^t B0^t F1^t SWAPIN[t] B1^t STEP[t] SWAPOUT[t]
"""


def test_an_update_waits_for_its_state_alone():
    """By hand: F and B take 2, STEP 1 and a copy 5. SWAPIN ends 3 after B1, and SWAPOUT while the next batch runs."""
    costs = Costs((StageCost(2.0, 1.0, 1.0, 1.0),), swap=5.0)
    timeline = play(check(parse_schedule(ONE)).lowered, costs, 2)[0]
    at = {i.label: (i.start, i.end) for i in timeline.intervals}
    assert at["SWAPIN0"] == (6, 11)
    assert at["B1"] == (6, 8)
    assert at["STEP0"] == (11, 12)
    assert at["SWAPOUT0"] == (12, 17)
    assert at["F2"] == (12, 14)
    assert at["SWAPIN1"] == (18, 23)
    assert split_time(timeline).idle == (Idle(copy=3 + 3),)


def test_hidden_copies_cost_no_time():
    proof = swapped("1f1b", 4, 8)[0]
    plain, hidden, slow = (
        simulate_schedule(proof, replace(Costs.uniform(proof.schedule), swap=swap), 4) for swap in (0.0, 2.0, 8.0)
    )
    assert plain.bubble == hidden.bubble
    assert slow.bubble.makespan > plain.bubble.makespan
    assert slow.time_split.shares()["copy"] > 0


def test_updates_that_may_be_taken_back_keep_their_state():
    with pytest.raises(ScheduleError, match="set offload_optimizer to none"):
        swapped("zb-h2-post", 4, 8)
