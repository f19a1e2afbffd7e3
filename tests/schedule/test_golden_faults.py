"""One fault each in the hand-written schedules, aimed at the feature that the file shows: all refused, and told apart.

A fault is (what stands there, what is put in its place, what the message must say). What stands there must occur, so
that a changed golden file cannot switch a fault off. Dots stand for what a message says between its telling parts.
"""

from pathlib import Path

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule

FOLDER = Path(__file__).parents[1] / "golden"


def message_of(name, *edits):
    text = (FOLDER / f"{name}.txt").read_text()
    for old, new in edits:
        assert old in text, f"{name}.txt does not hold {old!r}"
        text = text.replace(old, new, 1)
    with pytest.raises(ScheduleError) as caught:
        check(parse_schedule(text, name))
    return str(caught.value)


GATHERING = [
    ("GATHER[t]@2^t ", "", "rank 0, F0@2^t: reads version t, which is not gathered here"),
    ("F1@0^t RELEASE[t]@0^t ", "RELEASE[t]@0^t F1@0^t ", "rank 0, F1@0^t: reads version t, which is not gathered"),
    ("B1@0^t RELEASE[t]@0^t", "RELEASE[t]@0^t B1@0^t", "rank 0, B1@0^t: reads version t, which is not gathered"),
    ("B1@0^t RELEASE[t]@0^t", "B1@0^t", "rank 0, STEP[t]@0: updates version t, which is still gathered; a RELEASE"),
    ("GATHER[t]@2^t", "GATHER[t]@2", "rank 0, GATHER[t]@2: names no version, as in GATHER[t]^t"),
    ("GATHER[t]@2^t", "GATHER[t]@2^t-1", "rank 0, F0@2^t: reads version t, which is not gathered here"),
    ("GATHER[t]@2^t", "GATHER[t]@2^t-1 RELEASE[t]@2^t-1 GATHER[t]@2^t", "reads version t-1, which no longer exists"),
    ("RELEASE[t]@2^t", "RELEASE[t]@2", "rank 0, RELEASE[t]@2: names no version, as in RELEASE[t]^t"),
    ("RELEASE[t]@2^t", "RELEASE[t]@2^t RELEASE[t]@2^t", "RELEASE[t]@2^t: releases version t, which is not"),
    ("GATHER[t]@2^t", "GATHER[t]@2^t GATHER[t]@2^t", "GATHER[t]@2^t: gathers version t, which is gathered already"),
    ("RELEASE[t]@0^t GATHER[t]@2^t", "GATHER[t]@2^t RELEASE[t]@0^t", "on rank 0 2 stages are gathered at once, but"),
    ("REDUCE[t]@2 STEP[t]@2", "STEP[t]@2 REDUCE[t]@2", "rank 0, STEP[t]@2: needs the REDUCE of its batch first"),
    ("REDUCE[t]@2 STEP[t]@2", "STEP[t]@2", "rank 0, STEP[t]@2: needs the REDUCE of its batch first"),
    ("B1@2^t RELEASE[t]@2^t REDUCE[t]@2", "REDUCE[t]@2 B1@2^t RELEASE[t]@2^t", "STEP[t]@2: needs the REDUCE of its"),
    ("REDUCE[t]@2 ", "REDUCE[t]@2 REDUCE[t]@2 ", "rank 0, REDUCE[t]@2: adds nothing: no backward of batch t has run"),
    ("REDUCE[t]@2 STEP[t]@2 GATHER[t]@0^t B0@0^t", "GATHER[t]@0^t B0@0^t REDUCE[t]@2 STEP[t]@2", "2 full-size"),
    ("REDUCE[t]@2 ", "REDUCE[t]%2@2 ", "REDUCE"),  # every batch has a gradient to reduce
    ("sharding full:weights=1:gradients=1", "", "rank 0, GATHER[t]@0^t: gathers weights that are not sharded"),
    ("sharding full:weights=1:gradients=1", "sharding gradients", "GATHER[t]@0^t: gathers version t, which is whole"),
]  # fmt: skip

