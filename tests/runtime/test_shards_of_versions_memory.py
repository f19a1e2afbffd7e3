"""What 2BW on fully sharded state gathers, adds up and holds: as often, and as many bytes, as the proof says."""

from __future__ import annotations

import gc
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.comm.collective.shard_exchange import LocalShards
from penstock.options.parallelism import DataParallel
from penstock.options.passes import PrecisionName
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.memory_ledger import MemoryLedger
from support.schedules import make_schedule
from support.sharded import storages_of, with_late_sums
from support.state_bytes import state_bytes


def pipeline_of_layers(schedule: Any, width: int, precision: PrecisionName = "fp32") -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        {f"layer {n}": nn.Linear(48, 48, bias=False) for n in range(schedule.num_stages)},
        schedule,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
        data_parallel=DataParallel(width),
        precision=precision,
    )


def counted(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, batches: int) -> Counter[tuple[str, int, int]]:
    """How often each rank of each pipeline joins a gather or a reduction in a run."""
    counts: Counter[tuple[str, int, int]] = Counter()
    with monkeypatch.context() as patch:
        for name in ("gather", "scatter"):
            real = getattr(LocalShards, name)

            def joined(self: Any, members: Any, me: Any, *rest: Any, name: str = name, real: Any = real) -> Any:
                counts[name, me.pipeline, me.stage.rank] += 1
                return real(self, members, me, *rest)

            patch.setattr(LocalShards, name, joined)
        m = pipeline.schedule.microbatches * pipeline.grid.width
        list(pipeline.run([(torch.randn(2 * m, 48), torch.randn(2 * m, 48))] * batches))
    return counts


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("times", [1, 2])
def test_each_batch_gathers_and_reduces_what_the_proof_says(
    monkeypatch: pytest.MonkeyPatch, ranks: int, chunks: int, times: int
) -> None:
    """2v - k + 1 gathers, 2v - k on the last rank, and v reductions for each batch, with m = p and m = 2p."""
    schedule = make_schedule("2bw-layered", ranks, times * ranks, options={"chunks": chunks}, sharding="full")
    pipeline = pipeline_of_layers(schedule, 2)
    first, longer = (counted(monkeypatch, pipeline, batches) for batches in (4, 7))  # from two versions on, both
    first = counted(monkeypatch, pipeline, 4)
    for pipe in range(2):
        for rank in range(ranks):
            facts = pipeline.proof.shards[rank]
            for name, proven in (("gather", facts.gathers), ("scatter", facts.reductions)):
                assert longer[name, pipe, rank] - first[name, pipe, rank] == 3 * proven
            assert facts.gathers == 2 * chunks - 2 + (rank < ranks - 1)
            assert facts.reductions == chunks
            assert first["scatter", pipe, rank] == 4 * chunks
            assert first["gather", pipe, rank] == 4 * facts.gathers + chunks  # and so that users find whole weights


def test_one_version_is_gathered_once_where_it_is_read_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first span begins with one version, which its second batch reads as well."""
    schedule = make_schedule("2bw-layered", 2, 4, options={"chunks": 2}, sharding="full")
    pipeline = pipeline_of_layers(schedule, 2)
    first, second = (counted(monkeypatch, pipeline, 4) for _ in range(2))
    for pipe in range(2):
        assert second["gather", pipe, 0] - first["gather", pipe, 0] == 1
        assert second["scatter", pipe, 0] == first["scatter", pipe, 0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("microbatches", "chunks", "width"), [(2, 2, 2), (4, 3, 2), (4, 3, 4), (2, 2, 3)])
def test_the_memory_of_shards_of_versions_is_what_is_derived(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionName, microbatches: int, chunks: int, width: int
) -> None:
    """To the byte: of gathered stages, of gradients at full size, of sums that wait, and of all rows together."""
    with_late_sums(monkeypatch)
    schedule = make_schedule("2bw-layered", 2, microbatches, options={"chunks": chunks}, sharding="full")
    pipeline, low = pipeline_of_layers(schedule, width, precision), precision == "bf16"
    m = microbatches * width
    together: Counter[int] = Counter()
    rows = ("weights", "master weights", "summed gradients", "idle buffers")
    record = MemoryLedger.record

    def watched(self: MemoryLedger, *, optimizers: bool) -> None:
        record(self, optimizers=optimizers)
        for number, live in pipeline.live_bytes().items():
            together[number] = max(together[number], sum(live.get(kind, 0) for kind in rows))

    monkeypatch.setattr(MemoryLedger, "record", watched)
    list(pipeline.run([(torch.randn(2 * m, 48), torch.randn(2 * m, 48))] * 4))
    stages = len(schedule.on_rank(0))
    share, counters = stages * 48 * 48, stages * 4  # a number of steps for each parameter
    scratch = 0 if low else stages * 48 * 4 * (48 // width)
    for number, peak in pipeline.peak_bytes().items():
        rank = number % 2
        facts, derived = pipeline.proof.shards[rank], state_bytes(pipeline.proof, rank, width, low)
        assert peak["gathered weights"] == derived.weights * share
        assert peak["gradients"] == derived.gradients * share == 4 * facts.gradients_share * share
        assert peak["summed gradients"] == 4 * facts.waiting_share * Fraction(share, width)
        assert together[number] == (derived.sums + derived.master) * share
        assert peak["optimizer"] - counters - scratch == derived.optimizer * share


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_versions_are_those_of_the_ledger(precision: PrecisionName) -> None:
    """What is alive in the size of a stage, in a run and between two: nothing for each microbatch.

    The ledger forgets a gradient that is being summed only when the sum is there.
    """
    size = 44 * 44 * 4
    gc.collect()  # what tests before this one have left
    model = nn.Sequential(*(nn.Linear(44, 44, bias=False) for _ in range(6)))
    before = storages_of(size) - len(model)
    seen = list[tuple[int, int]]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        held = sum(live.get(kind, 0) for live in pipeline.live_bytes().values() for kind in kinds) // size
        seen.append((storages_of(size) - before, held))
        return nn.functional.mse_loss(output, target)

    pipeline = Pipeline(
        model,
        make_schedule("2bw-layered", 2, 4, options={"chunks": 3}, sharding="full"),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        data_parallel=DataParallel(2),
        precision=precision,
    )
    kinds = {"gradients", "weights between runs", *(["gathered weights"] if precision == "fp32" else [])}
    batch = torch.randn(16, 44), torch.randn(16, 44)
    for _ in range(2):
        for _ in pipeline.run([batch] * 4):
            pass
        assert storages_of(size) - before == 12
    assert all(alive <= held <= 16 for alive, held in seen), "two places of each kind on each of four ranks"
    assert sum(alive == held for alive, held in seen) > len(seen) / 2
