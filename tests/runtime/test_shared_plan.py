"""A job proves each schedule once: rank 0 does, the others get their part, and all hear if it is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from penstock.errors import ConfigError, PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan import actions_for_options
from penstock.schedule import build
from penstock.schedule.build import prove
from penstock.schedule.machine.instructions import LoweredProgram
from penstock.schedule.orders.gpipe import gpipe
from penstock.schedule.proof import check as proofs
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from support.cases import Case, make_pipeline
from support.pool import Pool
from support.schedules import make_schedule

pytestmark = pytest.mark.processes

LIMIT = 2.0  # seconds


def plain(method: Any, group: dist.ProcessGroup | None, m: int | None, **changes: Any) -> Pipeline:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(3, 3) for _ in range(4)]
    return Pipeline(
        blocks,
        **{"method": method, "microbatches": m, "group": group, **changes},
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def count_proofs(group: dist.ProcessGroup, case: Case, second: str) -> tuple[int, int, int, list[bool]]:
    """Make a pipeline, train, and go on under another method; how often each rank has built or proven anything."""
    with (
        mock.patch.object(proofs, "prove_versions", wraps=proofs.prove_versions) as proven,
        mock.patch.object(build, "_build", wraps=build._build) as made,
    ):
        pipeline = plain(case.method, group, case.m, stages=case.depth, data_parallel=case.width)
        built = proven.call_count
        batch = torch.ones(12, 3), torch.ones(12, 3)
        list(pipeline.run([batch] * 3))
        pipeline.switch(method=second)
        list(pipeline.run([batch] * 3))
        pipeline.evaluate([batch])
    nothing = LoweredProgram((), ())
    return (
        made.call_count,
        built,
        proven.call_count,
        [program != nothing for program in pipeline.proof.lowered.programs],
    )


@pytest.mark.parametrize(("case", "ranks"), [(Case("2bw", 3, 3), 3), (Case("1f1b", 2, 3, width=2), 4)])
def test_one_rank_proves_for_all(pool: Pool, case: Case, ranks: int) -> None:
    """And builds: training and evaluation; the other method. Each rank has the program of its own place only."""
    first, *others = pool.submit(count_proofs, case, "stash", ranks=ranks)
    assert first == (2, 2, 3, [True] * case.depth)
    for rank, found in enumerate(others, 1):
        assert found == (0, 0, 0, [rank % case.depth == other for other in range(case.depth)])


CALLS: list[int] = []


def own_order(stages: int, microbatches: int) -> list[str]:
    """All forwards, then all backwards; it counts how often it is called in this process."""
    CALLS.append(stages)
    if microbatches == 5:
        raise ValueError("five is too much")
    numbers = range(microbatches)
    return [" ".join([*(f"F{k}" for k in numbers), *(f"B{k}" for k in numbers)])] * stages


def count_of_own(group: dist.ProcessGroup, kind: str) -> tuple[int, ...]:
    """Make and switch a pipeline of an order of one's own; how often it is called, proven, and given more actions."""
    CALLS.clear()
    given: Any = make_schedule("gpipe", 2, 4) if kind == "a schedule" else own_order
    with (
        mock.patch.object(proofs, "prove_versions", wraps=proofs.prove_versions) as proven,
        mock.patch.object(actions_for_options, "extended", wraps=actions_for_options.extended) as added,
    ):
        pipeline = plain(given, group, None if kind == "a schedule" else 4, max_grad_norm=1.0)
        found = proven.call_count, added.call_count
        batch = torch.ones(12, 3), torch.ones(12, 3)
        list(pipeline.run([batch] * 2))
        pipeline.switch(given)
        list(pipeline.run([batch] * 2))
    return len(CALLS), *found, proven.call_count, added.call_count


@pytest.mark.parametrize(("kind", "calls"), [("a function", 2), ("a schedule", 0)])
def test_rank_0_alone_calls_extends_and_proves_orders_of_ones_own(pool: Pool, kind: str, calls: int) -> None:
    """One proof for training and one for evaluations; one for the switch."""
    first, second = pool.submit(count_of_own, kind, ranks=2)
    assert first == (calls, 2, 1, 3, 2)
    assert second == (0, 0, 0, 0, 0)


def an_order_that_fails(group: dist.ProcessGroup) -> str:
    with pytest.raises((ValueError, PenstockError)) as caught:
        plain(own_order, group, 5)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_hear_that_an_order_of_ones_own_fails(pool: Pool) -> None:
    first, second = pool.submit(an_order_that_fails, ranks=2)
    assert first == "ValueError: five is too much"
    assert second == "TransportError: rank 0, planning the pipeline, failed: ValueError: five is too much"


def other_orders(group: dist.ProcessGroup, own: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        plain(own_order if own and dist.get_rank(group) else "gpipe", group, 4)
    return str(caught.value)


def test_a_method_and_an_order_of_ones_own_are_two_schedules(pool: Pool) -> None:
    first, second = pool.submit(other_orders, True, ranks=2)
    assert "this one gpipe (flush), 2 stages, 4 microbatches, 4 blocks; rank 1 own_order (flush), 2 stages" in first
    assert "this one own_order" in second


def test_an_order_with_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="asked for 2 stages, the order has 3 ranks"):
        plain(lambda stages, m: gpipe(stages + 1, m), None, 4, stages=2)


