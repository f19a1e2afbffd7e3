"""Batches as loaders yield them: split into microbatches, short at the end, or not there because the loader failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Checkpoints, Pipeline, make_schedule
from penstock.errors import DataError
from support.loaders import METHODS, STAGES, DiskError, M, assert_equal, failing, make_loader, make_pipeline, weights_of
from support.pool import Pool


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [1, 2])
def test_whole_batches_give_the_bits_of_their_microbatches(method: str, width: int) -> None:
    whole, lists = (make_pipeline(method, data_parallel=width) for _ in range(2))
    loader = make_loader(40, 8)
    reports = [(r.batch, r.loss, r.weight) for r in whole.run(loader)]
    size = 8 // M // width
    chopped = [[(x[k : k + size], y[k : k + size]) for k in range(0, 8, size)] for x, y in loader]
    assert [(r.batch, r.loss, r.weight) for r in lists.run(chopped)] == reports
    assert_equal(weights_of(whole), weights_of(lists))


def test_updates_are_those_of_plain_torch_also_for_a_short_last_batch() -> None:
    """27 samples in batches of 8: the last one has 3 for 2 microbatches, so one of them counts twice as much."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in make_loader(27, 8):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.manual_seed(1)
    blocks = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)]
    pipeline = Pipeline(
        blocks,
        make_schedule("1f1b", STAGES, 2),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    )
    reports = list(pipeline.run(make_loader(27, 8)))
    assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-5)
    assert [r.weight for r in reports] == [8.0, 8.0, 8.0, 3.0]
    found = list(weights_of(pipeline).values())
    torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_batches_before_one_that_is_too_short_are_trained_on(method: str) -> None:
    pipeline, wanted = make_pipeline(method), make_pipeline(method)
    reports = []
    said = r"batch 3 has 3 samples, too few for 4 microbatches; .*drop_last=True"
    with pytest.raises(DataError, match=said):  # noqa: PT012
        for report in pipeline.run(make_loader(27, 8)):
            reports.append(report.batch)
    list(wanted.run(list(make_loader(24, 8))))
    assert reports == [0, 1, 2]
    assert pipeline.batches == 3
    assert_equal(weights_of(pipeline), weights_of(wanted))
    for each in (pipeline, wanted):  # it is as good as after any run
        list(each.run(make_loader(16, 8)))
    assert_equal(weights_of(pipeline), weights_of(wanted))
    assert pipeline.batches == 5


def test_what_a_loss_raises_has_the_shapes_that_it_was_given() -> None:
    pipeline = Pipeline(
        [nn.Linear(3, 5), nn.Linear(5, 2)],
        make_schedule("1f1b", STAGES, M),
        loss=lambda output, target: F.cross_entropy(output["logits"], target),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    with pytest.raises(IndexError) as caught:
        list(pipeline.run([(torch.ones(8, 3), torch.ones(8, 7))]))
    said = "raised by the loss, whose output and target of a microbatch are (2, 2) and (2, 7)"
    assert said in caught.value.__notes__


@pytest.mark.parametrize(("odd", "said"), [(5, "a int"), ((1, 2, 3), "a tuple of 3"), (None, "a NoneType")], ids=str)
def test_batches_before_one_whose_microbatches_are_no_pairs_are_trained_on(odd: Any, said: str) -> None:
    pipeline, reports = make_pipeline("2bw"), []
    microbatches = [(x, y) for x, y in make_loader(8, 2)]
    batches = [microbatches, microbatches, [*microbatches[:3], odd]]
    with pytest.raises(DataError, match=rf"batch 2: microbatch 3 is not a pair \(input, target\) but {said}"):  # noqa: PT012
        for report in pipeline.run(batches):
            reports.append(report.batch)
    assert reports == [0, 1]
    with pytest.raises(DataError, match="batch 2: microbatch 3 is not a pair"):
        pipeline.evaluate(batches)
    assert len(list(pipeline.run(make_loader(16, 8)))) == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [1, 3])
def test_a_loader_that_fails_costs_no_work(method: str, after: int) -> None:
    pipeline, wanted = make_pipeline(method), make_pipeline(method)
    reports = []
    with pytest.raises(DiskError, match="the disk of the user"):  # noqa: PT012
        for report in pipeline.run(failing(after)):
            reports.append(report.batch)
    list(wanted.run(list(make_loader(8 * after, 8))))
    assert reports == list(range(after))
    assert_equal(weights_of(pipeline), weights_of(wanted))


def test_a_loader_that_fails_at_once_leaves_the_pipeline_as_it_was() -> None:
    pipeline = make_pipeline()
    before = weights_of(pipeline)
    with pytest.raises(DiskError):
        list(pipeline.run(failing(0)))
    assert_equal(weights_of(pipeline), before)
    assert len(list(pipeline.run(make_loader(16, 8)))) == 2


