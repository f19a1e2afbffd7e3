"""Anything may travel between stages: nested trees with all kinds of leaves, in shapes that change all the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import runtime_cases
import torch
import torch.distributed as dist
from runtime_cases import (
    METHODS,
    VOCABULARY,
    WIDTH,
    Case,
    Outcome,
    Recording,
    Residual,
    assert_same,
    cut,
    finish,
    make_pipeline,
    mixed,
    token_loss,
)
from torch import Tensor, nn

from penstock.errors import TransportError
from penstock.train.reference import train_reference
from pool import Pool


class Spread(nn.Module):
    """Tokens to a tree with everything that may be in one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.table(tokens)
        turned = x.transpose(0, 1)  # not contiguous
        return {
            "x": x,
            "nested": (None, [turned, {"ids": tokens, "mask": tokens > 3}], ()),
            "plain": {"flag": True, "count": 3, "rate": 0.25, "name": "spread", "nothing": None},
            "still": torch.full((2,), 0.5),
            "unused": torch.exp(x),
            "expanded": x.mean().expand(3, 2),
            "scalar": x.square().mean(),
        }


class Change(nn.Module):
    """Works on some leaves and hands the others on as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Residual()

    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        nothing, (turned, found), empty = tree["nested"]
        plain = tree["plain"]
        assert nothing is None
        assert empty == ()
        assert (plain["flag"], plain["count"], plain["name"]) == (True, 3, "spread")
        assert found["ids"].dtype == torch.int64
        assert found["mask"].dtype == torch.bool
        assert not tree["still"].requires_grad
        x = self.mlp(tree["x"]) * plain["rate"] + tree["still"].sum()
        x = x + found["mask"].unsqueeze(-1) * tree["expanded"].mean() + tree["scalar"]
        return tree | {"x": x, "nested": (None, [turned * 1.5, found], ())}


class Gather(nn.Module):
    """The first stage's output, which every stage in between has passed on, and what became of it."""

    def forward(self, tree: dict[str, Any]) -> Tensor:
        _, (turned, found), _ = tree["nested"]
        x: Tensor = tree["x"] + turned.transpose(0, 1)
        return x * (found["ids"] > 0).unsqueeze(-1)


def trees() -> dict[str, Any]:
    changes = {name: Change() for name in ("a", "b", "c")}
    return {"spread": Spread(), **changes, "gather": Gather(), "head": nn.Linear(WIDTH, VOCABULARY)}


class Kind(nn.Module):
    """Sends a plain value that differs from microbatch to microbatch, sometimes only in its type or sign."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Any]:
        x, number = pair if isinstance(pair, tuple) else (pair, pair)
        value = (1, True, 1.0, 0.0, -0.0, 0, False, None)[int(number.detach().abs().sum() * 1e4) % 8]
        return self.layer(x), value


def use_kind(pair: tuple[Tensor, Any]) -> Tensor:
    x, value = pair
    return x * (1.0 + 0.1 * ("int", "bool", "float", "NoneType").index(type(value).__name__) + len(repr(value)))


def kinds() -> dict[str, Any]:
    middle = {"a": Kind(), "use a": use_kind, "b": Kind(), "use b": use_kind}
    return {"table": nn.Embedding(VOCABULARY, WIDTH), **middle, "head": nn.Linear(WIDTH, VOCABULARY)}


@dataclass(frozen=True)
class TreeCase(Case):
    """A case of which the model is one of this module's, and microbatches may have any shapes.

    Attributes:
        shapes: samples and length of each microbatch of a batch; all alike if empty.
    """

    shapes: tuple[tuple[int, int], ...] = ()


class Turned(nn.Module):
    """Takes and gives outputs whose features lie furthest apart in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_contiguous()
        y = self.layer.weight @ x.movedim(-1, 0).flatten(1) + self.layer.bias.unsqueeze(1)
        return torch.tanh(y).unflatten(1, x.shape[:-1]).movedim(0, -1)


