"""Models as people write them, each of which is divided exactly or refused: never trained as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, SAMPLES = 6, 4
Kind = Callable[[], nn.Module]
EXACT: dict[str, Kind] = {}
REFUSED: dict[str, tuple[Kind, str]] = {}


def exact(kind: type[nn.Module]) -> type[nn.Module]:
    """Add a model that is divided exactly."""
    EXACT[(kind.__doc__ or "").strip().rstrip(".")] = kind
    return kind


def refused(said: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Add a model that is refused in certain words."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        REFUSED[(kind.__doc__ or "").strip().rstrip(".")] = kind, said
        return kind

    return add


class Layers(nn.Module):
    """Four layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))))


@exact
class Skips(Layers):
    """Skips over several layers, a sum in place."""

    def forward(self, x: Tensor) -> Any:
        first = torch.relu(self.a(x))
        h = self.c(self.b(first).relu_() + x)
        h += first
        return self.head(self.d(h) + first)


@exact
class OtherOperand(Layers):
    """A way that is decided behind the cut, by the data."""

    def forward(self, x: Tensor, flag: Tensor) -> Any:
        h = self.a(x)
        g = self.b(torch.tanh(h))
        y = self.d(self.c(g))
        return self.head(y + (h if flag.sum() % 2 else g))


@exact
class Preallocated(Layers):
    """Outputs that are written into a tensor of zeros, one after the other."""

    def forward(self, x: Tensor) -> Any:
        outputs = torch.zeros(x.shape[0], 4, WIDTH, dtype=x.dtype)
        h = x
        for place, layer in enumerate((self.a, self.b, self.c, self.d)):
            h = torch.tanh(layer(h))
            outputs[:, place] = h
        return self.head(outputs.sum(1))


@exact
class DroppedResults(Layers):
    """Operations in place whose results are dropped, and a second name for what they write."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) * 1
        alias = h.contiguous()
        h.mul_(2)
        h.masked_fill_(x > 1, 0.0)
        g = self.b(alias)
        g.add_(h)
        return self.head(self.d(self.c(g)) + alias)


@exact
class Loop(Layers):
    """A layer that is called several times, in a loop with another one."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for _ in range(3):
            h = torch.tanh(self.c(torch.tanh(self.b(h))))
        return self.head(self.d(h))


@exact
class Pairs(Layers):
    """Layers that take and return tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = PairLayer()

    def forward(self, x: Tensor) -> Any:
        h, extra = self.pair(self.a(x), scale={"by": 2.0})
        g, again = self.pair(self.b(h), scale={"by": extra["half"]})
        return self.head(self.d(self.c(g)) + again["half"])


class PairLayer(nn.Module):
    """Returns a tuple with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: dict[str, Any]) -> Any:
        y = self.inner(x) * scale["by"]
        return y, {"half": y / 2}


@exact
class OwnParameters(Layers):
    """Parameters of the model itself, one of which is read twice, one behind the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(2))
        self.register_buffer("offset", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = x + self.scale
        return self.head(self.d(self.c(self.b(self.a(x * self.scale) + self.offset)))) + self.shift


@exact
class Tied(Layers):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.d.weight = self.a.weight


@exact
class Normed(Layers):
    """Layers with running statistics and dropout of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = F.dropout(self.first(self.b(self.a(x))), 0.0, self.training)
        return self.head(self.d(self.second(self.c(h))))


@exact
class ManyOutputs(Layers):
    """Outputs of several stages, in a dict."""

    def forward(self, x: Tensor) -> Any:
        found = {}
        for name, layer in self.named_children():
            x = layer(x)
            found[name] = x
        return found


@exact
class Hooked(Layers):
    """Layers with hooks, one of which changes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, inputs, output: output * 2)
        self.c.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.d.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))


@exact
class GradientHook(Layers):
    """A hook on a value between layers."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.1)
        return self.head(self.d(self.c(h)))


