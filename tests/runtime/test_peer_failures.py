"""A peer that fails, stalls, dies or sends something else: every rank says whom it waited for, and none hangs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from penstock.comm.core.ticket import Ticket
from penstock.comm.message.tensor_message import TensorMessage
from penstock.comm.p2p.local import LocalLane
from penstock.errors import PenstockError, TransportError
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool
from support.runtime_faults import Fails, divide_by_zero, refuses_to_go_on, what_happens, with_block

pytestmark = pytest.mark.processes


def leaves_by_error(group: dist.ProcessGroup, case: Case) -> tuple[str, int]:
    """The loop's body fails on the last rank, which nobody else hears of."""
    pipeline, seen = make_pipeline(case, group, timeout=2.0), 0
    try:
        for report in pipeline.run(itertools.cycle(make_batches(case))):
            seen += 1
            if dist.get_rank(group) == case.depth - 1 and report.batch == 1:
                pipeline.abandon()
                raise ZeroDivisionError
    except Exception as error:
        return type(error).__name__, seen
    return "nothing", seen


def test_a_rank_that_abandons_its_run_does_not_train_on(pool: Pool) -> None:
    case = Case("2bw", 3, 2)
    said = pool.submit(leaves_by_error, case, ranks=3, fresh=True)
    assert said[2] == ("ZeroDivisionError", 2)
    assert [kind for kind, _ in said[:2]] == ["TransportError"] * 2


def raises_on_a_rank(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    changes = with_block(1, Fails(3, divide_by_zero), case.depth)
    return what_happens(group, case, make_batches(case), 2.0, **changes)


def test_a_block_that_raises_on_a_rank(pool: Pool) -> None:
    """It is named there; the others learn at least whom they waited for."""
    said = pool.submit(raises_on_a_rank, Case("2bw", 3, 2), ranks=3, fresh=True)
    assert said[1] == (
        "ZeroDivisionError",
        "a block of the user's raised in block 'extra' raised by F3 of stage 1 on rank 1",
    )
    assert said[0][0] == said[2][0] == "TransportError"
    assert "gradient lane from rank 1 to rank 0" in said[0][1]
    assert "rank 2, stage 2, F3: nothing moved on the activation lane from rank 1 to rank 2" in said[2][1]


def test_a_message_of_another_batch_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LocalLane.send

    def stray(self: LocalLane, message: TensorMessage) -> Ticket:
        if self.lane.source == 0 and message.header.first == 2:
            message = replace(message, header=message.header._replace(batch=7))
        return send(self, message)

    monkeypatch.setattr(LocalLane, "send", stray)
    with pytest.raises(TransportError, match=r"microbatch 2 \(batch 1\).* got that of microbatch 2 \(batch 7\)"):
        list(make_pipeline(Case("1f1b", 2, 2)).run(make_batches(Case("1f1b", 2, 2))))


def test_a_message_that_is_lost_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LocalLane.send

    def losing(self: LocalLane, message: TensorMessage) -> Ticket:
        lane = self.lane
        lost = lane.source == 1 and lane.target == 2 and message.header.first == 3
        return Ticket(lane) if lost else send(self, message)

    monkeypatch.setattr(LocalLane, "send", losing)
    case = Case("1f1b", 3, 2)
    pipeline = make_pipeline(case)
    with pytest.raises(TransportError, match="no rank can go on: .*rank 2, stage 2, F3"):
        list(pipeline.run(make_batches(case)))
    refuses_to_go_on(pipeline, case)


def test_a_message_that_is_not_the_one_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages change places."""
    send = LocalLane.send
    kept: list[TensorMessage] = []

    def swapping(self: LocalLane, message: TensorMessage) -> Ticket:
        lane = self.lane
        if lane == (0, 1, lane.payload) and message.header.first in (1, 2) and lane.source == 0:
            kept.append(message)
            if len(kept) == 1:
                return Ticket(lane)
            first = send(self, kept[1])
            send(self, kept[0])
            return first
        return send(self, message)

    monkeypatch.setattr(LocalLane, "send", swapping)
    case = Case("gpipe", 2, 4)
    with pytest.raises(
        TransportError,
        match=r"rank 1, stage 1, F1: expected the activation of microbatch 1 .* from rank 0, got that of microbatch 2",
    ):
        list(make_pipeline(case).run(make_batches(case)))


def stalls(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    block = Fails(4, lambda: time.sleep(2.0))
    return what_happens(group, case, make_batches(case), 0.5, **with_block(0, block, case.depth))


def test_a_message_that_does_not_come_in_time(pool: Pool) -> None:
    said = pool.submit(stalls, Case("1f1b", 2, 2), ranks=2, fresh=True)
    assert said[1][0] == "TransportError"
    assert "rank 1, stage 1, F4: nothing moved on the activation lane from rank 0 to rank 1 within 0.5" in said[1][1]
    assert "the peer is stalled or dead" in said[1][1]


def dies(group: dist.ProcessGroup, case: Case, victim: int) -> tuple[str, str]:
    block = Fails(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return what_happens(group, case, make_batches(case), 6.0, **with_block(victim, block, case.depth))


@pytest.mark.parametrize(("method", "victim"), [("1f1b", 1), ("2bw", 2)])
def test_a_rank_that_dies(method: str, victim: int) -> None:
    """Its neighbours notice the broken connection; they do not wait for the time-out."""
    alone = Pool(3)
    try:
        said = alone.submit(dies, Case(method, 3, 2), victim, ranks=3, victims=[victim], timeout=40.0)
    finally:
        alone.close()
    assert said[victim] is None
    for rank in {0, 1, 2} - {victim}:
        kind, text = said[rank]
        assert kind == "TransportError"
        assert re.search(rf"^rank {rank}, stage {rank}, ([A-Z]+\d+|sending \w+ \d+): ", text)
        assert " lane from rank " in text
        if abs(rank - victim) == 1:
            assert "broke" in text


def goes_on_without(group: dist.ProcessGroup, case: Case, deed: str) -> list[str]:
    """Train, lose the first stage, and try to go on."""
    pipeline = make_pipeline(case, group)
    list(pipeline.run(make_batches(case)))
    if dist.get_rank(group) == 0:
        if deed == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(8.0)  # longer than two time-outs of the group
        return []
    said = []
    for _ in range(2):
        with pytest.raises(PenstockError) as caught:
            list(pipeline.run(make_batches(case)))
        said.append(f"{caught.type.__name__}: {caught.value}")
    with pytest.raises(TransportError) as lost:
        pipeline.timeline()
    return [*said, str(lost.value)]


@pytest.mark.long
def test_a_peer_that_stalls_between_runs(pool: Pool) -> None:
    said = pool.submit(goes_on_without, Case("1f1b", 3, 2), "stalls", ranks=3, fresh=True)
    check_lost(said, 3)


def test_a_peer_that_dies_between_runs() -> None:
    alone = Pool(2)
    try:
        said = alone.submit(goes_on_without, Case("1f1b", 2, 2), "dies", ranks=2, victims=[0], timeout=40.0)
    finally:
        alone.close()
    check_lost(said, 2)


GONE = "a peer is dead or stalled, or has not made this call, which all ranks make together"


def check_lost(said: list[list[str]], ranks: int) -> None:
    for rank in range(1, ranks):
        start, again, timeline = said[rank]
        assert re.match(
            rf"TransportError: rank {rank}, (agreeing to start|telling how the learning rates go): {GONE} \(", start
        )
        assert again.startswith("PenstockError: the pipeline broke in an earlier run and cannot go on (TransportError")
        assert timeline.startswith(f"rank {rank}, gathering the timeline: {GONE} (")
