"""Orders in which ranks would wait for each other for ever, and lanes that cannot carry what an order asks of them."""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.play import Machine
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from support.schedules import make_schedule


def two_ranks(rank0, rank1, microbatches=2):
    lines = ["schedule user", f"microbatches {microbatches}", "nodes 0@0 1@1", f"rank 0: {rank0}", f"rank 1: {rank1}"]
    return parse_schedule("\n".join(lines))


def message_of(schedule, **machine):
    with pytest.raises(ScheduleError) as caught:
        check(schedule, **machine)
    return str(caught.value)


def test_ranks_that_take_the_microbatches_in_opposite_orders_wait_for_each_other():
    """Rank 0 sends microbatch 1 only after the backward of 0, rank 1 runs 0 only after 1."""
    message = message_of(two_ranks("F0 B0 F1 B1", "F1 B1 F0 B0"))
    assert message.splitlines() == [
        "deadlock: 2 ranks would wait for ever",
        "  rank 0 at B0@0 waits for the gradient of microbatch 0 from rank 1",
        "  rank 1 at F1@1 waits for the activation of microbatch 1 from rank 0",
        "run what one rank waits for earlier on the rank that it comes from",
    ]


def test_a_deadlock_in_the_middle_of_a_batch_names_the_actions_where_each_rank_stands():
    check(two_ranks("F0 F1 B0 F2 B1 B2", "F0 B0 F2 F1 B1 B2", 3))
    message = message_of(two_ranks("F0 F1 B0 F2 B1 B2", "F0 F2 B0 F1 B1 B2", 3))
    assert "rank 0 at B0@0 waits for the gradient of microbatch 0 from rank 1" in message
    assert "rank 1 at F2@1 waits for the activation of microbatch 2 from rank 0" in message


def test_a_deadlock_of_three_ranks():
    text = """
        microbatches 3
        nodes 0@0 1@1 2@2
        rank 0: F0 F1 B1 F2 B0 B2
        rank 1: F0 F1 B0 B1 F2 B2
        rank 2: F0 B0 F1 B1 F2 B2
    """
    check(parse_schedule(text))
    message = message_of(parse_schedule(text.replace("F0 F1 B0 B1 F2 B2", "F0 F1 F2 B0 B1 B2")))
    assert "rank 0 at B1@0 waits for the gradient of microbatch 1 from rank 1" in message
    assert "rank 1 at F2@1 waits for the activation of microbatch 2 from rank 0" in message
    assert "rank 2" in message


def test_a_deadlock_that_appears_only_when_batches_follow_each_other():
    """Rank 0 wants the last batch's gradient before it sends a microbatch, rank 1 a microbatch before that gradient.

    A span of one batch drains and never meets this; two batches wait for ever.
    """
    text = """
        rule stash
        microbatches 1
        nodes 0@0 1@1
        rank 0: B-1^t-1 STEP[t-1] F0^t
        rank 1: F0^t-1 B-1^t-2 STEP[t-1]
        drain 0: B-1^t-1 STEP[t-1]
        drain 1: B-1^t-2 STEP[t-1]
    """
    message = message_of(parse_schedule(text))
    assert "rank 0 at B0@0 waits for the gradient of microbatch 0 from rank 1" in message
    assert "rank 1 at F1@1 waits for the activation of microbatch 1 from rank 0" in message


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_messages_held_back_need_as_many_buffers(window):
    """Rank 1 takes the forwards last in, first out: all but the last have to be kept until then."""
    forwards = [f"F{k}" for k in range(window + 1)]
    backwards = " ".join(f"B{k}" for k in range(window + 1))
    schedule = two_ranks(f"{' '.join(forwards)} {backwards}", f"{' '.join(forwards[::-1])} {backwards}", window + 1)
    check(schedule, window=window + 1)
    message = message_of(schedule, window=window)
    assert f"the activation lane from rank 0 to rank 1 needs more than {window} buffers" in message


def test_gpipe_with_reversed_backwards_on_one_rank_only_needs_a_buffer_for_each():
    forwards, backwards = "F0 F1 F2 F3", "B0 B1 B2 B3"
    check(two_ranks(f"{forwards} {backwards}", f"{forwards} {backwards}", 4))
    check(two_ranks(f"{forwards} B3 B2 B1 B0", f"{forwards} B3 B2 B1 B0", 4))
    reversed_on_one = two_ranks(f"{forwards} {backwards}", f"{forwards} B3 B2 B1 B0", 4)
    assert check(reversed_on_one).lowered.window == 4
    message = message_of(reversed_on_one, window=2)
    assert "the gradient lane from rank 1 to rank 0 needs more than 2 buffers" in message


