"""The whole model comes together on rank 0, under the names that the unsplit model has, and goes back into it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError, PenstockError, TransportError
from penstock.options.run import Group
from penstock.partition.blocks import LazyBlock, named_blocks
from penstock.runtime.pipeline import Pipeline
from support.pool import Pool
from support.schedules import make_schedule
from support.snapshots import Kept

VOCABULARY, WIDTH, M = 11, 6, 4


class Embeddings(nn.Module):
    """What the unsplit model holds beside its layers, as a block: tokens and places."""

    def __init__(self, whole: Transformer) -> None:
        super().__init__()
        self.wte, self.wpe = whole.wte, whole.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return found


class Layer(nn.Module):
    """With buffers, and with a parameter that it holds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = self.map.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.map(self.norm(x.flatten(0, 1))).view_as(x) @ self.again
        return found


class Transformer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(5, WIDTH)
        self.h = nn.ModuleList(Layer() for _ in range(layers))


class Model(nn.Module):
    """As GPT-2 is written: names are nested, and the head is the embedding."""

    def __init__(self, layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.transformer = Transformer(layers)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = Embeddings(self.transformer)(tokens)
        for layer in self.transformer.h:
            x = layer(x)
        found: Tensor = self.lm_head(x)
        return found

    def blocks(self) -> dict[str, Any]:
        layers = {f"transformer.h.{i}": layer for i, layer in enumerate(self.transformer.h)}
        return {"transformer": Embeddings(self.transformer), **layers, "lm_head": self.lm_head}


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (count, 2 * M, 6), generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(group: dist.ProcessGroup | None, method: str, stages: int, **options: Any) -> Pipeline:
    options = {"optimizer": lambda named: torch.optim.AdamW(named, lr=0.01)} | options
    pipelines = options.get("data_parallel", 1)
    schedule = make_schedule(method, stages, M // pipelines)
    return Pipeline(Model().blocks(), schedule, loss=loss, group=Group(group, 20.0), **options)


def trained(
    group: dist.ProcessGroup | None, method: str, stages: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The newest weights, and the averaged ones."""
    pipeline = make(group, method, stages, ema_decay=0.5, **options)
    assert len(list(pipeline.run(batches(3)))) == 3
    return dict(pipeline.full_state_dict()), dict(pipeline.full_state_dict(averaged=True))


def plain() -> Model:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in batches(3):
        for x, y in zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True):
            (loss(model(x), y) / M).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_in_one_process_it_is_what_plain_torch_has_trained(stages: int) -> None:
    found, _ = trained(None, "1f1b", stages, {})
    wanted = plain().state_dict()
    assert found.keys() == wanted.keys()  # lm_head.weight and h.0.again among them
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "stages", "ranks", "options"),
    [
        ("2bw", 2, 2, {}),
        ("stash", 4, 4, {}),
        ("chimera", 2, 2, {}),
        ("1f1b", 2, 4, {"data_parallel": 2}),
    ],
)
def test_on_ranks_the_first_gets_what_one_process_has(
    pool: Pool, method: str, stages: int, ranks: int, options: dict[str, Any]
) -> None:
    both, *others = pool.submit(trained, method, stages, options, ranks=ranks)
    assert others == [({}, {})] * (ranks - 1)
    for found, wanted in zip(both, trained(None, method, stages, options), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    model = Model(seed=99)
    model.load_state_dict(both[0], strict=True)
    assert torch.equal(model.transformer.h[0].map.weight, both[0]["transformer.h.0.map.weight"])
    assert (both[0]["transformer.h.0.map.weight"] != both[1]["transformer.h.0.map.weight"]).any()  # averaged


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("1f1b", {}),
        ("2bw", {"precision": "bf16"}),
        ("stash", {"recompute": "stage"}),
        ("2bw", {"data_parallel": 2}),
        ("chimera", {}),
        ("newest", {}),
    ],
)
def test_in_one_process_the_model_itself_holds_it_after_a_run(method: str, options: dict[str, Any]) -> None:
    """So who goes on with the model, without loading anything into it, goes on with the newest weights."""
    model, schedule = Model(), make_schedule(method, 2, M // options.get("data_parallel", 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pipeline = Pipeline(
        model.blocks(), schedule, loss=loss, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), **options
    )
    list(pipeline.run(batches(3)))
    wanted = pipeline.full_state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert not torch.equal(wanted["lm_head.weight"], before["lm_head.weight"])


def test_what_it_returns_is_a_copy() -> None:
    pipeline = make(None, "2bw", 2)
    before = pipeline.full_state_dict()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    list(pipeline.run(batches(3)))
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())
    after = pipeline.full_state_dict()
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert torch.equal(after["lm_head.weight"], after["transformer.wte.weight"])


def test_in_a_run_it_is_refused() -> None:
    pipeline = make(None, "2bw", 2)
    for _ in pipeline.run(batches(2)):
        with pytest.raises(PenstockError, match=r"a run .* is under way.*save=checkpoints.every\(n\)"):
            pipeline.full_state_dict()


def saved_on_all_ranks(group: dist.ProcessGroup) -> str:
    """As scripts of one process do it."""
    weights = make(group, "1f1b", 2).full_state_dict()
    for copied in (copy.deepcopy(weights), copy.copy(weights), weights.copy()):
        assert type(copied) is type(weights)
        assert list(copied) == list(weights)
    try:
        torch.save(copy.copy(weights), io.BytesIO())
    except ConfigError as error:
        return str(error)
    return ""


def test_only_rank_0_saves(pool: Pool) -> None:
    first, second = pool.submit(saved_on_all_ranks, ranks=2)
    assert first == ""
    assert "gives the weights to rank 0 only" in second
    assert "if weights:\n        torch.save(weights, path)" in second


def alone(group: dist.ProcessGroup) -> str:
    """Only rank 0 asks."""
    pipeline = make(group, "1f1b", 2)
    list(pipeline.run(batches(1)))
    if dist.get_rank(group) == 0:
        with pytest.raises(TransportError) as caught:
            pipeline.full_state_dict()
        return str(caught.value)
    return ""


@pytest.mark.processes
def test_ranks_that_do_not_take_part_are_missed(pool: Pool) -> None:
    said, _ = pool.submit(alone, ranks=2, fresh=True)
    assert "rank 0, gathering the weights for full_state_dict(): a peer is dead or stalled" in said


def cannot_follow(group: dist.ProcessGroup) -> str:
    """Rank 1 has a parameter of another shape."""
    model = Model()
    pipeline = Pipeline(
        model.blocks(), make_schedule("1f1b", 2, M), loss=loss, optimizer=torch.optim.SGD, group=Group(group, 20.0)
    )
    if dist.get_rank(group):
        model.transformer.h[2].map.weight = nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(ConfigError) as caught:
        pipeline.full_state_dict()
    return str(caught.value)


def test_what_one_rank_cannot_give_all_hear_of(pool: Pool) -> None:
    first, second = pool.submit(cannot_follow, ranks=2)
    assert first == second
    assert "transformer.h.2.map.weight" in first


# --- nested names -----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A block that holds what is a block of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.h[0](x)
        return found


@pytest.mark.parametrize("outer", [Holder(), LazyBlock(Holder, 0)], ids=["made", "lazy"])
def test_a_parameter_of_two_blocks_by_name_is_refused(outer: Any) -> None:
    with pytest.raises(ConfigError, match=r"t\.h\.0\.weight is part of block 't', but by its name of block 't\.h\.0'"):
        named_blocks({"t": outer, "t.h.0": nn.Linear(2, 2)})


def test_nested_names_are_those_of_the_longest_block() -> None:
    """Delays, ties and snapshots find the block of a parameter."""
    pipeline = make(None, "1f1b", 2)
    list(pipeline.run(batches(2)))
    other = make(None, "2bw", 5, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01))
    other.load(Kept(pipeline.snapshots()))
    assert all(torch.equal(t, other.full_state_dict()[n]) for n, t in pipeline.full_state_dict().items())
