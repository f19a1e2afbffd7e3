"""What runs in the background: in order, with its outcome on the tickets, and nothing kept."""

import gc
import threading
import time
import weakref

import pytest

from penstock.comm.core import ticket as module
from penstock.comm.core.ticket import Background, Ticket
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


def test_work_goes_on_where_its_caller_issues_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a copy of what the caller computes on a stream of its own may begin before that is done."""
    streams, seen = iter("ab"), list[tuple[str, str]]()
    monkeypatch.setattr(module, "issuing_stream", lambda: Stream(next(streams), seen))
    background, tickets = Background("streams"), [Ticket("lane"), Ticket("lane")]
    for number, ticket in enumerate(tickets):
        background.later([ticket], lambda number=number: seen.append((f"work {number}", "")))
    tickets[1].wait(10.0, "rank 0")
    background.close()
    assert seen[:5] == [("enter", "a"), ("work 0", ""), ("exit", "a"), ("enter", "b"), ("work 1", "")]


class Stream:
    def __init__(self, name: str, seen: list[tuple[str, str]]) -> None:
        self._name, self._seen = name, seen

    def __enter__(self) -> None:
        self._seen.append(("enter", self._name))

    def __exit__(self, *_: object) -> None:
        self._seen.append(("exit", self._name))