def test_swapped_neighbours_fit_into_two_buffers():
    check(two_ranks("F0 F1 F2 B0 B1 B2", "F1 F0 F2 B1 B0 B2", 3))


def runs_with_blocking_sends(schedule):
    """Whether a span of one batch ends if a SEND blocks until the peer stands at the matching RECV."""
    ranks = schedule.ranks
    rows = []
    for rank in range(ranks):
        row = []
        for a in actions_of(schedule, rank, 1):
            if a.op in (Op.F, Op.B):
                came_from, goes_to = (rank - 1, rank + 1) if a.op is Op.F else (rank + 1, rank - 1)
                message = (a.op, a.unit.first)
                row += [("receive", came_from, message)] if 0 <= came_from < ranks else []
                row += [("send", goes_to, message)] if 0 <= goes_to < ranks else []
        rows.append(row)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if row and row[0][0] == "send":
                _, peer, message = row[0]
                if rows[peer] and rows[peer][0] == ("receive", rank, message):
                    del row[0], rows[peer][0]
                    moved = True
    return not any(rows)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_blocking_sends_deadlock_1f1b_at_every_depth(stages):
    """Why the machine model posts its sends (docs/design.md, section 4); GPipe would not need it."""
    assert not runs_with_blocking_sends(make_schedule("1f1b", stages, 2 * stages))
    assert runs_with_blocking_sends(make_schedule("gpipe", stages, 2 * stages))


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager", "2bw", "stash", "sequential"])
@pytest.mark.parametrize("stages", [2, 4])
def test_posted_sends_never_deadlock_with_any_number_of_buffers(method, stages):
    """They need one buffer only."""
    for microbatches in (stages - 1, 2 * stages):
        schedule = make_schedule(method, stages, microbatches)
        for lookahead in (0, 1, 2, 3):
            for window in (1, 2, 4):
                check(schedule, lookahead, window)


@pytest.mark.parametrize("lookahead", [4, 8, 20])
def test_receives_posted_long_before_keep_the_senders_order(lookahead):
    """A transport may declare more lookahead and buffers than the default; what was legal stays legal."""
    for stages, microbatches in [(2, 1), (2, 2), (3, 2), (3, 4)]:
        check(make_schedule("2bw", stages, microbatches), lookahead=lookahead, window=4)
        check(make_schedule("stash", stages, microbatches), lookahead=lookahead, window=8)


def test_a_lane_whose_ends_use_different_orders():
    """Lowering posts RECVs in the sender's order. If it did not, messages would be taken for each other."""
    lowered = lower(two_ranks("F0 F1 B0 B1", "F0 F1 B0 B1"))
    sender, receiver = lowered.programs
    period = list(receiver.period)
    first, second = (i for i, instruction in enumerate(period) if instruction.action.op is Op.RECV)
    period[first], period[second] = period[second], period[first]
    crossed = replace(lowered, programs=(sender, receiver._replace(period=tuple(period))))
    Machine(lowered).play(1)
    with pytest.raises(ScheduleError) as caught:
        Machine(crossed).play(1)
    assert "on the activation lane from rank 0 to rank 1" in str(caught.value)
    assert "both ends must use one order" in str(caught.value)


def test_collectives_that_three_ranks_join_crosswise():
    """Each rank reduces its own stage first and then waits for the next one, which does the same."""
    text = """
        microbatches 2
        nodes 0@0 1@1 2@2 0.1@1 1.1@2 2.1@0
        rank 0: F0@0^t F1@2.1^t B1@2.1^t B0@0^t REDUCE[t]@0 STEP[t]@0 REDUCE[t]@2.1 STEP[t]@2.1
        rank 1: F1@0.1^t F0@1^t B0@1^t B1@0.1^t REDUCE[t]@1 STEP[t]@1 REDUCE[t]@0.1 STEP[t]@0.1
        rank 2: F1@1.1^t F0@2^t B0@2^t B1@1.1^t REDUCE[t]@2 STEP[t]@2 REDUCE[t]@1.1 STEP[t]@1.1
    """
    message = message_of(parse_schedule(text))
    for rank in range(3):
        wanted = f"rank {rank} at STEP[0]@{rank} waits for a reduction or decision that other ranks have not joined"
        assert wanted in message