SHARED_CUTS = [
    ("REDUCE[t]@3 ", "", "stage 3 on rank 3 has 0 REDUCEs per batch; a stage of several directions needs one"),
    ("REDUCE[t]@3 STEP[t]@3", "STEP[t]@3 REDUCE[t]@3", "rank 3, STEP[t]@3: needs the REDUCE of its batch first"),
    ("STEP[t]@3.1 ", "", "stage 3.1 on rank 0 has 0 STEPs per batch instead of 1"),
    ("F2@3.1^t", "F2@0^t", "microbatch 2, stage 0 has 2 forwards per batch instead of 1"),
    ("B2@3.1^t", "B2@0^t", "microbatch 2, stage 0 needs one B, or one I and one W, per batch; it has 2 B"),
    (
        "REDUCE[t]@3 STEP[t]@3 REDUCE[t]@0.1 STEP[t]@0.1",
        "REDUCE[t]@0.1 STEP[t]@0.1 REDUCE[t]@3 STEP[t]@3",
        "rank 0 issues REDUCE of stage 3, batch 0, where another rank of its group issues it of stage 0, batch 0",
    ),
    (  # all reductions first: nobody waits, but one communicator would mix up the gradients of two stages
        "REDUCE[t]@3 STEP[t]@3 REDUCE[t]@0.1 STEP[t]@0.1",
        "REDUCE[t]@0.1 REDUCE[t]@3 STEP[t]@3 STEP[t]@0.1",
        "rank 0 issues REDUCE of stage 3, batch 0, where another rank of its group issues it of stage 0, batch 0",
    ),
    ("3@3 0.1@3", "3@3 0@3", "no such stage here"),
]  # fmt: skip

SPLIT_BACKWARD = [
    ("I0^t W0^t", "W0^t I0^t", "rank 0, W0 needs the backward of microbatch 0 on stage 0, which stands later"),
    (" W3^t STEP[t]", " STEP[t] W3^t", "rank 0, STEP[t]: comes before 1 of batch t"),
    (" W2^t", "", "microbatch 2, stage 0 needs one B, or one I and one W, per batch; it has 0 B, 1 I, 0 W"),
    ("I2^t W2^t", "W2^t", "microbatch 2, stage 0 needs one B, or one I and one W, per batch; it has 0 B, 0 I, 1 W"),
    (
        "I2^t W2^t",
        "B2^t W2^t",
        "microbatch 2, stage 0 needs one B, or one I and one W, per batch; it has 1 B, 0 I, 1 W",
    ),
]

SLICES = [
    ("rank 0: F0:0/2^t F0:1/2^t", "rank 0: F0:1/2^t F0:0/2^t", "rank 0, F0:1/2 needs the forward of"),
    ("B0:1/2^t F1:1/2^t B0:0/2^t", "B0:0/2^t F1:1/2^t B0:1/2^t", "rank 0, B0:0/2 needs the backward of"),
    ("F1:1/2^t ", "", "microbatch 1, slice 1, stage 0 has 0 forwards per batch instead of 1"),
    ("F1:1/2^t ", "F1:1/3^t ", "slice"),  # a third of a sequence and a half
    ("F1:1/2^t ", "F1^t ", "all units must have the same number of slices"),  # half and whole
]  # fmt: skip

RECOMPUTE = [
    (" R1^t\nrank 1", "\nrank 1", "microbatch 1, stage 0 has 0 recomputes per batch; all or none need one"),
    (
        "R0^t B0^t F1^t",
        "B0^t R0^t F1^t",
        "rank 1, B0 needs the recompute of microbatch 0 on stage 1, which stands later",
    ),
    ("R0^t B0^t F1^t", "R0^t-1 B0^t F1^t", "rank 1, R0^t-1: must read version t, not t-1"),
    ("R0^t B0^t F1^t", "R0^t R0^t B0^t F1^t", "microbatch 0, stage 1 has 2 recomputes per batch"),
    ("segments 0,1", "segments 0,1 1", "stage 1 appears twice in segments"),
    ("segments 0,1", "segments 0,2", "there is no stage 2 to be frozen or in a segment"),
    ("segments 0,1", "segments 1,0", "in a segment stage 1 must be the only input of stage 0"),
    ("R0^t B0^t F1^t R1^t B1^t", "B0^t F1^t B1^t", "stage 1 is in a segment, but does not recompute"),
]

