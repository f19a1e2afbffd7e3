"""What takes a GPU: ranks that share one over gloo, ranks with one each over NCCL, and `penstock train` there."""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.comm.core.devices import BOTH
from penstock.comm.transports import GlooTransports, NcclTransports
from penstock.options.passes import Precision
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.text_parser import parse_schedule
from penstock.stage.cuda_graphs.captured_pass import CapturedPass
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    assert_equal_tensors,
    assert_same,
    expected,
    finish,
    make_pipeline,
    run_spans,
    together,
    train,
)
from support.command_line import Command
from support.grouped import grouped
from support.own_methods import correction_of
from support.pool import Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SHARED = [
    Case("1f1b", 2, 4, device="cuda"),
    Case("2bw", 2, 4, device="cuda", precision="bf16"),
    Case("interleaved", 2, 4, device="cuda", options=(("chunks", 2),), clip=0.5),
    Case("zb-h1", 2, 4, device="cuda", recompute="block"),
    Case("bpipe", 4, 5, device="cuda"),
    Case("2bw", 2, 2, device="cuda", tied=True, width=2),
    Case("pipemare", 4, 2, device="cuda", correction=correction_of("pipemare", reschedule=3)),
]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: f"{case.method}-{case.depth}-{case.width}")
def test_ranks_share_a_gpu_over_gloo(pool: Pool, case: Case) -> None:
    """To the bits of the reference on the same GPU."""
    options = {"reschedule": 3} if case.method == "pipemare" else None
    found = together(pool.submit(train, case, ranks=case.width * case.depth))
    assert_same(found, expected(case, options=options))


OVER_NCCL = [
    Case("1f1b", 4, 5, device="cuda"),
    Case("gpipe", 4, 3, device="cuda", clip=0.5),
    Case("2bw", 4, 4, device="cuda", precision="bf16"),
    Case("interleaved", 4, 4, model="long", device="cuda", options=(("chunks", 2),)),
    Case("zb-h1", 4, 4, device="cuda", recompute="block"),
    Case("bpipe", 4, 5, device="cuda"),
    Case("2bw", 2, 2, device="cuda", tied=True, width=2),
]


def train_over_nccl(_: dist.ProcessGroup, case: Case, **changes: Any) -> tuple[str, Outcome]:
    """Run a case over a group of all ranks that has NCCL.

    It does not let ranks share a GPU unless they say that they are on different hosts.
    """
    rank = dist.get_rank()
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    recording = Recording(OPTIMIZERS[case.optimizer])
    group = dist.new_group(backend=BOTH)
    device = f"cuda:{torch.cuda.current_device()}"
    pipeline = make_pipeline(case, group, optimizer=recording, device=device, **changes)
    found = run_spans(pipeline, case)
    return type(pipeline._transports).__name__, finish(found, pipeline, recording)


@pytest.mark.parametrize("case", OVER_NCCL, ids=lambda case: f"{case.method}-{case.depth}-{case.width}")
def test_ranks_talk_over_nccl(pool: Pool, case: Case) -> None:
    """To the bits of the reference on a GPU."""
    found = pool.submit(train_over_nccl, case, ranks=4, timeout=120.0)
    assert {kind for kind, _ in found} == {NcclTransports.__name__}
    assert_same(together([outcome for _, outcome in found]), expected(case))


