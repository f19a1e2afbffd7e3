"""The smallest legal number of microbatches: derived by trying, compared with the closed forms."""

from contextlib import suppress

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.build import prove, smallest_microbatches
from penstock.schedule.orders.one_f_one_b import endless_1f1b
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

DEPTHS = range(1, 7)


@pytest.mark.parametrize("depth", DEPTHS)
def test_two_buffers_over_1f1b_are_legal_from_one_less_than_the_depth(depth):
    legal = max(1, depth - 1)
    for m in (legal, legal + 1, depth + 2, 3 * depth):
        make_schedule("2bw", depth, m)
    for m in range(1, legal):
        with pytest.raises(ScheduleError, match=rf"at least {legal} microbatches.*got {m}; raise .* to {legal}\b"):
            make_schedule("2bw", depth, m)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_three_versions_over_1f1b_are_legal_from_half_as_many(depth):
    """A delay of k is legal from (depth - 1) / k on: so many microbatches are in flight when a batch begins."""
    legal = max(1, depth // 2)
    for m in (legal, legal + 1, depth + 2):
        facts = prove("3bw", depth, m).stages.values()
        assert {(f.delay.forward, f.delay.backward) for f in facts} == {(2, 2)}
        assert {(f.versions, f.buffers) for f in facts} == {(3, 4)}
    for m in range(1, legal):
        with pytest.raises(ScheduleError, match=rf"at least {legal} microbatches.*got {m}; raise .* to {legal}\b"):
            prove("3bw", depth, m)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_two_buffers_over_eager_1f1b_need_twice_as_many(depth):
    legal = max(1, 2 * depth - 2)
    for m in (legal, legal + 1, 4 * depth):
        make_schedule("2bw-eager", depth, m)
    for m in range(1, legal):
        with pytest.raises(ScheduleError, match=rf"at least {legal} microbatches.*got {m}; raise .* to {legal}\b"):
            make_schedule("2bw-eager", depth, m)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", [name for name in CHAINS if not name.startswith("2bw")])
def test_all_other_methods_are_legal_from_one_microbatch(method, depth):
    for m in (1, 2, depth, 2 * depth + 1):
        make_schedule(method, depth, m)
    assert smallest_microbatches(method, depth) == 1


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 9])
def test_smallest_microbatches_without_a_failed_attempt(depth):
    assert smallest_microbatches("2bw", depth) == least("2bw", depth) == max(1, depth - 1)
    assert smallest_microbatches("2bw-eager", depth) == least("2bw-eager", depth) == max(1, 2 * depth - 2)


@pytest.mark.parametrize("order", ["endless-1f1b", "endless-eager-1f1b", "fine-grained"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_endless_orders_are_legal_from_some_number_on(order, depth):
    """So halving finds what trying all of them finds."""
    legal = []
    for m in range(1, 4 * depth + 1):
        with suppress(ScheduleError):
            make_schedule("2bw", depth, m, order=order)
            legal.append(m)
    for beyond in (0, 1, legal[0], legal[0] + 1):
        found = smallest_microbatches("2bw", depth, order=order, beyond=beyond)
        assert found == max(legal[0], beyond + 1)
    assert legal == list(range(legal[0], 4 * depth + 1))


def test_orders_that_take_only_some_numbers():
    """Even ones, or from twice the number of stages on: nothing between may be passed over or taken."""
    assert [smallest_microbatches("bitpipe", 4, beyond=beyond) for beyond in (0, 1, 2, 5, 6)] == [2, 2, 4, 6, 8]
    assert [smallest_microbatches("dualpipe", 2, beyond=beyond) for beyond in (0, 4, 5, 6)] == [4, 6, 6, 8]
    assert smallest_microbatches("dualpipe-v", 3) == 6


@pytest.mark.parametrize(("beyond", "legal"), [(0, 5), (4, 5), (5, 6), (11, 12)])
def test_smallest_microbatches_beyond_a_number(beyond, legal):
    assert smallest_microbatches("2bw", 6, beyond=beyond) == legal


def test_the_message_says_why_so_many():
    why = r"\(With fewer, the first stage begins a batch before the backwards of the batch two before it have ended"
    with pytest.raises(ScheduleError, match=why):
        make_schedule("2bw", 4, 2)


def test_of_an_order_of_ones_own_the_message_says_which_action_came_too_early():
    def late(stages, microbatches):
        return endless_1f1b(stages, microbatches)

    with pytest.raises(ScheduleError, match=r"rank 0, STEP\[t-2\]: comes before 1 of batch t-2's backwards"):
        prove(late, 4, 2, rule="double-buffer")


def test_an_order_that_no_number_of_microbatches_mends_says_what_is_wrong():
    def deaf(stages, microbatches):
        backwards = [f"B{k}" for k in range(microbatches)]
        forwards = [f"F{k}" for k in range(microbatches)]
        return [forwards + backwards] * (stages - 1) + [backwards + forwards]

    with pytest.raises(ScheduleError, match="rank 1, B0 needs the forward of microbatch 0") as caught:
        prove(deaf, 2, 3)
    assert "at least" not in str(caught.value)
    assert smallest_microbatches(deaf, 2) is None
