"""Models whose stages exchange nested trees of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support import cases
from support.cases import (
    VOCABULARY,
    WIDTH,
    Case,
    Outcome,
    Residual,
    cut,
    mixed,
    token_loss,
)
from support.own_methods import train_reference


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


def expected(case: TreeCase) -> Outcome:
    result = train_reference(
        cut(blocks_of(case), cases.BALANCE[case.depth]),
        token_loss,
        batches_of(case),
        method=case.method,
        optimizer=cases.OPTIMIZERS[case.optimizer],
        rate=cases.warm_up,
        divisor=case.divisor,
    )
    return cases.as_outcome(result)


RAGGED = ((3, 4), (1, 4), (0, 4), (5, 1), (40, 30))  # longer, shorter, empty, and more than fits into a first message
