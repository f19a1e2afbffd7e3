"""Parameters that stages share: summed gradients, equal copies, counted once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ConfigError
from penstock.partition.blocks import LazyBlock
from penstock.schedule.ir.schedule import Op
from support.cases import (
    ONE_OF_EACH,
    TIED,
    VOCABULARY,
    WIDTH,
    Case,
    assert_same,
    expected,
    make_batches,
    make_blocks,
    make_pipeline,
    train,
    train_on_ranks,
)
from support.pool import Pool
from support.smallest_batch import least

NAMES = next(iter(TIED["mixed"].items()))


@pytest.mark.parametrize("model", ["faint", "gpt"])
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("method", ONE_OF_EACH)
def test_tied_parameters_equal_the_reference(pool: Pool, method: str, depth: int, model: str, device: str) -> None:
    """The clipping norm is dominated by the tied parameter, so that counting it twice would show."""
    m = max(least(method, depth), 2)
    case = Case(method, depth, m, model=model, tied=True, clip=0.3, spans=(4, 3), device=device)
    wanted = expected(case)
    (name, owner), *_ = TIED[model].items()
    if method != "stash":  # whose stages read versions of different age, but step alike
        assert torch.equal(wanted.weights[name], wanted.weights[owner])
    clipped = [norm > 0.3 for _, _, norm, _, skipped in wanted.decided if not skipped]
    assert sum(clipped) >= len(clipped) / 2
    share = [
        g[owner].square().sum() / sum(x.square().sum() for n, x in g.items() if n != name) for g in wanted.gradients
    ]
    assert model == "gpt" or min(share) > 0.5
    assert_same(train(None, case), wanted)
    if (depth, model, device) == (3, "faint", "cpu"):
        assert_same(train_on_ranks(pool, case), wanted)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_without_clipping_and_with_parallel_pipelines(pool: Pool, method: str) -> None:
    plain = Case(method, 2, 2, tied=True)
    assert_same(train(None, plain), expected(plain))
    assert_same(train_on_ranks(pool, plain), expected(plain))
    wide = Case(method, 2, 2, tied=True, width=2, clip=0.3)
    found = train(None, wide)
    found.gradients = found.gradients[: len(expected(wide).gradients)]
    assert_same(found, expected(wide))


@pytest.mark.parametrize(
    ("method", "depth", "width", "options"),
    [
        ("chimera", 2, 1, ()), ("chimera", 2, 2, ()), ("chimera", 4, 1, ()), ("chimera", 4, 1, (("pairs", 2),)),
        ("dualpipe", 4, 1, ()), ("zb-v", 2, 1, ()), ("bitpipe", 2, 1, ()), ("interleaved", 2, 2, ()),
    ],
)  # fmt: skip
def test_ranks_that_hold_several_stages(pool: Pool, method: str, depth: int, width: int, options: Any) -> None:
    """Of two directions, each comes to its ties in another order on another rank; on a V both ends are on one rank."""
    case = Case(method, depth, 2 * depth, tied=True, clip=0.3, spans=(2, 2), skips=(), width=width, options=options)
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("width", [1, 2])
def test_several_ties_that_ranks_come_to_in_another_order(pool: Pool, width: int) -> None:
    """Rank 0 holds stages 0 and 3 of a V, rank 1 stages 1 and 2; 0 is tied to 2, and 1 to 3."""
    case = Case("zb-v", 2, 4, clip=0.3, width=width, spans=(3,))
    here = square_weights(None, case)
    for there in pool.submit(square_weights, case, ranks=2 * width):
        assert all(torch.equal(here[name], w) for name, w in there.items())
    assert torch.equal(here["c.weight"], here["a.weight"])
    assert torch.equal(here["d.weight"], here["b.weight"])
    assert not torch.equal(here["a.weight"], here["b.weight"])


def square_weights(group: dist.ProcessGroup | None, case: Case) -> dict[str, torch.Tensor]:
    """Of a model of four squares between a table and a head."""
    torch.manual_seed(3)
    blocks: dict[str, Any] = {"table": nn.Embedding(VOCABULARY, WIDTH)}
    blocks |= {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "abcd"}
    blocks["head"] = nn.Linear(WIDTH, VOCABULARY)
    tied = {"c.weight": "a.weight", "d.weight": "b.weight"}
    pipeline = make_pipeline(case, group, blocks=blocks, tied=tied, balance=(2, 1, 1, 2))
    list(pipeline.run(make_batches(case)))
    return {name: w.clone() for name, w in pipeline.state_dict().items()}


def shared() -> dict[str, Any]:
    """Blocks in which two modules hold one parameter object."""
    blocks = make_blocks("mixed")
    blocks["head"].weight = blocks["table"].weight
    return blocks


def weights_of(group: dist.ProcessGroup | None, case: Case, blocks: dict[str, Any]) -> dict[str, torch.Tensor]:
    pipeline = make_pipeline(case, group, blocks=blocks, tied=None)
    list(pipeline.run(make_batches(case)))
    return {name: w.clone() for name, w in pipeline.state_dict().items()}


def train_shared(group: dist.ProcessGroup | None, case: Case) -> dict[str, torch.Tensor]:
    return weights_of(group, case, shared())


def test_modules_that_hold_one_parameter_are_seen_to_do_so(pool: Pool) -> None:
    case = Case("2bw", 3, 2, tied=True, clip=0.3)
    wanted = expected(case).weights
    here = train_shared(None, case)
    there = {name: w for part in pool.submit(train_shared, case, ranks=3) for name, w in part.items()}
    for found in (here, there):
        assert all(torch.equal(found[name], w) for name, w in wanted.items())


def test_after_a_run_the_modules_share_their_parameter_again() -> None:
    case, blocks = Case("1f1b", 2, 2), shared()
    list(make_pipeline(case, blocks=blocks, tied=None).run(make_batches(case)))
    assert blocks["head"].weight is blocks["table"].weight


def test_within_one_stage_a_tie_is_one_parameter() -> None:
    case = Case("1f1b", 1, 2, tied=True, clip=0.3)
    pipeline = make_pipeline(case)
    (stage,) = pipeline.stages.values()
    assert not {NAMES[0]} & stage.module.tensors.trained.keys()
    list(pipeline.run(make_batches(case)))
    deep = train(None, Case("1f1b", 2, 2, tied=True, clip=0.3))
    assert torch.allclose(pipeline.state_dict()[NAMES[1]], deep.weights[NAMES[1]], atol=1e-5)


def test_copies_that_begin_apart_become_equal() -> None:
    case = Case("2bw", 2, 2, tied=True)
    pipeline = make_pipeline(case)
    state = pipeline.state_dict()
    assert torch.equal(state[NAMES[0]], state[NAMES[1]])
    assert torch.equal(state[NAMES[1]], make_blocks("mixed")["table"].weight)


def test_only_stages_that_share_wait_for_each_other() -> None:
    pipeline = make_pipeline(Case("2bw", 4, 4, tied=True))
    counts = [sum(a.op is Op.TIE for a in program.period) for program in pipeline.schedule.programs]
    assert counts == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        (
            {"nobody.weight": "table.weight"},
            "'nobody.weight' is not a parameter of any block; blocks: table, first",
        ),
        ({"head.wait": "table.weight"}, "(trains|has) no parameter 'head.wait'"),
        ({"head.bias": "table.weight"}, "have shapes|has shape"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_ties_that_cannot_be_are_refused(depth: int, tied: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pipeline(Case("1f1b", depth, 2), tied=tied)


def test_lazy_blocks() -> None:
    """Each is made with a random state of its own; the copy takes the value of the first stage."""
    case = Case("2bw", 2, 2, spans=(3,))
    blocks = {
        "table": LazyBlock(lambda: nn.Embedding(VOCABULARY, WIDTH), seed=1),
        "head": LazyBlock(lambda: nn.Linear(WIDTH, VOCABULARY), seed=2),
    }
    pipeline = make_pipeline(case, blocks=copy.copy(blocks), tied=TIED["mixed"], balance=None)
    list(pipeline.run(make_batches(case)))
    state = pipeline.state_dict()
    assert torch.equal(state[NAMES[0]], state[NAMES[1]])


@pytest.mark.parametrize("balance", [(1, 2, 2), (2, 1, 2), (1, 1, 3)])
def test_three_names_of_one_parameter(balance: tuple[int, ...]) -> None:
    """By way of each other, wherever the model is cut: all copies stay equal."""
    square = lambda: nn.Linear(WIDTH, WIDTH, bias=False)  # noqa: E731
    blocks: dict[str, Any] = {"table": nn.Embedding(VOCABULARY, WIDTH), "a": square(), "b": square(), "c": square()}
    blocks["head"] = nn.Linear(WIDTH, VOCABULARY)
    tied = {"c.weight": "b.weight", "b.weight": "a.weight"}
    case = Case("2bw", 3, 3, spans=(4,), clip=0.3)
    pipeline = make_pipeline(case, blocks=blocks, tied=tied, balance=balance)
    list(pipeline.run(make_batches(case)))
    state = pipeline.state_dict()
    copies = [state[name] for name in ("a.weight", "b.weight", "c.weight") if name in state]
    assert all(torch.equal(copies[0], other) for other in copies)
    assert torch.equal(blocks["c"].weight, blocks["a"].weight)


def test_names_that_go_round_in_a_circle() -> None:
    with pytest.raises(ConfigError, match="is tied to itself"):
        make_pipeline(Case("1f1b", 2, 2), tied={"head.weight": "table.weight", "table.weight": "head.weight"})


def test_one_module_in_two_stages_is_refused() -> None:
    """Each stage would put weights of its own into it."""
    norm = nn.LayerNorm(WIDTH)
    blocks = [nn.Embedding(VOCABULARY, WIDTH), norm, norm, nn.Linear(WIDTH, VOCABULARY)]
    with pytest.raises(ConfigError, match="LayerNorm .* is one module in stages 0 and 1"):
        make_pipeline(Case("1f1b", 2, 2), blocks=blocks, balance=None)


@pytest.mark.parametrize("method", ["1f1b", "dualpipe"])
def test_copies_that_are_stepped_differently_are_refused(method: str) -> None:
    """As by Muon, to which head.weight is no hidden matrix; copies would differ, and a checkpoint would not load."""
    with pytest.raises(ConfigError, match=r"table\.weight .* head\.weight .* optimizer Muon and AdamW"):
        make_pipeline(Case(method, 2, 4, "mixed", "configured muon", tied=True))

    def by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.2 if "head" in n else 0.1} for n, p in named])

    with pytest.raises(ConfigError, match=r"head\.weight of stage 1 are .* stepped with lr 0\.1 and 0\.2"):
        make_pipeline(Case(method, 2, 4, "mixed", "sgd", tied=True), optimizer=by_name)