@exact
class Checkpointed(Layers):
    """Layers under torch's activation checkpointing."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for layer in (self.b, self.c):
            h = torch.utils.checkpoint.checkpoint(layer, torch.tanh(h), use_reentrant=False)
        return self.head(self.d(h))


@exact
class Frozen(Layers):
    """A part without gradients."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            teacher = self.b(self.a(x))
        return self.head(self.d(self.c(self.a(x) + teacher)))


@exact
class Getters(Layers):
    """Transposes and data of values, shapes that decide, sizes of batches."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if h.shape[0] > 2:
            h = h.T.contiguous().T
        g = self.b(h) + h.data.mean()
        return self.head(self.d(self.c(g)) / len(x))


@exact
class Masks(Layers):
    """Masks that are made of the inputs, for all layers."""

    def forward(self, x: Tensor, flag: Tensor) -> Any:
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[flag > 2] = True
        h = self.a(x)
        for layer in (self.b, self.c, self.d):
            h = torch.where(mask[:, None], layer(h), h)
        return self.head(h)


@exact
class Drawn(Layers):
    """A layer that is passed over by chance, decided by torch."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for layer in (self.b, self.c, self.d):
            if torch.rand(()) < 1.0:
                h = torch.tanh(layer(h))
        return self.head(h)


@exact
class ThroughInput(Layers):
    """A layer that may return its input."""

    def __init__(self) -> None:
        super().__init__()
        self.maybe = Maybe()

    def forward(self, x: Tensor) -> Any:
        h = self.maybe(self.a(x))
        return self.head(self.d(self.c(self.b(h)) + h))


class Maybe(nn.Module):
    """Returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


@exact
class LeftOnLayer(Layers):
    """Takes an auxiliary value that a layer has left on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Leaves()

    def forward(self, x: Tensor) -> Any:
        h = self.mixture(self.a(x))
        return self.head(self.d(self.c(self.b(h)))) + self.mixture.auxiliary


class Leaves(nn.Module):
    """Leaves a value on itself."""

    auxiliary: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.auxiliary = y.mean()
        return y


@refused("puts something into a list or dict")
class Cache(Layers):
    """Layers that append to a list which they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Appends(), Appends()

    def forward(self, x: Tensor) -> Any:
        seen: list[Tensor] = []
        h = self.second(self.first(self.a(x), seen), seen)
        return self.head(self.d(self.c(self.b(h)) + sum(seen)))


class Appends(nn.Linear):
    """Appends to a list."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        seen.append(x)
        return super().forward(x)


@refused("writes into its argument")
class WritingLayer(Layers):
    """A layer that writes into its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) * 1
        g = self.writer(h)
        return self.head(self.d(self.c(self.b(g)) + h))


class Writer(nn.Linear):
    """Writes into its argument."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


@exact
class AsksForNumber(Layers):
    """Decides by a value that one stage has."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        if h.mean().item() > 0:
            h = h * 2
        return self.head(self.d(self.c(h)))


@refused("code of Seeding between layers seeds torch's random numbers")
class Seeding(Layers):
    """Random numbers that the model seeds itself."""

    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(3)
        return super().forward(F.dropout(self.a(x), 0.5))


@exact
class MultipliesByNumber(Layers):
    """A number of an early layer, which later ones take, and a way that the data decide behind."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        factor = h.mean().item()
        h = self.c(torch.tanh(self.b(h)) * factor)
        h = h * 2 + factor if h.sum().item() > 0 else h - factor
        return self.head(torch.tanh(self.d(h)))


@exact
class OwnFunction(Layers):
    """An autograd.Function between layers."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.d(self.c(Reversed.apply(self.b(self.a(x))))))


class Reversed(torch.autograd.Function):
    """Reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


@refused("grad between layers")
class Penalised(Layers):
    """A gradient through several layers in the forward."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        g = self.b(h)
        (slope,) = torch.autograd.grad(g.sum(), h, create_graph=True)
        return self.head(self.d(self.c(g + slope)))


@exact
class BorrowedWeight(Layers):
    """Weights that code of several stages uses, before and behind their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        x = x @ self.head.weight.T @ self.head.weight
        h = self.b(self.a(x @ self.d.weight) * self.scale) + self.a.bias
        h = self.d(self.c(F.linear(h, self.a.weight)) * self.scale @ self.head.weight.T @ self.head.weight)
        return self.head(
            F.linear(h, self.a.weight, self.a.bias) * self.scale + x @ self.head.weight.T @ self.head.weight
        )


