"""Runs between processes that are closed or dropped while a peer is idle or gone: waits end after the time-out."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock import Evaluating, Pipeline
from penstock.errors import PenstockError, TransportError
from penstock.options.run import Group
from support.pool import Pool

pytestmark = pytest.mark.processes

TIMEOUT = 1.5
BATCH = torch.ones(4, 3), torch.ones(4, 3)
PATIENT = timedelta(minutes=5)  # of the group: what waits for it takes longer than a test may


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_pool(pool: Pool) -> Iterator[None]:
    """Leave no broken pipelines behind in its processes: they would be collected, and wait, in the midst of others."""
    yield
    pool.close()


def make_pipeline(group: dist.ProcessGroup, method: str) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        [torch.nn.Linear(3, 3) for _ in range(4)],
        method=method,
        microbatches=2,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        group=Group(group, TIMEOUT),
    )


def close_or_drop(run: list[object], how: str) -> str:
    """End the only run in a list; return what is said."""
    if how == "close":
        with pytest.raises(TransportError) as caught:
            run[0].close()  # type: ignore[attr-defined]
        return str(caught.value)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run.clear()
        gc.collect()
    return " ".join(str(warning.message) for warning in heard if warning.category is RuntimeWarning)


def refused(pipeline: Pipeline) -> str:
    with pytest.raises(PenstockError) as caught:
        pipeline.snapshots()
    return str(caught.value)


def leaves(_: dist.ProcessGroup, method: str, how: str, idle: int, deed: str) -> tuple[float, str, str]:
    """Both stop asking for reports; one ends its run while the other is idle, or exits."""
    group = dist.new_group([0, 1], timeout=PATIENT)
    pipeline = make_pipeline(group, method)
    run = [pipeline.run([BATCH] * 50)]
    for _ in range(4):
        next(run[0])
    if dist.get_rank(group) == idle:
        if deed == "exits":
            os._exit(0)
        time.sleep(3 * TIMEOUT)
        pipeline.abandon()
        return 0.0, "", ""
    start = time.monotonic()
    said = close_or_drop(run, how)
    return time.monotonic() - start, said, refused(pipeline)


def check_left(took: float, said: str, refusal: str, how: str) -> None:
    assert " lane from rank " in said
    assert how == "close" or said.startswith(
        "a run was dropped whose batches under way could not be finished, so its pipeline is broken (close() raises "
    )
    assert "the pipeline broke in an earlier run and cannot go on (TransportError: " in refusal
    assert took < 3 * TIMEOUT  # the idle peer is there for longer


@pytest.mark.parametrize(("how", "idle"), [("close", 0), ("drop", 1)])
def test_a_peer_that_is_idle(pool: Pool, how: str, idle: int) -> None:
    said = pool.submit(leaves, "2bw", how, idle, "idles", ranks=2)[1 - idle]
    check_left(*said, how)
    assert "nothing moved" in said[1]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_peer_that_has_exited(how: str) -> None:
    alone = Pool(2)
    try:
        said = alone.submit(leaves, "2bw", how, 1, "exits", ranks=2, victims=[1])[0]
    finally:
        alone.close()
    check_left(*said, how)
    assert "broke" in said[1]


def keeps_the_last_report(_: dist.ProcessGroup, how: str) -> tuple[float, str, str]:
    """One rank is through with the run; the other has its last report, and never asks whether there is another one."""
    group = dist.new_group([0, 1], timeout=PATIENT)
    pipeline = make_pipeline(group, "1f1b")
    run = [pipeline.run([BATCH] * 4, evaluate=Evaluating(2, [BATCH]))]
    rank = dist.get_rank(group)
    for _ in range(4 if rank == 0 else 3):
        next(run[0])
    if rank == 0:
        time.sleep(4 * TIMEOUT)
        pipeline.abandon()
        return 0.0, "", ""
    start = time.monotonic()
    said = close_or_drop(run, how)
    return time.monotonic() - start, said, refused(pipeline)


@pytest.mark.long
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_peer_that_does_not_come_to_the_end(pool: Pool, how: str) -> None:
    took, said, refusal = pool.submit(keeps_the_last_report, how, ranks=2, timeout=30.0)[1]
    assert "rank 1, ending a run: a peer is dead or stalled" in said
    assert "the pipeline broke in an earlier run and cannot go on (TransportError: " in refusal
    assert took < 4 * TIMEOUT
