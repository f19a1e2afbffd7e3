"""Whole models, given with an example, train as in plain torch, whatever is between their layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Checkpoints, Pipeline
from penstock.errors import PenstockError
from penstock.partition.replay import comparison
from support.model_kinds import EXACT, REFUSED, SAMPLES, WIDTH, BorrowedWeight, Kind, Layers, MultipliesByNumber
from support.pool import Pool
from support.state_kinds import KEPT, NOT_KEPT, held

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


def train_plainly(kind: Kind, weights: dict[str, Tensor] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Train over the same microbatches."""
    model = make(kind)
    model.load_state_dict(weights or model.state_dict())
    return losses_of(kind, model), model.state_dict()


def losses_of(kind: Kind, model: nn.Module) -> list[float]:
    losses = []
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
    return losses


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


@pytest.mark.parametrize(
    ("way", "stages", "options"),
    [
        pytest.param(way, stages, options, marks=[] if number % 3 == place else pytest.mark.long)
        for number, way in enumerate(KEPT)
        for place, (stages, options) in enumerate([(2, {}), (3, {}), (3, {"recompute": "stage"})])
    ],
)
def test_what_code_between_layers_keeps_is_as_in_plain_torch(way: str, stages: int, options: Any) -> None:
    """Losses, weights, buffers, and all that the model then holds, in one process."""
    kind = KEPT[way]
    plain = make(kind)
    wanted = losses_of(kind, plain)
    pipeline = pipeline_of(kind, stages, **options)
    model = pipeline._given[0]
    assert [report.loss for report in pipeline.run(batches(kind))] == pytest.approx(wanted, rel=1e-12)
    found, left = {**pipeline.full_state_dict(), **held(model)}, {**plain.state_dict(), **held(plain)}
    assert found.keys() == left.keys()
    for name, value in left.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, check_dtype=False, msg=name)
        else:
            assert found[name] == (value if value is None else pytest.approx(value, rel=1e-12)), name
    assert all(torch.equal(model.state_dict()[name], pipeline.full_state_dict()[name]) for name in plain.state_dict())


@pytest.mark.parametrize("way", NOT_KEPT)
def test_what_code_between_layers_cannot_keep_is_refused_by_name(way: str) -> None:
    made, said = NOT_KEPT[way]
    with pytest.raises(PenstockError, match=said):
        list(pipeline_of(made, 3).run(batches(made)))


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


@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_a_forward_that_is_run_again_sends_what_it_sent(recompute: str) -> None:
    """A stage ahead of a number that it cannot know, which sends all that it has."""
    kind = MultipliesByNumber
    check_same(kind, pipeline_of(kind, 2, recompute=recompute))


class TakesArray(Layers):
    def forward(self, x: Tensor, array: Any = None) -> Any:
        return super().forward(x + torch.from_numpy(array))


