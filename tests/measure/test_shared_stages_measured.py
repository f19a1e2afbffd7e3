"""Stages that processes share: predicted memory is that of the ledger on each of them, and what measures them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from penstock.comm.core.tensor_group import TensorGroup
from penstock.errors import CapabilityError, ConfigError
from penstock.measure.model_profile import measure_blocks, profile_of
from penstock.measure.recompute_choice import choose_recompute
from penstock.measure.single_rank_rehearsal import _rehearse_parts
from penstock.measure.stage_bytes import measure_stages
from penstock.measure.stage_trial import Training
from penstock.models.gpt import gpt_blocks, language_loss
from penstock.options.all_options import PipelineOptions
from penstock.options.parallelism import Partition
from penstock.runtime.from_checked_plan import pipeline_of
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.plan.schedule_from_arguments import request_of
from penstock.simulate.memory.predicted import MemoryOptions, peak_bytes
from penstock.train.config.load import load_config
from penstock.train.prepare.prepare_run import prepare
from support.pool import Pool
from support.tensor_parallel_cases import SHAPE

SAMPLES = 2
SHARED = PipelineOptions().changed(tensor_parallel=2)


class Shared(NamedTuple):
    """What is trained by processes that share every stage."""

    method: str = "1f1b"
    stages: int = 2
    microbatches: int = 3
    optimizer: str = "adamw"
    recompute: str = "none"
    precision: str = "fp32"
    width: int = 1
    clip: float | None = 1.0
    ema: float | None = None
    vocabulary: int = SHAPE.vocabulary

    def steps(self, named: Any) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(named, lr=1e-3)
        return torch.optim.SGD(named, lr=1e-2, momentum=0.9 if self.optimizer == "momentum" else 0.0)

    def blocks(self) -> dict[str, Any]:
        return dict(gpt_blocks(replace(SHAPE, vocabulary=self.vocabulary), seed=3))

    def data(self, batches: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = batches, SAMPLES * self.microbatches * self.width, SHAPE.context + 1
        tokens = torch.randint(self.vocabulary, shape, generator=torch.Generator().manual_seed(7))
        return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]

    def options(self, tensor: int, **changes: Any) -> PipelineOptions:
        common = {"precision": self.precision, "recompute": self.recompute, "width": self.width}
        return PipelineOptions().changed(tensor_parallel=tensor, **common | changes)

    def plan(self, tensor: int) -> PipelinePlan:
        request, _ = request_of(self.method, self.stages, self.microbatches)
        options = self.options(tensor, max_grad_norm=self.clip, ema_decay=self.ema)
        return UnprovenPlan.of(self.blocks(), request, options).prove()


def predicted_peaks(case: Shared, plan: PipelinePlan, tensor: TensorGroup) -> dict[int, int]:
    (inputs, targets), *_ = case.data(1)
    training = Training(language_loss, case.steps, case.options(tensor.size), tensor=tensor)
    sample = inputs[:SAMPLES], targets[:SAMPLES]
    sizes = measure_stages(case.blocks(), plan.parts, sample, training, case.recompute != "none", plan.schedule)
    asked = MemoryOptions(
        case.width, case.precision != "fp32", case.recompute == "block", batches=4, averages=case.ema is not None
    )
    depth = plan.schedule.ranks
    peaks = peak_bytes(plan.proof, sizes, asked)
    return {pipeline * depth + rank: peak for (pipeline, rank), peak in peaks.items()}


def all_ranks_here(group: dist.ProcessGroup, case: Shared) -> tuple[dict[int, int], dict[int, dict[str, int]]]:
    """Run all ranks in each process, which share every stage; returns predicted and recorded peaks."""
    tensor = TensorGroup.around(group)
    plan = case.plan(tensor.size)
    pipeline = pipeline_of(plan, case.blocks(), language_loss, case.steps, tensor=tensor)
    list(pipeline.run(case.data()))
    return predicted_peaks(case, plan, tensor), pipeline.peak_bytes()


def in_a_job(group: dist.ProcessGroup, case: Shared, size: int) -> tuple[dict[int, int], dict[int, dict[str, int]]]:
    """Run as a job with a process for each rank and tensor rank; returns the same of the rank that is here."""
    pipeline = Pipeline(
        case.blocks(),
        method=case.method,
        stages=case.stages,
        microbatches=case.microbatches,
        loss=language_loss,
        optimizer=case.steps,
        max_grad_norm=case.clip,
        recompute=case.recompute,
        partition=Partition(tensor_parallel=size),
        group=group,
    )
    list(pipeline.run(case.data()))
    found = pipeline.peak_bytes()
    predicted = predicted_peaks(case, case.plan(size), pipeline.grid.tensor)
    return {rank: predicted[rank] for rank in found}, found


CASE = Shared("2bw", recompute="block")
MORE = (
    Shared(precision="bf16", optimizer="momentum", vocabulary=63),
    *(
        Shared(method, stages, optimizer=optimizer, recompute=recompute)
        for method in ("1f1b", "2bw", "gpipe")
        for stages in (1, 2)
        for optimizer in ("adamw", "sgd")
        for recompute in ("none", "stage")
    ),
    Shared("interleaved", 2, 4, recompute="block", precision="bf16", width=2),
    Shared("stash", 3, 3, "momentum", ema=0.9),
    Shared("2bw-eager", 2, 4, precision="bf16", ema=0.9, clip=None),
    Shared("chimera", 2, 4, recompute="stage", width=2),
    Shared("vertical-sync", 2, 3, vocabulary=63, recompute="block"),
)


@pytest.mark.processes
@pytest.mark.parametrize("case", [CASE, *(pytest.param(case, marks=pytest.mark.long) for case in MORE)], ids=str)
def test_the_predicted_peak_of_what_processes_share_is_that_of_each_ledger(pool: Pool, case: Shared) -> None:
    for predicted, found in pool.submit(all_ranks_here, case, ranks=2):
        assert predicted == {rank: kinds["total"] for rank, kinds in found.items()}


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("case", [Shared("gpipe", 1, recompute="stage"), Shared("2bw", 1), Shared("1f1b", 1)], ids=str)
def test_so_is_that_of_a_job_of_four_processes(pool: Pool, case: Shared) -> None:
    for predicted, found in pool.submit(in_a_job, case, 4, ranks=4):
        assert predicted == {rank: kinds["total"] for rank, kinds in found.items()}


def measure_shared(group: dist.ProcessGroup, seconds: float) -> list[Any]:
    blocks, (batch, _) = Shared().blocks(), Shared().data(1)[0]
    samples = {size: (batch[:size], batch[:size]) for size in (1, 2)}
    tensor = TensorGroup.around(group)
    found = measure_blocks(blocks, samples, language_loss, torch.optim.AdamW, SHARED, seconds, tensor=tensor)
    return list(profile_of("shared", found, settings={"tensor_parallel": 2}).layers)


@pytest.mark.long
@pytest.mark.processes
def test_blocks_are_measured_by_the_processes_that_share_them(pool: Pool) -> None:
    """Bytes are those of a part, and the same for each; the time is up for both at once."""
    first, second = pool.submit(measure_shared, 0.02, ranks=2)
    layer, head = first[1], first[-1]
    assert layer.parameters == 4 * (12 * SHAPE.width**2 // 2 + 2 * SHAPE.width)
    assert head.parameters == 4 * (SHAPE.vocabulary // 2 + 1) * SHAPE.width
    assert layer.output == [size * SHAPE.context * SHAPE.width * 4 for size in (1, 2)]
    assert layer.backward_input is None
    for here, there in zip(first, second, strict=True):
        for key in ("output", "stored", "shared", "parameters", "buffer", "optimizer"):
            assert getattr(here, key) == getattr(there, key)


def test_one_process_refuses_to_measure_what_others_share() -> None:
    """It would measure whole blocks, of which no process of such a run has any."""
    blocks, (batch, _) = Shared().blocks(), Shared().data(1)[0]
    sample = batch[:1], batch[:1]
    with pytest.raises(ConfigError, match="measured together by the 2 processes that share them, but here by 1"):
        measure_blocks(blocks, {1: sample}, language_loss, torch.optim.AdamW, SHARED, 0.0)
    with pytest.raises(ConfigError, match="as `tensor` of Training"):
        measure_stages(blocks, [list(blocks)], sample, Training(language_loss, torch.optim.AdamW, SHARED))
    run = {"method": "1f1b", "stages": 2, "microbatches": 2, "loss": language_loss, "optimizer": torch.optim.AdamW}
    with pytest.raises(CapabilityError, match="recompute=auto is not offered with tensor_parallel=2 yet"):
        choose_recompute(blocks, sample, 1e9, options=SHARED, **run)


def config_of(tmp_path: Path, *changes: str) -> Any:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy. " * 40)
    small = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "microbatches=4", "threads=1"]
    return load_config(None, [*small, "device=cpu", "tensor_parallel=2", f"data={text}", *changes])


def whole_run(group: dist.ProcessGroup, values: dict[str, Any]) -> dict[int, int]:
    """The peaks of all ranks of the whole pipeline, whose stages the processes of the group share."""
    config = load_config(None, []).model_validate(values)
    prepared = prepare(config)
    steps = Shared().steps
    pipeline = pipeline_of(
        prepared.plan, prepared.model.blocks, prepared.model.loss, steps, tensor=TensorGroup.around(group)
    )
    sample = prepared.windows.samples(0, config.microbatch_size)
    copies = [tuple(part.clone() for part in sample) for _ in range(4 * config.microbatches)]
    list(pipeline.run(copies[at : at + config.microbatches] for at in range(0, len(copies), config.microbatches)))
    return {rank: kinds["total"] for rank, kinds in pipeline.peak_bytes().items()}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [(1,), pytest.param((0,), marks=pytest.mark.long)])
def test_processes_rehearse_the_rank_that_they_share(pool: Pool, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    values = config_of(tmp_path, "method=2bw", "stages=2", "recompute=block").model_dump()
    peaks = pool.submit(whole_run, values, ranks=2)
    for rank in ranks:
        for index, found in enumerate(pool.submit(_rehearse_parts, values, rank, 1, 1, ranks=2)):
            assert found["peak"]["total"] == peaks[index][rank]
            assert found["passes"]["F"][0] == 4
            assert found["processes"] == 2
            assert found["left_out"] == ("what the 2 processes that share each stage decide together",)
