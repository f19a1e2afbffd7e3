"""2BW on fully sharded state: all versions are rows, and every number is that of the reference of 2bw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.options.parallelism import DataParallel
from penstock.runtime.pipeline import Pipeline
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.stage.checks.released_weight_placeholders import AbsentWeight
from penstock.verify.reference import Scaling
from support.cases import Case, Outcome, assert_equal_tensors
from support.layered_cases import THREE, TWO, layered, plain, said
from support.pool import Pool
from support.sharded import assert_as_whole, train_sharded

CASES = [
    layered(4, 2),
    layered(2, 3),
    layered(3, 3, precision="bf16"),
    layered(4, 2, precision="bf16", skips=(3, 12)),
    layered(4, 2, TWO, optimizer="sgd"),
    layered(2, 2, TWO, optimizer="momentum", recompute="block"),
    layered(3, 2, THREE, optimizer="nadam", recompute="stage", precision="bf16"),
    layered(2, 3, THREE, optimizer="configured muon"),
    layered(2, 2, TWO, optimizer="configured muon", precision="bf16"),
    layered(2, 2, THREE, optimizer="adafactor"),
    layered(2, 2, THREE, model="faint", clip=0.7, tied=True),
    layered(2, 3, TWO, model="faint", clip=0.7, tied=True, precision="bf16", recompute="stage"),
    layered(2, 2, TWO, model="half", clip=None, spans=(9,), scaling=Scaling(2.0**24, 2.0, 0.5, 2)),
    layered(2, 2, TWO, clip=None, spans=(6, 3), scaling=Scaling(2.0**10, 2.0, 0.5, 2), precision="fp16"),
    replace(layered(6, 2, TWO, spans=(6, 5)), depth=3),
]


def run_sharded(
    case: Case, group: dist.ProcessGroup | None = None, level: str = "full"
) -> tuple[Outcome, Any, dict[int, dict[str, int]]]:
    """A run whose schedule is sharded behind its recomputes."""
    return train_sharded(group, case, level, method=plain(case))


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda c: f"{c.depth}-{c.m}-{c.width}-{dict(c.options)['chunks']}-{c.model}-{c.optimizer}-{c.precision}",
)
def test_a_run_with_versions_as_shards_has_the_numbers_of_the_reference(case: Case) -> None:
    wanted = said(case)
    assert case.clip is None or sum(norm > case.clip for _, _, norm, *_ in wanted.decided) >= len(wanted.decided) / 2
    outcome, parts, _ = run_sharded(case)
    assert_as_whole(outcome, [parts], wanted)


@pytest.mark.parametrize("weights", [3, 4])
def test_more_places_than_it_takes(weights: int) -> None:
    """Several versions of a stage may be gathered at once, or be on their way."""
    case = layered(4, 2, spans=(9,))
    outcome, parts, _ = run_sharded(case, level=f"full:weights={weights}")
    assert_as_whole(outcome, [parts], said(case))


def test_modules_let_go_of_a_version_whose_memory_is_given_back() -> None:
    """On one rank the last pass before an update has read the version that it frees; a look at that would crash."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    pipeline = Pipeline(
        model,
        "2bw-layered",
        stages=1,
        microbatches=2,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        precision="bf16",
        data_parallel=DataParallel(2, sharding="gradients"),
    )
    for _ in pipeline.run([(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(4)]):
        there = [isinstance(w, AbsentWeight) or w.untyped_storage().nbytes() > 0 for w in (m.weight for m in model)]
        assert all(there)


def test_a_version_of_a_stage_that_trains_nothing_may_be_named_by_two_gathers() -> None:
    """Of a stage that trains the second one finds it whole."""
    found = []
    for sharding in ("none", "full"):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model[0].requires_grad_(False)
        pipeline = Pipeline(
            model,
            "2bw-layered",
            stages=2,
            microbatches=3,
            loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            data_parallel=DataParallel(2, sharding=sharding),
        )
        list(pipeline.run([(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(4)]))
        found.append(pipeline.full_state_dict())
    assert_equal_tensors(found[1], found[0], "weights")


def on_rank(group: dist.ProcessGroup, case: Case) -> Any:
    return run_sharded(case, group)


@pytest.mark.parametrize(
    "case",
    [
        layered(4, 2),
        layered(3, 2, TWO, precision="bf16", recompute="stage"),
        replace(layered(2, 3, optimizer="momentum"), depth=1),
    ],
    ids=lambda c: f"{c.depth}-{c.width}-{c.precision}",
)
def test_processes_with_versions_as_shards_have_the_same_numbers(pool: Pool, case: Case) -> None:
    outcomes, parts, _ = zip(*pool.submit(on_rank, case, ranks=case.depth * case.width), strict=True)
    whole = Outcome(decided=outcomes[0].decided)
    for place, outcome in enumerate(outcomes):
        assert repr(outcome.decided) == repr(whole.decided)
        for name, weight in outcome.weights.items():
            assert torch.equal(whole.weights.setdefault(name, weight), weight), (place, name)
    assert_as_whole(whole, parts, said(case))


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_2bw_layered_by_name(recompute: RecomputeMode) -> None:
    """It is sharded by itself, behind recomputes."""
    found = []
    for sharding in ("none", None):
        torch.manual_seed(3)
        pipeline = Pipeline(
            [nn.Linear(16, 16) for _ in range(4)],
            "2bw-layered",
            stages=2,
            microbatches=4,
            loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
            recompute=recompute,
            data_parallel=DataParallel(2, sharding=sharding),
        )
        batches = [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(5)]
        losses = [report.loss for report in pipeline.run(batches)]
        assert str(pipeline.schedule.sharding) == (sharding or "full:weights=2:gradients=2")
        found.append((losses, pipeline.full_state_dict()))
    (losses, weights), (others_, sharded) = found
    assert losses == others_
    assert_equal_tensors(sharded, weights, "weights")
