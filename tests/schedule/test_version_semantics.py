"""Which weights each pass reads, compared with the equations of the papers over unrolled spans."""

from itertools import pairwise

import pytest

from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op
from support.schedules import make_schedule

DEPTHS = [1, 2, 3, 4, 6]
SIZES = [1, 2, 3, 4, 7]
BATCHES = 5


def reads(schedule, rank, older=0, batches=BATCHES):
    """Per pass of the span, in order: (operation, microbatch of the span, version read)."""
    for action in actions_of(schedule, rank, batches, older):
        if action.op is not Op.STEP:
            (version,) = action.reads.versions
            yield action.op, action.unit.first, version


def pipedream_2bw(microbatch, m):
    """The paper's v(k) = max(floor((k-1)/m) - 1, 0), with inputs k counted from 1."""
    k = microbatch + 1
    return max((k - 1) // m - 1, 0)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager", "sequential"])
def test_flush_reads_every_earlier_update(method, depth, m):
    schedule = make_schedule(method, depth, m)
    for rank in range(depth):
        assert all(version == k // m for _, k, version in reads(schedule, rank))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("more", [0, 1, 5])
def test_2bw_reads_the_version_of_the_paper_in_both_passes(depth, more):
    m = max(depth - 1, 1) + more
    schedule = make_schedule("2bw", depth, m)
    for rank in range(depth):
        assert all(version == pipedream_2bw(k, m) for _, k, version in reads(schedule, rank))


@pytest.mark.parametrize("depth", DEPTHS)
def test_2bw_over_the_eager_order_reads_the_same_versions(depth):
    m = max(2 * depth - 2, 1)
    schedule = make_schedule("2bw", depth, m, order="endless-eager-1f1b")
    for rank in range(depth):
        assert all(version == pipedream_2bw(k, m) for _, k, version in reads(schedule, rank))


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_stash_reads_what_the_stage_had_when_the_microbatch_came(depth, m):
    """Forward g of stage s runs after backward g-(d-1-s)-1, so floor(max(0, g-(d-1-s))/m) updates are in."""
    schedule = make_schedule("stash", depth, m)
    for stage in range(depth):
        for _, g, version in reads(schedule, stage):  # the backward reads what the forward read
            assert version == max(0, g - (depth - 1 - stage)) // m


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_vertical_sync_reads_on_every_stage_what_stage_0_had(depth, m):
    schedule = make_schedule("vertical-sync", depth, m)
    for stage in range(depth):
        for _, g, version in reads(schedule, stage):
            assert version == max(0, g - (depth - 1)) // m


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_newest_reads_the_newest_weights_in_the_backward_too(depth, m):
    """The forward is that of stashing; the backward of g comes after that of g-1, so floor(g/m) updates are in."""
    schedule = make_schedule("newest", depth, m)
    for stage in range(depth):
        for op, g, version in reads(schedule, stage):
            assert version == (max(0, g - (depth - 1 - stage)) // m if op is Op.F else g // m)


@pytest.mark.parametrize("depth", DEPTHS)
def test_2bw_span_that_continues_an_earlier_one_begins_with_two_bases(depth):
    """After a checkpoint batch 0 reads the older of the two saved versions (-1) and batch 1 the newer one (0)."""
    m = depth + 1
    schedule = make_schedule("2bw", depth, m)
    for rank in range(depth):
        assert all(version == k // m - 1 for _, k, version in reads(schedule, rank, older=-1))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("older", [0, -1, -2])
def test_3bw_reads_the_version_of_two_batches_before_as_far_as_there_is_one(depth, older):
    m = max(depth // 2, 1)
    schedule = make_schedule("3bw", depth, m)
    for rank in range(depth):
        assert all(version == max(k // m - 2, older) for _, k, version in reads(schedule, rank, older))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", ["2bw", "3bw", "stash", "vertical-sync", "newest", "1f1b"])
def test_every_version_is_born_once_and_in_order(method, depth):
    schedule = make_schedule(method, depth, depth + 1)
    for rank in range(depth):
        steps = [a.unit.first for a in actions_of(schedule, rank, BATCHES) if a.op is Op.STEP]
        assert steps == list(range(BATCHES))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("more", [0, 1, 4])
def test_2bw_steps_directly_before_the_first_forward_that_reads_the_new_version(depth, more):
    m = max(depth - 1, 1) + more
    schedule = make_schedule("2bw", depth, m)
    for rank in range(depth):
        actions = list(actions_of(schedule, rank, BATCHES))
        for i, action in enumerate(actions):
            if action.op is Op.STEP and action.unit.first + 2 < BATCHES:
                following = actions[i + 1]
                assert (following.op, following.unit.first) == (Op.F, (action.unit.first + 2) * m)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", ["stash", "vertical-sync", "newest"])
def test_pipedream_steps_directly_after_the_last_backward_of_the_batch(method, depth, m):
    schedule = make_schedule(method, depth, m)
    for rank in range(depth):
        actions = list(actions_of(schedule, rank, BATCHES))
        for before, action in pairwise(actions):
            if action.op is Op.STEP:
                assert (before.op, before.unit.first) == (Op.B, action.unit.first * m + m - 1)


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager", "sequential"])
def test_flush_steps_when_nothing_is_in_flight(method):
    schedule = make_schedule(method, 3, 4)
    for rank in range(3):
        flying = 0
        for action in actions_of(schedule, rank, 3):
            flying += {Op.F: 1, Op.B: -1}.get(action.op, 0)
            if action.op is Op.STEP:
                assert flying == 0
