"""Ways in which code between layers keeps state: each is divided exactly or refused."""

from __future__ import annotations

import itertools
import random
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from support.model_kinds import WIDTH, Layers

GLOBAL: dict[str, Any] = {}
COUNT = 0


class Ticks:
    """Counts its calls."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


TICKS, SPACE, BYTES, ITERATOR = Ticks(), SimpleNamespace(calls=0), bytearray(1), itertools.count(1)
IN_CLOSURE, IN_PARTIAL = (lambda ticks: lambda: ticks())(TICKS), partial(lambda ticks: ticks(), TICKS)


def counted_by_itself(seen: list[int] = [0]) -> int:  # noqa: B006
    """Counts in its default and in an attribute."""
    seen[0] += 1
    counted_by_itself.calls += 1  # type: ignore[attr-defined]
    return seen[0] * int(counted_by_itself.calls)  # type: ignore[attr-defined]


class Stateful(Layers):
    """Four layers and a head, and what the ways below begin with."""

    calls = 0
    pointer: Tensor
    mean: Tensor
    queue: Tensor
    hidden: Any

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.ema, self.last, self.hidden, self.pair = 0, 0.5, None, None, None
        self.seen: list[Any] = [[0]]
        self.stats: dict[Any, Any] = {}
        self.recent: deque[Any] = deque(maxlen=3)
        self.sizes: set[int] = set()
        self.numbers, self.inner, self.box = np.zeros(2), nn.Module(), SimpleNamespace(calls=0)
        self.generator, self.plain = torch.Generator().manual_seed(3), torch.zeros(WIDTH)
        for name, buffer in {
            "mean": torch.zeros(WIDTH), "number": torch.zeros(()), "pointer": torch.zeros(1, dtype=torch.long),
            "queue": torch.zeros(12, WIDTH), "past": torch.zeros(1, WIDTH), "variance": torch.ones(WIDTH),
        }.items():  # fmt: skip
            self.register_buffer(name, buffer)
        GLOBAL.clear()
        self.ticks = Ticks()
        TICKS.calls = SPACE.calls = BYTES[0] = counted_by_itself.calls = 0  # type: ignore[attr-defined]
        counted_by_itself.__defaults__[0][0] = 0  # type: ignore[index]
        type(self).calls = globals()["COUNT"] = 0

    def front(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def back(self, h: Tensor) -> Any:
        return self.head(torch.tanh(self.d(torch.tanh(self.c(h)))))


KEPT: dict[str, type[Stateful]] = {}
NOT_KEPT: dict[str, tuple[type[Stateful], str]] = {}


def way(name: str, refused: str = "") -> Any:
    """Add a forward."""

    def add(forward: Any) -> Any:
        kind = type(forward.__name__, (Stateful,), {"forward": forward, "__module__": __name__})
        if refused:
            NOT_KEPT[name] = kind, refused
        else:
            KEPT[name] = kind
        return forward

    return add


@way("a value that is only kept")
def kept(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.last = h.square().mean()
    return self.back(h)


@way("a value and a number of another, of two stages, in a dict")
def kept_in_dict(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.stats = {"first": h.mean(), "samples": len(x)}
    y = self.back(h)
    self.stats["last"] = y.detach().mean()
    return y


@way("a number of a value that is only kept")
def number_kept(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    y = self.back(h)
    self.last = y.square().mean().item()
    return y


@way("a counter ahead of the layers")
def counter(self: Any, x: Tensor) -> Any:
    self.steps += 1
    return self.back(self.front(x) * self.steps) / self.steps


@way("a counter behind the layers, which warms up")
def counter_behind(self: Any, x: Tensor) -> Any:
    y = self.back(self.front(x) * min(1.0, self.steps / 4)) + self.steps
    self.steps += 1
    return y


@way("a counter behind a number that early stages cannot know")
def counter_behind_number(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    y = self.back(h)
    factor = 1 + y.detach().square().mean().item()
    self.steps += 1
    return y * factor * self.steps


@way("a counter in training only")
def counter_in_training(self: Any, x: Tensor) -> Any:
    if self.training:
        self.steps += 1
    return self.back(self.front(x)) * self.steps


@way("a counter of the class")
def counter_of_class(self: Any, x: Tensor) -> Any:
    type(self).calls += 1
    return self.back(self.front(x)) * type(self).calls


@way("a counter of an object")
def counter_of_object(self: Any, x: Tensor) -> Any:
    self.box.calls += 1
    return self.back(self.front(x)) * self.box.calls


@way("a counter on a module inside")
def counter_inside(self: Any, x: Tensor) -> Any:
    self.inner.calls = getattr(self.inner, "calls", 0) + 1
    return self.back(self.front(x)) * self.inner.calls


@way("a counter in an array of NumPy")
def counter_in_array(self: Any, x: Tensor) -> Any:
    self.numbers[1] += 1
    return self.back(self.front(x)) * float(self.numbers[1])


@way("a variable of the file")
def counter_of_file(self: Any, x: Tensor) -> Any:
    global COUNT
    COUNT += 1
    return self.back(self.front(x)) * COUNT


@way("a counter of an object that is called")
def counter_called(self: Any, x: Tensor) -> Any:
    return self.back(self.front(x)) * self.ticks()


@way("counters of objects of the file")
def counters_of_objects(self: Any, x: Tensor) -> Any:
    SPACE.calls += 1
    BYTES[0] += 1
    return self.back(self.front(x)) * SPACE.calls * BYTES[0] * TICKS()


@way("counters of functions")
def counters_of_functions(self: Any, x: Tensor) -> Any:
    return self.back(self.front(x)) * IN_CLOSURE() * IN_PARTIAL() * counted_by_itself()


@way("a dict of the file that code between layers writes and reads")
def dict_of_file(self: Any, x: Tensor) -> Any:
    GLOBAL["calls"] = GLOBAL.get("calls", 0) + 1
    return self.back(self.front(x) * GLOBAL["calls"])


@way("a list in a list")
def nested_list(self: Any, x: Tensor) -> Any:
    self.seen[0].append(len(x))
    return self.back(self.front(x) * len(self.seen[0]))


@way("a list of values that are taken in the next forwards where they were made")
def list_of_values(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    if len(self.seen) > 1:
        h = h + self.seen[-1]
    self.seen.append(h.detach().mean(0))
    return self.back(h)


@way("a list of numbers of values")
def list_of_numbers(self: Any, x: Tensor) -> Any:
    y = self.back(self.front(x))
    self.seen.append(y.detach().mean().item())
    return y


@way("a deque of values")
def deque_of_values(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.recent.append(h.detach().mean(0))
    return self.back(h - torch.stack(tuple(self.recent)).mean(0))


@way("a set of sizes")
def set_of_sizes(self: Any, x: Tensor) -> Any:
    self.sizes.add(len(x))
    return self.back(self.front(x)) * len(self.sizes)


@way("a cache of masks")
def cache_of_masks(self: Any, x: Tensor) -> Any:
    if len(x) not in self.stats:
        self.stats[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None] + 1
    return self.back(self.front(x) * self.stats[len(x)])


@way("a hidden value that the same place takes in the next forward")
def hidden(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    if self.hidden is not None:
        h = h + 0.5 * self.hidden
    self.hidden = h.detach().mean(0)
    return self.back(h)


@way("a hidden value with its graph, which is detached when it is taken")
def hidden_detached(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    if self.hidden is not None:
        h = h + self.hidden.detach()
    self.hidden = h.mean(0)
    return self.back(h)


@way("a hidden value of an early layer that a later place takes")
def hidden_early(self: Any, x: Tensor) -> Any:
    first, before = torch.tanh(self.a(x)), self.hidden
    self.hidden = first.detach().mean(0)
    h = torch.tanh(self.c(torch.tanh(self.b(first))))
    return self.head(torch.tanh(self.d(h + (0 if before is None else before))))


@way("a pair of hidden values")
def hidden_pair(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    if self.pair is not None:
        h = h * self.pair[0] + self.pair[1][0]
    self.pair = (h.detach().mean(0), (h.detach().std(0),))
    return self.back(h)


@way("a number of values, kept and taken behind the last layer")
def ema_of_numbers(self: Any, x: Tensor) -> Any:
    y = self.back(self.front(x))
    self.ema = 0.9 * self.ema + 0.1 * y.detach().square().mean().item()
    return y * self.ema


@way("a buffer that is assigned anew")
def buffer_anew(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return self.back(h - self.mean)


@way("a buffer that is written with values")
def buffer_written(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return self.back(h - self.mean) + self.mean.sum()


@way("a buffer that counts, ahead of the layers")
def buffer_count(self: Any, x: Tensor) -> Any:
    self.number += 1
    return self.back(self.front(x) * self.number.clone()) / self.number.clone()


@way("a buffer that counts, behind the layers")
def buffer_count_behind(self: Any, x: Tensor) -> Any:
    y = self.back(self.front(x))
    self.number += 1
    return y / self.number.clone()


@way("a buffer that grows")
def buffer_grows(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.past = torch.cat([self.past, h.detach().mean(0, keepdim=True)])
    return self.back(h + self.past.mean(0))


@way("a queue with a pointer")
def buffer_queue(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    place = int(self.pointer)
    self.queue[place : place + 2] = h[:2].detach()
    self.pointer[0] = (place + 2) % 12
    return self.back(h + self.queue.mean(0))


@way("statistics of a function")
def buffer_statistics(self: Any, x: Tensor) -> Any:
    h = F.batch_norm(self.front(x), self.mean, self.variance, training=True)
    return self.back(h) + self.mean.sum()


@way("a buffer that is assigned without values")
def buffer_of_sizes(self: Any, x: Tensor) -> Any:
    self.number = torch.tensor(float(len(x)), dtype=x.dtype)
    return self.back(self.front(x)) * self.number.clone()


@way("a generator of its own")
def own_generator(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    return self.back(h * torch.rand((), generator=self.generator).to(h))


@way("an attribute that comes and goes")
def comes_and_goes(self: Any, x: Tensor) -> Any:
    if hasattr(self, "once"):
        del self.once
        return self.back(self.front(x) * 2)
    self.once = True
    return self.back(self.front(x))


@way("a hidden value that an earlier place takes", "hidden")
def hidden_backwards(self: Any, x: Tensor) -> Any:
    h = self.a(x) if self.hidden is None else self.a(x) + self.hidden
    h = torch.tanh(self.d(torch.tanh(self.c(torch.tanh(self.b(h))))))
    self.hidden = h.detach().mean(0)
    return self.head(h)


@way("a number of values that an earlier place takes", "ema")
def number_backwards(self: Any, x: Tensor) -> Any:
    y = self.back(self.front(x * self.ema))
    self.ema = y.detach().square().mean().item()
    return y


@way("a hidden value with its graph", "hidden, which an earlier forward has left|same")
def hidden_with_graph(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    if self.hidden is not None:
        h = h + self.hidden
    self.hidden = h.mean(0)
    return self.back(h)


@way("a buffer taken by the first layer, and changed by the last", "is one block|stages")
def buffer_backwards(self: Any, x: Tensor) -> Any:
    y = self.head(self.d(self.c(self.b(self.a(x - self.mean)))))
    self.mean.copy_(y.detach().mean())
    return y


@way("a tensor that is no buffer, and is written", "plain, which was there before")
def plain_tensor(self: Any, x: Tensor) -> Any:
    h = self.front(x)
    self.plain.add_(h.detach().mean(0))
    return self.back(h + self.plain)


@way("a parameter that is assigned", "the graph of a value")
def parameter_assigned(self: Any, x: Tensor) -> Any:
    self.own = nn.Parameter(torch.ones(()))
    return self.back(self.front(x)) * self.own


@way("Python's random numbers", "changes Python's random numbers")
def python_random(self: Any, x: Tensor) -> Any:
    return self.back(self.front(x)) * random.random()


@way("the next of an iterator", "the next of .*ITERATOR")
def iterated(self: Any, x: Tensor) -> Any:
    return self.back(self.front(x)) * (2 if next(ITERATOR) > 20 else 1)


@way("an attribute of a layer", "changes b.scale")
def attribute_of_layer(self: Any, x: Tensor) -> Any:
    self.b.scale = getattr(self.b, "scale", 0) + 1
    return self.back(self.front(x)) * self.b.scale


class Writes(nn.Linear):
    """Leaves a number for another layer, in a dict of the file."""

    def forward(self, x: Tensor) -> Tensor:
        GLOBAL["scale"] = float(x.detach().abs().max())
        return super().forward(x)


class Reads(nn.Linear):
    """Takes it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GLOBAL.get("scale", 1.0)