POST_VALIDATION = [
    ("F0^t VALIDATE[t-1] I0^t", "F0^t I0^t VALIDATE[t-1]", "rank 1, I0^t: reads version t before VALIDATE accepts it"),
    ("drain 0: VALIDATE[t-1]\n", "", "to drain, stage 0 must run VALIDATE for [-1]"),
    ("VALIDATE[t-1] F2^t", "VALIDATE[t] F2^t", "to drain, stage 0 must run VALIDATE for nothing"),
    ("F0^t F1^t VALIDATE", "F0^t-1 F1^t VALIDATE", "rank 0, F0^t-1: must read version t, not t-1"),
    ("VALIDATE[t-1] F2^t", "VALIDATE[t-1] VALIDATE[t-1] F2^t", "to drain, stage 0 must run VALIDATE for [-1, -1]"),
]  # fmt: skip

PREDICTIONS = [
    ("PREDICT0^t-1~f0 ", "", "rank 0, F0^t-1~f0: reads copy f0, which no PREDICT has made"),
    ("rank 1: PREDICT0^t~f0 F0^t~f0", "rank 1: F0^t~f0 PREDICT0^t~f0", "rank 1, F0^t~f0: reads copy f0"),
    ("B1^t~b0", "B1^t~b1", "rank 1, B1^t~b1: reads copy b1, which no PREDICT has made"),
    ("B1^t~b0", "B1^t~b2", "rank 1, B1^t~b2: reads copy b2, which was made for another batch"),
    ("F1^t~f0 B1^t~b0", "F1^t~b0 B1^t~f0", "stage 1 on rank 1: forwards and backwards read copies of one label, 'b'"),
    ("F0^t-1~f0", "F0^t-1", "rank 0, F0^t-1: must read a copy that a PREDICT made"),
    ("PREDICT0^t-1~f0 F0^t-1~f0", "PREDICT0^t-2~f0 F0^t-2~f0", "PREDICT0^t-2~f0: reads version t-2, which no longer"),
    ("F1^t-1~f0", "F1^t~f0", "rank 0, F1^t~f0: copy f0 was made of other versions"),
    ("PREDICT0^t-1~f0 ", "PREDICT0^t-1 ", "rank 0, PREDICT0^t-1: must make a copy of its own, as in PREDICT0^t~p0"),
    ("PREDICT0^t-1~f0 ", "PREDICT0^t-1~f0 PREDICT0^t-1~g0 ", "makes a copy that no pass reads"),
    ("PREDICT0^t-1~f0 ", "PREDICT0^t-1~f0 PREDICT0^t-1~f0 ", "makes a copy that no pass reads or that already exists"),
]  # fmt: skip

BLEND = [
    ("PREDICT-1^t-2,t-1~i-1 B-1^t-2,t-1", "PREDICT-1^t-3,t-1~i-1 B-1^t-3,t-1", "version t-3, which no longer exists"),
    ("PREDICT-1^t-2,t-1~i-1 B-1^t-2,t-1", "PREDICT-1^t-2,t~i-1 B-1^t-2,t", "reads version t, which does not exist yet"),
    ("B-1^t-2,t-1~i-1 STEP", "B-1^t-1,t-1~i-1 STEP", "the forward of microbatch -1 read another"),  # a copy of others
    # Not the version that the forward read, and not the newest one: alive, but no blend of the two.
    ("PREDICT-1^t-2,t-1~i-1 B-1^t-2,t-1", "PREDICT-1^t-1,t-1~i-1 B-1^t-1,t-1", "made of version t-2, t-1, not t-1"),
    ("PREDICT-1^t-2,t-1~i-1 B-1^t-2,t-1", "PREDICT-1^t-2,t-2~i-1 B-1^t-2,t-2", "made of version t-2, t-1, not t-2"),
]  # fmt: skip

