"""A whole model in place of blocks is trained to the bits of plain torch, under its own names; what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import penstock
from penstock.errors import CapabilityError, ConfigError
from penstock.measure.recompute_choice import choose_recompute
from penstock.options.all_options import PipelineOptions
from penstock.partition.blocks import named_blocks
from penstock.partition.replay.model_stages import UnitBlocks
from penstock.partition.replay.units import Guard, copies_of
from penstock.runtime.plan.plan import UnprovenPlan
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders.stage_graph import over
from support.ordinary_models import ORDINARY, D, Twofold, squares
from support.own_methods import asked
from support.plain_training import PlainTraining
from support.pool import Pool
from support.schedules import make_schedule

VOCABULARY, LENGTH, M = 16, 6, 4


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (3, 2 * M, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def make_adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def make_pipeline(model: nn.Module, stages: int, method: Any = "1f1b", **more: Any) -> penstock.Pipeline:
    given = {"loss": loss, "optimizer": make_adamw, "example": batches()[0][0], "microbatches": M} | more
    return penstock.Pipeline(model, method, stages=stages, **given)


def make_sgd(named: Any) -> torch.optim.Optimizer:
    """For what is compared to rounding, which AdamW makes large where a gradient is nearly zero."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def parts_of(inputs: Any, targets: Tensor) -> list[tuple[Any, Tensor]]:
    """Return the microbatches of a batch."""
    return [
        (
            tuple(t.tensor_split(M)[part] for t in inputs)
            if isinstance(inputs, tuple)
            else inputs.tensor_split(M)[part],
            y,
        )
        for part, y in enumerate(targets.tensor_split(M))
    ]


def train_plain(model: nn.Module, batches: Any, loss: Any, optimizer: Any = make_adamw, delay: int = 0) -> list[float]:
    plain = PlainTraining(model, optimizer, delay)

    def weighted(output: Any, targets: Tensor) -> tuple[Tensor, int]:
        found = loss(output, targets)
        return found if isinstance(found, tuple) else (found * len(targets), len(targets))

    return [plain.update(parts_of(*batch), weighted) for batch in batches]


class TwoEmbeddings(nn.Module):
    """As many people write their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_emb, self.pos_emb = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


class Nested(nn.Module):
    """A model inside, with one embedding, and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed = nn.Embedding(VOCABULARY, 8)
        self.model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)
        self.lm_head.weight = self.model.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed(tokens)  # type: ignore[operator]
        for layer in self.model.layers:  # type: ignore[union-attr]
            x = layer(x)
        found: Tensor = self.lm_head(x)
        return found


