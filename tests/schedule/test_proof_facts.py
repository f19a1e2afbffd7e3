"""What the proof derives (versions, buffers, delays, activations), compared with the formulas of the papers."""

from math import ceil

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule

DEPTHS = [1, 2, 3, 4, 6]
SIZES = [1, 2, 3, 8]


def by_stage(proof):
    return [proof.stages[stage] for stage in sorted(proof.stages)]


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("method", "in_flight"),
    [
        ("gpipe", lambda d, s, m: m),
        ("1f1b", lambda d, s, m: min(m, d - s)),
        ("eager", lambda d, s, m: min(m, 2 * (d - s) - 1)),
        ("sequential", lambda d, s, m: 1),
        ("stash", lambda d, s, m: d - s),  # batches overlap: m is no cap
    ],
)
def test_the_proof_counts_peak_activations(method, in_flight, depth, m):
    proof = prove(method, depth, m)
    assert list(proof.activations) == [in_flight(depth, s, m) for s in range(depth)]


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager", "sequential"])
def test_flush_keeps_one_version_and_has_no_delay(method, depth, m):
    for facts in by_stage(prove(method, depth, m)):
        assert (facts.versions, facts.copies, facts.buffers, tuple(facts.delay)) == (1, 0, 2, (0, 0))


@pytest.mark.parametrize("more", [0, 1, 2, 6])
@pytest.mark.parametrize("depth", DEPTHS)
def test_2bw_keeps_two_versions_in_three_buffers_and_has_delay_one_on_every_stage(depth, more):
    for facts in by_stage(prove("2bw", depth, max(1, depth - 1) + more)):
        assert (facts.versions, facts.copies, facts.buffers, tuple(facts.delay)) == (2, 0, 3, (1, 1))


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_stashed_versions(depth, m):
    facts = by_stage(prove("stash", depth, m))
    assert [f.versions for f in facts] == [ceil((depth - 1 - s) / m) + 1 for s in range(depth)]


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_stash_delay_is_the_distance_to_the_last_stage(depth, m):
    """Of the m forwards of a batch on stage s, d-1-s run before the update that their place in line would allow."""
    for s, facts in enumerate(by_stage(prove("stash", depth, m))):
        assert facts.delay.forward == facts.delay.backward == pytest.approx((depth - 1 - s) / m, abs=1e-12)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_newest_has_the_stashed_forward_delay_and_none_in_the_backward(depth, m):
    for s, facts in enumerate(by_stage(prove("newest", depth, m))):
        assert facts.delay.forward == pytest.approx((depth - 1 - s) / m, abs=1e-12)
        assert (facts.delay.backward, facts.versions, facts.buffers) == (0, 1, 2)


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_vertical_sync_has_the_delay_of_stage_0_everywhere(depth, m):
    for facts in by_stage(prove("vertical-sync", depth, m)):
        assert facts.delay.forward == facts.delay.backward == pytest.approx((depth - 1) / m, abs=1e-12)


@pytest.mark.parametrize("method", ["seq1f1b", "terapipe"])
def test_every_slice_asks_for_what_its_microbatch_was_admitted_with(method):
    for facts in by_stage(prove(method, 3, 3, rule="vertical-sync")):
        assert (facts.delay.forward, facts.delay.backward, facts.versions) == (0, 0, 1)


def live_versions(schedule, rank, batches):
    """The most versions alive at once, from the unrolled span: a version lives from its birth to its last reader."""
    actions = list(actions_of(schedule, rank, batches))
    last_read, newest, most = {}, 0, 1
    for i, action in enumerate(actions):
        if action.reads:
            last_read[action.reads.versions[0]] = i
    for i, action in enumerate(actions):
        if action.op == "STEP":
            newest = action.unit.first + 1
            most = max(most, 1 + sum(last > i for version, last in last_read.items() if version < newest))
    return most


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", ["stash", "vertical-sync", "newest", "1f1b"])
def test_live_versions_equal_those_of_an_unrolled_span(method, depth, m):
    proof = prove(method, depth, m)
    batches = 2 * depth + 4  # long enough to fill the pipeline, whatever m is
    for rank in range(depth):
        assert proof.versions_on(rank) == live_versions(proof.schedule, rank, batches)