OFFLOAD = [
    ("FETCH2 B1^t FETCH3 B2^t", "FETCH3 B1^t B2^t FETCH2", "rank 0, B2^t: needs activations that are offloaded"),
    ("FETCH2 ", "", "rank 0, B2^t: needs activations that are offloaded"),
    ("F2^t OFFLOAD2", "OFFLOAD2 F2^t", "rank 0, OFFLOAD2: its activations are not in flight"),
    ("FETCH2 ", "FETCH2 FETCH2 ", "rank 0, FETCH2: its activations are not in flight"),
]  # fmt: skip

SWAPPED = [
    ("SWAPIN[t]@2 ", "", "stage 2 on rank 0 has 0 SWAPINs and 1 SWAPOUTs per batch; a stage that is trained may"),
    ("SWAPIN[t]@0 B1@0^t SWAPIN[t]@2 STEP[t]@0", "B1@0^t SWAPIN[t]@2 STEP[t]@0 SWAPIN[t]@0", "rank 0, STEP[t]@0: its"),
    ("STEP[t]@0 SWAPOUT[t]@0", "SWAPOUT[t]@0 STEP[t]@0", "rank 0, SWAPOUT[t]@0: must come behind the STEP of its"),
    ("SWAPIN[t]@2", "SWAPIN[t-1]@2", "to drain, stage 2 must run SWAPIN for [-1]"),
    ("SWAPIN[t]@0", "SWAPIN0@0", "rank 0, SWAPIN0@0: SWAPIN works on batches"),
]  # fmt: skip

AVERAGING = [  # after every fourth batch: the fault shows only there
    ("STEP[t] AVERAGE[t]%4\nrank 1", "AVERAGE[t]%4 STEP[t]\nrank 1", "AVERAGE"),
    ("STEP[t] AVERAGE[t]%4\nrank 1", "STEP[t]\nrank 1", "AVERAGE"),  # one stage's copies would drift apart
    ("STEP[t] AVERAGE[t]%4\nrank 1", "STEP[t] AVERAGE[t]%2\nrank 1", "AVERAGE"),
]

GRAPHS = [
    ("frozen_front", "rank 0: F0 F1 F2", "rank 0: F0 F1 F2 B0 B1 B2", "stage 0 is frozen ... must have no backward"),
    ("frozen_front", "rank 0: F0 F1 F2", "rank 0: F0 F1 F2 STEP[t]", "stage 0 on rank 0 has 1 STEPs per batch"),
    ("frozen_front", "frozen 0\n", "", "microbatch 0, stage 0 needs one B"),
    ("evaluation", "rank 1: Fe0 Fe1", "rank 1: Fe0", "microbatch 1, stage 1 has 0 forwards per batch instead of 1"),
    ("evaluation", "rank 1: Fe0 Fe1", "rank 1: Fe0 Fe1 B0", "must have no backward"),
    ("evaluation", "rank 1: Fe0 Fe1", "rank 1: Fe0 Fe1 STEP[t]", "stage 1 on rank 1 has 1 STEPs per batch"),
    ("local_losses", "rank 0: F0^t B0^t", "rank 0: F0^t", "microbatch 0, stage 0 needs one B"),
    ("two_branches", "edges 0>2 1>2", "edges 0>2 1>3", "edge 1>3 does not connect two stages"),
    ("two_branches", "edges 0>2 1>2", "edges 0>2 1>1", "edge 1>1 does not connect two stages"),
    ("two_branches", "edges 0>2 1>2", "edges 0>2 2>0", "rank 0 at F0@0 waits for the activation of microbatch 0"),
    ("two_branches", "rank 2: F0^t B0^t", "rank 2: B0^t F0^t", "needs the forward of microbatch 0 on stage 2"),
]  # fmt: skip

PLACEMENTS = [
    ("interleaved", "rank 0: F0@0^t F1@0^t F0@2^t", "rank 0: F0@2^t F0@0^t F1@0^t", "rank 0 at F0@2 waits for"),
    ("interleaved", "B0@2^t", "B0@0^t", "microbatch 0, stage 0 needs one B, or one I and one W, per batch; it has 2 B"),
    ("interleaved", " STEP[t]@2", "", "stage 2 on rank 0 has 0 STEPs per batch instead of 1"),
    ("zb_v", "F0@1^t F0@2^t", "F0@2^t F0@1^t", "rank 1, F0@2 needs the forward of microbatch 0 on stage 1"),
    ("zb_v", "I0@2^t W0@2^t", "W0@2^t I0@2^t", "rank 1, W0@2 needs the backward of microbatch 0 on stage 2"),
    ("dualpipe_v", "[F3@0^t+B1@3^t]", "[F3@0^t+B3@3^t]", "microbatch 1, stage 3 needs one B"),
    ("dualpipe_v", "I2@0^t W2@0^t", "W2@0^t I2@0^t", "rank 0, W2@0 needs the backward of microbatch 2 on stage 0"),
]  # fmt: skip

