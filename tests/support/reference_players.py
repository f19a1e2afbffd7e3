"""References of orders, played in plain floats, that several tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.verify.reference import Reference
from support import scalar_orders as by_order
from support.own_methods import train_reference
from support.reference_cases import BATCHES, Times, half_square, inputs, of, sgd
from support.scalar_orders import Pass
from support.scalar_pipelines import SKIPPED, Stage, rate

Orders = Callable[[int, int, int, int], list[Pass]]


def bent(d: int) -> list[dict[str, Any]]:
    """Stages of one weight w: tanh(w x)."""
    return [{f"b{s}": Times(0.8 + 0.1 * s), f"t{s}": torch.tanh} for s in range(d)]


def samples(m: int) -> list[list[tuple[Tensor, Tensor]]]:
    """One batch has no weight."""
    return [[(of(x), of(float(t != SKIPPED))) for x in xs] for t, xs in enumerate(inputs(m))]


def trained(method: str, d: int, m: int, optimizer: Any = sgd, **more: Any) -> Reference:
    arguments = {"method": method, "optimizer": optimizer, "rate": rate} | more
    return train_reference(bent(d), half_square, samples(m), **arguments)


def referred(method: str, d: int, m: int, optimizer: Any = sgd, **more: Any) -> list[list[float]]:
    """Per stage, the weight of each version as the reference says."""
    result = trained(method, d, m, optimizer, **more)
    return [[float(version[f"b{s}.w"]) for version in result.versions] for s in range(d)]


def played(
    kind: Callable[..., Stage], d: int, m: int, orders: Orders, drain: int = BATCHES, segment: int = 1
) -> list[list[float]]:
    """The same from stages that run by themselves, in plain floats."""
    stages = [kind(0.8 + 0.1 * s, s, d, m) for s in range(d)]
    for first, span in ((0, inputs(m)[:drain]), (drain, inputs(m)[drain:])):
        if span:
            play = by_order.Play(stages, [x for batch in span for x in batch], m, first, segment)
            play.go([orders(s, d, m, len(span)) for s in range(d)])
    return [stage.history for stage in stages]


def assert_same(a: Reference, b: Reference) -> None:
    """Bit for bit: losses, gradients, weights and optimizer states."""
    assert [x for x in a.losses if x == x] == [x for x in b.losses if x == x]
    for found, wanted in zip((*a.versions, *a.gradients), (*b.versions, *b.gradients), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], w) for name, w in wanted.items())
    for found, wanted in zip(a.optimizers, b.optimizers, strict=True):
        torch.testing.assert_close(found.get("state"), wanted.get("state"), rtol=0, atol=0)
