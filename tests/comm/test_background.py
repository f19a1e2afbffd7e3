"""What runs in the background: in order, with its outcome on the tickets, and nothing kept."""

import gc
import threading
import time
import weakref

import pytest

from penstock.comm.core.background import Background
from penstock.comm.core.ticket import Ticket
from penstock.errors import TransportError


def test_work_is_done_in_order_and_a_failure_stays_with_its_tickets() -> None:
    background, seen = Background("a test"), []
    tickets = [Ticket(f"lane {n}") for n in range(5)]

    def work(n: int) -> int:
        seen.append(n)
        return 12 // n

    for n in range(4):
        background.later(tickets[n : n + 2] if n == 0 else [tickets[n + 1]], lambda n=n: work(n))
    tickets[4].wait(10.0, "rank 0")
    assert seen == [0, 1, 2, 3]
    assert [ticket.result for ticket in tickets[2:]] == [12, 6, 4]
    for ticket in tickets[:2]:
        with pytest.raises(TransportError, match="F1: lane . broke: integer division"):
            ticket.check("F1")
    background.close()


def test_it_keeps_nothing_of_what_is_done_and_ends_once_all_is_done() -> None:
    class Block:
        pass

    background, first, second = Background("forgets"), Ticket("lane"), Ticket("lane")
    assert not [t for t in threading.enumerate() if t.name == "penstock forgets"]
    block, go = Block(), threading.Event()
    gone = weakref.ref(block)
    background.later([first], lambda block=block: None)
    (thread,) = [t for t in threading.enumerate() if t.name == "penstock forgets"]
    del block
    deadline = time.monotonic() + 10.0
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    background.later([second], go.wait)
    background.close()
    assert thread.is_alive()
    go.set()
    thread.join(10.0)
    assert second.result is True
    assert not thread.is_alive()
