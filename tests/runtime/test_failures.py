"""What goes wrong is said where it goes wrong, with a remedy; nothing hangs, and nobody goes on with wrong numbers."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_cases import BALANCE, METHODS, Case, make_batches, make_blocks, make_pipeline, mixed
from torch import Tensor, nn

from penstock.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    PenstockError,
    ScheduleError,
    TransportError,
)
from penstock.runtime.local import LocalTransport
from penstock.runtime.parcel import Parcel
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport import Ticket
from penstock.schedule.build import make_schedule
from penstock.schedule.lowered import LaneKey
from penstock.schedule.text import parse_schedule
from pool import Pool

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.txt"))


class Fails:
    """A block that does something bad when it meets microbatch `at`."""

    def __init__(self, at: int, deed: Callable[[], object]) -> None:
        self.at, self.deed, self.passed = at, deed, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.passed += 1
        if self.passed == self.at + 1:
            self.deed()
        return x


def divide_by_zero() -> None:
    raise ZeroDivisionError("a block of the user's")


def with_block(stage: int, block: Any, depth: int) -> dict[str, Any]:
    """Blocks and balance with one more block at the start of a stage."""
    items, balance = list(make_blocks("mixed").items()), list(BALANCE[depth])
    items.insert(sum(balance[:stage]), ("extra", block))
    balance[stage] += 1
    return {"blocks": dict(items), "balance": balance}


def refuses_to_go_on(pipeline: Pipeline, case: Case) -> None:
    with pytest.raises(PenstockError, match="broke in an earlier run") as caught:
        list(pipeline.run(make_batches(case)))
    assert caught.value.__cause__ is not None
    with pytest.raises(PenstockError, match="broke in an earlier run"):
        pipeline.evaluate(make_batches(case))


# --- the model raises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_block_that_raises(method: str, stage: int) -> None:
    case = Case(method, 3, 2)
    pipeline = make_pipeline(case, **with_block(stage, Fails(5, divide_by_zero), 3))
    with pytest.raises(ZeroDivisionError, match="a block of the user's") as caught:
        list(pipeline.run(make_batches(case)))
    assert caught.value.__notes__ == [f"raised by F5 of stage {stage} on rank {stage}"]
    refuses_to_go_on(pipeline, case)


class FailsBackward(torch.autograd.Function):
    """The identity, the backward of which fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("a backward of the user's")


def test_a_backward_that_raises() -> None:
    case = Case("2bw", 3, 2)
    pipeline = make_pipeline(case, **with_block(1, FailsBackward.apply, 3))
    with pytest.raises(ZeroDivisionError, match="a backward of the user's") as caught:
        list(pipeline.run(make_batches(case)))
    assert caught.value.__notes__ == ["raised by B0 of stage 1 on rank 1"]
    refuses_to_go_on(pipeline, case)


def test_an_optimizer_that_raises() -> None:
    def rate(ordinal: int) -> float:
        return 1.0 if ordinal < 2 else 1 / (ordinal - 2)

    case = Case("1f1b", 2, 2, skips=())
    pipeline = make_pipeline(case, rate=rate)
    with pytest.raises(ZeroDivisionError) as caught:
        list(pipeline.run(make_batches(case)))
    assert caught.value.__notes__[0].startswith("raised by STEP2 of stage")
    refuses_to_go_on(pipeline, case)


