"""What takes a GPU: ranks that share one over gloo, ranks with one each over NCCL, and `penstock train` there."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.comm.transports import GlooTransports, NcclTransports
from penstock.options.passes import Precision
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.text import parse_schedule
from support.cases import Case, assert_equal_tensors, assert_same, expected, together, train
from support.command_line import Command
from support.pool import Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SHARED = [
    Case("1f1b", 2, 4, device="cuda"),
    Case("2bw", 2, 4, device="cuda", precision="bf16"),
    Case("interleaved", 2, 4, device="cuda", options=(("chunks", 2),), clip=0.5),
    Case("zb-h1", 2, 4, device="cuda", recompute="block"),
    Case("bpipe", 4, 5, device="cuda"),
    Case("2bw", 2, 2, device="cuda", tied=True, width=2),
    Case("pipemare", 4, 2, device="cuda"),
]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: f"{case.method}-{case.depth}-{case.width}")
def test_ranks_share_a_gpu_over_gloo(pool: Pool, case: Case) -> None:
    """To the bits of the reference on the same GPU."""
    assert_same(together(pool.submit(train, case, ranks=case.width * case.depth)), expected(case))


def train_on_every_gpu(_: dist.ProcessGroup, method: str, batches: int) -> tuple[str, list[float | None]]:
    """Train a small model over a group that has NCCL, from batches on the host."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    blocks = [layer for _ in range(ranks) for layer in (nn.Linear(16, 16), nn.Tanh())]
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    pipeline = Pipeline(
        blocks,
        method=method,
        microbatches=4,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        max_grad_norm=1.0,
        group=both,
        device=f"cuda:{rank}",
    )
    assert {stage.module.device for stage in pipeline.stages.values()} == {torch.device("cuda", rank)}
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(batches)]
    losses = [report.loss for report in pipeline.run(data)]
    assert isinstance(pipeline._transports, NcclTransports)
    return type(pipeline._transports).__name__, losses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a GPU for each rank")
@pytest.mark.parametrize("method", ["1f1b", "2bw", "interleaved", "zb-h1", "bpipe", "gpipe"])
def test_ranks_with_a_gpu_each_talk_over_nccl(pool: Pool, method: str) -> None:
    ranks = min(torch.cuda.device_count(), 4)
    found = pool.submit(train_on_every_gpu, method, 6, ranks=ranks, fresh=True)
    losses = [losses for _, losses in found if None not in losses]
    assert len(losses) == 1
    assert losses[0][-1] is not None
    assert losses[0][0] is not None
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("width", [1, 2])
def test_penstock_train_on_one_gpu(command: Command, tmp_path: Path, width: int) -> None:
    """The ranks share it; the losses are nearly those of the CPU."""
    values = ("batches=4", "sample_length=0", "validation_samples=8", f"width={width}")
    small = [part for value in values for part in ("--set", value)]
    ends = {}
    for device in ("cpu", "cuda:0"):
        out = tmp_path / device.replace(":", "")
        here = ("--set", f"device={device}", "--set", f"out={out}")
        done = command("train", "1f1b", "--stages", 2, "--microbatches", 2, *small, *here)
        assert done.returncode == 0, done.stderr
        (metrics,) = out.rglob("metrics.jsonl")
        ends[device] = metrics.read_text().count('"loss"')
    assert ends["cpu"] == ends["cuda:0"] > 0


def test_transports_of_a_group_without_nccl(pool: Pool) -> None:
    assert set(pool.submit(transports_of, ranks=2)) == {GlooTransports.__name__}


def transports_of(group: dist.ProcessGroup) -> str:
    pipeline = Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        method="1f1b",
        microbatches=2,
        loss=F.mse_loss,
        optimizer=torch.optim.AdamW,
        group=group,
        device="cuda",
    )
    list(pipeline.run([(torch.ones(4, 2), torch.ones(4, 2))]))
    return type(pipeline._transports).__name__


