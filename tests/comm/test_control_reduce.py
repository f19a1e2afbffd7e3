"""Control scalars of many processes: the sum does not depend on their tree, nor messages on their number."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from penstock.comm.collective import control_reduce
from penstock.comm.collective.control_reduce import FAN, GlooControlReduce, LocalControlReduce, flat
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.ticket import Ticket
from penstock.schedule.ir.schedule import Stage
from penstock.weights.decision import Share
from support.many_ranks import Network


class Digest(NamedTuple):
    """Another one for every order of contributions."""

    value: float


def in_order(parts: list[Digest]) -> Digest:
    total = 0.0
    for part in parts:
        total = (total * 31 + part.value) % 65521
    return Digest(total)


def sums(monkeypatch: pytest.MonkeyPatch, ranks: int, chunks: int, batches: int = 1) -> tuple[list[float], Network]:
    """The sum that every stage of a looped pipeline has received for the last batch, and what was sent for it."""
    holders = [Holder(0, Stage(index, 0, index % ranks)) for index in range(ranks * chunks)]
    network, made = Network(), []
    monkeypatch.setattr(control_reduce.dist, "get_rank", lambda rank: rank)
    for rank in range(ranks):
        monkeypatch.setattr(control_reduce, "TaggedGroup", network.end(rank))
        made.append(GlooControlReduce(holders, lambda holder: holder.stage.rank, rank, in_order))  # type: ignore[arg-type]
    for batch in range(batches):
        tickets = [Ticket(holder) for holder in holders]
        for holder, ticket in zip(reversed(holders), reversed(tickets), strict=True):  # as backwards end
            made[holder.stage.rank].contribute(holder, batch, Digest(holder.stage.index + 1), ticket)
        for ticket in tickets:
            ticket.wait(60.0, "adding")
    for one in made:
        one.close()
    return [ticket.result.value for ticket in tickets], network


@pytest.mark.smoke
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 2), (2, 1), (9, 3), (10, 1), (75, 2)])
def test_the_sum_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch, ranks: int, chunks: int) -> None:
    holders, tickets = [Holder(0, Stage(index, 0, 0)) for index in range(ranks * chunks)], []
    local = LocalControlReduce(holders, in_order)
    for holder in holders:
        tickets.append(Ticket(holder))
        local.contribute(holder, 0, Digest(holder.stage.index + 1), tickets[-1])
    found, _ = sums(monkeypatch, ranks, chunks)
    assert found == [ticket.result.value for ticket in tickets]


def test_messages_of_a_decision_do_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes do at the top alone, where every share arrives once: 208 a stage."""
    for ranks in (16, 256):
        _, network = sums(monkeypatch, ranks, 1, batches=3)
        assert max(network.messages.values()) <= 3 * 2 * (FAN + 1)
        assert sum(network.messages.values()) == 3 * 2 * 2 * (ranks - 1)
        size = 8 * len(Digest._fields)
        assert network.bytes[0] <= 3 * size * (ranks + FAN)
        assert sorted(network.bytes.values())[ranks // 2] == 3 * size * 2  # most processes: a share up, the sum down
    assert 8 * len(flat(Share())) == 208
