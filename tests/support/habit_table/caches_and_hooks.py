"""Blocks that make something at their first forward, share or copy parts, and hooks of rarer kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts as selective_contexts,
)

from support.habit_table.modules import CLOSURE, F64, HOOKS, LAYERS, ONE_MODULE, RUNNING, SHARING, of
from support.habits import WIDTH, Differs, Refused, Script, habit, linear, regression


class Lazy(nn.Module):
    """A layer whose output is scaled by what its first forward has made."""

    def __init__(self, keep: Callable[[Lazy, Tensor], None]) -> None:
        super().__init__()
        self.layer, self._keep = linear(), keep

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self._keep(self, torch.arange(WIDTH, dtype=F64).cos())
        y: Tensor = self.layer(x) * self.table
        return y


@habit(LAYERS)
def lazy_cache() -> Script:
    """A table that the first forward keeps as an attribute (rotary embeddings)."""
    return of(lambda: Lazy(lambda block, table: setattr(block, "table", table)))


@habit(LAYERS)
def lazy_buffer() -> Script:
    """The same as a buffer (`register_buffer(..., persistent=False)` in the forward)."""
    return of(lambda: Lazy(lambda block, table: block.register_buffer("table", table, persistent=False)))


@habit(LAYERS)
def lazy_persistent_buffer() -> Script:
    """The same as a buffer that `state_dict` has."""
    return of(lambda: Lazy(lambda block, table: block.register_buffer("table", table)))


@habit(LAYERS, Refused("belongs to no module of this stage", "no optimizer knows of it; make it in the constructor"))
def lazy_parameter() -> Script:
    """A parameter that the first forward makes."""
    return of(lambda: Lazy(lambda block, table: setattr(block, "table", nn.Parameter(table))))


@habit(LAYERS)
def running_count() -> Script:
    """A count and a cumulative mean in buffers, written in place; gradients accumulated in plain torch, too."""

    class Centered(nn.Module):
        """Takes away the mean of all that it has seen."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(WIDTH, dtype=F64))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 1 / float(self.count))
            y: Tensor = self.layer(x - self.mean)
            return y

    return of(Centered, accumulates=True)


@habit(SHARING)
def shared_submodule() -> Script:
    """Two blocks of a stage with a submodule in common."""
    shared = linear()
    return Script({"first": linear(), "second": linear(), "third": nn.Sequential(shared, nn.Tanh()),
                   "head": nn.Sequential(shared, linear())}, regression())  # fmt: skip


@habit(SHARING, Refused("is one module in stages 0 and 1", ONE_MODULE))
def submodule_of_two_stages() -> Script:
    """Blocks of two stages with a submodule in common."""
    shared = linear()
    return Script({"first": nn.Sequential(shared, nn.Tanh()), "second": linear(), "third": linear(),
                   "head": nn.Sequential(shared, linear())}, regression())  # fmt: skip


