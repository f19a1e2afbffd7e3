"""Blocks that copy what autograd saves (save_on_cpu and the like), where backwards look weights up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import CapabilityError
from support.plain_training import assert_close_weights, make_data, make_model, pipeline_of_model

PIPEMARE = penstock.method("pipemare", reschedule=0)


class Inside(nn.Module):
    """A layer that runs under hooks of its own."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            found = checkpoint(self.inner, x, use_reentrant=False)
            assert isinstance(found, Tensor)
            return found
        if self.kind == "activations":
            with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                x = x.sin()
            y: Tensor = self.inner(x)
            return y
        hooks = save_on_cpu() if self.kind == "save_on_cpu" else saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        with hooks:
            z: Tensor = self.inner(x)
        return z


def blocks(kind: str) -> list[Any]:
    model = make_model()
    return [Inside(model[0], kind), model[1], Inside(model[2], kind), model[4]]


@pytest.mark.parametrize("kind", ["save_on_cpu", "copies"])
def test_copies_of_weights_are_refused_where_backwards_look_them_up(kind: str) -> None:
    """They would be the forward's, not the newest."""
    with pytest.raises(CapabilityError, match=r"saved-tensor hooks of its own.*stash or 2bw"):
        list(pipeline_of_model(blocks(kind), method=PIPEMARE).run(make_data()))


@pytest.mark.parametrize("kind", ["activations", "checkpoint"])
def test_copies_of_activations_and_checkpoints_are_fine(kind: str) -> None:
    assert len(list(pipeline_of_model(blocks(kind), method=PIPEMARE).run(make_data()))) == 4


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_elsewhere_copies_are_those_that_backwards_read(method: str) -> None:
    states = []
    for kind in ("copies", "nothing"):
        made = blocks(kind)
        if kind == "nothing":
            made = [b.inner if isinstance(b, Inside) else b for b in made]
        pipeline = pipeline_of_model(made, method=method)
        list(pipeline.run(make_data()))
        states.append({name.replace(".inner", ""): tensor for name, tensor in pipeline.state_dict().items()})
    assert_close_weights(*states)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_what_a_block_with_torch_func_keeps_is_counted(recompute: Literal["none", "block"]) -> None:
    """torch.func refuses the hooks that count saved bytes; then they are counted in the graph, to the same number."""

    def peaks(block: Callable[[Tensor], Tensor]) -> list[int]:
        pipeline = penstock.Pipeline(
            {"first": nn.Linear(4, 6), "norm": nn.LayerNorm(6), "act": block, "head": nn.Linear(6, 4)},
            method="1f1b",
            stages=2,
            microbatches=2,
            loss=F.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            partition=(3, 1),
            recompute=recompute,
        )
        list(pipeline.run([(torch.randn(8, 4), torch.randn(8, 4))] * 2))
        return [peak["activations"] for peak in pipeline.peak_bytes().values()]

    def differentiating(x: Tensor) -> Tensor:
        torch.func.grad(torch.sum)(x.detach())
        return torch.sin(x).relu()

    assert peaks(differentiating) == peaks(lambda x: torch.sin(x).relu())