@exact
class Picked(Layers):
    """As many values as are positive."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.head(self.d(self.c(h)) + h[h > 0].mean())


@refused("writes into a tensor, which was there before the forward")
class WritesInput(Layers):
    """Writes into its input."""

    def forward(self, x: Tensor, flag: Tensor) -> Any:
        flag += 1
        return self.head(self.d(self.c(self.b(self.a(x) * flag[:, None]))))


@exact
class NormedAtFirst(Layers):
    """A layer that sets its bias in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.c = SetsBias()


class SetsBias(nn.Linear):
    """Centres its output once."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("done", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.done:
            self.bias.data.sub_(y.detach().mean(0))
            self.done += 1
            y = super().forward(x)
        return y


@exact
class Averaging(Layers):
    """A layer with an average in a frozen parameter, which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.c = Averages()


class Averages(nn.Linear):
    """Averages its outputs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean.data.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


@exact
class CheckpointedBlocks(Layers):
    """Blocks of several layers, each under torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for block in self.blocks:
            h = h + torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False)
        return self.head(h)


@exact
class CachedMask(Layers):
    """A mask for each length, made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: Any = CACHE

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.head(self.d(self.c(h * mask_of(len(x))) + h))


CACHE: dict[int, Tensor] = {}


def mask_of(length: int) -> Tensor:
    """Return a column of ones and halves, kept by length."""
    if length not in CACHE:
        CACHE[length] = (torch.arange(length) % 2 + 1)[:, None] / 2
    return CACHE[length]


@refused("has left somewhere|fails on the example")
class KeptByHook(Layers):
    """Takes what a hook of a layer has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        kept = self.kept
        self.b.register_forward_hook(lambda module, inputs, output: kept.__setitem__(slice(None), [output.mean()]))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.d(torch.tanh(self.c(self.b(self.a(x)))))) + self.kept[0]


@refused("reads a parameter or buffer of norm|is in stages|has left somewhere")
class OthersBuffer(Layers):
    """A layer that reads the statistics of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.d = ReadsStatistics(self.norm)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return self.head(self.d(torch.tanh(self.c(self.b(self.norm(self.a(x)))))))


class ReadsStatistics(nn.Linear):
    """Subtracts the statistics of another module."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others = [norm]

    def forward(self, x: Tensor) -> Tensor:
        mean = self.others[0].running_mean
        assert mean is not None
        return super().forward(x - mean)


@refused("graph of a value")
class AsksForGraph(Layers):
    """Asks whether a value has a graph."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.tanh(self.a(x)))
        return self.head(self.d(self.c(h) * (1 if h.is_leaf else 2)))


@refused("has hooks")
class HookedItself(Layers):
    """A model with a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 2)


@refused("another view")
class WrittenView(Layers):
    """Writes behind other layers into a view of what it also reads as a whole."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        first = h[:, 0]
        k = self.c(self.b(h.clone()))
        first.zero_()
        return self.head(self.d(k) + h) + first[:, None]


@exact
class CountsByValue(Layers):
    """Loops as often as a value says, and multiplies by another value of a later stage."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for _ in range(1 + int(h.detach().abs().sum()) % 3):
            h = torch.tanh(self.b(h))
        g = self.c(h)
        return self.head(self.d(g if float(g.detach().mean()) > 0 else g * 2) + h)


