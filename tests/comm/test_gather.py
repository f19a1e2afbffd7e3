"""Every rank gets the JSON values of all ranks, in rank order, and an error that says what was being done."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from penstock.comm.collective.control_plane import gather_json
from penstock.errors import TransportError
from support.pool import Pool

pytestmark = pytest.mark.processes


def value(rank: int) -> Any:
    """Of another size on every rank; a tuple comes back as a list, also on the rank that gave it."""
    return {"rank": rank, "text": "ä" * 1000 * rank, "pair": (rank, None)}


def gather_twice(group: dist.ProcessGroup) -> list[list[Any]]:
    rank = dist.get_rank(group)
    return [gather_json(value(rank), "gathering", group), gather_json(rank, "gathering", group)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_gets_all_values_in_order(pool: Pool, ranks: int) -> None:
    wanted = [{**value(rank), "pair": [rank, None]} for rank in range(ranks)]
    assert pool.submit(gather_twice, ranks=ranks) == [[wanted, list(range(ranks))]] * ranks


def gather_alone(group: dist.ProcessGroup) -> str:
    """Rank 0 waits for a rank that has gone."""
    if dist.get_rank(group) == 0:
        with pytest.raises(TransportError) as caught:
            gather_json(0, "comparing notes", group)
        return str(caught.value)
    return ""


def test_a_rank_that_does_not_take_part_is_an_error(pool: Pool) -> None:
    said, _ = pool.submit(gather_alone, ranks=2, fresh=True)
    assert "rank 0, comparing notes: a peer is dead or stalled, or has not made this call" in said


def gather_something_else(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    with pytest.raises(TransportError) as caught:
        gather_json(rank, "counting sheep" if rank == 2 else "comparing notes", group)
    return str(caught.value)


def test_ranks_that_make_different_calls_all_hear_of_it(pool: Pool) -> None:
    found = pool.submit(gather_something_else, ranks=3, fresh=True)
    assert found[:2] == [f"rank {r} is comparing notes, but rank 2 is counting sheep{LAST}" for r in (0, 1)]
    assert found[2] == f"rank 2 is counting sheep, but rank 0 is comparing notes{LAST}"


LAST = "; all ranks make such calls together, in one order"
