"""A loader that fails on one rank only ends the run on all before the batch, with an error; the pipeline goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import DataError, Evaluating, Pipeline, make_schedule
from penstock.options.run import Group
from penstock.schedule.proof.data_read_ahead import batches_ahead
from support.pool import Pool

M, MANY = 4, 30
METHODS = ("1f1b", "interleaved", "2bw", "stash", "zb-h1", "gpipe", "stash:in_flight=7/4/1", "zb-interleaved")


class UserError(Exception):
    """What the loader raises."""


def make_pipeline(method: str, depth: int, group: dist.ProcessGroup | None, **options: Any) -> Pipeline:
    torch.manual_seed(1)
    if depth == 2:
        method = method.replace("7/4/1", "7/1")
    widths = [3, *[5] * (2 * depth - 1), 2]
    return Pipeline(
        [nn.Linear(a, b) for a, b in itertools.pairwise(widths)],
        make_schedule(method, depth, M),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
        group=Group(group, 20.0),
        **options,
    )


def data(start: int, fails: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(start, MANY):
        if number == fails:
            raise UserError(f"at {number}")
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def fails_late(
    group: dist.ProcessGroup, method: str, at: int, every: int, who: int, options: dict[str, Any]
) -> tuple[list[int], str, int, Any]:
    """What is reported, raised and trained where only one rank fails; the state after three batches more."""
    depth, rank = dist.get_world_size(group) // options.get("data_parallel", 1), dist.get_rank(group)
    pipeline, reports, raised = make_pipeline(method, depth, group, **options), [], ""
    evaluate = Evaluating(every, lambda: list(data(MANY - 2))) if every else None
    try:
        for report in pipeline.run(data(0, at if rank == who else None), evaluate=evaluate):
            reports.append(report.batch)
    except (UserError, DataError) as error:
        raised = f"{type(error).__name__}: {error}"
    trained = pipeline.batches
    assert [r.batch for r in pipeline.run(itertools.islice(data(trained), 3))] == [trained, trained + 1, trained + 2]
    return reports, raised, trained, {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


def check(pool: Pool, method: str, depth: int, at: int, every: int = 0, who: int | None = None, **options: Any) -> None:
    ranks = depth * options.get("data_parallel", 1)
    who = ranks - 1 if who is None else who
    found = pool.submit(fails_late, method, at, every, who, options, ranks=ranks)
    weights: dict[str, Tensor] = {}
    for rank, (reports, raised, trained, state) in enumerate(found):
        assert trained == at
        assert reports == list(range(at))
        elsewhere = (
            f"rank {who} could not read its next batch (UserError: at {at}), so the run ends after batch {at - 1}"
        )
        assert raised == (f"UserError: at {at}" if rank == who else f"DataError: {elsewhere} on all ranks")
        weights |= state
    wanted = make_pipeline(method, depth, None, **options)
    evaluate = Evaluating(every, lambda: list(data(MANY - 2))) if every else None
    list(wanted.run(itertools.islice(data(0), at), evaluate=evaluate))
    list(wanted.run(itertools.islice(data(at), 3)))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(weights[name], tensor), name


PAIRWISE = [  # each method fails before each batch, and at both depths; so does each batch
    (method, 2 + (i + j) % 2, at) for i, method in enumerate(METHODS) for j, at in enumerate((1, 2, 3, 7))
]


@pytest.mark.parametrize(("method", "depth", "at"), PAIRWISE)
def test_the_run_ends_before_the_batch(pool: Pool, method: str, depth: int, at: int) -> None:
    """Weights and momenta go on as those of a run that was given only the batches before."""
    check(pool, method, depth, at)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_it_does_so_with_evaluations_in_the_stream(pool: Pool, method: str) -> None:
    check(pool, method, 2, 7, every=3)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_it_does_so_where_all_stages_decide_about_updates(pool: Pool, method: str) -> None:
    check(pool, method, 3, 5, max_grad_norm=0.1)


@pytest.mark.parametrize(
    ("method", "at", "who"),
    [
        ("1f1b", 3, 0),
        ("1f1b", 5, 3),
        ("2bw", 1, 2),
        ("2bw", 6, 0),
        ("2bw", 6, 1),
        ("stash", 5, 3),
        ("interleaved", 4, 2),
    ],
)
def test_it_does_so_in_parallel_pipelines(pool: Pool, method: str, at: int, who: int) -> None:
    """All stages decide together there, so whichever rank cannot read is heard in time, a first one too."""
    check(pool, method, 2, at, who=who, data_parallel=2)


@pytest.mark.parametrize(
    ("method", "at", "who"), [("chimera", 1, 0), ("chimera", 5, 1), ("dualpipe", 4, 1), ("bitpipe", 3, 0)]
)
def test_it_does_so_where_both_ends_read(pool: Pool, method: str, at: int, who: int) -> None:
    check(pool, method, 2, at, who=who)


def stopped_twice(group: dist.ProcessGroup, method: str) -> tuple[list[int], Any]:
    """Two runs over one iterator, the first of which is left after a few batches."""
    pipeline, batches = make_pipeline(method, dist.get_world_size(group), group), data(0)
    for report in pipeline.run(batches):
        if report.batch == 2:
            pipeline.stop()
    first = pipeline.batches
    for report in pipeline.run(batches):
        if report.batch == first + 3:
            pipeline.stop()
    return [first, pipeline.batches], {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_what_was_read_ahead_is_not_lost_to_a_second_run_over_the_iterator(pool: Pool, method: str) -> None:
    found = pool.submit(stopped_twice, method, ranks=3)
    first, second = found[0][0]
    assert 3 <= first < second
    wanted, batches, weights = make_pipeline(method, 3, None), data(0), {}
    list(wanted.run(itertools.islice(batches, first)))
    list(wanted.run(itertools.islice(batches, second - first)))
    for _, state in found:
        weights |= state
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    ("method", "depth", "m", "ahead"),
    [
        ("gpipe", 4, 8, 2),
        ("1f1b", 4, 8, 2),
        ("2bw", 4, 8, 3),
        ("stash:in_flight=9/5/3/1", 4, 4, 4),
        ("chimera", 2, 4, 2),
    ],
)
def test_how_far_ranks_read_ahead(method: str, depth: int, m: int, ahead: int) -> None:
    """With a flush one batch more than the first rank; another where batches overlap."""
    assert batches_ahead(make_schedule(method, depth, m).schedule) == ahead