@exact
class Sorts(Layers):
    """Sorts samples by a list of values, asserts that all are finite, and formats one."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        g = self.b(h[sorted(range(len(x)), key=h.sum(1).tolist().__getitem__)])
        assert bool(torch.isfinite(g).all())
        return self.head(self.d(self.c(g * (2 if "-" in f"{g.sum():.3f}" else 3))) + h)


@exact
class ReturnsNumbers(Layers):
    """A layer that returns as many rows as values are positive, with two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps = Keeps()

    def forward(self, x: Tensor) -> Any:
        first = self.a(x)
        h, count, scale = self.keeps(first)
        return self.head(self.d(self.c(self.b(h)) * scale).sum(0, keepdim=True) / count + first)


class Keeps(nn.Linear):
    """Keeps the first row, and those with positive sums."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        keep = y.sum(1) > 0
        keep[0] = True
        return y[keep], int(keep.sum()), float(y.detach().mean())


@exact
class ReturnsTwice(Layers):
    """A layer that returns one tensor twice, and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.several = Several()

    def forward(self, x: Tensor) -> Any:
        one, two, given = self.several(self.a(x))
        return self.head(self.d(self.c(self.b(one)) + two) * given)


class Several(nn.Linear):
    """Returns several tensors that are the same."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y, x


class TwoResults(torch.autograd.Function):
    """Has two results, a kept tensor and a number of a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = x.detach().mean().item()
        return x * ctx.scale, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.scale + gradients[1] * x.sign(), None


BOUND = TwoResults.apply


@exact
class BoundFunction(Layers):
    """An autograd.Function with two results, bound before."""

    def forward(self, x: Tensor) -> Any:
        one, two = BOUND(self.b(self.a(x)), x)
        return self.head(self.d(self.c(one)) * two)


class Doubles(torch.autograd.Function):
    """Doubles in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


@refused("writes into a tensor unseen")
class FunctionInPlace(Layers):
    """An autograd.Function that writes into its argument."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x)) * 1
        Doubles.apply(h)
        return self.head(self.d(self.c(h)))


@refused("writes into a tensor unseen")
class WritesLists(Layers):
    """Writes into tensors of a list at once."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) * 1
        torch._foreach_mul_([h], 2.0)
        return self.head(self.d(self.c(self.b(h))) + h)


@refused("use_reentrant=False")
class Reentrant(Layers):
    """A layer under torch's reentrant checkpoint."""

    def forward(self, x: Tensor) -> Any:
        h = torch.utils.checkpoint.checkpoint(self.b, self.a(x), use_reentrant=True)
        return self.head(self.d(self.c(h)))


@exact
class WrittenByTwo(Layers):
    """Positions that every stage makes, and two write into, read in between."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        places = torch.zeros(len(x), WIDTH, dtype=h.dtype)
        places[:, :3] = h[:, :3] * 2
        before, row = places * 1, places[None].sum(0)
        g = self.c(self.b(h + row))
        places[:, 3:] = g[:, 3:]
        return self.head(self.d(g) + places + before)


@exact
class ViewedBehind(Layers):
    """A view that is made behind other layers, and written."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        g = self.c(self.b(h * 1))
        h.view(-1)[0] = 0.0
        return self.head(self.d(g) + h)


@exact
class IndexedByNumPy(Layers):
    """Rows by arrays of different lengths, one after the other."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        first = h[np.array([0])] * 1
        both = h[np.array([0, 1])]
        return self.head(self.d(self.c(self.b(both))).sum(0, keepdim=True) + h + first)


@exact
class Caught(Layers):
    """Catches whatever comes around a value that a later stage has."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        g = self.c(self.b(h))
        try:
            scale = g.mean().item()
        except BaseException:
            return g
        return self.head(self.d(g) * scale + h)


@refused("under torch.func")
class Mapped(Layers):
    """vmap over values of layers."""

    def forward(self, x: Tensor) -> Any:
        h = torch.vmap(lambda row: row * row.sum())(self.b(self.a(x)))
        return self.head(self.d(self.c(h)))


@refused("ndarray cannot be sent")
class AsArray(Layers):
    """Takes a value as an array of NumPy."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.head(self.d(self.c(h * float(h.detach().numpy().mean()))))


@exact
class Normalised(Layers):
    """Weights under spectral norm, old and new, and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.utils.spectral_norm(self.b)
        self.c = torch.nn.utils.parametrizations.weight_norm(self.c)
        self.d = torch.nn.utils.parametrizations.spectral_norm(self.d)