class Borrowing(nn.Module):
    """A layer with the weight of another one, which it does not own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=F64))
        self.__dict__["other"] = other

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.other.weight, self.bias)


@habit(SHARING)
def tied_by_attribute() -> Script:
    """A weight that a property reads from another block of the stage."""
    other = linear()
    return Script({"first": linear(), "second": linear(), "third": other, "head": Borrowing(other)}, regression())


@habit(SHARING, Refused("belongs to no module of this stage", CLOSURE))
def tied_by_attribute_far() -> Script:
    """The same from a block of another stage."""
    other = linear()
    return Script({"first": other, "second": linear(), "third": linear(), "head": Borrowing(other)}, regression())


@habit(SHARING, Refused("left out", "a stage trains all its parameters; freeze with `requires_grad_(False)`"))
def left_out_of_the_optimizer() -> Script:
    """Parameters that are left out of the optimizer."""
    return of(linear, optimizer=lambda named: torch.optim.SGD([p for n, p in named if "bias" not in n], lr=0.1))


@habit(SHARING)
def rate_of_zero() -> Script:
    """A group with a learning rate of zero."""
    return of(linear, optimizer=lambda named: torch.optim.SGD(
        [{"params": [p], "lr": 0.0 if "bias" in name else 0.1} for name, p in named]
    ))  # fmt: skip


@habit(RUNNING)
def checkpointed_sequential() -> Script:
    """`checkpoint_sequential` in a block."""

    class Parts(nn.Sequential):
        """Two segments."""

        def forward(self, x: Tensor) -> Any:
            return checkpoint_sequential(list(self), 2, x, use_reentrant=False)

    return of(lambda: Parts(linear(), nn.Tanh(), linear(), nn.Tanh()))


@habit(RUNNING)
def selective_checkpoint() -> Script:
    """Selective activation checkpoint (`context_fn`) in a block."""

    class Selective(nn.Sequential):
        """Keeps the results of some operations."""

        def forward(self, x: Tensor) -> Any:
            contexts = partial(selective_contexts, [torch.ops.aten.addmm.default])
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    return of(lambda: Selective(linear(), nn.Tanh(), linear()))


@habit(RUNNING)
def mixed_weights() -> Script:
    """`torch.func.functional_call` with weights of two layers mixed, and `stack_module_state`-like ensembles."""

    class Mixed(nn.Module):
        """The mean of two layers, once of their weights and once of their outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linear() for _ in range(2))
            self.__dict__["base"] = copy.deepcopy(self.layers[0]).to("meta")

        def forward(self, x: Tensor) -> Tensor:
            named = [dict(layer.named_parameters()) for layer in self.layers]
            stacked = {name: torch.stack([each[name] for each in named]) for name in named[0]}
            call = lambda weights: torch.func.functional_call(self.base, weights, (x,))  # noqa: E731
            mean: Tensor = call({name: each.mean(0) for name, each in stacked.items()})
            return mean + torch.vmap(call)(stacked).mean(0)

    return of(Mixed)


@habit(HOOKS)
def masked_before_nodes() -> Script:
    """A prehook of the node that accumulates gradients (`expand_as(p).grad_fn.next_functions[0][0]`), a mask."""
    script = of(linear)
    for name in ("first", "third"):
        weight = script.blocks[name].weight
        script.blocks[name].node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        script.blocks[name].node.register_prehook(lambda g: (g[0] * torch.eye(WIDTH, dtype=F64),))
    return script


@habit(HOOKS, Refused("register_post_accumulate_grad_hook", "use `register_post_accumulate_grad_hook`"))
def hooked_behind_nodes() -> Script:
    """`register_hook` of that node, as older code for gradients in buckets does."""
    script = of(linear)
    weight = script.blocks["first"].weight
    script.blocks["first"].node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    script.blocks["first"].node.register_hook(lambda *_: None)
    return script


@habit(HOOKS)
def counting_hook() -> Script:
    """A forward hook that counts in a buffer; gradients accumulated in plain torch, too."""

    def make() -> nn.Module:
        layer = linear()
        layer.register_buffer("calls", torch.tensor(0))
        layer.register_forward_hook(lambda module, *_: module.calls.add_(1) and None)
        return layer

    return of(make, accumulates=True)


ONCE = "forwards that are run again go without it"


@habit(HOOKS, recompute=Differs(ONCE))
def hook_for_once() -> Script:
    """A forward hook that removes itself; gradients accumulated in plain torch, too."""

    def make() -> nn.Module:
        def triple(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            handle.remove()
            return 3 * y

        layer = linear()
        handle = layer.register_forward_hook(triple)
        return layer

    return of(make, accumulates=True)


@habit(HOOKS)
def backward_hook_of_a_pair() -> Script:
    """A full backward hook on a block whose output is a pair."""

    class Pair(nn.Module):
        """Two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = linear(), linear()
            self.register_full_backward_hook(lambda _, found, __: tuple(g if g is None else g * 0.5 for g in found))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    class Sum(nn.Linear):
        """A layer of the sum of both."""

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(pair[0] + pair[1])

    join = Sum(WIDTH, WIDTH, dtype=F64)
    return Script({"first": linear(), "second": Pair(), "third": join, "head": linear()}, regression())


@habit(HOOKS)
def clamped_weights_in_forward() -> Script:
    """Weights that the forward clamps by `.data.clamp_`; gradients accumulated in plain torch, too."""

    class Clamped(nn.Linear):
        """A layer of small weights."""

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.3, 0.3)
            return super().forward(x)

    return of(lambda: Clamped(WIDTH, WIDTH, dtype=F64), accumulates=True)