class Counts(nn.Linear):
    """Counts the calls of all layers, in a variable of the file."""

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().forward(x) * COUNT


class Shares(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = Writes(WIDTH, WIDTH), Reads(WIDTH, WIDTH)


class SharesBackwards(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = Reads(WIDTH, WIDTH), Writes(WIDTH, WIDTH)


class SharesCount(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = Counts(WIDTH, WIDTH), Counts(WIDTH, WIDTH)


class KeepsCount(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.c = Counts(WIDTH, WIDTH)


KEPT["a variable of the file that one layer counts"] = KeepsCount
_DIVIDED = "computes something else when it is divided"
NOT_KEPT["a dict of the file that one layer writes, and a later one reads"] = Shares, _DIVIDED
NOT_KEPT["a dict of the file that one layer writes, and an earlier one reads"] = SharesBackwards, _DIVIDED
NOT_KEPT["a variable of the file that two layers count"] = SharesCount, _DIVIDED


def held(model: nn.Module) -> dict[str, Any]:
    """Return what a forward has left on a model: numbers and tensors by name."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in vars(nn.Module()) and key != "generator":
                value = list(value) if isinstance(value, deque | set) else getattr(value, "calls", value)
                leaves = tree_leaves(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
                found |= {f"{path}.{key}.{place}": leaf for place, leaf in enumerate(leaves)}
    return found