@exact
class Sparse(Layers):
    """A sparse matrix, which all stages make, times values."""

    def forward(self, x: Tensor) -> Any:
        ones = torch.eye(len(x), dtype=x.dtype).to_sparse()
        h = torch.sparse.mm(ones, self.b(torch.sparse.mm(ones, self.a(x))))
        return self.head(self.d(self.c(h)))


@refused("sparse_coo tensor of values")
class SparseValues(Layers):
    """Values as a sparse tensor."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x))).to_sparse()
        return self.head(self.d(self.c(h.to_dense())))


@exact
class Complex(Layers):
    """Complex values that later stages take."""

    def forward(self, x: Tensor) -> Any:
        h = torch.fft.rfft(self.b(self.a(x)), dim=0)
        g = self.c(torch.fft.irfft(h, n=len(x), dim=0))
        return self.head(self.d(g) + h.abs().sum(0))


@exact
class Distinct(Layers):
    """The distinct values of what a layer returns, as an index."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        columns = torch.unique(h.argmax(1))
        g = self.c(h)
        return self.head(self.d(g) + g[:, columns].mean(1, keepdim=True))


@refused("memory of its own")
class AsksForMemory(Layers):
    """Compares the addresses of values."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        return self.head(self.d(self.c(h)) * (2 if h.data_ptr() == h.contiguous().data_ptr() else 1))


@exact
class ReadTwice(Layers):
    """A parameter of the model that is read in the first stage and in the last, as a number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) / self.temperature.item()
        return self.head(self.d(self.c(self.b(h))) * self.temperature)


class Calls(torch.autograd.Function):
    """Calls a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Any:
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


@refused("within an autograd.Function")
class LayerInFunction(Layers):
    """A layer that an autograd.Function calls."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.d(Calls.apply(self.b(self.a(x)), self.c)))


@refused("a mode such as torch.device")
class LayerUnderDevice(Layers):
    """A layer that is called under a default device."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        with torch.device("cpu"):
            h = self.c(h)
        return self.head(self.d(h))


class LeavesNumbers(nn.Linear):
    """A layer that leaves a number on another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others = [other]  # in a list, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].scale = float(x.detach().abs().max())
        return super().forward(x)


class Scaled(nn.Linear):
    """A layer that reads it."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@refused("a layer of stage 0 changes head.scale of a layer of another stage")
class NumberOnAnotherLayer(Layers):
    """A number that a layer leaves on another one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Scaled(WIDTH, 2)
        self.a = LeavesNumbers(self.head)


class CountedByClass(nn.Linear):
    """A layer whose class counts the calls of all."""

    calls: list[int] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return super().forward(x) * len(self.calls)


@refused("a layer of stage 0 changes CountedByClass.calls of a layer of another stage")
class ListOfAClass(Layers):
    """A list of a class that layers append to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = CountedByClass(WIDTH, WIDTH), CountedByClass(WIDTH, WIDTH)
        CountedByClass.calls.clear()


class Own(nn.Linear):
    """A layer that counts its calls, in a buffer, a number, a list and a dict."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls, self.seen, self.sizes = 0, [0.0], dict[str, int]()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        self.seen.append(float(x.detach().sum()))
        self.sizes["last"] = len(x)
        h = super().forward(x) + self.mean / self.count
        return h * (1 + self.calls / 10) + self.seen[-2] / 100 + self.sizes["last"]


class Growing(nn.Linear):
    """A layer with a buffer that grows with every call."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("past", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.past = torch.cat([self.past, x.detach().mean(0, keepdim=True)])
        return super().forward(x) + self.past.mean(0)


@exact
class GrowingBuffer(Layers):
    """A buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Growing()


@exact
class StateOfLayers(Layers):
    """Buffers written and assigned, a counter, a list and a dict, which layers keep for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.d = Own(), Own()
