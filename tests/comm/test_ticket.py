"""Waiting for a message: looking at first, asleep later; what is said if it does not come."""

import threading
import time

import pytest

from penstock.comm.core.ticket import Polling, Ticket, brief
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey

LANE = LaneKey(0, 1, Payload.ACTIVATION)


@pytest.mark.parametrize("polled", [0.0, 0.1, 20.0])
def test_it_returns_once_the_message_is_there(polled: float) -> None:
    polling = Polling(polled / 2, polled)
    ticket = Ticket(LANE)
    timer = threading.Timer(0.3, ticket.complete)
    start = time.perf_counter()
    timer.start()
    ticket.wait(30.0, "rank 1", polling)
    assert ticket.done
    assert 0.2 < time.perf_counter() - start < 10.0


@pytest.mark.parametrize("polled", [0.0, 0.1, 20.0])
def test_it_gives_up_in_time(polled: float) -> None:
    polling = Polling(polled / 2, polled)
    start = time.perf_counter()
    with pytest.raises(TransportError, match="F3: nothing moved on .* within 0.3 seconds"):
        Ticket(LANE).wait(0.3, "F3", polling)
    assert 0.2 < time.perf_counter() - start < 10.0


@pytest.mark.parametrize("polled", [0.0, 20.0])
def test_a_failure_reaches_the_one_who_waits(polled: float) -> None:
    polling = Polling(polled / 2, polled)
    ticket = Ticket(LANE)
    threading.Timer(0.1, lambda: ticket.complete(error=RuntimeError("connection closed"))).start()
    with pytest.raises(TransportError, match="F3: the activation lane from rank 0 to rank 1 broke: connection closed"):
        ticket.wait(30.0, "F3", polling)


def test_what_gloo_says_is_cut_down_to_what_happened() -> None:
    raw = (
        "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41694. "
        "This is typically caused by a remote worker crashing. Check the logs of the\nremote worker. GLHF!"
    )
    assert brief(RuntimeError(raw)) == "Connection closed by peer [127.0.0.1]:41694"
    assert brief(ValueError("[1, 2] is not a shape")) == "[1, 2] is not a shape"


@pytest.mark.parametrize("polled", [0.0, 20.0])
def test_all_who_wait_go_on_and_a_second_completion_changes_nothing_for_them(
    polled: float,
) -> None:
    polling = Polling(polled / 2, polled)
    ticket, settled = Ticket(LANE), []
    waiting = [threading.Thread(target=lambda: settled.append(ticket.settles(30.0, polling))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    assert not settled
    ticket.complete(5)
    ticket.complete(5)
    for thread in waiting:
        thread.join(10.0)
    assert settled == [True] * 3
    assert ticket.settles(0.0)


class _Observed:
    """An event that notes, when it is set, whether its ticket says that it is done."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket, self.seen = ticket, list[bool]()

    def set(self) -> None:
        self.seen.append(self._ticket.done)


def test_it_is_done_before_waiters_are_released() -> None:
    """A released waiter looks at `done`, and would raise if it were false."""
    ticket = Ticket(LANE)
    ticket._pending = event = _Observed(ticket)  # type: ignore[assignment]
    ticket.complete()
    assert event.seen == [True]
