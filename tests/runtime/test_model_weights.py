"""Weights of a pipeline by the names of the user's model, and back from them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError
from support.pool import Pool

VOCABULARY, WIDTH = 7, 4


class Net(nn.Module):
    """Names nested, one tied, one beside the blocks, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Module()
        self.body.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.body.embed.weight
        self.unused = nn.Linear(1, 1)

    def parts(self) -> list[nn.Module]:
        return [self.body.embed, *self.body.layers, self.norm, self.head]  # type: ignore[list-item, misc]


class Wrapped(nn.Module):
    """A block made for the pipeline, around a module of the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def make_pipeline(blocks: Any, group: dist.ProcessGroup | None = None, **options: Any) -> penstock.Pipeline:
    given = {"method": "1f1b", "stages": 2, "microbatches": 2} | options
    optimizer = given.pop("optimizer", lambda named: torch.optim.Adam(named, lr=0.01))
    return penstock.Pipeline(
        blocks, loss=F.cross_entropy, optimizer=optimizer, group=penstock.Group(group, 20.0), **given
    )


def data(count: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(x, (x + 1) % VOCABULARY) for x in torch.randint(VOCABULARY, (count, 4), generator=generator)]


def trained_by_name(group: dist.ProcessGroup | None, wrapped: bool) -> tuple[dict[str, Tensor], list[str]]:
    model = Net()
    pipeline = make_pipeline([Wrapped(part) if wrapped else part for part in model.parts()], group)
    list(pipeline.run(data()))
    return dict(pipeline.full_state_dict(model)), list(pipeline.full_state_dict())


@pytest.mark.parametrize("wrapped", [False, True])
def test_of_a_list_of_blocks_names_are_those_of_the_model(wrapped: bool) -> None:
    found, by_block = trained_by_name(None, wrapped)
    model = Net()
    assert list(found) == list(model.state_dict())  # what is beside the blocks, and both names of what is tied
    assert by_block[0] == ("0.inner.weight" if wrapped else "0.weight")
    model.load_state_dict(found)
    twin = Net()
    list(make_pipeline(twin.parts()).run(data()))
    assert all(torch.equal(found[name], tensor) for name, tensor in twin.state_dict().items())
    assert not torch.equal(found["norm.running_mean"], Net().norm.running_mean)  # type: ignore[arg-type]
    assert torch.equal(found["unused.weight"], Net().unused.weight)


def test_averages_come_under_all_names_of_the_model() -> None:
    """Also a shared one, whose newest weights the model holds under both of its names."""
    model = Net()
    pipeline = make_pipeline(model.parts(), ema_decay=0.5)
    list(pipeline.run(data()))
    found, by_block = pipeline.full_state_dict(model, averaged=True), pipeline.full_state_dict(averaged=True)
    assert torch.equal(found["head.weight"], by_block["0.weight"])
    assert torch.equal(found["body.embed.weight"], by_block["0.weight"])
    assert not torch.equal(found["head.weight"], model.head.weight)


def test_between_processes_the_first_has_all_names(pool: Pool) -> None:
    (found, _), (nothing, _) = pool.submit(trained_by_name, True, ranks=2)
    wanted, _ = trained_by_name(None, True)
    assert nothing == {}
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def another_model(group: dist.ProcessGroup | None, on: tuple[int, ...]) -> str:
    model = Net()
    pipeline = make_pipeline(model.parts(), group)
    rank = 0 if group is None else dist.get_rank(group)
    with pytest.raises(ConfigError, match="not a parameter or buffer of this Net; pass the model itself") as refused:
        pipeline.full_state_dict(Net() if rank in on else model)
    pipeline.full_state_dict(model)
    return str(refused.value)


def test_another_model_is_refused_on_all_ranks(pool: Pool) -> None:
    assert "0.weight of block '0'" in another_model(None, (0,))
    first, second = pool.submit(another_model, (1,), ranks=2)
    assert first == second


# --- back -------------------------------------------------------------------------------------------------------------


def started_again(group: dist.ProcessGroup | None, method: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    pipeline = make_pipeline(Net(seed=5).parts(), group, method=method)
    pipeline.load_state_dict(state)
    list(pipeline.run(data()))
    return dict(pipeline.full_state_dict())


@pytest.mark.parametrize(("method", "ranks"), [("1f1b", 0), ("2bw", 0), ("chimera", 0), ("1f1b", 2), ("chimera", 2)])
def test_a_pipeline_goes_on_from_loaded_weights(pool: Pool, method: str, ranks: int) -> None:
    """As a new one of a model that has them; in one process the tied one may come under one of its names."""
    first = make_pipeline(Net().parts())
    list(first.run(data()))
    state = first.full_state_dict()
    model = Net(seed=5)
    for part, name in zip(model.parts(), "01234", strict=True):
        own = {n.removeprefix(f"{name}."): t for n, t in state.items() if n.startswith(name)}
        part.load_state_dict(own)
    other = make_pipeline(model.parts(), method=method)
    list(other.run(data()))
    wanted = other.full_state_dict()
    if not ranks:
        state.pop("4.weight")
    found = pool.submit(started_again, method, state, ranks=ranks)[0] if ranks else started_again(None, method, state)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_with_its_optimizers_it_goes_on_as_if_it_had_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    """As scripts in plain torch save and load: model and optimizer. (`Checkpoints` does more.)"""
    whole = make_pipeline(Net().parts())
    list(whole.run(data(6)))
    first = make_pipeline(Net().parts())
    list(first.run(data(6)[:3]))
    saved = first.full_state_dict(), [o.state_dict() for o in first.optimizers().values()]
    second = make_pipeline(Net(seed=5).parts())
    with caplog.at_level(logging.WARNING, "penstock"):
        second.load_state_dict(saved[0])
    assert "has loaded weights, and no state of optimizers" in caplog.text
    assert "penstock.Checkpoints(pipeline, folder); checkpoints.load()" in caplog.text
    for optimizer, state in zip(second.optimizers().values(), saved[1], strict=True):
        optimizer.load_state_dict(state)
    list(second.run(data(6)[3:]))
    wanted = whole.full_state_dict()
    assert all(torch.equal(second.full_state_dict()[name], tensor) for name, tensor in wanted.items())


def fault(change: Any) -> tuple[Any, str]:
    pipeline = make_pipeline(Net().parts())
    before = pipeline.full_state_dict()
    state = change(dict(before))
    with pytest.raises(ConfigError, match="load_state_dict") as refused:
        pipeline.load_state_dict(state)
    assert all(torch.equal(before[name], tensor) for name, tensor in pipeline.full_state_dict().items())
    return state, str(refused.value)


def without(*names: str) -> Any:
    return lambda state: {name: tensor + 1 for name, tensor in state.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            without("1.weight", "1.bias"),
            r'every rank loads the state of the whole.*\n    Missing key\(s\) in state_dict: "1.weight", "1.bias".',
        ),
        (without("0.weight", "4.weight"), 'Missing.* "0.weight", "4.weight".'),
        (lambda s: {**s, "1.wieght": torch.ones(2)}, r'Unexpected key\(s\) in state_dict: "1.wieght".'),
        (
            lambda s: Net().state_dict(),
            r"body.embed.weight belongs to no block; .*\n    model.load_state_dict\(state\)",
        ),
        (
            lambda s: {**{n: t + 1 for n, t in s.items()}, "1.weight": torch.ones(2, 2), "3.more": torch.ones(1)},
            r'Unexpected .*"3.more".\n    size mismatch for 1.weight: copying a param with shape torch.Size\(\[2, '
            r"2\]\) from checkpoint, the shape in current model is torch.Size\(\[4, 4\]\).",
        ),
        (lambda s: {"model": s, "optimizer": {}}, r"'model' is of type dict.*penstock.Checkpoints\(pipeline, folder\)"),
        (lambda s: list(s), "takes what full_state_dict"),
        (lambda s: {}, 'Missing.* "0.weight", .* and 6 more'),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_loaded(change: Any, said: str) -> None:
    import re

    assert re.search(said, fault(change)[1], re.DOTALL)


def halfway(group: dist.ProcessGroup) -> tuple[str, bool]:
    """A state does not fit a block of the other process, too."""
    model = Net()
    pipeline = make_pipeline(model.parts(), group)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = make_pipeline(Net(seed=5).parts()).full_state_dict()
    with pytest.raises(ConfigError, match="size mismatch for 3.weight"):
        pipeline.load_state_dict(state | {"3.weight": torch.ones(1)})
    return "", all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_between_processes_all_is_loaded_or_nothing(pool: Pool) -> None:
    assert pool.submit(halfway, ranks=2) == [("", True)] * 2


class Renaming(nn.Linear):
    """Loads files of an earlier version, as torch's own hook for that is used."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, _: nn.Module, state: dict[str, Tensor], prefix: str, *__: Any) -> None:
        if f"{prefix}gamma" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}gamma")