@pytest.mark.parametrize("depth", DEPTHS)
def test_flushed_schedules_are_steady_from_the_first_batch(depth):
    assert prove("1f1b", depth, 3).steady_from == 0


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_endless_schedules_are_steady_once_the_pipeline_is_full(depth, m):
    """Batch t works on microbatches up to d-1 back: before batch ceil((d-1)/m) some of them do not exist."""
    assert prove("stash", depth, m).steady_from >= ceil((depth - 1) / m)


def test_a_period_that_works_on_the_batch_before_has_the_same_facts():
    """The same stream of actions, written one batch later: nothing about its weights changes."""
    here = "rule stash\nmicrobatches 1\nnodes 0@0\nrank 0: F0^t B0^t STEP[t]\n"
    late = here.replace("F0^t B0^t STEP[t]", "F-1^t-1 B-1^t-1 STEP[t-1]") + "drain 0: F-1^t-1 B-1^t-1 STEP[t-1]\n"
    assert by_stage(check(parse_schedule(late))) == by_stage(check(parse_schedule(here)))


def test_forwards_may_read_versions_in_any_order():
    """Microbatch 1 was admitted with version t, microbatch 0 with t-1; rank 1 runs them the other way round.

    Version t-1 has to live until the later forward, although the one before it reads a newer one.
    """
    text = """
        rule vertical-sync
        microbatches 2
        nodes 0@0 1@1
        rank 0: F0^t-1 B-1^t-1 B-2^t-2 STEP[t-1] F1^t
        rank 1: F1^t B1^t F0^t-1 B0^t-1 STEP[t]
        drain 0: B-1^t-1 B-2^t-2 STEP[t-1]
    """
    check(parse_schedule(text))


def test_moving_the_input_of_a_recomputed_microbatch_frees_no_activations():
    """R2 and R3 hold two; OFFLOAD and FETCH move what counts as nothing."""
    text = """
        microbatches 4
        nodes 0@0
        rank 0: F0^t F1^t OFFLOAD0 OFFLOAD1 F2^t F3^t R2^t R3^t B2^t B3^t FETCH0 R0^t B0^t FETCH1 R1^t B1^t STEP[t]
    """
    assert list(check(parse_schedule(text)).activations) == [2]


def test_vertical_sync_with_a_rank_that_admits_and_follows():
    """Two directions: each rank admits for the other, so that no rank can be played as a whole before the other."""
    text = """
        rule vertical-sync
        microbatches 2
        nodes 0@0 1@1 0.1@1 1.1@0
        rank 0: F0@0^t F1@1.1^t B1@1.1^t B0@0^t REDUCE[t]@0 STEP[t]@0 REDUCE[t]@1.1 STEP[t]@1.1
        rank 1: F1@0.1^t F0@1^t B0@1^t B1@0.1^t REDUCE[t]@0.1 STEP[t]@0.1 REDUCE[t]@1 STEP[t]@1
    """
    proof = check(parse_schedule(text))
    assert all(facts.delay.forward == 0 for facts in proof.stages.values())


def test_vertical_sync_remembers_an_admission_until_every_stage_has_asked():
    """With a local loss the first stage is through with a microbatch before the second one begins."""
    text = """
        rule vertical-sync
        microbatches 1
        nodes 0@0 1@1
        edges 0|1
        rank 0: F0^t B0^t STEP[t]
        rank 1: F-1^t-1 B-1^t-1 STEP[t-1]
        drain 1: F-1^t-1 B-1^t-1 STEP[t-1]
    """
    assert [tuple(facts.delay) for facts in check(parse_schedule(text)).stages.values()] == [(0, 0), (0, 0)]
