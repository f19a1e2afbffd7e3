"""Every way to spoil a schedule that we can think of is refused, with the action named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Op, Program, WeightRef
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from support.brute_force import complaint
from support.examples import examples
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

SWEEP = settings(max_examples=examples(100), derandomize=True, deadline=None, database=None)


@st.composite
def schedules(draw, methods=tuple(CHAINS)):
    """A legal schedule of any method."""
    method = draw(st.sampled_from(methods))
    stages = draw(st.integers(1, 4))
    fewest = max(stages - 1, least(method, stages))
    return make_schedule(method, stages, draw(st.integers(fewest, max(fewest, 5))))


@st.composite
def places(draw, schedule, op=None):
    """(rank, part, position) of an action, of one operation if asked."""
    found = [
        (rank, part, i)
        for rank, program in enumerate(schedule.programs)
        for part in (0, 1)
        for i, action in enumerate(program[part])
        if op is None or action.op is op
    ]
    return draw(st.sampled_from(found))


def edited(schedule, rank, part, edit):
    """The schedule with one part of one rank's program changed; `edit` works on a list of actions in place."""
    programs = [[list(p) for p in program] for program in schedule.programs]
    edit(programs[rank][part])
    return replace(schedule, programs=tuple(Program(tuple(p), tuple(e)) for p, e in programs))


def swapped(schedule, rank, part, i):
    def swap(row):
        row[i], row[i + 1] = row[i + 1], row[i]

    return edited(schedule, rank, part, swap)


def refused(schedule):
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    return str(caught.value)


@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize("stages", range(1, 6))
def test_every_method_passes_the_proof(method, stages):
    fewest = max(stages - 1, least(method, stages))
    for microbatches in (fewest, fewest + 1, fewest + 3):
        schedule = make_schedule(method, stages, microbatches)
        assert check(schedule).schedule == schedule
        assert complaint(schedule) is None


def agrees_with_the_second_judge(spoilt):
    message = None
    try:
        check(spoilt)
    except ScheduleError as error:
        message = str(error)
    if complaint(spoilt):
        assert message
    else:  # legal, unless its messages need more buffers, or another order, than a lane offers
        assert message is None or "lane from rank" in message


# --- any edit: the proof and a second judge agree --------------------------------------------------------------------


@SWEEP
@given(st.data())
def test_swapped_neighbours_are_refused_exactly_where_the_meaning_changes(data):
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule))
    if i + 1 == len(schedule.programs[rank][part]):
        return
    agrees_with_the_second_judge(swapped(schedule, rank, part, i))


@SWEEP
@given(st.data())
def test_a_wrong_version_is_refused(data):
    """Nothing but the version differs: whether a number is right shows only batches later, at the start it is 0."""
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule))
    action = schedule.programs[rank][part][i]
    if action.reads is None:
        return
    version = action.reads.versions[0] + data.draw(st.sampled_from([-3, -2, -1, 1, 2]))
    wrong = action._replace(reads=WeightRef((version,)))
    spoilt = edited(schedule, rank, part, lambda row: row.__setitem__(i, wrong))
    assert complaint(spoilt)
    message = refused(spoilt)
    assert f"rank {rank}, " in message


@SWEEP
@given(st.data())
def test_a_moved_action_is_judged_as_by_the_second_judge(data):
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule))
    to = data.draw(st.integers(0, len(schedule.programs[rank][part]) - 1))
    spoilt = edited(schedule, rank, part, lambda row: row.insert(to, row.pop(i)))
    agrees_with_the_second_judge(spoilt)


# --- edits that are always wrong -------------------------------------------------------------------------------------


@SWEEP
@given(st.data())
def test_a_dropped_action_is_refused(data):
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule))
    action = schedule.programs[rank][part][i]
    message = refused(edited(schedule, rank, part, lambda row: row.pop(i)))
    assert {Op.F: "forward", Op.B: " B", Op.STEP: "STEP"}[action.op] in message
    assert f"stage {rank}" in message or f"stage {rank}" in message


@SWEEP
@given(st.data())
def test_a_doubled_action_is_refused(data):
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule))
    to = data.draw(st.integers(0, len(schedule.programs[rank][part])))
    action = schedule.programs[rank][part][i]
    message = refused(edited(schedule, rank, part, lambda row: row.insert(to, action)))
    assert {Op.F: "2 forwards", Op.B: "2 B", Op.STEP: "2 STEPs"}[action.op] in message or "to drain" in message


@SWEEP
@given(st.data())
def test_an_action_of_another_batch_is_refused(data):
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule))
    action = schedule.programs[rank][part][i]
    step = 1 if action.op is Op.STEP else schedule.microbatches
    moved = action._replace(
        unit=action.unit._replace(first=action.unit.first + data.draw(st.sampled_from([-1, 1])) * step)
    )
    spoilt = edited(schedule, rank, part, lambda row: row.__setitem__(i, moved))
    message = refused(spoilt)
    assert "to drain" in message or "has not begun" in message


@SWEEP
@given(st.data())
def test_an_action_on_another_ranks_stage_is_refused(data):
    schedule = data.draw(schedules().filter(lambda s: s.ranks > 1))
    rank, part, i = data.draw(places(schedule))
    other = schedule.stages[(rank + data.draw(st.integers(1, schedule.ranks - 1))) % schedule.ranks]
    wrong = schedule.programs[rank][part][i]._replace(stage=other)
    message = refused(edited(schedule, rank, part, lambda row: row.__setitem__(i, wrong)))
    assert f"is in the program of rank {rank}, which holds no such stage" in message
    assert f"{wrong.op}" in message