def turn(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def turned() -> dict[str, Any]:
    ends = {"table": nn.Embedding(VOCABULARY, WIDTH), "turn": turn}, {"head": nn.Linear(WIDTH, VOCABULARY)}
    return {**ends[0], "a": Turned(), "b": Turned(), "c": Turned(), **ends[1]}


class Normed(nn.Module):
    """Gives an output in one piece, and its input a gradient that lies otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2).contiguous()
        return y


def normed() -> dict[str, Any]:
    middle = {name: Normed() for name in "abcd"}
    return {"table": nn.Embedding(VOCABULARY, WIDTH), **middle, "head": nn.Linear(WIDTH, VOCABULARY)}


MODELS = {"trees": trees, "kinds": kinds, "mixed": mixed, "turned": turned, "normed": normed}


def blocks_of(case: TreeCase) -> dict[str, Any]:
    torch.manual_seed(9)
    return MODELS[case.model]()


def batches_of(case: TreeCase) -> list[list[tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(2)
    shapes = case.shapes or ((2, 3),) * case.m
    batches = []
    for t in range(sum(case.spans)):
        turned = [*shapes[t % case.m :], *shapes[: t % case.m]]  # so that each stage meets them in another order
        draw = [[torch.randint(VOCABULARY, shape, generator=g) for _ in range(2)] for shape in turned]
        batches.append([(inputs, targets) for inputs, targets in draw])
    return batches


def train(group: dist.ProcessGroup | None, case: TreeCase) -> Outcome:
    recording = Recording(runtime_cases.OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, group, blocks=blocks_of(case), optimizer=recording)
    outcome = Outcome([(r.batch, r.loss, r.weight) for r in pipeline.run(batches_of(case))])
    return finish(outcome, pipeline, recording)


def expected(case: TreeCase) -> Outcome:
    result = train_reference(
        cut(blocks_of(case), runtime_cases.BALANCE[case.depth]),
        token_loss,
        batches_of(case),
        method=case.method,
        optimizer=runtime_cases.OPTIMIZERS[case.optimizer],
        rate=runtime_cases.warm_up,
        divisor=case.divisor,
    )
    return runtime_cases.as_outcome(result)


RAGGED = ((3, 4), (1, 4), (0, 4), (5, 1), (40, 30))  # longer, shorter, empty, and more than fits into a first message


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("depth", "m"), [(1, 2), (2, 3), (4, 3)])
def test_trees(pool: Pool, method: str, depth: int, m: int) -> None:
    case = TreeCase(method, depth, m, "trees", optimizer="sgd", spans=(4,))
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    assert_same(runtime_cases.together(pool.submit(train, case, ranks=depth)), wanted)


@pytest.mark.parametrize("depth", [2, 3, 6])
@pytest.mark.parametrize("model", ["turned", "normed"])
def test_tensors_lie_in_memory_as_they_did(pool: Pool, model: str, depth: int) -> None:
    """Or kernels would round otherwise, and the numbers would depend on the cuts."""
    case = TreeCase("1f1b", depth, 2, model, spans=(4,))
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if depth < 6:
        assert_same(runtime_cases.together(pool.submit(train, case, ranks=depth)), wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["mixed", "trees"])
def test_changing_shapes(pool: Pool, method: str, model: str) -> None:
    shapes = RAGGED if model == "mixed" else tuple(shape for shape in RAGGED if shape[0])  # no mean of nothing
    case = TreeCase(method, 3, len(shapes), model, optimizer="sgd", spans=(6,), shapes=shapes)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    assert_same(runtime_cases.together(pool.submit(train, case, ranks=3)), wanted)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_an_odd_last_microbatch(pool: Pool, method: str) -> None:
    case = TreeCase(method, 4, 4, "mixed", spans=(5,), shapes=((4, 4), (4, 4), (4, 4), (1, 4)))
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    assert_same(runtime_cases.together(pool.submit(train, case, ranks=4)), wanted)


@pytest.mark.parametrize("where", ["in one process", "on ranks"])
def test_plain_values_keep_their_type_and_sign(pool: Pool, where: str) -> None:
    """1, True and 1.0 are equal to Python, as are 0.0 and -0.0, but they are not the same."""
    case = TreeCase("1f1b", 4, 4, "kinds", spans=(6,))
    if where == "on ranks":
        found = runtime_cases.together(pool.submit(train, case, ranks=4, fresh=True))
    else:
        found = train(None, case)
    assert_same(found, expected(case))


def double(x: Tensor) -> Tensor:
    return x * 2.0


def double_and_erase(x: Tensor) -> Tensor:
    doubled = double(x)
    x.detach().zero_()
    return doubled


def test_a_stage_may_write_into_what_it_received() -> None:
    """The stage before it still has what it saved: tanh needs its own result in its backward."""
    case = Case("1f1b", 2, 3, spans=(3,))
    batches = runtime_cases.make_batches(case)
    weights = []
    for function in (double, double_and_erase):
        torch.manual_seed(4)
        pipeline = make_pipeline(case, blocks=mixed() | {"norm": function})  # the first block of the second stage
        list(pipeline.run(batches))
        weights.append(pipeline.state_dict())
    runtime_cases.assert_equal_tensors(weights[1], weights[0], "weights")


class Odd:
    """Nothing that can travel."""


def send_odd(x: Tensor) -> Any:
    return {"x": x, "odd": Odd()}


def drop_odd(tree: dict[str, Any]) -> Tensor:
    x: Tensor = tree["x"]
    return x


def send_refusal(group: dist.ProcessGroup | None, depth: int) -> str:
    """What the pipeline says when a block returns something that cannot travel."""
    case = Case("1f1b", depth, 2, spans=(2,))
    mixed_blocks = list(mixed().items())
    blocks = dict([*mixed_blocks[:2], ("send", send_odd), ("drop", drop_odd), *mixed_blocks[2:]])
    pipeline = make_pipeline(case, group, blocks=blocks, balance=(3, 5), timeout=3.0)
    try:
        list(pipeline.run(runtime_cases.make_batches(case)))
    except TransportError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("where", ["on ranks", "in one process"])
def test_what_cannot_travel_is_refused(pool: Pool, where: str) -> None:
    said = send_refusal(None, 2) if where == "in one process" else pool.submit(send_refusal, 2, ranks=2, fresh=True)[0]
    assert "a block returned a Odd" in said
    assert "activation lane from rank 0 to rank 1" in said
