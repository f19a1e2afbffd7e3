"""State that is divided among ranks, or lies on the host, where ranks compute on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm.core.devices import BOTH
from penstock.comm.transports import NcclTransports
from support.cases import Case, Outcome, assert_equal_tensors, assert_same, expected, make_pipeline, run_spans, train
from support.pool import Pool
from support.sharded import assert_as_whole, train_sharded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CASES = [
    (Case("1f1b", 2, 3, width=2, spans=(4, 3), device="cuda"), "optimizer"),
    (Case("2bw", 2, 3, width=2, spans=(4, 3), device="cuda"), "gradients"),
    (Case("2bw", 2, 2, "faint", width=2, spans=(4,), tied=True, device="cuda"), "gradients"),
    (Case("2bw", 2, 3, width=2, spans=(4,), precision="bf16", device="cuda"), "gradients"),
    (Case("1f1b", 2, 3, width=2, spans=(4, 3), device="cuda"), "full"),
    (Case("breadth-first", 2, 4, width=2, spans=(4,), options=(("chunks", 3),), device="cuda"), "full"),
]


def assert_nearly_as_whole(outcome: Outcome, parts: Any, wanted: Outcome) -> None:
    """As `assert_as_whole`, but a GPU adds the terms of a norm in an order that depends on where they lie."""
    norms = {batch: norm for batch, _, norm, *_ in wanted.decided}
    for batch, _, norm, *_ in outcome.decided:
        assert norm == pytest.approx(norms[batch], rel=1e-6, nan_ok=True)
    same = [(batch, loss, norms[batch], *rest) for batch, loss, _, *rest in outcome.decided]
    assert_as_whole(replace(outcome, decided=same), parts, wanted)


@pytest.mark.parametrize(("case", "level"), CASES, ids=lambda value: getattr(value, "method", value))
def test_shards_on_one_gpu(case: Case, level: str) -> None:
    outcome, parts, _ = train_sharded(None, case, level)
    assert_nearly_as_whole(outcome, [parts], expected(case))


def train_shards_over_nccl(_: dist.ProcessGroup, case: Case, level: str) -> Any:
    """Run a case over a group of all ranks that has NCCL, which takes several on one GPU if hosts seem different."""
    rank = dist.get_rank()
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return train_sharded(dist.new_group(backend=BOTH), case, level, device=f"cuda:{torch.cuda.current_device()}")


@pytest.mark.parametrize(("case", "level"), CASES, ids=lambda value: getattr(value, "method", value))
def test_shards_over_nccl(pool: Pool, case: Case, level: str) -> None:
    outcomes, parts, _ = zip(*pool.submit(train_shards_over_nccl, case, level, ranks=4, timeout=120.0), strict=True)
    whole = Outcome(decided=outcomes[0].decided)
    for outcome in outcomes:
        whole.weights |= outcome.weights
    assert_nearly_as_whole(whole, parts, expected(case))


def train_with_fast_sums(_: dist.ProcessGroup, case: Case) -> tuple[str, Outcome]:
    """Run a case whose pipelines add gradients by NCCL's all_reduce."""
    rank = dist.get_rank()
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}"
    pipeline = make_pipeline(case, dist.new_group(backend=BOTH), device=device, reduce="fast")
    outcome = run_spans(pipeline, case)
    outcome.weights = {name: w.clone() for name, w in pipeline.state_dict().items()}
    return type(pipeline._transports).__name__, outcome


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_fast_sums_over_nccl(pool: Pool, method: str) -> None:
    """The sum of two has the bits of the reference, in whichever order."""
    case = Case(method, 2, 3, width=2, spans=(4, 2), device="cuda")
    found, wanted = pool.submit(train_with_fast_sums, case, ranks=4, timeout=120.0), expected(case)
    for kind, outcome in found:
        assert kind == NcclTransports.__name__
        here = {name: w for name, w in wanted.weights.items() if name in outcome.weights}
        assert here
        assert_equal_tensors(outcome.weights, here, "weights")


@pytest.mark.parametrize("kind", ["stages", "pieces"])
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_optimizer_states_on_the_host(method: str, kind: str) -> None:
    """The bits of runs whose states stay on the GPU; they are on the host when a run has ended."""
    case = Case(method, 2, 3, spans=(4, 3), device="cuda")
    found, wanted = train(None, case, offload_optimizer=kind, device="cuda"), expected(case)
    away = [value for state in found.state.values() for value in state.values() if value.dim()]
    assert away
    assert not any(value.is_cuda for value in away)
    assert_same(replace(found, state=on_the_host(found)), replace(wanted, state=on_the_host(wanted)))


def on_the_host(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {name: {kind: value.cpu() for kind, value in state.items()} for name, state in outcome.state.items()}