class Masked(nn.Module):
    """A mask that is made once goes to all layers; a bare parameter; a head that reads the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok, self.pos = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.start = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.norm, self.unused = nn.LayerNorm(8), nn.Linear(2, 2)
        self.scale = 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tok(tokens) * self.scale + self.pos(torch.arange(length)) + self.start
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x) @ self.tok.weight.T  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Any]]] = {
    "two embeddings": (TwoEmbeddings, batches, loss),
    "nested": (Nested, batches, loss),
    "masked": (Masked, batches, loss),
    **{kind: (make, lambda data=data: [data()] * 3, squares) for kind, (make, data) in ORDINARY.items()},
}
SHARED = ("nested", "masked", "a tied head, a scale", "nanoGPT, (logits, loss)")  # parameters, by two stages
RUNS = list(itertools.product(("1f1b", "2bw"), (2, 3, 4)))


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]().double()


def doubled(tree: Any) -> Any:
    return tree_map(lambda t: t.double() if t.is_floating_point() else t, tree)


@pytest.mark.all_cases
@pytest.mark.filterwarnings("ignore:stages are uneven")
@pytest.mark.parametrize(
    ("kind", "method", "stages"),
    [
        pytest.param(kind, *run, marks=[] if place == number % len(RUNS) else pytest.mark.long)
        for number, kind in enumerate(MODELS)
        for place, run in enumerate(RUNS)
    ],
)
def test_a_whole_model_trains_to_the_bits_of_plain_torch(kind: str, method: str, stages: int) -> None:
    """In place, in one process; what plain torch does not train stays as it is.

    Each of the stages that share a parameter adds up its own gradients first, so there it is to rounding.
    """
    close = {"rtol": 1e-12, "atol": 1e-12} if kind in SHARED else {"rtol": 0, "atol": 0}
    _, data, loss = MODELS[kind]
    plain, model, given = made(kind), made(kind), doubled(data())
    optimizer = make_sgd if kind in SHARED else make_adamw
    losses = train_plain(plain, given, loss, optimizer, delay=int(method == "2bw"))
    pipeline = make_pipeline(model, stages, method, loss=loss, optimizer=optimizer, example=given[0][0])
    assert [report.loss for report in pipeline.run(given)] == pytest.approx(losses, rel=close["rtol"], abs=0)
    found, wanted = pipeline.full_state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, **close)
        assert torch.equal(found[name], model.state_dict()[name]), name
    made(kind).load_state_dict(found)


def test_optimizers_see_the_names_of_the_model() -> None:
    """Also of a parameter that two stages use, of which the second has a copy; hooks of updates see both."""
    model, given, updated = Masked(), [], set()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        given.extend(name for name, _ in pairs)
        return make_adamw(pairs)

    pipeline = make_pipeline(model, 3, optimizer=optimizer)
    pipeline.on_update(lambda update, weights: updated.update(weights))
    list(pipeline.run(batches()))
    names = {name for name, _ in model.named_parameters()}
    assert set(given) == names
    assert updated == names | {"1@.tok.weight"}


def test_a_state_goes_into_a_pipeline_of_a_whole_model() -> None:
    weights = Masked().state_dict()
    pipeline = make_pipeline(Masked(), 3)
    first = [report.loss for report in pipeline.run(batches())]
    pipeline.load_state_dict(weights)
    again = make_pipeline(pipeline._given[0], 3)
    assert [report.loss for report in again.run(batches())] == first
    with pytest.raises(ConfigError, match='Unexpected key.*"other.weight"'):
        pipeline.load_state_dict({**weights, "other.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match='Missing key.*"pos.weight"'):
        pipeline.load_state_dict({name: tensor for name, tensor in weights.items() if name != "pos.weight"})


@pytest.mark.parametrize("stages", [2, 3])
def test_a_checkpoint_of_a_whole_model_goes_on_under_other_stages(tmp_path: Any, stages: int) -> None:
    whole = [report.loss for report in make_pipeline(Masked(), 2, "2bw").run(batches())]
    pipeline = make_pipeline(Masked(), 3, "2bw")
    first = [report.loss for report in pipeline.run(batches()[:1])]
    penstock.Checkpoints(pipeline, tmp_path).save()
    resumed = make_pipeline(Masked(), stages, "2bw")
    penstock.Checkpoints(resumed, tmp_path).load()
    assert first + [report.loss for report in resumed.run(batches()[1:])] == whole


def in_processes(group: dist.ProcessGroup) -> tuple[list[float | None], dict[str, Tensor]]:
    model = Masked()
    pipeline = make_pipeline(model, 2, group=penstock.Group(group, 20.0))
    losses = [report.loss for report in pipeline.run(batches())]
    with pytest.raises(ConfigError, match="is trained by another process"):
        model.state_dict()
    sent = [dict(pipeline.full_state_dict())]
    dist.broadcast_object_list(sent, src=0, group=group)
    model.load_state_dict(sent[0])
    assert all(torch.equal(tensor, sent[0][name]) for name, tensor in model.state_dict().items())
    losses += [report.loss for report in pipeline.run(batches())]
    sent = [dict(pipeline.full_state_dict())]
    dist.broadcast_object_list(sent, src=0, group=group)
    pipeline.load_state_dict(sent[0])
    losses += [report.loss for report in pipeline.run(batches())]
    return losses, dict(pipeline.full_state_dict())


def test_a_whole_model_between_processes_trains_to_the_bits_of_one(pool: Pool) -> None:
    """A mask travels with the activations; weights go into the model, and into the pipeline, on every rank."""
    (_, found), (losses, _) = pool.submit(in_processes, ranks=2)
    alone = make_pipeline(Masked(), 2)
    assert losses == [report.loss for _ in range(3) for report in alone.run(batches())]
    wanted = alone.full_state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_model_that_was_changed_between_two_runs() -> None:
    """What its forward reads counts from the next run on; a module in the place of a unit is refused."""
    model, plain = Masked(), Masked()
    pipeline = make_pipeline(model, 2, optimizer=lambda named: torch.optim.SGD(named, lr=0.0))
    for scale in (0.5, 0.25):
        model.scale = plain.scale = scale
        wanted = train_plain(plain, batches(), loss, lambda named: torch.optim.SGD(named, lr=0.0))
        assert [report.loss for report in pipeline.run(batches())] == pytest.approx(wanted, rel=1e-6)
    model.norm = nn.LayerNorm(8)
    with pytest.raises(ConfigError, match="norm is another object since the pipeline was made"):
        pipeline.run(batches())


class Experts(nn.Module):
    """A layer with layers inside, and a weight of its own, which looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Parameter(torch.randn(D)), nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.experts[0 if (x @ self.gate).sum() > 0 else 1](x)
        return x + found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train_twice(group: dist.ProcessGroup | None) -> list[Any]:
    """Two runs and an evaluation; then the same with a second pipeline of the model, which other weights went into."""
    model = Mixture()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = [(torch.randn(4, D, generator=torch.Generator().manual_seed(k)), torch.zeros(4, D)) for k in range(3)]
    found: list[Any] = []
    for _ in range(2):
        pipeline = make_pipeline(
            model, 2, loss=F.mse_loss, optimizer=make_sgd, group=penstock.Group(group, 20.0), example=data[0][0]
        )
        pipeline.load_state_dict(before)
        assert all(any(name.startswith("layers.") for name in part) for part in pipeline.parts)
        for batch in data:
            found += [report.loss for report in pipeline.run([batch])]
            found.append(pipeline.evaluate(data))
    return found


