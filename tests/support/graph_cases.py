"""Models whose stages do not form a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.schedule.ir.schedule import Edge
from penstock.schedule.orders.stage_graph import over

WIDTH, M = 6, 5


class Join(nn.Module):
    """tanh of a map of all inputs side by side."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.map = nn.Linear(inputs * WIDTH, WIDTH)

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        return torch.tanh(self.map(torch.cat(parts, dim=-1)))


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def frozen() -> nn.Module:
    return layer().requires_grad_(False)


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return ((output - target) ** 2).sum(), float(len(target))


def halves(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return 0.5 * (output + target).abs().sum(), 7.0  # its weight does not count


@dataclass(frozen=True)
class Shape:
    """A graph of stages.

    Attributes:
        edges: pairs; with a third entry False no gradient goes back.
        kinds: what makes the block of each stage; joins where several edges come together.
        losses: of stages that have one beside the last.
    """

    num_stages: int
    edges: list[Any]
    frozen: tuple[int, ...] = ()
    losses: Mapping[int, Any] = field(default_factory=dict)

    @property
    def joined(self) -> list[Edge]:
        return sorted(Edge(*edge) for edge in self.edges)

    @property
    def entrances(self) -> list[int]:
        return sorted(set(range(self.num_stages)) - {e.target for e in self.joined})

    def blocks(self) -> dict[str, nn.Module]:
        torch.manual_seed(5)
        made = {}
        for index in range(self.num_stages):
            inputs = sum(e.target == index for e in self.joined)
            make: Callable[[], nn.Module] = frozen if index in self.frozen else layer
            made[f"c{index}"] = (Join(inputs) if inputs > 1 else make()).double()
        return made

    @property
    def order(self) -> Any:
        return over(self.joined, self.frozen)


SHAPES = {
    "skip": Shape(4, [(0, 1), (1, 2), (2, 3), (0, 3)]),
    "two towers": Shape(4, [(0, 2), (1, 2), (2, 3)]),
    "branches": Shape(4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
    "encoder and decoder": Shape(5, [(0, 1), (1, 3), (1, 4), (2, 3), (3, 4)]),
    "two heads": Shape(3, [(0, 1), (0, 2)], losses={1: halves}),
    "a frozen front": Shape(3, [(0, 1), (1, 2)], frozen=(0,)),
    "a frozen tower": Shape(4, [(0, 2), (1, 2), (2, 3)], frozen=(1,)),
    "local losses": Shape(3, [(0, 1, False), (1, 2, False)], losses={0: squares, 1: halves}),
    "one without a way back": Shape(4, [(0, 1), (1, 2), (2, 3), (0, 3, False)]),
}


def data(shape: Shape, batches: int = 3) -> list[list[tuple[Any, Tensor]]]:
    g = torch.Generator().manual_seed(7)

    def numbers() -> Tensor:
        return torch.randn(4, WIDTH, generator=g, dtype=torch.float64)

    several = len(shape.entrances) > 1
    return [
        [(tuple(numbers() for _ in shape.entrances) if several else numbers(), numbers()) for _ in range(M)]
        for _ in range(batches)
    ]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)