def test_a_block_that_raises_after_the_loop_was_left() -> None:
    """Python swallows the error if the loop's `break` closes the run, so the pipeline must remember it."""
    case = Case("2bw", 3, 3)
    pipeline = make_pipeline(case, **with_block(0, Fails(5, divide_by_zero), 3))
    run = pipeline.run(make_batches(case))
    next(run)
    with pytest.raises(ZeroDivisionError):
        run.close()  # type: ignore[attr-defined]
    refuses_to_go_on(pipeline, case)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: output, r"scalar, or \(sum, weight\); got a tensor of shape"),
        (lambda output, target: 3.0, r"scalar, or \(sum, weight\); got float"),
        (lambda output, target: (output.sum(), 1.0, 2.0), r"scalar, or \(sum, weight\); got tuple"),
        (lambda output, target: (output.sum(), -1.0), r"must not be negative, got -1\.0"),
        (lambda output, target: (output.sum(), float("nan")), r"must not be negative, got nan"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    pipeline = make_pipeline(Case("1f1b", 2, 2), loss=loss)
    with pytest.raises(ConfigError, match="stage 1 on rank 1: .*" + message):
        list(pipeline.run(make_batches(Case("1f1b", 2, 2))))


# --- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_microbatches(batch: int, count: int) -> None:
    case = Case("1f1b", 2, 2)
    batches = make_batches(case)
    batches[batch] = (batches[batch] * 2)[:count]
    with pytest.raises(DataError, match=f"batch {batch} has {count} microbatches, but the schedule takes 2 per batch"):
        list(make_pipeline(case).run(batches))


def test_what_is_no_pair() -> None:
    batches: Any = [[torch.zeros(2, 4, dtype=torch.int64)] * 2] * 2
    with pytest.raises(DataError, match=r"microbatch 0 is not a pair \(input, target\) but Tensor"):
        list(make_pipeline(Case("1f1b", 2, 2)).run(batches))


def test_data_that_raise() -> None:
    def data() -> Iterator[Any]:
        yield from make_batches(Case("2bw", 2, 2))[:3]
        raise OSError("the disk of the user")

    pipeline = make_pipeline(Case("2bw", 2, 2))
    with pytest.raises(OSError, match="the disk of the user"):
        list(pipeline.run(data()))
    refuses_to_go_on(pipeline, Case("2bw", 2, 2))


def what_happens(group: dist.ProcessGroup, case: Case, batches: Any, timeout: float, **changes: Any) -> tuple[str, str]:
    """The kind of error on this rank and what it says."""
    try:
        list(make_pipeline(case, group, timeout=timeout, **changes).run(batches))
    except Exception as error:
        return type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing", ""


def with_own_data(group: dist.ProcessGroup, case: Case, data: dict[int, Any], timeout: float) -> tuple[str, str]:
    """Each rank with its own idea of the data."""
    return what_happens(group, case, data.get(dist.get_rank(group), make_batches(case)), timeout)


@pytest.mark.parametrize("part", ["input", "target", "length"])
def test_data_that_differ_between_first_and_last_stage(pool: Pool, part: str) -> None:
    case = Case("1f1b", 3, 2)
    other = make_batches(case)
    inputs, targets = other[1][1]
    if part == "length":
        other[1][1] = inputs[:1], targets[:1]
    else:
        other[1][1] = (inputs.roll(1, 0), targets) if part == "input" else (inputs, targets.roll(1, 0))
    said = pool.submit(with_own_data, case, {2: other}, 1.0, ranks=3, fresh=True)
    assert said[2][0] == "DataError"
    assert "microbatch 3 (batch 1) is not the same on the first and the last stage" in said[2][1]
    assert [kind for kind, _ in said[:2]] == ["TransportError"] * 2


def test_data_that_end_too_early_on_the_last_stage(pool: Pool) -> None:
    case = Case("2bw", 2, 2)
    said = pool.submit(with_own_data, case, {1: make_batches(case)[:3]}, 1.0, ranks=2, fresh=True)
    assert said[1] == (
        "DataError",
        "the data ends after 3 batches, but the first stage has sent batch 3 raised by F6 of stage 1 on rank 1",
    )


def test_data_that_fail_at_once_on_the_first_stage(pool: Pool) -> None:
    case = Case("1f1b", 2, 2)
    said = pool.submit(with_own_data, case, {0: [[]]}, 1.0, ranks=2, fresh=True)
    assert said[0][0] == "DataError"
    assert said[1][0] == "TransportError"


# --- what does not fit ----------------------------------------------------------------------------------------------


def wrong_group(group: dist.ProcessGroup) -> str:
    with pytest.raises(ConfigError) as caught:
        make_pipeline(Case("1f1b", 3, 2), group)
    return str(caught.value)


def test_a_group_of_the_wrong_size(pool: Pool) -> None:
    assert set(pool.submit(wrong_group, ranks=2)) == {"the schedule has 3 ranks, the process group 2"}


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan")])
def test_a_divisor_that_is_not_positive(divisor: float) -> None:
    with pytest.raises(ConfigError, match="divisor must be positive"):
        make_pipeline(Case("1f1b", 2, 2), divisor=divisor)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem) for path in GOLDEN],
)
def test_schedules_that_the_runtime_does_not_offer(path: Path) -> None:
    schedule = parse_schedule(path.read_text())
    with pytest.raises(CapabilityError, match=f"{schedule.name}: the runtime"):
        make_pipeline(Case("1f1b", 4, 1), schedule=schedule, balance=None)


