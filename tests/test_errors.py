"""What errors say when they are raised again with more words before them."""

from __future__ import annotations

from penstock.errors import DeadlockError


def test_the_advice_on_a_deadlock_is_given_once() -> None:
    first = DeadlockError("rank 0 waits for rank 1")
    again = DeadlockError(f"mine.py: {first}")
    assert (
        str(again)
        == "mine.py: rank 0 waits for rank 1\nrun what one rank waits for earlier on the rank that it comes from"
    )
    assert again.waits == "mine.py: rank 0 waits for rank 1"