def test_layers_that_are_not_called_are_with_those_of_the_same_module() -> None:
    """So that a stage has all experts of its layers, and what code between them takes."""
    groups = UnitBlocks(Mixture(), torch.ones(4, D), 4).groups.values()
    layers = [{path.split(".")[1] for path in (*group.units, *group.unused)} for group in groups]
    assert layers == [{"0"}, {"1"}, {"2"}, {"3"}]
    assert all(group.unused for group in groups)


@pytest.mark.long
def test_a_guarded_layer_with_layers_inside_is_trained_in_several_runs(pool: Pool) -> None:
    _, found = pool.submit(train_twice, ranks=2)
    assert found == train_twice(None)
    assert found[:6] == found[6:]


def test_copies_of_a_model_are_without_its_guards() -> None:
    class Refusing(Guard):
        def refuse(self, *_: Any) -> None:
            raise ValueError("guarded")

    layer, seen = nn.Linear(D, D), []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_pre_hook(Refusing().refuse)
    layer.register_forward_pre_hook(lambda *_: seen.append("after"))
    model = nn.Sequential(layer)
    with copies_of(model) as (twin,):
        twin(torch.zeros(1, D))
    assert seen == ["before", "after"]
    with pytest.raises(ValueError, match="guarded"):
        model(torch.zeros(1, D))


# --- methods and options ----------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, D, generator=generator), torch.randn(8, D, generator=generator)) for _ in range(3)]


def losses_of(whole: bool, method: Any, **options: Any) -> list[float | None]:
    """Train a model whole, or as the list of its blocks, which has the same names."""
    model = Chain()
    given: Any = model if whole else {f"layers.{place}": layer for place, layer in enumerate(model.layers)}
    example = rows()[0][0] if whole else None
    asked = {"microbatches": 4, "loss": F.mse_loss, "optimizer": make_sgd} | options
    pipeline = make_pipeline(given, 2, method, example=example, **asked)
    return [report.loss for report in pipeline.run(rows())]


def make_nadam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(named, lr=0.01, betas=(0.99, 0.999))


RATES = {"pipemare": 10}
NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"data_parallel": 2, "microbatches": 2} for name in ("depth-first-full", "layered", "2bw-layered")},
    "nag-pp": {"optimizer": make_nadam},
    "gap-aware": {"microbatches": 1},
}
OF_BLOCKS = {
    "seq1f1b": "seq1f1b takes slices of sequences",
    "terapipe": "terapipe takes slices of sequences",
    "vocabulary-1f1b": "the 5 stages of vocabulary-1f1b are no chain",
}


@pytest.mark.parametrize("method", [*(name for name in METHODS if name not in OF_BLOCKS), "gap-aware", "nag-pp"])
def test_every_method_trains_a_whole_model_as_its_blocks(method: str) -> None:
    name: Any = penstock.method(method, reschedule=RATES[method]) if method in RATES else asked(method)
    assert losses_of(True, name, **NEEDED.get(method, {})) == losses_of(False, name, **NEEDED.get(method, {}))


