"""A module of any forward, and its gradients by a whole backward or by two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.autograd.split_backward import BackwardSplitter
from penstock.stage.autograd.weight_proxy import ProxyWeights

WIDTH, TOKENS, SAMPLES = 8, 5, 3


class Plain(nn.Module):
    """Any function of x and the parameters of a module."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


@contextmanager
def split(module: nn.Module, offload: SavedBytes | None = None) -> Iterator[BackwardSplitter]:
    """As in a stage: stand-ins are in the places of the weights; `offload` may take away what was saved."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    watch = ProxyWeights(trained)
    stands = {id(p): watch.tensors[name] for name, p in trained.items()}
    places = [(inner, key, p) for inner in module.modules() for key, p in inner._parameters.items() if id(p) in stands]
    for inner, key, p in places:
        inner._parameters[key] = stands[id(p)]
    try:
        with BackwardSplitter(watch, offload, moves=offload is not None) as splitting:
            yield splitting
    finally:
        for inner, key, p in places:
            inner._parameters[key] = p


def adding(module: nn.Module) -> tuple[dict[str, Tensor], Callable[[str, Tensor], None]]:
    """The weights, and what adds to their gradients."""
    trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def add(name: str, found: Tensor) -> None:
        before = trained[name].grad
        trained[name].grad = found if before is None else before.add_(found)

    return trained, add


def gradients_of(module: nn.Module, x: Tensor, halves: bool, at_once: set[str]) -> dict[str, Tensor]:
    """Of the input and all parameters, from a backward in one or in two halves."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if halves:
        with split(module) as splitting:
            y = module(x)
    else:
        y = module(x)
    torch.autograd.backward(y, torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
    if halves:
        assert {name for name, p in trained.items() if p.grad is not None} == at_once
        splitting.deferred.run(*adding(module))
    assert x.grad is not None
    found = {"x": x.grad, "y": y.detach()} | {name: p.grad for name, p in trained.items() if p.grad is not None}
    assert found.keys() | {name for name in trained if name.startswith("other.")} == {"x", "y", *trained}
    for parameter in module.parameters():
        parameter.grad = None
    return found
