"""A backward in two halves: the bits of a whole one, and what lives between the halves."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import CapabilityError
from penstock.stage.autograd.activation_offload import ActivationOffload
from penstock.stage.autograd.saved_bytes import graph_nodes
from support.cases import Residual
from support.halved_backwards import SAMPLES, TOKENS, WIDTH, Plain, adding, gradients_of, split
from support.live_storage import LiveStorage


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Scaled(torch.autograd.Function):
    """x w, with a backward of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum((0, 1))


class Stop(torch.autograd.Function):
    """The identity, from which no gradient comes back."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, _gradient: Tensor) -> None:  # type: ignore[override]
        return None


def downhill(self: Any, x: Tensor) -> Tensor:
    """Moves x along the gradient of an energy, which is a number like any other."""
    at = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(self.norm(self.map(at)).pow(4).sum(), at)
    y: Tensor = self.norm(self.map(x)) - 0.1 * slope
    return y


def under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = self.map(x)
    return y


def frozen_norm(self: Any, x: Tensor) -> Tensor:
    y: Tensor = x * self.norm(self.w)
    return y


def attention(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.attention(x, x, x, need_weights=False)[0]
    return x + y


def twice(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.map(torch.tanh(self.map(x)))
    return y


def convolved(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.norm(self.map(x.transpose(1, 2)))
    return F.relu_(y).transpose(1, 2)


def added_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.map(x)
    y += self.shift
    return torch.tanh(y)


def doubled(self: Any, x: Tensor) -> Tensor:
    """Linear maps and a norm whose gradients a hook changes before they arrive."""
    for made in (x := self.map(x), x := self.norm(x), x := self.map(x.flatten(0, 1))):
        made.register_hook(lambda gradient: 2 * gradient)
    return x


def before_nodes(self: Any, x: Tensor) -> Tensor:
    """Maps and norms whose gradients a hook before their nodes changes."""
    for made in (x := self.map(x.flatten(0, 1)), x := self.norm(x)):
        made.grad_fn.register_prehook(lambda gradients: tuple(g if g is None else 2 * g for g in gradients))
    return x


def complex_map(self: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(self.map(torch.complex(x, x.tanh())))


def in_double(self: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that numbers differ
        return F.rms_norm(x, [WIDTH], self.w)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "rms norm": lambda: Plain(lambda s, x: x + torch.tanh(s.map(s.norm(x))), norm=nn.RMSNorm(8), map=nn.Linear(8, 8)),
    "layer norm": lambda: Plain(lambda s, x: x + s.map(s.norm(x)), norm=nn.LayerNorm((TOKENS, 8)), map=nn.Linear(8, 8)),
    "layer norm without a bias": lambda: Plain(lambda s, x: x + s.norm(x), norm=nn.LayerNorm(8, bias=False)),
    "one norm twice": lambda: Plain(lambda s, x: s.norm(torch.tanh(s.norm(x))), norm=nn.LayerNorm(8)),
    "a hook on an output": lambda: Plain(doubled, map=nn.Linear(8, 8), norm=nn.RMSNorm(8)),
    "a hook before a node": lambda: Plain(before_nodes, map=nn.Linear(8, 8), norm=nn.LayerNorm(8)),
    "complex numbers": lambda: Plain(complex_map, map=nn.Linear(8, 8, dtype=torch.complex64)),
    "layer norm in 16 bits": lambda: Plain(lambda s, x: s.n(x.bfloat16()).float(), n=nn.LayerNorm(8).bfloat16()),
    "rms norm in 16 bits": lambda: Plain(lambda s, x: s.n(x.bfloat16()).float(), n=nn.RMSNorm(8).bfloat16()),
    "rms norm of other numbers": lambda: Plain(in_double, w=nn.Parameter(weight(8).double())),
    "a bias of one number": lambda: Plain(lambda s, x: F.linear(x, s.w, s.b), w=weight(8, 8), b=weight(1)),
    "a bias made of a weight": lambda: Plain(lambda s, x: F.linear(x, s.w, 2 * s.b), w=weight(8, 8), b=weight(8)),
    "one row": lambda: Plain(lambda s, x: x + s.map(x[0, 0]), map=nn.Linear(8, 8)),
    "no rows": lambda: Plain(lambda s, x: x + s.map(x[:0]).sum(), map=nn.Linear(8, 8)),
    "four dimensions": lambda: Plain(lambda s, x: s.map((x * 1).view(3, 5, 1, 8)), map=nn.Linear(8, 8)),
    "in-place activation": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "convolution": lambda: Plain(convolved, map=nn.Conv1d(WIDTH, WIDTH, 3), norm=nn.GroupNorm(2, WIDTH)),
    "one weight twice": lambda: Plain(twice, map=nn.Linear(WIDTH, WIDTH)),
    "attention": lambda: Plain(attention, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "recurrent": lambda: Plain(lambda s, x: s.cell(x)[0], cell=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "made of weights": lambda: Plain(lambda s, x: F.linear(x, s.w * s.g / s.w.norm()), w=weight(4, 8), g=weight(4, 1)),
    "a table by position": lambda: Plain(lambda s, x: torch.tanh(x + s.w[: x.shape[1]]), w=weight(9, WIDTH)),
    "an embedding by position": lambda: Plain(lambda s, x: x + s.t(torch.arange(TOKENS)), t=nn.Embedding(9, WIDTH)),
    "einsum": lambda: Plain(lambda s, x: torch.einsum("btc,cd->btd", x, s.w), w=weight(WIDTH, 4)),
    "chunks": lambda: Plain(lambda s, x: (lambda a, b: a * b.tanh())(*torch.chunk(x @ s.w, 2, -1)), w=weight(8, 8)),
    "two outputs": lambda: Plain(lambda s, x: torch.std_mean(x * s.w, 2)[0] + torch.max(x * s.w, 2)[0], w=weight(8)),
    "weights alone in the sum": lambda: Plain(lambda s, x: s.map(x) + s.map.weight.square().sum(), map=nn.Linear(8, 8)),
    "norms by keyword": lambda: Plain(lambda s, x: F.rms_norm(x, normalized_shape=[8], weight=s.w), w=weight(8)),
    "written over": lambda: Plain(lambda s, x: F.relu_(s.map(x)[:, 1:]), map=nn.Linear(8, 8)),
    "rows": lambda: Plain(lambda s, x: F.relu_(s.map(x.flatten(0, 1))), map=nn.Linear(8, 8, bias=False)),
    "not in one piece": lambda: Plain(lambda s, x: s.map(x.transpose(0, 1)), map=nn.Linear(8, 8, bias=False)),
    "a transposed sample": lambda: Plain(lambda s, x: s.map(x[:1].repeat(1, 13, 1).transpose(0, 1)),
                                         map=nn.Linear(8, 8, bias=False)),
    "a weight of one dimension": lambda: Plain(lambda s, x: F.linear(x, s.w)[..., None] + x, w=weight(8)),
    "nothing comes back": lambda: Plain(lambda s, x: s.map(x) + Stop.apply(s.other(x)), map=nn.Linear(8, 8),
                                        other=nn.Linear(8, 8)),
    "frozen bias": lambda: Plain(lambda s, x: s.map(x) + s.b, map=nn.Linear(8, 8), b=weight(8).requires_grad_(False)),
    "a gradient of its own": lambda: Plain(downhill, map=nn.Linear(8, 8), norm=nn.LayerNorm(8)),
    "autocast": lambda: Plain(under_autocast, map=nn.Linear(8, 8)),
    "batch statistics": lambda: Plain(lambda s, x: s.norm(x.flatten(0, 1)), norm=nn.BatchNorm1d(WIDTH)),
}  # fmt: skip
AT_ONCE: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "added in place": (lambda: Plain(added_in_place, map=nn.Linear(8, 8), shift=weight(8)), {"shift"}),
    "a frozen norm of a parameter": (
        lambda: Plain(frozen_norm, norm=nn.RMSNorm(8).requires_grad_(False), w=weight(8)),
        {"w"},
    ),
    "a Function": (lambda: Plain(lambda s, x: Scaled.apply(s.map(x), s.w), map=nn.Linear(8, 8), w=weight(8)), {"w"}),
}
"""With the parameters whose gradients are not put off."""


@pytest.mark.parametrize("name", [*MODULES, *AT_ONCE])
def test_the_bits_of_a_whole_backward(name: str) -> None:
    torch.manual_seed(2)
    make, at_once = AT_ONCE[name] if name in AT_ONCE else (MODULES[name], set())
    module, x = make(), torch.randn(SAMPLES, TOKENS, WIDTH)
    whole, halves = gradients_of(module, x, False, set()), gradients_of(module, x, True, at_once)
    for key, value in whole.items():
        assert torch.equal(halves[key], value), key


def test_linear_maps_and_norms_make_no_graph_of_their_own() -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH))
    with split(module):
        y = module(torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_())
    assert not [node.name() for node in graph_nodes(y) if "Detached" in node.name()]
    with split(module := nn.Sequential(nn.GroupNorm(1, TOKENS))):  # to see that such nodes would be found
        y = module(torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_())
    assert [node.name() for node in graph_nodes(y) if "Detached" in node.name()]


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_gradients_that_are_differentiated_again_are_refused(kind: str) -> None:
    """What they add to the gradients of the weights would be lost."""
    module = nn.Linear(WIDTH, WIDTH) if kind == "linear" else nn.LayerNorm(WIDTH)
    x = torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_()
    with pytest.raises(CapabilityError, match=r"create_graph=True\), which a backward in two halves"), split(module):
        torch.autograd.grad(module(x).pow(4).sum(), x, create_graph=True)


def test_gradients_of_weights_within_a_forward_are_refused() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(CapabilityError, match="asks for the gradients of its own weights while it runs"), split(module):
        torch.autograd.grad(module(torch.ones(2, WIDTH)).sum(), module.weight, allow_unused=True)


class Fixpoint(nn.Module):
    """A step towards z = tanh(W z + x), and a hook that solves for the gradient, as implicit layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.map(x) + x)
        at = found.detach().requires_grad_()
        again = torch.tanh(self.map(at) + x)
        found.register_hook(lambda g: g + torch.autograd.grad(again, at, g, retain_graph=True)[0])
        return found


