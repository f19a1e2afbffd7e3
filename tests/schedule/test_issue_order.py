"""Do all ranks issue their messages in one order, as NCCL needs it? Not by themselves; with other places for RECVs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.schedule.lowering.lower import Lowering
from penstock.schedule.lowering.send_window_search import settled
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.issue_order import Event, Issued, buffers, issued, one_order
from penstock.schedule.machine.play import Machine
from penstock.schedule.methods.table import METHODS


def ordered(lowered: Lowered) -> Lowered:
    return Lowering(lowered.schedule).in_one_order(lowered.window)


def makespan(lowered: Lowered, batches: int) -> float:
    machine = Machine(lowered, unit_time)
    machine.play(batches)
    return max(machine.clock)


def test_plain_1f1b_has_none() -> None:
    """Rank 0 posts the RECV of a gradient, rank 1 that of an activation, before either sends the other's."""
    with pytest.raises(ScheduleError, match="in orders that do not agree") as error:
        one_order(issued(prove("1f1b", 2, 4).lowered, 2))
    assert str(error.value).splitlines()[1:] == [
        "  rank 0 issues message 0 on the activation lane from rank 0 to rank 1 before message 1 on the activation "
        "lane from rank 0 to rank 1",
        "  rank 1 issues message 1 on the activation lane from rank 0 to rank 1 before message 0 on the gradient lane "
        "from rank 1 to rank 0",
        "  rank 0 issues message 0 on the gradient lane from rank 1 to rank 0 before message 0 on the activation lane "
        "from rank 0 to rank 1",
    ]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_one_with_its_receives_placed_for_it(method: str) -> None:
    """In fill, steady state and drain, with decisions and rejected versions; no later, and within its window."""
    for stages, microbatches, decides in [(2, 4, False), (3, 5, True), (4, 4, True), (4, 8, False)]:
        try:
            lowered = prove(method, stages, microbatches, decides=decides).lowered
        except (ConfigError, ScheduleError):  # not for these numbers
            continue
        found, batches = ordered(lowered), settled(lowered.schedule) + 1
        for length, rejected in [(1, ()), (2, ()), (batches, ()), (batches, (1,))]:
            Machine(found).play(length, rejected)  # no deadlock, no message in the place of another one
            one_order(issued(found, length, rejected))
        assert buffers(found, batches) <= found.window
        assert makespan(found, batches) <= makespan(lowered, batches)


def test_only_receives_move() -> None:
    lowered = prove("2bw", 4, 4).lowered
    for before, after in zip(lowered.programs, ordered(lowered).programs, strict=True):
        for part, moved in zip(before, after, strict=True):
            assert [i for i in part if i.action.op is not Op.RECV] == [i for i in moved if i.action.op is not Op.RECV]


def test_a_receive_behind_the_next_send_makes_a_cycle() -> None:
    """The last RECV of rank 1 behind the gradient that rank 0 receives after it has sent the activation."""
    found = ordered(prove("1f1b", 2, 4).lowered)
    period = list(found.programs[1].period)
    place = max(i for i, each in enumerate(period) if each.action.op is Op.RECV)
    behind = next(i for i in range(place, len(period)) if period[i].action.op is Op.SEND)
    period.insert(behind, period.pop(place))
    wrong = replace(found, programs=(found.programs[0], found.programs[1]._replace(period=tuple(period))))
    one_order(issued(found, 2))
    with pytest.raises(ScheduleError, match="do not agree"):
        one_order(issued(wrong, 2))


def test_the_order_agrees_with_every_rank() -> None:
    orders = issued(ordered(prove("1f1b", 4, 8, decides=True).lowered), 2)
    place = {event: i for i, event in enumerate(one_order(orders))}
    for events in orders:
        messages: list[Event] = [event for event in events if isinstance(event, Issued)]
        assert messages == sorted(messages, key=lambda event: place[event])  # type: ignore[index]
