"""Whole models, given with an example, train as in plain torch, whatever is between their layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Checkpoints, Pipeline
from penstock.errors import PenstockError
from support.model_kinds import EXACT, REFUSED, SAMPLES, WIDTH, Kind, Layers
from support.pool import Pool

MICROBATCHES = 2


def make(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batches(kind: Any, count: int = 3) -> Iterator[tuple[Any, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        samples = SAMPLES + 2 * (number % 2)
        x = torch.randn(samples, WIDTH, generator=generator).double()
        flag = torch.randint(0, 5, (samples,), generator=generator)
        inputs = (x, flag) if len(inspect.signature(kind.forward).parameters) == 3 else x
        yield inputs, torch.randn(samples, 2, generator=generator).double()


def loss(output: Any, target: Tensor) -> Any:
    if isinstance(output, dict):
        return sum((value.square().sum() for value in output.values()), F.mse_loss(output["head"], target)), len(target)
    return F.mse_loss(output, target)


def train_plainly(kind: Kind) -> tuple[list[float], dict[str, Tensor]]:
    """Train over the same microbatches."""
    model, losses = make(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(kind):
        optimizer.zero_grad()
        total, weight = torch.zeros(()), 0.0
        for part in range(MICROBATCHES):
            given = [t.chunk(MICROBATCHES)[part] for t in (inputs if isinstance(inputs, tuple) else (inputs,))]
            target = targets.chunk(MICROBATCHES)[part]
            found = loss(model(*given), target)
            sum_, count = found if isinstance(found, tuple) else (found * len(target), len(target))
            total, weight = total + sum_, weight + count
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    return losses, model.state_dict()


def pipeline_of(kind: Kind, stages: int, method: str = "1f1b", **options: Any) -> Pipeline:
    example, _ = next(batches(kind, 1))
    return Pipeline(
        make(kind), method, stages=stages, microbatches=MICROBATCHES, loss=loss, example=example,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), **options,
    )  # fmt: skip


def check_same(kind: Kind, pipeline: Pipeline) -> None:
    wanted, weights = train_plainly(kind)
    assert [report.loss for report in pipeline.run(batches(kind))] == pytest.approx(wanted, rel=1e-12)
    found = pipeline.full_state_dict()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", EXACT)
def test_a_model_trains_as_in_plain_torch(kind: str, stages: int) -> None:
    check_same(EXACT[kind], pipeline_of(EXACT[kind], stages))


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_stages_cannot_run_alike_is_refused(kind: str) -> None:
    made, said = REFUSED[kind]
    with pytest.raises(PenstockError, match=said):
        list(pipeline_of(made, 5).run(batches(made)))


class Chance(Layers):
    """Dropout in layers and between them; layers that are passed over by chance."""

    def forward(self, x: Tensor) -> Any:
        h = F.dropout(self.a(x), 0.2, self.training)
        for layer in (self.b, self.c, self.d):
            if self.training and torch.rand(()) < 0.3:
                continue
            h = h + F.dropout(torch.tanh(layer(h)), 0.2, self.training)
        return self.head(h)


def bits_of(pipeline: Pipeline) -> tuple[list[float | None], Any, dict[str, Tensor]]:
    losses = [report.loss for report in pipeline.run(batches(Chance))]
    return losses, pipeline.evaluate(batches(Chance)), dict(pipeline.full_state_dict())


def check_bits(found: Any, wanted: Any) -> None:
    assert found[:2] == wanted[:2]
    assert all(torch.equal(found[2][name], weight) for name, weight in wanted[2].items())


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "2bw", "2bw-ahead"])
def test_random_numbers_are_the_same_at_any_depth(method: str) -> None:
    wanted = bits_of(pipeline_of(Chance, 1, method))
    for stages in (2, 3):
        check_bits(bits_of(pipeline_of(Chance, stages, method)), wanted)


def test_an_evaluation_is_without_dropout_between_layers() -> None:
    pipeline, model = pipeline_of(Chance, 3), make(Chance).eval()
    found, _ = pipeline.evaluate(batches(Chance, 1)) or (0.0, 0.0)
    ((inputs, targets),) = batches(Chance, 1)
    assert found == pytest.approx(float(F.mse_loss(model(inputs), targets).detach()), rel=1e-12)


@pytest.mark.parametrize("options", [{"recompute": "stage"}, {"ema_decay": 0.9}, {"method": "interleaved"}], ids=str)
def test_stages_of_a_model_go_with_options(options: dict[str, Any]) -> None:
    check_bits(bits_of(pipeline_of(Chance, 2, **options)), bits_of(pipeline_of(Chance, 1)))


def test_parallel_pipelines_have_a_model_each() -> None:
    pipeline = pipeline_of(Layers, 2, data_parallel=2)
    whole = pipeline_of(Layers, 1)
    losses = [[report.loss for report in one.run(batches(Layers))] for one in (pipeline, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def in_low_precision(stages: int) -> list[float | None]:
    torch.manual_seed(0)
    data = [(x.float(), y.float()) for x, y in batches(Chance)]
    pipeline = Pipeline(
        Chance(), "1f1b", stages=stages, microbatches=2, loss=loss, example=data[0][0], precision="bf16",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    return [report.loss for report in pipeline.run(data)]


def test_stages_of_a_model_compute_in_low_precision() -> None:
    assert in_low_precision(3) == in_low_precision(1)


def test_a_model_that_was_put_into_evaluation_mode_is_trained_so() -> None:
    model = make(Chance)
    model.eval()
    pipeline = Pipeline(
        model, "1f1b", stages=2, microbatches=2, loss=loss, example=next(batches(Chance))[0],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
    )  # fmt: skip
    (inputs, targets), *_ = batches(Chance)
    (report,) = pipeline.run([(inputs, targets)])
    with torch.no_grad():
        assert report.loss == pytest.approx(float(F.mse_loss(model(inputs), targets)), rel=1e-12)


def run_in_process(group: Any, method: str) -> Any:
    """Train two stages of a model in two processes."""
    return bits_of(pipeline_of(Chance, 2, method, group=group))


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_processes_of_a_model_have_the_bits_of_one(pool: Pool, method: str) -> None:
    first, last = pool.submit(run_in_process, method, ranks=2)
    wanted = bits_of(pipeline_of(Chance, 2, method))
    assert last[:2] == wanted[:2]
    assert all(torch.equal(first[2][name], weight) for name, weight in wanted[2].items())


def test_weights_of_two_stages_are_loaded_into_three(tmp_path: Path) -> None:
    trained = pipeline_of(Chance, 2)
    list(trained.run(batches(Chance)))
    Checkpoints(trained, tmp_path).save()
    wanted = [report.loss for report in trained.run(batches(Chance))]
    resumed = pipeline_of(Chance, 3)
    Checkpoints(resumed, tmp_path).load()
    assert [report.loss for report in resumed.run(batches(Chance))] == wanted


def test_an_example_is_for_whole_models() -> None:
    with pytest.raises(PenstockError, match="example is for a whole model"):
        Pipeline([nn.Linear(2, 2)], "1f1b", stages=1, example=torch.zeros(1, 2), loss=loss, optimizer=torch.optim.SGD)