@SWEEP
@given(st.data())
def test_a_step_too_early_is_refused(data):
    """A STEP moved ahead of one of its batch's backwards would use half a gradient."""
    schedule = data.draw(schedules())
    rank, part, i = data.draw(places(schedule, Op.STEP))
    row = schedule.programs[rank][part]
    batch, m = row[i].unit.first, schedule.microbatches
    before = [j for j in range(i) if row[j].op is Op.B and row[j].unit.first // m == batch]
    if not before:
        return
    to = data.draw(st.sampled_from(before))
    message = refused(edited(schedule, rank, part, lambda r: r.insert(to, r.pop(i))))
    assert f"rank {rank}, STEP" in message
    assert "comes before" in message


# --- one fault each, with its message --------------------------------------------------------------------------------


def text_fault(schedule, old, new):
    """Spoil a schedule through its text form; `old` must be there."""
    text = str(schedule)
    assert text.count(old) == 1, text
    return refused(parse_schedule(text.replace(old, new)))


def test_a_backward_before_its_forward():
    message = text_fault(make_schedule("1f1b", 2, 2), "rank 1: F0^t B0^t", "rank 1: B0^t F0^t")
    assert "rank 1, B0 needs the forward of microbatch 0 on stage 1, which stands later on the same rank" in message


def test_a_2bw_step_one_batch_too_early_overwrites_a_buffer():
    """With STEP[t-1] in place of STEP[t-2] the gradient of batch t-1 is not complete on stage 0."""
    schedule = make_schedule("2bw", 2, 2)
    text = "rank 0: STEP[t-1] F0^t-1 B-1^t-2 F1^t-1 B0^t-1"
    message = text_fault(schedule, "rank 0: STEP[t-2] F0^t-1 B-1^t-2 F1^t-1 B0^t-1", text)
    assert "to drain, stage 0 must run STEP for [-1]" in message


def test_a_2bw_step_behind_the_forward_that_should_read_it():
    schedule = make_schedule("2bw", 1, 2)
    message = text_fault(schedule, "rank 0: STEP[t-2] F0^t-1 B0^t-1", "rank 0: F0^t-1 STEP[t-2] B0^t-1")
    assert "rank 0, F0^t-1: reads version t-1, which does not exist yet" in message
    assert "found in batch 2" in message


def test_a_second_gradient_finds_no_buffer():
    """The last backward of batch t-1 comes after the first of batch t: two gradients at once, and two versions."""
    text = """
        rule double-buffer
        microbatches 2
        nodes 0@0
        rank 0: F0^t-1 F1^t-1 B0^t-1 B-1^t-2 STEP[t-1]
        drain 0: B-1^t-2 STEP[t-1]
    """
    message = refused(parse_schedule(text))
    assert "rank 0, B0^t-1: needs a buffer for the gradient of batch t" in message
    assert "all 3 are in use: versions t-2, t-1, gradients of batches t-1" in message


def test_newest_weights_have_room_for_one_gradient_only():
    schedule = make_schedule("stash", 2, 3)
    message = refused(replace(make_schedule("2bw", 2, 2), rule="newest"))
    assert "rule 'newest'" in message
    assert check(schedule).stages[schedule.stages[0]].buffers == 3  # two versions and a gradient


def test_flush_refuses_an_update_under_a_microbatch_in_flight():
    text = "rank 0: F0^t F1^t B0^t B1^t STEP[t]"
    schedule = make_schedule("gpipe", 1, 2)
    message = text_fault(schedule, text, "rank 0: F0^t B0^t F1^t STEP[t] B1^t")
    assert "rank 0, STEP[t]: comes before 1 of batch t's backwards" in message


def test_stash_reads_again_what_the_forward_read():
    message = text_fault(make_schedule("stash", 2, 1), "B-1^t-2 STEP[t-1]\nrank 1", "B-1^t-1 STEP[t-1]\nrank 1")
    assert "rank 0, B-1^t-1: must read version t-2, as its forward did (rule 'stash', found in batch 2)" in message


def test_a_dropped_drain_is_refused_with_what_it_must_hold():
    message = text_fault(make_schedule("stash", 3, 2), "\ndrain 1: B-1^t-1 STEP[t-1]", "")
    assert "to drain, stage 1 must run B for [-1] (relative to the end); the epilogue has nothing" in message


def test_a_pass_without_a_version_is_refused():
    message = text_fault(make_schedule("1f1b", 1, 1), "F0^t B0^t", "F0 B0^t")
    assert "rank 0, F0: names no version of the weights" in message


def test_an_unknown_rule_is_refused_with_the_known_ones():
    message = refused(replace(make_schedule("1f1b", 1, 1), rule="fresh"))
    assert "unknown rule 'fresh'" in message
    assert "double-buffer" in message


def test_two_steps_out_of_turn_are_refused():
    message = text_fault(make_schedule("2bw", 1, 1), "drain 0: STEP[t-2] STEP[t-1]", "drain 0: STEP[t-1] STEP[t-2]")
    assert "rank 0, STEP[t-1]: starts from version t-1, which is not the newest valid version" in message
