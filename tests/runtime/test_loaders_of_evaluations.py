"""Evaluations whose loader is short or fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from penstock import Evaluating, Pipeline
from penstock.errors import DataError, TransportError
from support.loaders import DiskError, assert_equal, failing, make_loader, make_pipeline, weights_of
from support.pool import Pool


@pytest.mark.parametrize("after", [0, 2])
def test_an_evaluation_whose_loader_fails_says_so(after: int) -> None:
    pipeline = make_pipeline()
    with pytest.raises(DiskError):
        pipeline.evaluate(failing(after))
    assert_same_evaluation(pipeline.evaluate(make_loader(16, 8)), make_pipeline(), 16)


def assert_same_evaluation(found: tuple[float, float] | None, pipeline: Pipeline, samples: int) -> None:
    """It is the mean over so many samples under a pipeline's weights, computed with torch alone."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
    model.load_state_dict(pipeline.full_state_dict())
    ((x, y),) = make_loader(samples, samples)
    with torch.no_grad():
        assert found == (pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-5), samples)


@pytest.mark.parametrize("samples", [17, 26, 3])
@pytest.mark.parametrize("width", [1, 2])
def test_an_evaluation_takes_short_batches(width: int, samples: int) -> None:
    """The last batch has 1, 2 or 3 samples, for 4 or 8 microbatches."""
    pipeline = make_pipeline(data_parallel=width)
    assert_same_evaluation(pipeline.evaluate(make_loader(samples, 8)), pipeline, samples)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])  # the last one is drained for evaluations
def test_evaluations_within_a_run_take_short_batches(method: str) -> None:
    pipeline, wanted = make_pipeline(method), make_pipeline(method)
    evaluate = Evaluating(2, make_loader(17, 8))
    found = [e for report in pipeline.run(make_loader(40, 8), evaluate=evaluate) for e in report.evaluated]
    found += pipeline.evaluated()
    list(wanted.run(list(make_loader(16, 8))))
    assert_same_evaluation((found[0].loss, found[0].weight), wanted, 17)  # type: ignore[arg-type]


def evaluate_short(group: dist.ProcessGroup) -> Any:
    pipeline = make_pipeline("2bw", group)
    held_out = make_loader(17, 8)
    alone = pipeline.evaluate(held_out)
    found = [e for r in pipeline.run(make_loader(40, 8), evaluate=Evaluating(2, held_out)) for e in r.evaluated]
    return alone, [(e.loss, e.weight) for e in (*found, *pipeline.evaluated())]


def test_evaluations_between_processes_take_short_batches(pool: Pool) -> None:
    (alone, first), (other, found) = pool.submit(evaluate_short, ranks=2)
    assert_same_evaluation(alone, make_pipeline("2bw"), 17)
    assert (other, first) == (alone, found[-1:])  # of the end of the run, which all ranks hear of
    wanted = make_pipeline("2bw")
    list(wanted.run(list(make_loader(16, 8))))
    assert_same_evaluation(found[0], wanted, 17)


def fail_in_evaluation(group: dist.ProcessGroup | None, method: str, after: int, **options: Any) -> Any:
    """What a run and an evaluation raise, the batches reported and trained, and the weights after more."""
    pipeline, reports, errors = make_pipeline(method, group, **options), [], []
    evaluate = Evaluating(2, lambda: failing(after))
    try:
        for report in pipeline.run(make_loader(64, 8), evaluate=evaluate):
            reports.append(report.batch)
            assert not report.evaluated  # of a part of the data
    except (DiskError, DataError, TransportError) as error:
        errors.append(str(error))
    trained = pipeline.batches
    try:
        pipeline.evaluate(failing(after))
    except (DiskError, DataError, TransportError) as error:
        errors.append(str(error))
    list(pipeline.run(make_loader(16, 8)))
    return errors, reports, trained, weights_of(pipeline)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("width", [1, 2])
