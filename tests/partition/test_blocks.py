"""What counts as a block, and where a list of blocks is cut."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from penstock.errors import ConfigError
from penstock.partition.blocks import LazyBlock, named_blocks
from support.cases import Case, assert_equal_tensors, gpt, make_pipeline
from support.examples import examples
from support.pool import Pool


def test_lazy_blocks_are_made_only_where_they_are_needed(pool: Pool) -> None:
    made = pool.submit(made_blocks, ranks=3)
    assert made == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert made_blocks(None) == ["0", "1", "2", "3", "4", "5"]


def made_blocks(group: dist.ProcessGroup | None) -> list[str]:
    made: list[str] = []

    def build(name: str) -> nn.Module:
        made.append(name)
        return nn.Linear(2, 2)

    blocks = {str(i): LazyBlock(lambda i=i: build(str(i)), seed=i, cost=1.0) for i in range(6)}  # type: ignore[misc]
    make_pipeline(Case("1f1b", 3, 2), group, blocks=blocks)
    return made


def test_lazy_blocks_do_not_depend_on_the_cut_or_on_the_global_seed() -> None:
    states = []
    for depth in (1, 2, 4):
        torch.manual_seed(depth)
        states.append(make_pipeline(Case("1f1b", depth, 2, "gpt"), blocks=gpt()).state_dict())
        after = torch.rand(1)
        torch.manual_seed(depth)
        assert after.equal(torch.rand(1))
    assert_equal_tensors(states[1], states[0], "weights")
    assert_equal_tensors(states[2], states[0], "weights")


@pytest.mark.parametrize("balance", [(3, 2), (7, -1), (6,), (2, 2, 2), (6, 0), ()])
def test_a_balance_that_does_not_fit(balance: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must hold 2 positive numbers that add up to the model's 6 blocks"):
        make_pipeline(Case("1f1b", 2, 2), balance=balance)


def test_too_few_blocks() -> None:
    with pytest.raises(ConfigError, match="2 blocks, which cannot be cut into 3 stages; use fewer stages"):
        make_pipeline(Case("1f1b", 3, 2), blocks=[torch.relu, torch.relu], balance=None)
    with pytest.raises(ConfigError, match="no blocks"):
        make_pipeline(Case("1f1b", 1, 2), blocks=[], balance=None)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([torch.relu, 3], "block .1. is of type int"),
        ("half", "must be a list or a dict of modules, got str"),
        (3, "must be a list or a dict"),
        ([nn.Linear], r"block '0' is the class Linear; pass an instance, or LazyBlock\(lambda: Linear"),
        (nn.Linear(2, 2).parameters(), r"block '0' is of type Parameter; blocks are the modules .*model.children\(\)"),
        (
            [nn.ModuleList([nn.Linear(2, 2)])],
            r"block '0' is of type ModuleList, which has no forward; pass what it holds",
        ),
        ([nn.DataParallel(nn.Linear(2, 2))], r"block '0' is of type DataParallel; .*model.module.*data_parallel=2"),
        (nn.DataParallel(nn.Linear(2, 2)), r"the model is of type DataParallel; .*model.module.*data_parallel=2"),
    ],
)
def test_what_is_no_block(blocks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pipeline(Case("1f1b", 1, 2), blocks=blocks, balance=None)


def test_what_fully_shard_has_wrapped_is_refused_with_the_way_on() -> None:
    """Also within a block, in a model that is wrapped as a whole, and in a lazy block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inner = fully_shard(nn.Linear(2, 2))
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for blocks in (
            [inner],
            [nn.Sequential(nn.ReLU(), inner)],
            fully_shard(model),
            [LazyBlock(lambda: inner, seed=0)],
        ):
            with pytest.raises(ConfigError, match=r"is of type FSDP.*DataParallel\(2, sharding='full'\)"):
                make_pipeline(Case("1f1b", 1, 2), blocks=blocks, balance=None)
    finally:
        dist.destroy_process_group()