def test_arguments_that_are_arrays_are_refused() -> None:
    x = torch.ones(2, WIDTH)
    inputs = x, x.numpy()
    pipeline = Pipeline(
        TakesArray(), "1f1b", stages=2, microbatches=2, loss=loss, example=inputs,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    with pytest.raises(PenstockError, match="an argument of the model is a ndarray"):
        list(pipeline.run([(inputs, torch.ones(2, 2))]))


def test_a_state_has_the_names_of_the_model() -> None:
    """Also where a later stage has a copy of a weight that belongs to an earlier one."""
    assert pipeline_of(BorrowedWeight, 3).state_dict().keys() == make(BorrowedWeight).state_dict().keys()


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


class Initialised(Layers):
    """Layers with initialisers, two of which have one weight, and a module whose own one fills what no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH))
        self.c.weight = self.a.weight

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.b.weight)
        nn.init.normal_(self.scale)
        self.table.copy_(torch.rand(WIDTH))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight)

    def forward(self, x: Tensor) -> Any:
        h = self.c(self.norm(torch.tanh(self.b(torch.tanh(self.a(x) * self.scale))) + self.table))
        return self.head(self.d(torch.tanh(h)) * self.scale)


def on_meta(stages: int, kind: Any = Initialised, **options: Any) -> Pipeline:
    with torch.device("meta"):
        model = kind().double()
    return Pipeline(
        model, "1f1b", stages=stages, microbatches=MICROBATCHES, loss=loss, example=next(batches(kind))[0],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), **options,
    )  # fmt: skip


def values_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.full_state_dict().items()}


def test_a_model_on_meta_is_initialised_alike_at_any_cut(tmp_path: Path) -> None:
    """It trains, and takes checkpoints of other cuts, as one that had these weights all along."""
    for stages in (1, 2, 3):
        pipeline = on_meta(stages)
        weights = values_of(pipeline)
        wanted = weights if stages == 1 else wanted  # noqa: F821
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
        losses, trained = train_plainly(Initialised, weights)
        assert [report.loss for report in pipeline.run(batches(Initialised))] == pytest.approx(losses, rel=1e-12)
        for name, tensor in values_of(pipeline).items():
            torch.testing.assert_close(tensor, trained[name], rtol=1e-12, atol=1e-12, msg=name)
    assert wanted["b.weight"].std() > 0.5  # of _init_weights
    assert not torch.equal(wanted["a.weight"], wanted["d.weight"])
    Checkpoints(pipeline, tmp_path).save()
    resumed = on_meta(2)
    Checkpoints(resumed, tmp_path).load()
    found, held = values_of(resumed), values_of(pipeline)
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
    other = on_meta(2, seed=1)
    assert not torch.equal(values_of(other)["a.weight"], wanted["a.weight"])


def train_on_meta(group: Any) -> Any:
    """Train in two processes, load what there was before, and train again; also the names of what is on meta."""
    pipeline = on_meta(2, group=group)
    sent = [values_of(pipeline)]
    dist.broadcast_object_list(sent, src=0, group=group)
    losses = [report.loss for report in pipeline.run(batches(Initialised))]
    pipeline.load_state_dict(sent[0])
    model = pipeline._given[0]
    there = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.is_meta}
    return losses, [report.loss for report in pipeline.run(batches(Initialised))], sent[0], there


def test_a_process_has_no_weights_of_other_stages_of_a_model_on_meta(pool: Pool) -> None:
    (_, _, weights, first), (losses, again, _, second) = pool.submit(train_on_meta, ranks=2)
    alone = on_meta(2)
    wanted = values_of(alone)
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
    assert losses == [report.loss for report in alone.run(batches(Initialised))]
    alone.load_state_dict(wanted)
    assert again == [report.loss for report in alone.run(batches(Initialised))]
    assert first & second == {"a.weight", "c.weight", "scale"}
    assert first | second == {name for name, _ in Initialised().named_parameters(remove_duplicate=False)}


def shift_second_output(loss: Tensor, calls: int, _: Any) -> None:
    loss += calls == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shift_second_output, "with other values than the example's its output differs"),
        (
            lambda _, calls, model: model.norm.running_mean.add_(1),
            "on the example the buffer norm.running_mean differs",
        ),
        (lambda _, calls, model: setattr(model.norm, "momentum", calls), "on the example norm.momentum differs"),
    ],
)
def test_stages_are_compared_on_other_values_and_in_state(monkeypatch: Any, damage: Any, said: str) -> None:
    run, calls = comparison._through_stages, []

    def damaged(model: nn.Module, *given: Any) -> Any:
        (found, *gradients), output = run(model, *given)
        calls.append(0)
        damage(found, len(calls), model)
        return [found, *gradients], output

    monkeypatch.setattr(comparison, "_through_stages", damaged)
    with pytest.raises(PenstockError, match=said):
        pipeline_of(Initialised, 2)


class WithoutInitialiser(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.scale)


class BufferOfNumbers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x[:, self.places])


class ReadsAnother(Layers):
    def reset_parameters(self) -> None:
        self.a.weight.copy_(self.d.weight)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (WithoutInitialiser, "scale is on the device 'meta', and neither reset_parameters of its WithoutInitialiser"),
        (BufferOfNumbers, "places is on the device 'meta', and neither"),
        (ReadsAnother, "the model: reset_parameters fails where parameters of other stages have no values"),
    ],
)
def test_what_cannot_be_initialised_by_stage_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(PenstockError, match=said):
        on_meta(2, kind)


def test_an_example_is_for_whole_models() -> None:
    with pytest.raises(PenstockError, match="example is for a whole model"):
        Pipeline([nn.Linear(2, 2)], "1f1b", stages=1, example=torch.zeros(1, 2), loss=loss, optimizer=torch.optim.SGD)
