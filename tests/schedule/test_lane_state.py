"""Copies of activations to the host and back: on a lane of their own, awaited by what uses them only."""

from itertools import pairwise

import pytest

from penstock.idle_time import Idle, split_time
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op, Unit, passes
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from penstock.simulate.simulate import simulate_schedule
from penstock.view.svg import timeline_svg
from penstock.view.text import draw_timeline

ONE = """
schedule offloaded
rule flush
microbatches 3
nodes 0@0
rank 0: F0^t OFFLOAD0 F1^t OFFLOAD1 F2^t B2^t FETCH1 FETCH0 B1^t B0^t STEP[t]
"""


def placed(copy, batches=1, text=ONE):
    schedule = parse_schedule(text)
    costs = Costs((StageCost(2.0, 1.0, 1.0),) * schedule.num_stages, copy=copy)
    found = play(check(schedule).lowered, costs, batches)[0]
    return {i.label: (i.start, i.end) for i in found.intervals if i.what not in ("SEND", "STEP")}, found


def test_passes_go_on_while_activations_are_copied():
    """F takes 2, B 2 and a copy 1.5: FETCH0 ends at 11, but B1 needs FETCH1 only."""
    at, timeline = placed(1.5)
    assert at["F0"] == (0, 2)
    assert at["OFFLOAD0"] == (2, 3.5)
    assert at["F1"] == (2, 4)
    assert at["OFFLOAD1"] == (4, 5.5)
    assert at["B2"] == (6, 8)
    assert at["FETCH1"] == (8, 9.5)
    assert at["FETCH0"] == (9.5, 11)
    assert at["B1"] == (9.5, 11.5)
    assert at["B0"] == (11.5, 13.5)
    assert timeline.bubble().busy == (12,)


def test_what_a_rank_waits_for_is_a_copy():
    """By hand, with copies of 5: B1 begins at 17, 9 after the last pass, and B0 at 22, 3 after B1."""
    _, timeline = placed(5.0)
    assert split_time(timeline).idle == (Idle(copy=9 + 3),)
    _, timeline = placed(0.0)
    assert split_time(timeline).idle == (Idle(),)


def test_slow_copies_queue_and_hold_up_what_needs_them():
    at, _ = placed(5.0)
    assert at["OFFLOAD0"] == (2, 7)
    assert at["OFFLOAD1"] == (7, 12)
    assert at["FETCH1"] == (12, 17)
    assert at["B2"] == (6, 8)  # needs no copy
    assert at["B1"] == (17, 19)
    assert at["FETCH0"] == (17, 22)
    assert at["B0"] == (22, 24)


def test_a_copy_frees_memory_when_it_ends():
    """With slow copies all three microbatches are held at once; with fast ones two."""
    schedule = parse_schedule(ONE)
    fast, slow = (Costs((StageCost(2.0, 1.0, 1.0),), copy=copy) for copy in (0.5, 5.0))
    assert simulate_schedule(schedule, fast).activations == (2.0,)
    found = simulate_schedule(schedule, slow)
    assert found.activations == (3.0,)
    samples = found.timeline.memory[0, "activations"]
    assert all(before[0] <= after[0] for before, after in pairwise(samples))
    assert samples[-1][1] == 0


def test_copies_without_a_price_change_no_time():
    at, _ = placed(0.0)
    assert at["B1"] == (8, 10)
    assert at["B0"] == (10, 12)


def reference(schedule, forward, backward, copy, batches):
    """The times of one rank without messages, by its equations."""
    now = free = 0.0
    back, found = {}, {}
    for action in actions_of(schedule, 0, batches):
        for p in passes(action):
            if p.op in (Op.OFFLOAD, Op.FETCH):
                free = max(now, free) + copy
                if p.op is Op.FETCH:
                    back[p.unit.first] = free
            elif p.op in (Op.F, Op.B):
                now = max(now, back.pop(p.unit.first, 0.0)) + (forward if p.op is Op.F else backward)
                found[p.op, p.unit.first] = now
    return found


@pytest.mark.parametrize("copy", [0.25, 1.0, 3.0, 9.0])
def test_a_span_follows_the_equations(copy):
    schedule = parse_schedule(ONE)
    expected = reference(schedule, 2.0, 2.0, copy, 3)
    _, timeline = placed(copy, batches=3)
    assert {(Op(i.what), i.microbatch): i.end for i in timeline.work() if i.what in ("F", "B")} == expected


def test_drawings_show_a_lane_of_the_host():
    _, timeline = placed(1.5)
    drawn = str(draw_timeline(timeline, 100))
    assert "host 0" in drawn
    assert "↑0" in drawn
    assert "↓1" in drawn
    svg = timeline_svg(timeline, "offloaded")
    assert ">host</text>" in svg
    assert "activations moved away" in svg
    _, none = placed(0.0)
    assert "host" not in str(draw_timeline(none, 100))


def test_units_of_copies_are_whole_microbatches():
    assert Costs((StageCost(1, 1, 1),), copy=4.0).duration(check_action(Op.OFFLOAD)) == 4.0
    assert (
        Costs((StageCost(1, 1, 1),), copy=4.0).duration(check_action(Op.FETCH)._replace(unit=Unit(0, 1, (0, 2)))) == 2
    )


def check_action(op):
    return next(a for a in parse_schedule(ONE).programs[0].period if a.op is op)
