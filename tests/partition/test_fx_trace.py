"""Forwards are followed as if nobody guarded modules that other processes train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.partition.whole_model.fx_trace import Guard, without_guards
from support.pool import Pool

D = 4


class Experts(nn.Module):
    """A layer with layers inside, and a weight of its own, which looks at values: a part of its own."""

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
    batches = [(torch.randn(4, D, generator=torch.Generator().manual_seed(k)), torch.zeros(4, D)) for k in range(3)]
    found: list[Any] = []
    for _ in range(2):
        pipeline = penstock.Pipeline(
            model, "1f1b", stages=2, microbatches=2, loss=F.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1), group=penstock.Group(group, 20.0),
        )  # fmt: skip
        pipeline.load_state_dict(before)
        assert all(any(name.startswith("layers.") for name in part) for part in pipeline.parts)
        for batch in batches:
            found += [report.loss for report in pipeline.run([batch])]
            found.append(pipeline.evaluate(batches))
    return found


@pytest.mark.long
def test_a_guarded_layer_with_layers_inside_is_trained_in_several_runs(pool: Pool) -> None:
    _, found = pool.submit(train_twice, ranks=2)
    assert found == train_twice(None)
    assert found[:6] == found[6:]


def test_guards_are_back_in_their_places_whatever_happens_meanwhile() -> None:
    class Refusing(Guard):
        def refuse(self, *_: Any) -> None:
            raise ValueError("guarded")

    layer, seen = nn.Linear(D, D), []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_pre_hook(Refusing().refuse)
    layer.register_forward_pre_hook(lambda *_: seen.append("after"))
    held = list(layer._forward_pre_hooks.items())
    model = nn.Sequential(layer)
    with without_guards(model):
        model(torch.zeros(1, D))
    with pytest.raises(RuntimeError), without_guards(model):
        model(torch.zeros(1, D + 1))
    assert seen == ["before", "after"] * 2
    assert list(layer._forward_pre_hooks.items()) == held
    with pytest.raises(ValueError, match="guarded"):
        model(torch.zeros(1, D))
    assert seen == ["before", "after"] * 2 + ["before"]