def wrong_schedule(group: dist.ProcessGroup) -> str:
    with pytest.raises(PenstockError) as caught:
        plain("2bw", group, 1)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_hear_that_a_schedule_is_wrong(pool: Pool) -> None:
    first, *others = pool.submit(wrong_schedule, ranks=4)
    assert first.startswith("ScheduleError: 2bw with 4 stages needs at least 3 microbatches per batch, got 1")
    assert others == [first] * 3


def breaks_while_proving(group: dist.ProcessGroup) -> str:
    broken = mock.Mock(side_effect=MemoryError("no room"))
    with mock.patch.object(proofs, "prove_versions", broken), pytest.raises(Exception, match="no room") as caught:
        plain("2bw", group, 4)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_do_not_wait_for_a_proof_that_has_broken_down(pool: Pool) -> None:
    said = "TransportError: rank 0, planning the pipeline, failed: MemoryError: no room"
    assert pool.submit(breaks_while_proving, ranks=2) == ["MemoryError: no room", said]


def different_orders(group: dist.ProcessGroup) -> str:
    """Both call their method 1f1b, with as many stages and microbatches."""
    window = 3 + dist.get_rank(group)
    with pytest.raises(ConfigError) as caught:
        plain(make_schedule("1f1b", 2, 4, window=window), group, None)
    return str(caught.value)


def test_ranks_with_different_schedules_are_told_so(pool: Pool) -> None:
    first, second = pool.submit(different_orders, ranks=2)
    assert "this one and rank 1 have 1f1b (flush), 2 stages, 4 microbatches, 4 blocks, but not the same order" in first
    assert "this one and rank 0 have 1f1b" in second


def proof_elsewhere(group: dist.ProcessGroup, case: Case) -> tuple[list[float | None], float]:
    """Take the proof of a pipeline to a pipeline in this process, and to the simulator."""
    proof = make_pipeline(case, group).proof
    here = plain(proof, None, None)
    batch = torch.ones(12, 3), torch.ones(12, 3)
    simulated = simulate_schedule(proof, Costs.uniform(proof.schedule))
    return [report.loss for report in here.run([batch] * 2)], simulated.bubble.bubble


def test_a_proof_of_one_rank_serves_elsewhere(pool: Pool) -> None:
    case = Case("1f1b", 2, 4)
    first, second = pool.submit(proof_elsewhere, case, ranks=2)
    assert first == second
    whole = prove("1f1b", 2, 4)
    assert first[1] == simulate_schedule(whole, Costs.uniform(whole.schedule)).bubble.bubble
    assert None not in first[0]


def proves_slowly(_: dist.ProcessGroup) -> int:
    """The proof takes longer than the group's time-out."""
    group, check = dist.new_group(timeout=timedelta(seconds=LIMIT)), proofs.prove_versions

    def slow(*args, **kwargs):
        time.sleep(2 * LIMIT)
        return check(*args, **kwargs)

    with mock.patch.object(proofs, "prove_versions", slow):
        pipeline = plain("2bw", group, 4, stages=4)
    return len(list(pipeline.run([(torch.ones(12, 3), torch.ones(12, 3))] * 2)))


@pytest.mark.long
def test_ranks_wait_for_a_proof_as_long_as_it_takes(pool: Pool) -> None:
    """The time-out is that of a rank 0 that says nothing; ranks that hear of it through others wait as well."""
    assert pool.submit(proves_slowly, ranks=4) == [2] * 4


def ends_while_proving(_: dist.ProcessGroup, deed: str) -> tuple[str, float]:
    """Rank 0 dies, or is stopped and says nothing any more, after the others have been told that it is at work."""
    group = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=LIMIT))

    def end(*_: object, **__: object) -> None:
        time.sleep(2 * LIMIT)
        if deed == "stops":  # for as long as the others may wait, and longer
            subprocess.Popen(["sh", "-c", f"sleep {4 * LIMIT}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP if deed == "stops" else signal.SIGKILL)

    start = time.monotonic()
    with mock.patch.object(proofs, "prove_versions", end), pytest.raises(PenstockError) as caught:
        plain("2bw", group, 4, stages=4)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - start


@pytest.mark.parametrize("deed", ["dies", pytest.param("stops", marks=pytest.mark.long)])
def test_a_rank_that_ends_while_it_proves_ends_the_job(deed: str) -> None:
    alone = Pool(4)
    try:
        said = alone.submit(ends_while_proving, deed, ranks=4, victims=[0], timeout=40.0)
    finally:
        alone.close()
    for rank, (text, took) in enumerate(said[1:], 1):
        assert text.startswith(f"TransportError: rank {rank}, planning the pipeline: a peer is dead or stalled")
        assert took < 5 * LIMIT