def test_a_block_may_rename_what_it_loads() -> None:
    pipeline = make_pipeline([Renaming(), nn.Linear(4, 4)])
    state = {f"0.{name}": t for name, t in (("gamma", torch.ones(4, 4)), ("weight", torch.zeros(4, 4)))}
    state |= {name: t for name, t in pipeline.full_state_dict().items() if name not in state}
    pipeline.load_state_dict(state)
    assert torch.equal(pipeline.full_state_dict()["0.weight"], torch.ones(4, 4))


@pytest.mark.parametrize("given", [{"0.weight": torch.ones(3)}, {"model": {"0.weight": torch.ones(3)}, "epoch": 3}, 3])
def test_a_state_dict_given_to_load_is_named_and_not_printed(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"to begin with other weights: pipeline.load_state_dict\(weights\)"
    ) as refused:
        make_pipeline(Net().parts()).load(given)
    assert "tensor(" not in str(refused.value)
    named = "3;" if given == 3 else f"a dict of {len(given)} entries"
    assert f"saved with its facts, not {named}" in str(refused.value)


def test_within_a_run_nothing_is_loaded() -> None:
    pipeline = make_pipeline(Net().parts())
    state = pipeline.full_state_dict()
    for _ in pipeline.run(data()):
        with pytest.raises(penstock.PenstockError, match="a run .* is under way"):
            pipeline.load_state_dict(state)
