"""Batches as loaders yield them: split into microbatches, short at the end, or not there because the loader failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from penstock import Checkpoints, Evaluating, Pipeline, make_schedule
from penstock.errors import DataError, TransportError
from penstock.options.run import Group
from penstock.runtime.data.microbatches import microbatches_of
from support.pool import Pool

M, STAGES = 4, 2
METHODS = ("1f1b", "2bw", "stash", "zb-h1")


def make_pipeline(method: str = "1f1b", group: dist.ProcessGroup | None = None, **options: Any) -> Pipeline:
    torch.manual_seed(1)
    blocks = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)]
    return Pipeline(
        blocks,
        make_schedule(method, STAGES, M),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        group=Group(group, 20.0),
        **options,
    )


def make_loader(samples: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(64, 3, generator=generator), torch.randn(64, 2, generator=generator)
    return DataLoader(TensorDataset(inputs[:samples], targets[:samples]), batch_size=batch_size)


def weights_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


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


class DiskError(Exception):
    """What a user's loader raises."""


def failing(after: int) -> Iterator[Any]:
    yield from list(make_loader(8 * after, 8))
    raise DiskError("the disk of the user")


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
        for report in pipeline.run(failing(3)):
            reports.append(report.batch)
    except DiskError as raised:
        error = str(raised)
    more = [report.batch for report in pipeline.run(make_loader(16, 8))]
    return reports, error, more, weights_of(pipeline)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_loader_that_fails_on_ranks(pool: Pool, method: str) -> None:
    """The rank with the last stage reads further ahead, so it hears of it; the others end after the same batch."""
    wanted = make_pipeline(method)
    list(wanted.run(list(make_loader(24, 8))))
    list(wanted.run(make_loader(16, 8)))
    found = pool.submit(train_on_failing, method, ranks=2, fresh=True)
    assert [error for _, error, _, _ in found] == ["", "the disk of the user"]
    weights: dict[str, Tensor] = {}
    for reports, _, more, state in found:
        assert (reports, more) == ([0, 1, 2], [3, 4])
        weights |= state
    assert_equal(weights, weights_of(wanted))


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
    assert (other, first) == (alone, [])
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
        return failing(after) if how == "read" else list(make_loader(8 * after, 8))

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


PAIR = (torch.arange(6.0).reshape(6, 1), torch.arange(6))


@pytest.mark.parametrize("kind", [tuple, list])
def test_parts_differ_by_one_sample_at_most(kind: Callable[[Any], Any]) -> None:
    parts = microbatches_of(kind(PAIR), 4, 0)
    assert [y.tolist() for _, y in parts] == [[0, 1], [2, 3], [4], [5]]
    assert torch.equal(torch.cat([x for x, _ in parts]), PAIR[0])


def test_trees_are_split_leaf_by_leaf() -> None:
    """What is no tensor, or has no dimension, goes to every microbatch."""
    inputs = {"ids": torch.arange(4), "mask": torch.ones(4, 2), "name": "text", "scale": torch.tensor(3.0)}
    parts = microbatches_of((inputs, torch.arange(4)), 2, 0)
    assert [(x["ids"].tolist(), tuple(x["mask"].shape), x["name"], float(x["scale"])) for x, _ in parts] == [
        ([0, 1], (2, 2), "text", 3.0),
        ([2, 3], (2, 2), "text", 3.0),
    ]


@pytest.mark.parametrize(
    "batch", [[PAIR, PAIR], [PAIR] * 3, (PAIR,) * 3, [(None, 1.0), (torch.ones(2), torch.ones(2))]], ids=str
)
def test_microbatches_are_taken_as_they_are(batch: Any) -> None:
    assert microbatches_of(batch, len(batch), 0) is batch


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("count", [2, 3])
def test_a_tuple_of_pairs_is_a_whole_batch(kind: Callable[[Any], Any], count: int) -> None:
    masked, weighted = kind([torch.arange(6), torch.ones(6)]), kind([torch.arange(6), torch.zeros(6)])
    parts = microbatches_of((masked, weighted), count, 0)
    (ids, mask), (labels, weights) = parts[0]
    assert (ids.tolist(), mask.tolist()) == (list(range(6 // count)), [1.0] * (6 // count))
    assert (labels.tolist(), weights.tolist()) == (list(range(6 // count)), [0.0] * (6 // count))
    assert (len(parts), type(parts[0][0])) == (count, kind)


A, B = torch.ones(4, 2), torch.ones(4)


class Both(NamedTuple):
    ids: Tensor
    mask: Tensor


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("batch", [[[A, B], [A, B]], [[A, B], (A, B)], [Both(A, B), Both(A, B)]])
def test_a_list_of_two_pairs_could_be_either(count: int, batch: Any) -> None:
    """Of a loader of samples of two pairs, or of two batches of a loader; whatever the number of microbatches."""
    both = r"(?s)batch 5 is a list of two pairs, .*for batch in loader\).*tuple\(pair\) for pair in batch\]"
    with pytest.raises(DataError, match=both):
        microbatches_of(batch, count, 5)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            PAIR[0],
            r"batch 5 is a Tensor; a batch is a pair.*For a single batch: pipeline.run\(\[\(inputs, targets\)\]\)",
        ),
        ("text", "batch 5 is a str; a batch is a pair"),
        (
            {"x": A, "labels": B},
            r"(?s)is a dict; .*batches = \(\(batch\['x'\], batch\['labels'\]\) for batch in loader\)",
        ),
        ({"y": A, "x": B}, r"\(\(batch\['x'\], batch\['y'\]\) for"),
        ({"a": A, "b": A, "c": B}, r"\(\(\{key: batch\[key\] for key in \['a', 'b'\]\}, batch\['c'\]\) for"),
        ({"a": A}, "batch 5 is a dict; a batch is a pair"),
        ([A], r"batch 5 has 1 parts; .*What is the loss compared with\? TensorDataset\(inputs, targets\)"),
        ((A, A, B), r"(?s)has 3 parts; .*batches = \(\(\(a, b\), target\) for a, b, target in loader\)"),
        ((A,) * 12, r"\(\(\(\*inputs\), target\)"),
        ((A.numpy(), B.numpy()), "batch 5 has no tensor that could be split, only ndarray; make tensors"),
        ((PAIR[0], torch.arange(5)), r"its tensors have shapes \(6, 1\), \(5,\), so not as many samples each"),
        ((PAIR[0][:2], PAIR[1][:2]), "batch 5 has 2 samples, too few for 3 microbatches"),
        (("text", 3), "batch 5 has no tensor that could be split, only int, str"),
    ],
)
def test_what_cannot_be_split(batch: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        microbatches_of(batch, 3, 5)


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
        list(pipeline.run(make_loader(11, 8)))


@pytest.mark.parametrize("loader", [lambda: failing(3), lambda: make_loader(27, 8)], ids=["exception", "too short"])
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