@pytest.mark.parametrize("passes", ["F0^t F1^t B0..1^t", "F0..1^t B0^t B1^t"])
def test_units_of_several_microbatches_are_not_run_in_part(passes: str) -> None:
    text = f"schedule several\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: {passes} STEP[t]\n"
    with pytest.raises(CapabilityError, match="several: the runtime"):
        make_pipeline(Case("1f1b", 1, 2), schedule=parse_schedule(text))


def test_a_drain_of_several_microbatches_is_not_run_in_part() -> None:
    """The books would count two backwards where one has run."""
    text = """
        rule stash
        microbatches 2
        nodes 0@0
        rank 0: F0^t-1 B-2^t-2 F1^t-1 B-1^t-2 STEP[t-1]
        drain 0: B-2..-1^t-2 STEP[t-1]
    """
    with pytest.raises(CapabilityError, match="one whole training microbatch"):
        make_pipeline(Case("1f1b", 1, 2), schedule=parse_schedule(text))


def test_periods_of_the_batch_before_are_not_run() -> None:
    """Their messages would say too late that the data has ended."""
    row = "F-1^t-1 B-1^t-1 STEP[t-1]"
    text = f"rule stash\nmicrobatches 1\nnodes 0@0\nrank 0: {row}\ndrain 0: {row}\n"
    with pytest.raises(CapabilityError, match="periods that begin the forwards of their own batch"):
        make_pipeline(Case("1f1b", 1, 1), schedule=parse_schedule(text))


@pytest.mark.parametrize("schedule", ["2bw", None, 3])
def test_what_is_no_schedule(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="schedule must come from make_schedule, prove or check"):
        make_pipeline(Case("1f1b", 1, 2), schedule=schedule)


def test_a_batch_that_is_no_sequence() -> None:
    case = Case("1f1b", 2, 2)
    with pytest.raises(DataError, match="batch 0 is a generator; a batch is a list of 2 pairs"):
        list(make_pipeline(case).run([(pair for pair in make_batches(case)[0])]))  # type: ignore[list-item]


def test_a_stage_that_begins_in_place_is_refused_with_the_remedy() -> None:
    blocks = mixed() | {"norm": nn.ReLU(inplace=True)}  # the first block of the second stage
    with pytest.raises(ConfigError, match=r"stage 1 on rank 1: a block writes in place .*inplace=False"):
        list(make_pipeline(Case("1f1b", 2, 2), blocks=blocks).run(make_batches(Case("1f1b", 2, 2))))


def leaves_by_error(group: dist.ProcessGroup, case: Case) -> tuple[str, int]:
    """The loop's body fails on the last rank, which nobody else hears of."""
    pipeline, seen = make_pipeline(case, group, timeout=1.5), 0
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