WIDE_UNITS = [
    ("B-4..-1^t-1 STEP[t-1] F2", "B-3..-1^t-1 STEP[t-1] F2", "microbatch 0, stage 0 needs one B"),
    ("F3^t B0..3^t", "B0..3^t F3^t", "rank 1, B0..3 needs the forward of microbatch 3 on stage 1, which stands later"),
    ("drain 0: B-4..-1^t-1", "drain 0: B-4..-2^t-1", "to drain, stage 0 must run B for [-1]"),
    ("rank 0: F0^t-1", "rank 0: F0^t", "rank 0, F0^t: must read version t-1, not t"),
]

WAVES = [
    ("F0^t-1 B-1^t-2 STEP", "F0^t-1 B-1^t-1 STEP", "rank 0, B-1^t-1: must read version t-2, as its forward did"),
    ("rank 0: F0^t-1", "rank 0: F0^t", "rank 0, F0^t: must read version t-1, not t"),
    (" AVERAGE[t-3]%2\nrank 1", "\nrank 1", "AVERAGE"),
    ("drain 0: B-1^t-2 STEP[t-1] AVERAGE[t-3]%2", "drain 0: B-1^t-2 STEP[t-1]", "AVERAGE"),  # rank 1 has averaged it
]  # fmt: skip

FAULTS = [
    *(("breadth_first", *fault) for fault in GATHERING),
    *(("chimera", *fault) for fault in SHARED_CUTS),
    *(("zb_h1", *fault) for fault in SPLIT_BACKWARD),
    *(("seq1f1b", *fault) for fault in SLICES),
    *(("pipemare_recompute", *fault) for fault in RECOMPUTE),
    *(("post_validation", *fault) for fault in POST_VALIDATION),
    *(("xpipe", *fault) for fault in PREDICTIONS),
    *(("blend", *fault) for fault in BLEND),
    *(("offload", *fault) for fault in OFFLOAD),
    *(("swapped", *fault) for fault in SWAPPED),
    *(("periodic_averaging", *fault) for fault in AVERAGING),
    *(("nf1b", *fault) for fault in WIDE_UNITS),
    *(("wave_synchronous", *fault) for fault in WAVES),
    *GRAPHS,
    *PLACEMENTS,
]


@pytest.mark.parametrize(
    ("name", "old", "new", "telling"), FAULTS, ids=[f"{name}: {old!r} to {new!r}" for name, old, new, _ in FAULTS]
)
def test_a_planted_fault_is_refused(name, old, new, telling):
    message = message_of(name, (old, new))
    assert all(part in message for part in telling.split(" ... "))


def test_slices_of_different_sizes_do_not_cover_a_sequence():
    text = "microbatches 1\nnodes 0@0\nrank 0: F0:0/2 F0:1/2 F0:2/3 B0:2/3 B0:1/2 B0:0/2\n"
    with pytest.raises(ScheduleError, match="slice"):
        check(parse_schedule(text))


def test_a_unit_across_a_batch_border_is_refused():
    """At the first batch it would vanish as a whole, and microbatch 0 would never be seen."""
    text = "rule frozen\nmicrobatches 2\nnodes 0@0\nrank 0: Fe-1..0\ndrain 0: Fe-1\n"
    with pytest.raises(ScheduleError, match=r"Fe-1\.\.0"):
        check(parse_schedule(text))


