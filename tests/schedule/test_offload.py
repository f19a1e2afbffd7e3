"""Activations that are moved to the host's memory: where copies stand, what is proven, what it costs."""

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extend
from penstock.schedule.ir.schedule import Op, passes
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.offload import with_offload
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

METHODS = [
    "gpipe",
    "1f1b",
    "2bw",
    "2bw-ahead",
    "stash",
    "zb-h1",
    "interleaved",
    "zb-v",
    "chimera",
    "seq1f1b",
    "timeprest",
]


def simulated(method, stages, m, copy=None, batches=1):
    proof = check(make_schedule(method, stages, m))
    proof = proof if copy is None else extend(proof, offloads=True)
    costs = Costs.uniform(proof.schedule)
    return simulate_schedule(proof, Costs(costs.stages, copy=copy or 0.0), batches, window="unlimited")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_proven_with_it(method):
    proof = extend(make_schedule(method, 4, 8), offloads=True)
    plain = check(make_schedule(method, 4, 8))
    assert Op.OFFLOAD in proof.schedule.operations
    assert all(now <= before for now, before in zip(proof.activations, plain.activations, strict=True))
    assert {s: f.delay for s, f in proof.stages.items()} == {s: f.delay for s, f in plain.stages.items()}


def test_gpipe_holds_three_microbatches():
    """One that is made or used, and one on its way back: whatever m is."""
    for m in (4, 8, 16):
        assert max(extend(make_schedule("gpipe", 4, m), offloads=True).activations) <= 3
    assert extend(make_schedule("gpipe", 4, 16), offloads=True).activations[0] < 16


def test_copies_stand_behind_forwards_and_a_pass_before_backwards():
    schedule = with_offload(make_schedule("1f1b", 3, 4))
    assert " ".join(str(a).partition("@")[0] for a in schedule.programs[0].period) == (
        "F0 OFFLOAD0 F1 OFFLOAD1 FETCH0 F2 OFFLOAD2 B0 FETCH1 F3 OFFLOAD3 FETCH2 B1 FETCH3 B2 B3 STEP[0]"
    )
    assert all(a.op not in (Op.OFFLOAD, Op.FETCH) for a in schedule.programs[2].period)


def test_fast_copies_cost_no_time_and_slow_ones_do():
    """Copies of half a forward are hidden behind passes; with copies of two forwards the lane is the bottleneck."""
    plain = simulated("1f1b", 4, 16).bubble.makespan
    assert simulated("1f1b", 4, 16, copy=0.5).bubble.makespan == plain
    slow = simulated("1f1b", 4, 16, copy=2.0).bubble.makespan
    assert slow > plain
    copies = sum(p.op in (Op.OFFLOAD, Op.FETCH) for a in with_offload(make_schedule("1f1b", 4, 16)).programs[0].period
                 for p in passes(a))  # fmt: skip
    assert slow >= 2.0 * copies


def test_what_moves_activations_by_itself_is_refused():
    with pytest.raises(ScheduleError, match="by itself"):
        with_offload(make_schedule("bpipe", 4, 8))


def test_stages_that_recompute_move_nothing():
    again = extend(make_schedule("gpipe", 3, 4), recomputes=(0,), offloads=True).schedule
    moved = {a.stage.index for program in again.programs for a in program.period if a.op is Op.OFFLOAD}
    assert moved == {1, 2}
    with pytest.raises(ConfigError, match="stage 0 recomputes"):
        with_offload(extend(make_schedule("gpipe", 3, 4), recomputes=(0,)).schedule, stages=[0])


def test_the_text_form_keeps_it():
    schedule = with_offload(make_schedule("2bw", 3, 4))
    assert parse_schedule(str(schedule)).programs == schedule.programs
