"""Parameters by name, their gradients, and optimizers that step them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.train.config.sections import OptimizerName, OptimizerSection
from penstock.train.setup.optimizers import optimizer_factory

Named = list[tuple[str, nn.Parameter]]


def some(seed: int = 0, dtype: torch.dtype = torch.float32) -> Named:
    """A matrix of a hidden layer, wider and higher, a vector, an embedding, and a kernel."""
    shapes = {
        "layers.0.a.weight": (4, 6),
        "layers.0.b.weight": (6, 3),
        "layers.0.b.bias": (6,),
        "head.out.weight": (5, 4),
    }
    g = torch.Generator().manual_seed(seed)
    shapes |= {"layers.1.conv.weight": (2, 3, 3, 3)}
    return [(name, nn.Parameter(torch.randn(shape, generator=g).to(dtype))) for name, shape in shapes.items()]


def made(name: OptimizerName, named: Named, **changes: Any) -> Optimizer:
    return optimizer_factory(OptimizerSection(name=name, lr=0.03, weight_decay=0.2, **changes))(named)


def gradients(named: Named, steps: int) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=g).to(p.dtype) for _, p in named] for _ in range(steps)]


def run(optimizer: Optimizer, named: Named, steps: int = 25) -> None:
    for found in gradients(named, steps):
        for (_, p), g in zip(named, found, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for (_, p), g in zip(named, found, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, g)  # whatever the library does with it


def orthogonalised(momentum: Tensor) -> Tensor:
    """Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X, a = 3.4445, b = -4.7750, c = 2.0315, from M / |M|."""
    x = momentum.double()
    high = x.shape[0] > x.shape[1]
    x = x.T if high else x
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x.T if high else x