def test_a_message_of_another_batch_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LocalTransport.send

    def stray(self: LocalTransport, lane: LaneKey, parcel: Parcel) -> Ticket:
        if lane.source == 0 and parcel.header.first == 2:
            parcel = replace(parcel, header=parcel.header._replace(batch=7))
        return send(self, lane, parcel)

    monkeypatch.setattr(LocalTransport, "send", stray)
    with pytest.raises(TransportError, match=r"microbatch 2 \(batch 1\).* got that of microbatch 2 \(batch 7\)"):
        list(make_pipeline(Case("1f1b", 2, 2)).run(make_batches(Case("1f1b", 2, 2))))


@pytest.mark.parametrize("method", ["vertical-sync", "newest"])
def test_methods_that_are_only_simulated(method: str) -> None:
    with pytest.raises(CapabilityError, match="does not offer version rule"):
        make_pipeline(Case(method, 2, 2))


def test_a_schedule_that_is_wrong_is_not_run() -> None:
    """A schedule is proven before anything runs, whoever made it."""
    text = str(make_schedule("1f1b", 2, 2))
    assert "B1^t" in text
    with pytest.raises(ScheduleError, match="microbatch 0"):
        make_pipeline(Case("1f1b", 2, 2), schedule=parse_schedule(text.replace("B1^t", "B0^t")))


# --- messages -------------------------------------------------------------------------------------------------------


def test_a_message_that_is_lost_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LocalTransport.send

    def losing(self: LocalTransport, lane: LaneKey, parcel: Parcel) -> Ticket:
        lost = lane.source == 1 and lane.target == 2 and parcel.header.first == 3
        return Ticket(lane) if lost else send(self, lane, parcel)

    monkeypatch.setattr(LocalTransport, "send", losing)
    case = Case("1f1b", 3, 2)
    pipeline = make_pipeline(case)
    with pytest.raises(TransportError, match="no rank can go on: .*rank 2, stage 2, F3"):
        list(pipeline.run(make_batches(case)))
    refuses_to_go_on(pipeline, case)


def test_a_message_that_is_not_the_one_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages change places."""
    send = LocalTransport.send
    kept: list[Parcel] = []

    def swapping(self: LocalTransport, lane: LaneKey, parcel: Parcel) -> Ticket:
        if lane == (0, 1, lane.payload) and parcel.header.first in (1, 2) and lane.source == 0:
            kept.append(parcel)
            if len(kept) == 1:
                return Ticket(lane)
            first = send(self, lane, kept[1])
            send(self, lane, kept[0])
            return first
        return send(self, lane, parcel)

    monkeypatch.setattr(LocalTransport, "send", swapping)
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
    assert "rank 1, stage 1, F4: nothing came on the activation lane from rank 0 to rank 1 within 0.5" in said[1][1]
    assert "the peer is stalled or dead" in said[1][1]


def raises_on_a_rank(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    changes = with_block(1, Fails(3, divide_by_zero), case.depth)
    return what_happens(group, case, make_batches(case), 1.0, **changes)


def test_a_block_that_raises_on_a_rank(pool: Pool) -> None:
    """It is named there; the others learn at least whom they waited for."""
    said = pool.submit(raises_on_a_rank, Case("2bw", 3, 2), ranks=3, fresh=True)
    assert said[1] == ("ZeroDivisionError", "a block of the user's raised by F3 of stage 1 on rank 1")
    assert said[0][0] == said[2][0] == "TransportError"
    assert "gradient lane from rank 1 to rank 0" in said[0][1]
    assert "rank 2, stage 2, F3: nothing came on the activation lane from rank 1 to rank 2" in said[2][1]


def dies(group: dist.ProcessGroup, case: Case, victim: int) -> tuple[str, str]:
    block = Fails(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return what_happens(group, case, make_batches(case), 8.0, **with_block(victim, block, case.depth))


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
        assert f"rank {rank}, s" in text  # stage and action, or what was being sent
        assert " lane from rank " in text
        if abs(rank - victim) == 1:
            assert "broke" in text
