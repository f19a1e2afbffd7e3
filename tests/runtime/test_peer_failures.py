"""A peer that fails, stalls, dies or sends something else: every rank says whom it waited for, and none hangs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.transport import LocalLane
from penstock.errors import PenstockError, TransportError
from support.cases import LOSSES, OPTIMIZERS, Case, make_batches, make_pipeline
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
    """It is named there; the others learn whom they waited for, and why, before their time-out."""
    said = pool.submit(raises_on_a_rank, Case("2bw", 3, 2), ranks=3, fresh=True)
    place = "raised by F3 of stage 1 on rank 1, the forward of microbatch 1 of batch 1"
    assert said[1][0] == "ZeroDivisionError"
    assert said[1][1].startswith(f"a block of the user's raised in block 'extra' {place} batch 1 was under way")
    assert said[0][0] == said[2][0] == "TransportError"
    reason = f"rank 1 could not go on (ZeroDivisionError: a block of the user's; raised in block 'extra'; {place})"
    assert f"gradient lane from rank 1 to rank 0 any more: {reason}" in said[0][1]
    assert (
        f"rank 2, stage 2, F3: nothing comes on the activation lane from rank 1 to rank 2 any more: {reason}"
        in (said[2][1])
    )


def saves_what_is_left(group: dist.ProcessGroup, case: Case, folder: Path) -> str:
    pipeline, rank = (
        make_pipeline(case, group, timeout=2.0, **with_block(1, Fails(3, divide_by_zero), 2)),
        dist.get_rank(group),
    )
    with pytest.raises((TransportError, ZeroDivisionError)) as caught:
        list(pipeline.run(make_batches(case)))
    torch.save(pipeline.state_dict(), folder / f"rank{rank}.pt")
    return str(caught.value.__notes__[-1])


def test_the_weights_that_an_error_between_processes_leaves_can_be_saved_and_loaded(pool: Pool, tmp_path: Path) -> None:
    """As the message says, on every rank; of what was trained before."""
    case = Case("1f1b", 2, 2)
    for said in pool.submit(saves_what_is_left, case, tmp_path, ranks=2, fresh=True):
        assert "save these weights on every rank, torch.save(pipeline.state_dict(), f'rank{rank}.pt')" in said
    changes = with_block(1, Fails(-1, divide_by_zero), 2)
    pipeline, wanted = make_pipeline(case, **changes), make_pipeline(case, **changes)
    pipeline.load_state_dict({**torch.load(tmp_path / "rank0.pt"), **torch.load(tmp_path / "rank1.pt")})
    list(wanted.run(make_batches(case)[:1]))
    same = wanted.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in pipeline.state_dict().items())


def fails_in(group: dist.ProcessGroup, case: Case, what: str) -> str:
    """Something of the user's fails on the last rank, in batch 1, or (the loop) hangs there."""
    changes: dict[str, Any] = {}
    here, calls = dist.get_rank(group) == 1, []

    def third(*_: Any) -> None:
        calls.append(1)
        if here and len(calls) == 3:
            divide_by_zero()

    if what == "loss":
        changes["loss"] = lambda output, target: (third(), LOSSES[case.loss](output, target))[1]
    if what == "optimizer":
        changes["optimizer"] = lambda named: OPTIMIZERS[case.optimizer](named)
    pipeline = make_pipeline(case, group, timeout=2.0, **changes)
    if what == "optimizer" and here:
        (optimizer,) = pipeline.optimizers().values()
        optimizer.register_step_pre_hook(third)
    if what == "hook":
        pipeline.on_update(third)
    with pytest.raises((TransportError, ZeroDivisionError)) as caught:  # noqa: PT012
        for report in pipeline.run(make_batches(case)):
            if what == "loop" and here and report.batch == 1:
                time.sleep(3.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("loss", "raised by the loss, .*the forward of microbatch 0 of batch 1"),
        ("optimizer", "raised by STEP2 of stage 1 on rank 1, the optimizer step of batch 2"),
        (
            "hook",
            "raised by a function given to on_update, which was shown update 3 of stage 1 on rank 1; raised by STEP2",
        ),
    ],
)
def test_peers_end_with_the_reason_of_the_rank_that_failed(pool: Pool, what: str, reason: str) -> None:
    said = pool.submit(fails_in, Case("1f1b", 2, 2, skips=()), what, ranks=2, fresh=True)
    assert said[1] == "a block of the user's"
    assert re.search(rf"rank 1 could not go on \(ZeroDivisionError: a block of the user's; {reason}", said[0])


