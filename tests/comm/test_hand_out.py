"""What rank 0 alone makes reaches every rank, with a part of its own; and so does the reason why it could not."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from penstock.comm.collective.control_plane import HandedOut, from_first, hand_out
from penstock.errors import DataError, DeadlockError, PenstockError
from support.pool import Pool

pytestmark = pytest.mark.processes


def everything(group: dist.ProcessGroup) -> list[Any]:
    calls: list[int] = []

    def make() -> HandedOut:
        calls.append(dist.get_rank(group))
        return HandedOut({"text": "ä" * 1000}, lambda rank: [rank] * rank)

    first = hand_out(make, "handing out", group)
    second = from_first(lambda: calls.append(7) or 3, "counting", group)
    return [*first, second, calls]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_gets_what_is_common_and_its_part(pool: Pool, ranks: int) -> None:
    text = {"text": "ä" * 1000}
    first, *others = pool.submit(everything, ranks=ranks)
    assert first == [text, None, 3, [0, 7]]
    assert others == [[text, [rank] * rank, 3, []] for rank in range(1, ranks)]


FAULTS = {"data": DataError("no text"), "deadlock": DeadlockError("rank 1 waits"), "other": ZeroDivisionError("by 0")}


def fails(group: dist.ProcessGroup, what: str) -> tuple[str, str]:
    def make() -> int:
        raise FAULTS[what]

    with pytest.raises((PenstockError, ZeroDivisionError)) as caught:
        from_first(make, "counting", group)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("what", FAULTS)
def test_all_ranks_hear_why_it_could_not_be_made(pool: Pool, what: str) -> None:
    first, *others = pool.submit(fails, what, ranks=4)
    assert first == (type(FAULTS[what]).__name__, str(FAULTS[what]))
    if what == "other":
        first = ("TransportError", "rank 0, counting, failed: ZeroDivisionError: by 0")
    assert others == [first] * 3