@pytest.mark.parametrize(
    "options",
    [
        {"partition": penstock.Partition([3, 5], tied={"layers.6.0.weight": "layers.1.0.weight"})},
        {"recompute": ["block", "none"], "max_grad_norm": 0.1},
        {"data_parallel": penstock.DataParallel(2, sharding="full"), "microbatches": 2},
        {"data_parallel": penstock.DataParallel(2, combine=penstock.Combine("average", 2)), "microbatches": 2},
        {"precision": penstock.Precision("bf16", boundary_gradients="bf16")},
    ],
    ids=str,
)
def test_options_act_on_a_whole_model_as_on_its_blocks(options: dict[str, Any]) -> None:
    assert losses_of(True, "1f1b", **options) == losses_of(False, "1f1b", **options)


def test_delays_of_blocks_act_on_a_whole_model() -> None:
    """Also of those that are not the first of their stage, and of backwards."""
    for given in {"delays": {"layers.3": 1, "layers.4": 2}}, {"delays": "1f1b:8", "backward_delays": {"layers.1": 1}}:
        options = {"staleness": penstock.Staleness(**given)}
        assert losses_of(True, "1f1b", **options) == losses_of(False, "1f1b", **options) != losses_of(False, "1f1b")


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        *((method, {}, said) for method, said in OF_BLOCKS.items()),
        ("vocabulary-1f1b", {"partition": [2, 2, 2, 1, 1]}, OF_BLOCKS["vocabulary-1f1b"]),
        (over([(0, 2), (1, 2)]), {"stages": 3}, "the 3 stages of graph_1f1b are no chain"),
        ("1f1b", {"device": penstock.Device("cuda", cuda_graphs=True)}, "cuda_graphs would not run the code around"),
    ],
    ids=lambda given: given.__name__ if callable(given) else str(given),
)
def test_what_needs_blocks_is_refused_for_a_whole_model(method: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CapabilityError, match=f"{said}.*; pass a list or dict of blocks, without example"):
        make_pipeline(Chain(), **{"stages": 2, "method": method, "microbatches": 4, "example": rows()[0][0]} | options)


def test_processes_that_share_stages_are_refused_for_a_whole_model() -> None:
    options = PipelineOptions().changed(tensor_parallel=2)
    with pytest.raises(CapabilityError, match="tensor_parallel divides blocks with a method parallelize"):
        UnprovenPlan.of(named_blocks(Chain(), rows()[0][0]), make_schedule("1f1b", 2, 4), options)


def test_recompute_is_chosen_for_a_whole_model() -> None:
    """The sample is its example; the bytes are those of a run."""
    run: dict[str, Any] = {"method": "1f1b", "stages": 2, "microbatches": 4, "loss": F.mse_loss, "optimizer": make_sgd}
    data = [[tuple(part.repeat(2, 1) for part in rows()[0]) for _ in range(4)] for _ in range(3)]
    sample = data[0][0]
    plain = choose_recompute(Chain(), sample, 1e9, **run)
    assert plain.recompute == ("none", "none")
    found = choose_recompute(Chain(), sample, max(plain.peaks) - 1, **run)
    assert found.recompute != plain.recompute
    for choice in (plain, found):
        pipeline = penstock.Pipeline(Chain(), example=sample[0], recompute=choice.recompute, **run)
        list(pipeline.run(data))
        assert tuple(peak["total"] for peak in pipeline.peak_bytes().values()) == choice.peaks


@pytest.mark.parametrize(
    "make", [Chain, lambda: Twofold(nn.Linear(D, D)), nn.Module], ids=["own", "sequential", "none"]
)
def test_a_whole_model_without_an_example_is_told_which_line_to_write(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.raises(ConfigError) as refused:
        named_blocks(model)
    said = str(refused.value)
    assert said.startswith(f"{type(model).__name__} is a whole model")
    assert "penstock.Pipeline(model, ..., example=next(iter(loader))[0])" in said
    assert "list or dict of blocks, each of which takes what the one before returns, needs none" in said


def lazy() -> nn.Module:
    model = Chain()
    model.layers[0] = nn.LazyLinear(D)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lazy, "the model: layers.0.weight has no shape yet, as in torch's lazy modules"),
        (lambda: nn.DataParallel(Chain()), r"the model is of type DataParallel; .* \(model.module\)"),
        (lambda: nn.Linear(D, D), r"Linear calls no layers with weights, so it is one block: pass \[model\]"),
        (lambda: Chain, "example is for a whole model, which is an nn.Module, and this is a type"),
    ],
)
def test_a_whole_model_that_cannot_be_run_is_refused_with_the_reason(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        named_blocks(make(), rows()[0][0])