def test_a_rank_that_is_busy_in_the_loop_over_reports_is_named(pool: Pool) -> None:
    said = pool.submit(fails_in, Case("1f1b", 2, 2, skips=()), "loop", ranks=2, fresh=True)
    assert "the peer is stalled or dead; meanwhile rank 1, in the loop over reports had been running for" in said[0]


def calls_apart(group: dist.ProcessGroup, folder: str) -> list[str]:
    """What each pair of calls raises, and what a run finds afterwards."""
    pipeline, said, rank = make_pipeline(Case("2bw", 2, 2), group), [], dist.get_rank(group)
    batches = make_batches(Case("2bw", 2, 2))
    calls: dict[str, Callable[[], Any]] = {
        "run()": lambda: list(pipeline.run(batches)),
        "evaluate()": lambda: pipeline.evaluate(batches),
        "full_state_dict()": pipeline.full_state_dict,
        "sharded states": pipeline.sharded_state_dict,
        "switch()": lambda: pipeline.switch("1f1b"),
        "save()": penstock.Checkpoints(pipeline, folder).save,
        "load()": lambda: penstock.Checkpoints(pipeline, folder).load(),
        "shorter": lambda: list(pipeline.run(batches[:3])),
        "shorter evaluation": lambda: pipeline.evaluate(batches[:3]),
        "longer stream": lambda: list(pipeline.run(iter(batches))),
        "shorter stream": lambda: list(pipeline.run(iter(batches[:3]))),
        "longer evaluation": lambda: pipeline.evaluate(iter(batches)),
        "evaluated stream": lambda: pipeline.evaluate(iter(batches[:3])),
    }
    calls["run()"]()
    for pair in APART:
        with pytest.raises(PenstockError) as caught:
            calls[pair[rank]]()
        said.append(str(caught.value))
    assert len(calls["run()"]()) == len(batches)
    return said


APART = {
    ("run()", "evaluate()"): r"agreeing to start run\(\).*agreeing to start evaluate\(\)",
    ("full_state_dict()", "run()"): r"full_state_dict\(\).*start run\(\)",
    ("evaluate()", "switch()"): r"start evaluate\(\).*agreeing to switch\(\)",
    ("switch()", "run()"): r"agreeing to switch\(\).*start run\(\)",
    ("sharded states", "evaluate()"): r"sharded states.*start evaluate\(\)",
    ("save()", "run()"): r"in save\(\).*start run\(\)",
    ("evaluate()", "load()"): r"start evaluate\(\).*(preparing for checkpoints|in load\(\))",
    ("run()", "shorter"): "the numbers of batches differ: 6 on rank 0 and 3 on rank 1",
    ("shorter", "run()"): "the numbers of batches differ: 3 on rank 0 and 6 on rank 1",
    ("shorter evaluation", "evaluate()"): "the numbers of batches differ: 3 on rank 0 and 6 on rank 1",
    ("shorter stream", "longer stream"): "the data have ended on rank 0, but not on rank 1, so the run ends after",
    ("longer stream", "shorter stream"): "the data have ended on rank 1, but not on rank 0, so the run ends after",
    ("evaluated stream", "longer evaluation"): "ends after 3 batches on the first stage, not on the last",
    ("longer evaluation", "evaluated stream"): "ends after 3 batches, but the first stage has sent batch 3",
}


def test_ranks_that_make_different_calls_or_have_other_data_are_told_at_once(pool: Pool, tmp_path: Path) -> None:
    """Nothing is lost: the pipeline goes on."""
    first, second = pool.submit(calls_apart, str(tmp_path), ranks=2, timeout=15.0)
    for pattern, mine, other in zip(APART.values(), first, second, strict=True):
        assert re.search(pattern, mine)
        names = re.split(r"\.\*", pattern)
        assert all(re.search(name, other) for name in names)


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
    assert "the peer is stalled or dead; meanwhile rank 0, stage 0, F4 (batch 2) had been running for " in said[1][1]


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
        first = r"(agreeing to start run\(\)|telling how the learning rates of run\(\) go)"
        assert re.match(rf"TransportError: rank {rank}, {first}: {GONE} \(", start)
        assert again.startswith("PenstockError: the pipeline broke in an earlier run and cannot go on (TransportError")
        assert timeline.startswith(f"rank {rank}, gathering the timeline: {GONE} (")