def train_and_wait_for_the_gpu(group: dist.ProcessGroup, method: str, width: int) -> list[int]:
    """Train over NCCL, with messages too large for its buffers; wait for the GPU and for all ranks at every report."""
    rank, reports = dist.get_rank(), list[int]()
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    arguments: dict[str, Any] = {"method": method, "stages": 4 // width, "microbatches": 8, "width": width}
    arguments |= {"loss": F.mse_loss, "optimizer": torch.optim.SGD, "group": dist.new_group(backend=BOTH)}
    arguments |= {"device": f"cuda:{torch.cuda.current_device()}"}
    pipeline = Pipeline([nn.Linear(1024, 1024) for _ in range(4)], **grouped(arguments))
    sample = torch.ones(8 * 4096 * width, 1024)
    for report in pipeline.run([(sample, sample)] * 4):
        torch.cuda.synchronize()
        dist.barrier(group)
        reports.append(report.batch)
    return reports


@pytest.mark.parametrize(("method", "width"), [("2bw", 1), ("1f1b", 1), ("1f1b", 2)])
def test_callers_may_wait_for_the_gpu(pool: Pool, method: str, width: int) -> None:
    assert pool.submit(train_and_wait_for_the_gpu, method, width, ranks=4, timeout=120.0) == [[0, 1, 2, 3]] * 4


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


AS_CUDA_GRAPHS = [
    Case("1f1b", 2, 4, loss="mean", device="cuda"),
    Case("1f1b", 3, 2, loss="mean", clip=0.5, device="cuda"),
    Case("gpipe", 4, 3, loss="mean", device="cuda"),
    Case("2bw", 4, 4, loss="mean", device="cuda"),
    Case("2bw", 2, 4, loss="mean", precision="bf16", device="cuda"),
    Case("2bw", 3, 3, loss="mean", precision="fp16", device="cuda"),
    Case("interleaved", 2, 4, loss="mean", options=(("chunks", 2),), device="cuda"),
    Case("stash", 3, 2, loss="mean", spans=(2, 1, 3), device="cuda"),
    Case("zb-h1", 3, 4, loss="mean", device="cuda"),
    Case("zb-v", 2, 4, loss="mean", precision="bf16", device="cuda"),
    Case("2bw", 2, 2, loss="mean", tied=True, width=2, device="cuda"),
]


@pytest.mark.parametrize("case", AS_CUDA_GRAPHS, ids=lambda case: f"{case.method}-{case.depth}-{case.precision}")
def test_passes_replayed_as_cuda_graphs(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bits of the reference; in low precision, where that reads a mean in less, of a run without them."""
    replays = Counter[str]()
    for what in ("forward", "backward"):
        replay = getattr(CapturedPass, what)
        monkeypatch.setattr(
            CapturedPass,
            what,
            lambda self, *given, what=what, replay=replay: replays.update([what]) or replay(self, *given),
        )
    wanted = expected(case) if case.precision == "fp32" else train(None, case)
    assert_same(train(None, case, device="cuda", cuda_graphs=True), wanted)
    assert replays["forward"] >= replays["backward"] > 0
    assert not caplog.records, "all passes can be recorded"


def test_a_loss_that_waits_for_the_gpu_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("1f1b", 2, 4, device="cuda")
    assert_same(train(None, case, device="cuda", cuda_graphs=True), expected(case))
    (warning,) = caplog.messages
    assert "stage 1" in warning
    assert "waits for the GPU, as .item()" in warning


def train_as_cuda_graphs(group: dist.ProcessGroup, case: Case) -> tuple[str, Outcome]:
    """As `train_over_nccl`, with passes that are replayed."""
    return train_over_nccl(group, case, cuda_graphs=True)


@pytest.mark.parametrize("case", [OVER_NCCL[0], OVER_NCCL[2], OVER_NCCL[6]], ids=lambda case: case.method)
def test_cuda_graphs_between_ranks(pool: Pool, case: Case) -> None:
    """To the bits of the reference."""
    found = pool.submit(train_as_cuda_graphs, case, ranks=4, timeout=120.0)
    assert_same(together([outcome for _, outcome in found]), expected(case))


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


def wide(batches: int, size: int = 512, samples: int = 64) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(samples, size), torch.randn(samples, size)) for _ in range(batches)]


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
        beside, at_rest = streamed.on_cpu(streamed.tensors), drained.on_cpu(drained.tensors)
        assert_equal_tensors(beside, at_rest, f"stage {drained.stage}")


def test_parked_activations_come_back_to_the_same_bits() -> None:
    """From pinned memory, beside the work."""
    text = (Path(__file__).parents[1] / "golden" / "offload.txt").read_text()
    case = Case("gpipe", 2, 4, spans=(3,), device="cuda")
    assert_same(train(None, case, method=parse_schedule(text)), expected(case))


def test_the_allocator_says_what_it_had() -> None:
    pipeline = pipeline_on("cuda")
    list(pipeline.run(wide(2)))
    for peaks in pipeline.peak_bytes().values():
        assert peaks["device: reserved"] >= peaks["device: allocated"] >= peaks["total"] - peaks.get("messages", 0)


def test_tf32_rounds_products_and_is_taken_back() -> None:
    """Of matrices with many rows: of fewer, cuBLAS has products that do not round."""
    before, found = torch.backends.cuda.matmul.fp32_precision, {}
    for tf32 in (False, True):
        pipeline = pipeline_on("cuda", precision=Precision(tf32=tf32))
        found[tf32] = [report.loss for report in pipeline.run(wide(2, samples=512))]
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