@pytest.mark.parametrize("every", ["", "%4"])
def test_an_average_behind_the_next_reader_is_refused(every):
    """The forward would have read what its own pipeline bore, the backward what all agreed on."""
    text = f"microbatches 1\nnodes 0@0\nrank 0: F0^t AVERAGE[t-1]{every} B0^t STEP[t]\n"
    with pytest.raises(
        ScheduleError, match=r"AVERAGE.* must come between a STEP and the first read of its new version"
    ):
        check(parse_schedule(text + f"drain 0: AVERAGE[t-1]{every}\n"))


def test_an_average_ahead_of_its_own_update_is_refused():
    text = "microbatches 1\nnodes 0@0\nrank 0: AVERAGE[t] F0^t B0^t STEP[t]\n"
    with pytest.raises(ScheduleError, match=r"rank 0, AVERAGE\[t\]: must come between a STEP and the first read"):
        check(parse_schedule(text))


def test_messages_are_not_written_by_hand():
    """Lowering adds them; one that stands in a schedule would be played as an action that does nothing."""
    text = "microbatches 1\nnodes 0@0 1@1\nrank 0: F0^t SEND0@0>1/activation B0^t STEP[t]\nrank 1: F0^t B0^t STEP[t]\n"
    with pytest.raises(ScheduleError, match="SEND"):
        check(parse_schedule(text))


def test_only_passes_are_fused():
    text = "microbatches 1\nnodes 0@0\nrank 0: F0^t [B0^t+REDUCE[t]] STEP[t]\n"
    with pytest.raises(ScheduleError, match="REDUCE"):
        check(parse_schedule(text))


def test_a_missing_validate_leaves_a_provisional_version_behind():
    message = message_of("post_validation", ("VALIDATE[t-1] F2^t", "F2^t"), ("drain 0: VALIDATE[t-1]\n", ""))
    assert "after draining 1 batches, rank 0 still has provisional versions [1]" in message


def test_a_backward_on_the_other_replica_has_no_forward_there():
    message = message_of("chimera", ("B2@0.1^t ", ""), ("B0@0^t B1@0^t", "B2@0^t B0@0^t B1@0^t"))
    assert "rank 0, B2@0 needs the forward of microbatch 2 on stage 0, which stands nowhere" in message


def test_a_prediction_too_late_for_the_backward():
    message = message_of("xpipe", ("F0^t~f0 PREDICT0^t~b0 B0^t~b0 F1^t~f0", "F0^t~f0 B0^t~b0 PREDICT0^t~b0 F1^t~f0"))
    assert "rank 1, B0^t~b0: reads copy b0, which no PREDICT has made" in message


def test_a_whole_microbatch_is_not_the_first_slice_of_one():
    text = "microbatches 1\nnodes 0@0\nrank 0: F0^t F0:1/2^t B0:1/2^t B0^t STEP[t]\n"
    with pytest.raises(ScheduleError, match=r"rank 0, F0: .* all units must have the same number of slices"):
        check(parse_schedule(text))


def test_a_segment_does_not_skip_a_cut():
    """What stage 0 recomputes is not the input of stage 2."""
    text = """
        microbatches 1
        nodes 0@0 1@1 2@2
        segments 0,2
        rank 0: F0^t R0^t B0^t STEP[t]
        rank 1: F0^t B0^t STEP[t]
        rank 2: F0^t R0^t B0^t STEP[t]
    """
    with pytest.raises(ScheduleError, match="stage 0 must be the only input of stage 2"):
        check(parse_schedule(text))


def test_a_blend_is_of_its_own_microbatch():
    """Of the same versions, but with another microbatch's activations in mind."""
    text = """
        rule blended
        microbatches 2
        nodes 0@0
        rank 0: F0^t F1^t PREDICT1^t,t~i1 B0^t,t~i1 B1^t,t~i1 STEP[t]
    """
    with pytest.raises(ScheduleError, match="rank 0, B0.*reads copy i1, which was made for another microbatch"):
        check(parse_schedule(text))


def test_what_was_recomputed_is_not_moved_away():
    text = "microbatches 1\nnodes 0@0\nrank 0: F0^t R0^t OFFLOAD0 FETCH0 B0^t STEP[t]\n"
    with pytest.raises(ScheduleError, match="rank 0, OFFLOAD0: .* offload them before"):
        check(parse_schedule(text))