def test_a_loss_is_read_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a number of a GPU waits for it."""
    waits: list[int] = []
    real = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: waits.append(1) or real(self))  # type: ignore[func-returns-value]
    pipeline = Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        method="1f1b",
        stages=2,
        microbatches=8,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        device="cuda",
    )
    data = [(torch.ones(8, 2), torch.ones(8, 2))] * 3
    assert len(list(pipeline.run(data))) == 3
    assert len(waits) == 0


def pipeline_on(device: str, blocks: int = 4, size: int = 512, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(
        [nn.Linear(size, size) for _ in range(blocks)],
        stages=2,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        device=device,
        **{"method": "2bw", "microbatches": 4} | options,
    )


def wide(batches: int, size: int = 512) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(64, size), torch.randn(64, size)) for _ in range(batches)]


def test_passes_have_the_times_of_the_gpu() -> None:
    """In order, none before it was issued, and all read when the run is over."""
    pipeline = pipeline_on("cuda")
    list(pipeline.run(wide(3)))
    before = time.perf_counter()
    list(pipeline.run(wide(4)))
    torch.cuda.synchronize()
    passed, timeline = time.perf_counter() - before, pipeline.timeline()
    for rank, seconds in pipeline.busy_seconds().items():
        work = timeline.work(rank)
        assert all(first.end <= second.start + 1e-5 for first, second in pairwise(work))
        assert seconds == pytest.approx(sum(i.end - i.start for i in work), rel=1e-3)
        assert sum(i.end - i.start for i in work if i.span == 1) <= passed


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_snapshots_are_copied_beside_the_work(method: str) -> None:
    """To the bits of those that are copied while nothing else is done."""
    taken: list[Snapshot] = []
    pipeline, other = pipeline_on("cuda", method=method), pipeline_on("cuda", method=method)
    list(pipeline.run(wide(6), save=Saving(3, taken.append)))
    list(other.run(wide(3)))
    for drained in other.snapshots():
        (streamed,) = [s for s in taken if (s.batch, s.stage) == (3, drained.stage)]
        assert all(tensor.is_cpu for tensor in streamed.tensors.values())
        assert any(tensor.is_pinned() for tensor in streamed.tensors.values())
        assert_equal_tensors(streamed.on_cpu(), drained.on_cpu(), f"stage {drained.stage}")


def test_parked_activations_come_back_to_the_same_bits() -> None:
    """From pinned memory, beside the work."""
    text = (Path(__file__).parents[1] / "golden" / "offload.txt").read_text()
    case = Case("gpipe", 2, 4, spans=(3,), device="cuda")
    assert_same(train(None, case, schedule=parse_schedule(text)), expected(case))


def test_the_allocator_says_what_it_had() -> None:
    pipeline = pipeline_on("cuda")
    list(pipeline.run(wide(2)))
    for peaks in pipeline.peak_bytes().values():
        assert peaks["device: reserved"] >= peaks["device: allocated"] >= peaks["total"] - peaks.get("messages", 0)


def test_tf32_rounds_products_and_is_taken_back() -> None:
    before, found = torch.backends.cuda.matmul.fp32_precision, {}
    for tf32 in (False, True):
        found[tf32] = [report.loss for report in pipeline_on("cuda", precision=Precision(tf32=tf32)).run(wide(2))]
        assert torch.backends.cuda.matmul.fp32_precision == before
    if torch.cuda.get_device_capability() >= (8, 0):
        assert found[False] != found[True]
    assert found[False] == pytest.approx(found[True], rel=1e-2)


@pytest.mark.parametrize("sdpa", ["flash", "efficient", "cudnn", "math"])
def test_penstock_train_with_each_backend_of_attention(command: Command, tmp_path: Path, sdpa: str) -> None:
    values = ("batches=2", "sample_length=0", "validation_samples=8", f"sdpa={sdpa}", "precision=bf16")
    values += ("device=cuda:0", f"out={tmp_path}")
    done = command("train", "1f1b", "--stages", 2, "--microbatches", 2, *(p for v in values for p in ("--set", v)))
    assert done.returncode == 0, done.stderr


def test_penstock_train_with_compiled_blocks(command: Command, tmp_path: Path) -> None:
    values = (
        "batches=3",
        "sample_length=0",
        "validation_samples=8",
        "compile=true",
        "device=cuda:0",
        f"out={tmp_path}",
    )
    done = command("train", "2bw", "--stages", 2, "--microbatches", 2, *(p for v in values for p in ("--set", v)))
    assert done.returncode == 0, done.stderr