def train_on_failing(group: dist.ProcessGroup, method: str) -> Any:
    pipeline, reports, error = make_pipeline(method, group), [], ""
    try:
        for report in pipeline.run(failing(3 + 2 * (dist.get_rank(group) == 0))):
            reports.append(report.batch)
    except (DiskError, DataError) as raised:
        error = str(raised)
    more = [report.batch for report in pipeline.run(make_loader(16, 8))]
    return reports, error, more, weights_of(pipeline)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_loader_that_fails_on_ranks(pool: Pool, method: str) -> None:
    """The rank with the last stage reads further ahead; the others hear of it, and end after the same batch."""
    wanted = make_pipeline(method)
    list(wanted.run(list(make_loader(24, 8))))
    list(wanted.run(make_loader(16, 8)))
    found = pool.submit(train_on_failing, method, ranks=2, fresh=True)
    assert found[1][1] == "the disk of the user"
    assert "rank 1 could not read its next batch (DiskError: the disk of the user)" in found[0][1]
    weights: dict[str, Tensor] = {}
    for reports, _, more, state in found:
        assert (reports, more) == ([0, 1, 2], [3, 4])
        weights |= state
    assert_equal(weights, weights_of(wanted))


@pytest.mark.parametrize(
    ("batches", "said"),
    [(5, "got int"), (make_loader, "got a function; call it"), (None, "got NoneType")],
    ids=["number", "function", "none"],
)
def test_what_is_no_iterable_of_batches(batches: Any, said: str) -> None:
    pipeline = make_pipeline()
    with pytest.raises(
        DataError, match=f"batches must be an iterable of batches, such as a DataLoader or a list; {said}"
    ):
        list(pipeline.run(batches))
    assert len(list(pipeline.run(make_loader(16, 8)))) == 2


def test_batches_are_numbered_as_in_reports_in_messages() -> None:
    pipeline = make_pipeline()
    list(pipeline.run(make_loader(16, 8)))
    with pytest.raises(DataError, match="batch 3 has 3 samples"):
        list(pipeline.run(list(make_loader(11, 8))))


@pytest.mark.parametrize(
    "loader", [lambda: failing(3), lambda: iter(make_loader(27, 8))], ids=["exception", "too short"]
)
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_what_was_trained_before_a_failure_is_saved(
    method: str, loader: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, resumed = make_pipeline(method, max_grad_norm=0.5), make_pipeline(method, max_grad_norm=0.5)
    checkpoints, decided = Checkpoints(pipeline, tmp_path), []
    with pytest.raises((DiskError, DataError)):  # noqa: PT012
        for report in pipeline.run(loader(), save=checkpoints.every(2)):
            decided += report.decided
    decided += pipeline.decided()
    assert [decision.batch for decision in decided] == [0, 1, 2]
    checkpoints.save()
    Checkpoints(resumed, tmp_path).load()
    assert resumed.batches == 3
    assert_equal(weights_of(resumed), weights_of(pipeline))
    assert caplog.text == ""


class LaterRankFails:
    """A loader that fails on one rank only, when it is iterated over or when it is asked for its first batch."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __iter__(self) -> Iterator[Any]:
        if self._how == "iter":
            raise DiskError("the disk of the user")
        return failing(0) if self._how == "next" else iter(())


def begin_on_failing(group: dist.ProcessGroup, how: str) -> Any:
    pipeline, errors = make_pipeline("2bw", group), []
    loader = LaterRankFails(how) if dist.get_rank(group) == STAGES - 1 else make_loader(16, 8)
    for call in (lambda: list(pipeline.run(loader)), lambda: pipeline.evaluate(loader)):
        try:
            call()
        except (DiskError, DataError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, pipeline.batches, [report.batch for report in pipeline.run(make_loader(16, 8))]


@pytest.mark.parametrize("how", ["iter", "next", "empty"])
def test_a_loader_that_fails_at_once_on_a_later_rank_is_told_to_all(pool: Pool, how: str) -> None:
    """Before any of them begins a batch; the pipeline remains as it was."""
    found = pool.submit(begin_on_failing, how, ranks=2, fresh=True)
    first, last = (errors for errors, _, _ in found)
    assert [(batches, more) for _, batches, more in found] == [(0, [0, 1])] * 2
    if how == "empty":
        said = "DataError: rank 1 has no batch, but rank 0 has: every rank needs the same batches"
        assert len(first) == 2
        assert all(error.startswith(said) for error in (*first, *last))
        return
    assert first == ["DataError: rank 1 could not begin (DiskError: the disk of the user)"] * 2
    assert last == ["DiskError: the disk of the user"] * 2