def test_an_evaluation_that_fails_within_a_run_costs_no_work(method: str, after: int, width: int) -> None:
    found = fail_in_evaluation(None, method, after, data_parallel=width)
    errors, reports, trained, weights = found
    assert errors == ["the disk of the user"] * 2
    assert reports == list(range(trained))
    assert 2 <= trained <= 4
    wanted = make_pipeline(method, data_parallel=width)
    list(wanted.run(list(make_loader(8 * trained, 8))))
    list(wanted.run(make_loader(16, 8)))
    assert_equal(weights, weights_of(wanted))


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("after", [0, 2])
def test_an_evaluation_that_fails_on_ranks(pool: Pool, method: str, after: int) -> None:
    (first, *one), (second, *other) = pool.submit(fail_in_evaluation, method, after, ranks=2)
    assert first == ["the disk of the user"] * 2
    assert len(second) == 2
    assert one[:2] == other[:2] == [list(range(one[1])), one[1]]
    wanted = make_pipeline(method)
    list(wanted.run(list(make_loader(8 * one[1], 8))))
    list(wanted.run(make_loader(16, 8)))
    assert_equal(one[2] | other[2], weights_of(wanted))


def fail_on_one(group: dist.ProcessGroup, method: str, after: int, who: int, how: str) -> Any:
    """As `fail_in_evaluation`, but only one rank's data is at fault."""
    pipeline, errors = make_pipeline(method, group), []

    def held_out() -> Any:
        if dist.get_rank(group) != who:
            return make_loader(40, 8)
        if how == "called":
            raise DiskError("the disk of the user")
        return failing(after) if how == "read" else iter(list(make_loader(8 * after, 8)))  # which does not say how many

    before = weights_of(pipeline)
    try:
        pipeline.evaluate(held_out() if how != "called" or dist.get_rank(group) != who else failing(0))
    except (DiskError, DataError) as error:
        errors.append(str(error))
    assert_equal(weights_of(pipeline), before)
    try:
        for report in pipeline.run(make_loader(64, 8), evaluate=Evaluating(2, held_out)):
            assert not report.evaluated
    except (DiskError, DataError) as error:
        errors.append(str(error))
    trained = pipeline.batches
    list(pipeline.run(make_loader(16, 8)))
    return errors, trained, weights_of(pipeline)


@pytest.mark.parametrize(
    ("method", "who", "after", "how"),
    [
        ("1f1b", 0, 0, "read"), ("1f1b", 1, 0, "read"), ("1f1b", 1, 2, "read"), ("1f1b", 0, 2, "called"),
        ("2bw", 1, 2, "read"), ("2bw", 0, 0, "read"), ("2bw", 1, 0, "called"), ("2bw", 1, 2, "ends"),
        ("stash", 1, 2, "read"), ("stash", 0, 0, "called"), ("stash", 1, 2, "ends"), ("stash", 1, 0, "called"),
    ],
)  # fmt: skip
def test_an_evaluation_that_fails_on_one_rank_only(pool: Pool, method: str, who: int, after: int, how: str) -> None:
    """All ranks end after the same batch and say why, long before any time-out; the pipeline goes on."""
    found = pool.submit(fail_on_one, method, after, who, how, ranks=2, timeout=15.0)
    trained, weights = found[0][1], {}
    assert 2 <= trained <= 5
    reason = "the data ends after 2 batches" if how == "ends" else "the disk of the user"
    for errors, here, state in found:
        assert here == trained
        assert len(errors) == 2
        assert all(reason in error for error in errors), errors
        weights |= state
    assert all(f"rank {who} could not" in error for error in found[1 - who][0]), found[1 - who][0]
    wanted = make_pipeline(method)
    list(wanted.run(list(make_loader(8 * trained, 8))))
    list(wanted.run(make_loader(16, 8)))
    assert_equal(weights, weights_of(wanted))


def test_all_ranks_of_a_process_evaluate_the_same_samples() -> None:
    """A loader that shuffles yields other samples each time it is iterated over."""
    torch.manual_seed(5)
    data = TensorDataset(torch.arange(64.0).reshape(64, 1), torch.arange(64.0).reshape(64, 1))
    held_out = DataLoader(data, batch_size=8, shuffle=True)
    pipeline = Pipeline(
        [nn.Linear(1, 1), nn.Identity()],
        method="1f1b",
        stages=2,
        microbatches=2,
        partition=[1, 1],
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
    )
    for name, tensor in pipeline.state_dict().items():
        tensor.fill_(float(name.endswith("weight")))  # the identity
    reports = list(pipeline.run(list(held_out)[:4], evaluate=Evaluating(2, held_out)))
    assert [(e.loss, e.weight) for report in reports for e in report.evaluated] == [(0.0, 64.0)]
