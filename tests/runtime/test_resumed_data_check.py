"""A resumed run that is given its data from the beginning again says so, and what to write."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import penstock
from support.pool import Pool

Data = Callable[[], Any]
SAMPLES = torch.randn(40, 3, generator=torch.Generator().manual_seed(5))
PAIRS = [(x, x.sin()) for x in SAMPLES.split(4)]


def make_pipeline(folder: Path, group: dist.ProcessGroup | None = None) -> tuple[penstock.Pipeline, Any]:
    torch.manual_seed(0)
    pipeline = penstock.Pipeline(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        method="2bw",
        stages=2,
        microbatches=2,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.1),
        group=group,
    )
    return pipeline, penstock.Checkpoints(pipeline, folder)


def loader(seed: int | None = None, dataset: Any = None, **given: Any) -> DataLoader[Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(dataset or TensorDataset(SAMPLES, SAMPLES.sin()), batch_size=4, generator=generator, **given)


def train(folder: Path, data: Iterable[Any], batches: int | None = None) -> dict[str, Tensor]:
    """Go on from the newest checkpoint, for so many batches at most, and save."""
    pipeline, checkpoints = make_pipeline(folder)
    checkpoints.load()
    for count, _ in enumerate(pipeline.run(data)):
        if count + 1 == batches:
            pipeline.stop()
    checkpoints.save()
    return pipeline.full_state_dict()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


AGAIN: dict[str, Data] = {
    "list": lambda: PAIRS,
    "iterator": lambda: iter(PAIRS),
    "microbatches": lambda: [[(x[:2], y[:2]), (x[2:], y[2:])] for x, y in PAIRS],
    "loader": loader,
    "seeded": lambda: loader(3, shuffle=True),
    "shuffled": lambda: loader(shuffle=True),
}


@pytest.mark.parametrize("data", AGAIN)
def test_data_that_begin_again_are_noticed(data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, AGAIN[data](), 3)
    pipeline, checkpoints = make_pipeline(tmp_path)
    checkpoints.load()
    trained = pipeline.batches
    assert 3 <= trained < 8
    assert not warnings_of(caplog)
    next(pipeline.run(AGAIN[data]()))
    (said,) = warnings_of(caplog)
    assert f"run: after {trained} batches, the " in said
    assert "begin" in said
    assert f"itertools.islice(batches, {trained}, None)" in said


def test_what_the_warning_says_to_write_trains_to_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(tmp_path / "whole", PAIRS)
    train(tmp_path / "parts", PAIRS, 3)
    pipeline, checkpoints = make_pipeline(tmp_path / "parts")
    checkpoints.load()
    next(pipeline.run(PAIRS))
    (said,) = warnings_of(caplog)
    pipeline, checkpoints = make_pipeline(tmp_path / "parts")
    checkpoints.load()
    lines = "\n".join(line.strip() for line in said.splitlines() if line.startswith("    "))
    exec(lines, {"batches": PAIRS, "pipeline": pipeline, "itertools": itertools})
    assert pipeline.batches == 10
    assert all(torch.equal(pipeline.full_state_dict()[name], tensor) for name, tensor in whole.items())
    assert len(warnings_of(caplog)) == 1


def epochs(count: int) -> Iterator[Any]:
    """One loader, in another order in every epoch, but in the same ones after every start."""
    again = loader(7, shuffle=True)
    return itertools.chain.from_iterable(again for _ in range(count))


def test_in_a_later_epoch_the_number_is_that_of_the_data_that_begin_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, checkpoints = make_pipeline(tmp_path)
    for _ in pipeline.run(PAIRS):
        pass
    for count, _ in enumerate(pipeline.run(PAIRS)):
        if count == 2:
            pipeline.stop()
    trained = pipeline.batches
    checkpoints.save()
    again, found = make_pipeline(tmp_path)
    found.load()
    next(again.run(PAIRS))
    (said,) = warnings_of(caplog)
    assert f"after {trained} batches" in said
    assert f"islice(batches, {trained - 10}, None)" in said


def test_the_data_that_training_began_with_are_known_in_a_later_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, epochs(1))
    second = itertools.islice(epochs(2), 10, None)
    train(tmp_path, second, 2)
    assert not warnings_of(caplog)
    pipeline, checkpoints = make_pipeline(tmp_path)
    checkpoints.load()
    trained = pipeline.batches
    next(pipeline.run(epochs(2)))
    (said,) = warnings_of(caplog)
    assert f"islice(batches, {trained}, None)" in said


def rest_of(data: Data) -> Callable[[int], Any]:
    return lambda trained: itertools.islice(data(), trained, None)


SILENT: dict[str, tuple[Data, int | None, Callable[[int], Any]]] = {
    "the rest": (lambda: PAIRS, 3, lambda trained: PAIRS[trained:]),
    "the rest of an iterator": (lambda: epochs(2), 3, rest_of(lambda: epochs(2))),
    "another epoch": (lambda: PAIRS, None, lambda _: PAIRS),
    "another epoch of a loader": (lambda: loader(shuffle=True), None, lambda _: loader(shuffle=True)),
    "one batch over and over": (lambda: [PAIRS[0]] * 9, 3, lambda trained: [PAIRS[0]] * (9 - trained)),
    "the rest of a dataset": (
        lambda: loader(shuffle=True),
        3,
        lambda trained: loader(dataset=Subset(TensorDataset(SAMPLES, SAMPLES), range(4 * trained, 40)), shuffle=True),
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_of_data_that_go_on(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, batches, second = SILENT[case]
    train(tmp_path, first(), batches)
    pipeline, checkpoints = make_pipeline(tmp_path)
    checkpoints.load()
    next(pipeline.run(second(pipeline.batches)))
    assert not warnings_of(caplog)


def test_a_state_that_was_loaded_keeps_its_place_until_a_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "first", PAIRS, 3)
    pipeline, checkpoints = make_pipeline(tmp_path / "first")
    checkpoints.load()
    assert not list(pipeline.run([]))
    penstock.Checkpoints(pipeline, tmp_path / "second").save()
    again, found = make_pipeline(tmp_path / "second")
    found.load()
    next(again.run(PAIRS))
    assert len(warnings_of(caplog)) == 1


def begin_again(group: dist.ProcessGroup, folder: str) -> list[str]:
    """What a rank says, of its own and with the other one."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    try:
        pipeline, checkpoints = make_pipeline(Path(folder), group)
        for report in pipeline.run(PAIRS, save=checkpoints.every(2)):
            if report.batch == 2:
                pipeline.stop()
        checkpoints.save()
        pipeline, checkpoints = make_pipeline(Path(folder), group)
        checkpoints.load()
        list(pipeline.run(PAIRS))
    finally:
        logging.getLogger("penstock").removeHandler(handler)
    return said


@pytest.mark.processes
def test_between_processes_the_first_one_says_it(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.submit(begin_again, str(tmp_path), ranks=2)
    assert len(first) == 1
    assert "the data begin again" in first[0]
    assert second == []