def test_gradients_within_a_backward_are_refused() -> None:
    """Those of the hook are not for the weights, which nothing says to what puts gradients of weights off."""
    module = Fixpoint()
    with split(module):
        y = module(torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_())
    with pytest.raises(CapabilityError, match=r"within a backward, in a hook or Function of its own"):
        y.sum().backward()


SEVERAL: dict[str, Callable[[], nn.Module]] = {
    "ways": lambda: Plain(
        lambda s, x: (
            torch.tanh(s.w[0] + F.linear(F.linear(x * s.v, s.w), s.w, s.v))
            + F.linear(x, s.w) * s.v
            + 0.1 * s.map(x) * s.map.weight.square().sum()
        ),
        w=weight(8, 8),
        v=weight(8),
        map=nn.Linear(8, 8),
    ),
    "linear maps": lambda: Plain(twice, map=nn.Linear(8, 8)),
    "norms": lambda: Plain(lambda s, x: s.a(s.b(torch.tanh(s.a(s.b(x))))), a=nn.LayerNorm(8), b=nn.RMSNorm(8)),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_weight_that_is_read_in_several_places(name: str) -> None:
    """What one microbatch adds is summed up before it is added to what others have, as autograd does."""
    torch.manual_seed(2)
    module = SEVERAL[name]()
    found: list[list[Tensor]] = []
    for halves in (False, True):
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.1)
        for k in range(3):
            x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(k)).requires_grad_()
            with split(module) if halves else nullcontext() as splitting:
                y = module(x)
            y.square().sum().backward()
            if splitting is not None:
                splitting.deferred.run(*adding(module))
        found.append([p.grad for p in module.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("halves", [False, True])
def test_what_weights_have_read_must_not_be_written_into(halves: bool) -> None:
    torch.manual_seed(2)
    module = Plain(lambda s, x: (h := x * 1.0, s.map(h), h.add_(1))[1], map=nn.Linear(8, 8))
    x = torch.randn(SAMPLES, TOKENS, WIDTH).requires_grad_()
    with split(module) if halves else nullcontext() as splitting:
        y = module(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # noqa: PT012
        y.sum().backward()
        if splitting is not None:
            splitting.deferred.run(*adding(module))


def test_a_table_of_tokens_puts_everything_off() -> None:
    """Where tokens come in nothing wants a gradient, but what follows is cut off all the same."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Embedding(9, WIDTH), Residual())
    tokens, trained = torch.randint(9, (SAMPLES, TOKENS)), list(module.parameters())
    module(tokens).sum().backward()
    wanted = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    with split(module) as splitting:
        y = module(tokens)
    y.sum().backward()
    assert all(p.grad is None for p in trained)
    splitting.deferred.run(*adding(module))
    for p, gradient in zip(trained, wanted, strict=True):
        assert p.grad is not None
        assert gradient is not None
        assert torch.equal(p.grad, gradient)


def test_nothing_keeps_what_is_moved_away() -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.RMSNorm(256), nn.LayerNorm(256), nn.ReLU())
    offload = ActivationOffload({p.untyped_storage()._cdata for p in module.parameters()})
    gc.collect()
    with LiveStorage() as tracker:
        x = torch.randn(32, 64).requires_grad_()
        with offload, split(module, offload) as splitting:
            y = module(x)
        offload.pin([x, y])
        before, taken = tracker.live, offload.nbytes
        given = [tensor.clone() for tensor in offload.take_bytes()]
        assert taken >= 3 * 32 * 256 * 4
        assert tracker.live - before == 0  # as much as the copies take, which are somewhere else in earnest
        offload.put_bytes(given)
    y.sum().backward()
    splitting.deferred.run(*adding(module))
    assert all(p.grad is not None for p in module.parameters())


def test_what_lives_between_the_halves() -> None:
    """Of linear, gelu, linear: the inputs of both linear maps and two gradients, but not what gelu keeps."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    trained, row = list(module.parameters()), 32 * 4
    gc.collect()
    gc.disable()
    try:
        with LiveStorage() as tracker:
            x = torch.randn(32, 64).requires_grad_()
            with split(module) as splitting:
                y = module(x)
            kept = (64 + 256 + 256) * row  # x, what gelu reads, what it makes; y is only handed on
            assert tracker.live - kept - y.nbytes <= 8
            gradient = torch.randn(32, 64)
            edge = torch.autograd.graph.get_gradient_edge(y)
            del y
            torch.autograd.backward([edge], [gradient])
            del edge, gradient
            late = (64 + 256) * row + (256 + 64) * row  # inputs, and the gradients of outputs
            assert x.grad is not None
            assert tracker.live - late - x.grad.nbytes <= 8
            splitting.deferred.run(*adding(module))
            weights = sum(p.grad.nbytes for p in trained if p.grad is not None)
            assert tracker.live - x.nbytes - x.grad.nbytes - weights <= 8
    finally:
        gc.enable()
