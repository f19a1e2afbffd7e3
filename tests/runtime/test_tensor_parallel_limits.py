"""Tensor parallelism: how runs end, and what is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import CapabilityError, ConfigError, DataError, PenstockError
from penstock.models.gpt import gpt_blocks
from penstock.options.all_options import PipelineOptions
from penstock.options.run import Group
from penstock.runtime.plan.plan import UnprovenPlan
from penstock.runtime.plan.schedule_from_arguments import request_of
from penstock.schedule.methods.data_parallel_sync import Combine
from support.pool import Pool
from support.tensor_parallel_cases import SHAPE, TensorCase, gpt_pipeline, tokens


def leave(group: dist.ProcessGroup, case: TensorCase, rank: int) -> int:
    """Leave the loop on one rank alone."""
    pipeline = gpt_pipeline(group, case)
    for report in pipeline.run(tokens(30)):
        if report.batch == 2 and dist.get_rank(group) == rank:
            break
    return pipeline.batches


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("method", "clip"), [("1f1b", None), ("2bw", 0.7), ("stash", 0.7)])
def test_whoever_leaves_the_loop_ends_the_run_after_the_same_batch_for_all(
    pool: Pool, rank: int, method: str, clip: float | None
) -> None:
    found = pool.submit(leave, TensorCase(method, clip=clip), rank, ranks=4)
    assert len(set(found)) == 1
    assert 3 <= found[0] < 30


def die(group: dist.ProcessGroup, case: TensorCase, victim: int) -> str:
    """Die on one rank directly after an update, so that the next forward misses it."""
    pipeline = gpt_pipeline(Group(group, timeout=5.0), case)
    if dist.get_rank(group) == victim:
        pipeline.on_update(lambda update, _: update < 3 or os._exit(1))
    try:
        list(pipeline.run(tokens(20)))
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "it has ended"


@pytest.mark.long
@pytest.mark.processes
def test_a_process_that_dies_ends_the_run_of_those_that_share_its_stage() -> None:
    alone = Pool(4)
    try:
        said = alone.submit(die, TensorCase(), 3, ranks=4, victims=[3], timeout=60.0)
    finally:
        alone.close()
    assert all(text.startswith("TransportError: ") for text in said[:3])
    assert "a process that shares the stage by tensor parallelism is dead or stalled" in said[2]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("zb-h1", {}, r"tensor_parallel=2 is not offered with backwards in two halves \(zero-bubble orders\)"),
    ("zb-v", {}, "with backwards in two halves"),
    ("pipemare:reschedule=0", {}, "with version rule newest"),
    ("spectrain", {}, "with version rule predicted"),
    ("zb-h2-post", {}, "with backwards in two halves"),
    ("seq1f1b", {}, "with slices of sequences"),
    ("bpipe", {}, "where activations are moved away"),
    ("1f1b", {"offload": "activations"}, "where activations are moved away"),
    ("1f1b", {"width": 2, "sharding": "optimizer"}, "with sharding optimizer"),
    ("1f1b", {"width": 2, "reduce": "fast"}, "with reduce='fast'"),
    ("1f1b", {"width": 2, "combine": Combine("average", every=2)}, "with pipelines that have weights of their own"),
    ("1f1b", {"delays": 1}, "with corrections of staleness or chosen delays"),
    ("1f1b", {"compile": True}, "with compiled blocks"),
    ("1f1b", {"device": "cuda:0"}, "on GPUs"),
    ("1f1b:in_flight=auto", {}, "with in_flight='auto'"),
]


@pytest.mark.parametrize(("method", "changes", "said"), REFUSED, ids=[f"{m}-{said}" for m, _, said in REFUSED])
def test_what_does_not_go_with_it_yet_is_refused_by_name(method: str, changes: dict[str, Any], said: str) -> None:
    """By the plan, which needs no processes."""
    request, correction = request_of(method, 4, 8)
    options = PipelineOptions().changed(tensor_parallel=2, correction=correction, **changes)
    with pytest.raises(CapabilityError, match=said):
        UnprovenPlan.of(gpt_blocks(replace(SHAPE, layers=6), seed=3), request, options)


def test_one_process_is_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match="tensor_parallel=2: 2 processes share each stage, and this is one"):
        gpt_pipeline(None, TensorCase())


def with_optimizer(group: dist.ProcessGroup, case: TensorCase) -> str:
    with pytest.raises(CapabilityError) as caught:
        gpt_pipeline(group, case, optimizer=lambda named: torch.optim.Adafactor(named))
    return str(caught.value)


@pytest.mark.processes
def test_optimizers_that_look_at_whole_parameters_are_refused(pool: Pool) -> None:
    for said in pool.submit(with_optimizer, TensorCase(), ranks=4):
        assert said.startswith("Adafactor looks at parameters as a whole")


def with_processes(group: dist.ProcessGroup, case: TensorCase) -> None:
    gpt_pipeline(group, case)


@pytest.mark.processes
def test_another_number_of_processes_is_refused(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="3 ranks with tensor_parallel=2 are 6 processes, but the process group has"):
        pool.submit(with_processes, TensorCase(stages=3), ranks=4)
    with pytest.raises(CapabilityError, match="all 4 processes of the job must take part"):
        pool.submit(with_processes, TensorCase(stages=1), ranks=2)


def lose_data(group: dist.ProcessGroup, case: TensorCase, rank: int) -> tuple[int, str]:
    """Train on data that one rank cannot read from some batch on."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(tokens(12)):
            if number == 5 and dist.get_rank(group) == rank:
                raise OSError("the disk is gone")
            yield batch

    pipeline, said = gpt_pipeline(group, case), ""
    try:
        list(pipeline.run(batches()))
    except (OSError, DataError) as error:
        said = str(error)
    return pipeline.batches, said


@pytest.mark.processes
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_data_that_one_process_cannot_read_end_the_run_for_all(pool: Pool, method: str, rank: int) -> None:
    found = pool.submit(lose_data, TensorCase(method), rank, ranks=4)
    assert len({batches for batches, _ in found}) == 1
    assert 1 <= found[0][0] <= 5
    assert found[rank][1] == "the disk is gone"
    others = [said for other, (_, said) in enumerate(found) if other != rank]
    assert all("could not read its next batch (OSError: the disk is gone)" in said for said in others)