class Cached(nn.Linear):
    """A layer with a buffer that no checkpoint has, such as the angles of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("angles", torch.ones(2, device="meta"), persistent=False)


@pytest.mark.parametrize(("make", "name"), [(lambda: nn.Linear(2, 2, device="meta"), "weight"), (Cached, "angles")])
def test_a_block_without_values_is_refused(make: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"block '0': {name} is on the device 'meta', .*LazyBlock"):
        make_pipeline(Case("1f1b", 2, 2), blocks=[make(), nn.Linear(2, 2)], balance=None)


def test_a_compiled_model_is_no_block() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(ConfigError, match=r"the model is compiled as a whole; .*block.compile\(\)"):
        make_pipeline(Case("1f1b", 1, 2), blocks=compiled, balance=None)


@pytest.mark.parametrize("container", [list, nn.Sequential, nn.ModuleList, lambda b: nn.ModuleDict(enumerate_names(b))])
def test_containers_of_blocks(container: Any) -> None:
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    made = container(*[blocks] if container is not nn.Sequential else blocks)
    pipeline = make_pipeline(Case("1f1b", 3, 1), blocks=made, balance=None)
    assert [list(stage.module.blocks) for stage in pipeline.stages.values()] == [["0"], ["1"], ["2"]]


def test_parts_of_a_sequential_keep_their_names() -> None:
    """So its own state comes back; also of a module that is used twice."""
    twice = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), middle=twice, act=nn.Tanh(), again=twice))
    pipeline = make_pipeline(Case("1f1b", 2, 1), blocks=model, balance=None)
    assert [name for part in pipeline.parts for name in part] == ["first", "middle", "act", "again"]
    model.load_state_dict(pipeline.full_state_dict())


class Twofold(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Named(nn.Sequential):
    """Only its name is its own."""


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_forward_hook(lambda *_: None)
    return model


def with_a_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("scale", torch.ones(2))
    return model


@pytest.mark.parametrize(
    "model", [Twofold(nn.Linear(2, 2), nn.Linear(2, 2)), with_a_buffer()], ids=["forward", "buffer"]
)
def test_a_sequential_that_is_more_than_its_parts_is_a_whole_model(model: nn.Module) -> None:
    """Its parts alone would be trained without the rest."""
    with pytest.raises(ConfigError, match="is a whole model, since it has a (forward|parameter or buffer) of its own"):
        named_blocks(model)
    assert list(named_blocks(model, torch.zeros(1, 2))) == ["0", "1"]


def test_a_sequential_with_hooks_is_refused() -> None:
    """As a block it is called as a whole."""
    model = hooked()
    for example in (None, torch.zeros(1, 2)):
        with pytest.raises(ConfigError, match=r"Sequential has hooks, .* put them on its layers, or pass \[model\]"):
            named_blocks(model, example)
    make_pipeline(Case("1f1b", 1, 2), blocks=[model], balance=None)
    make_pipeline(Case("1f1b", 2, 2), blocks=Named(nn.Linear(2, 2), nn.Linear(2, 2)), balance=None)


def test_children_of_a_module_are_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    wanted = [["0"], ["1"], ["2"]]
    for given in (model.children(), model.named_children(), list(model.named_children())):
        pipeline = make_pipeline(Case("1f1b", 3, 1), blocks=given, balance=None)
        assert [list(stage.module.blocks) for stage in pipeline.stages.values()] == wanted


def test_too_few_blocks_of_which_one_has_parts() -> None:
    blocks = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)]
    with pytest.raises(ConfigError, match="use fewer stages, or pass the 2 parts of '1' as blocks of their own"):
        make_pipeline(Case("1f1b", 4, 1), blocks=blocks, balance=None)


def enumerate_names(blocks: list[nn.Module]) -> dict[str, nn.Module]:
    return {str(i): block for i, block in enumerate(blocks)}


def test_the_costliest_stage_is_as_cheap_as_can_be() -> None:
    """Against all ways to cut."""
    g = torch.Generator().manual_seed(0)
    for _ in range(examples(20)):
        costs = torch.randint(1, 20, (7,), generator=g).tolist()
        blocks = {str(i): LazyBlock(lambda: nn.Identity(), seed=0, cost=float(c)) for i, c in enumerate(costs)}
        for stages in (1, 2, 3, 4):
            pipeline = make_pipeline(Case("1f1b", stages, 1), blocks=blocks, balance=None)
            found = max(sum(costs[int(name)] for name in part) for part in pipeline.parts)
            ways = [(0, *inner, 7) for inner in combinations(range(1, 7), stages - 1)]
            best = min(max(sum(costs[a:b]) for a, b in pairwise(way)) for way in ways)
            assert found == best
