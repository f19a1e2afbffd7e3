"""The backward in two halves: first the gradients of a stage's inputs (I), later those of its weights (W).

Every operation of a forward that reads weights is cut off from the graph around it, with a small graph of its own. The
backward through the outer graph asks it for the gradients of its inputs only, and leaves with it what arrived; W asks
all of them for the gradients of the weights. So nothing is computed twice; after I the outer graph is gone, and what
stays is what the small graphs hold, and a gradient for each. Everyone is asked the same on the same numbers as in a
whole backward, and the engine adds in the same order, so the bits are the same.

An operation that writes in place, and weights that a Function of the user's takes, are left in the outer graph: their
gradients are complete after I, and nothing is put off. An operation that has weights deep inside, such as attention
with packed projections, is walked through again by W. Compiled blocks run as if they were not compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.runtime.saved import SavedBytes

_EXACT = (torch.float32, torch.float64)
_KEEPING = frozenset({F.linear, torch.mul, F.layer_norm, F.conv1d, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul})
"""Operations whose gradients of the weights need their inputs."""


class Late:
    """What of a backward has been put off: operations that read weights, and the gradients that have arrived there."""

    def __init__(self) -> None:
        self._roots: list[GradientEdge] = []
        self._gradients: list[Tensor] = []

    def add(self, roots: Iterable[GradientEdge], gradients: Iterable[Tensor]) -> None:
        """A gradient has arrived at an operation."""
        self._roots += roots
        self._gradients += gradients

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Those that have arrived."""
        return self._gradients

    def run(self, weights: Sequence[Tensor]) -> None:
        """Add the gradients of the weights to where their `.grad` points, and let go of everything."""
        roots, gradients = self._roots, self._gradients
        self._roots, self._gradients = [], []
        if roots:
            torch.autograd.backward(roots, gradients, inputs=list(weights))


class Splitting(TorchFunctionMode):
    """While it is active, operations that read weights are cut off from the graph.

    Args:
        weights: the leaves.
        counter: counts what the graphs save; what the small ones save counts as late.
        moves: what graphs save may be moved away, so that nothing else may keep it.
    """

    def __init__(self, weights: Iterable[Tensor], counter: SavedBytes | None = None, moves: bool = False) -> None:
        super().__init__()
        self._moves = moves
        self.late = Late()
        # Weights, and what has been made of weights alone; kept, so that no other tensor can have their identity.
        self._weights = {id(leaf): leaf for leaf in weights}
        self._counter = counter
        self.gate = torch.zeros((), requires_grad=True)
        self._eager: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> Splitting:
        """Begin a forward; what is compiled runs as if it were not: what happens here would be traced, and lost."""
        if "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        """The forward is over, or has failed."""
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._eager.__exit__(*failure)

    def forget(self) -> None:
        """The forward is over: let go of the weights, of which some may have been made in it."""
        self._weights, self._counter = {}, None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or cut it off."""
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        _collect((*args, *kwargs.values()) if kwargs else args, tensors)
        weights = self._weights
        reads = sum([id(tensor) in weights for tensor in tensors])
        if not reads or not torch.is_grad_enabled() or _writes(func, kwargs):
            return func(*args, **kwargs)
        if func is F.rms_norm and all(tensor.dtype in _EXACT for tensor in tensors):
            return self._rms_norm(*args, **kwargs)
        if reads < len(tensors):
            return self._cut_off(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        made: list[Tensor] = []
        _collect((result,), made)
        weights.update({id(tensor): tensor for tensor in made if tensor.requires_grad})
        return result

    def _rms_norm(self, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
        """In its two steps. The first uses x twice; were it cut off, too, gradients of x would be added otherwise."""
        normed = F.rms_norm(x, list(shape), None, eps)
        scaled: Tensor = self._cut_off(torch.mul, (normed, weight), {}, [normed, weight])
        return scaled

    def _cut_off(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        distinct = {id(t): t for t in tensors if t.requires_grad and id(t) not in self._weights}
        outer = list(distinct.values())
        opened: Sequence[Tensor]
        inner: Sequence[Any]
        if func in _KEEPING and not self._moves:  # leaves: they live as long as the small graph, as their memory does
            opened = inner = [tensor.detach().requires_grad_() for tensor in outer]
        else:
            cut = [tensor.detach() for tensor in outer]  # or the way back would lead on into the outer graph
            opened = _Open.apply(self.gate, *cut) if outer else ()  # type: ignore[no-untyped-call]
            inner = [get_gradient_edge(tensor) for tensor in opened]
        inside = dict(zip(distinct, opened, strict=True))
        args = [_replaced(value, inside) for value in args]
        kwargs = {key: _replaced(value, inside) for key, value in kwargs.items()}
        with nullcontext() if self._counter is None else self._counter.apart():
            result = func(*args, **kwargs)
        made: list[Tensor] = []
        _collect((result,), made)
        made = [tensor for tensor in made if tensor.requires_grad]
        if not made:
            return result
        joined = _Join.apply(self.late, inner, made, self.gate, *outer)  # type: ignore[no-untyped-call]
        if result is made[0]:
            return joined[0]
        outside = {id(tensor): out for tensor, out in zip(made, joined, strict=True)}
        return pytree.tree_map(lambda leaf: outside.get(id(leaf), leaf), result)


class _Open(torch.autograd.Function):
    """The inputs of an operation in a graph of its own. (Leaves would live as long as the graph, needed or not.)"""

    @staticmethod
    def forward(_ctx: Any, _gate: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The same tensors, cut off."""
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        """Nobody goes further than to its output."""
        return (None,) * (1 + len(gradients))


class _Join(torch.autograd.Function):
    """The place of an operation in the outer graph."""

    @staticmethod
    def forward(
        ctx: Any, late: Late, inner: Sequence[Any], outputs: list[Tensor], _gate: Tensor, *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """What the operation has made, cut off from its own graph."""
        ctx.set_materialize_grads(False)
        ctx.late, ctx.inner, ctx.roots = late, inner, [get_gradient_edge(tensor) for tensor in outputs]
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Ask the operation for the gradients of its inputs, and put the rest off."""
        pairs = [(root, g) for root, g in zip(ctx.roots, gradients, strict=True) if g is not None]
        nothing = (None, None, None, None)
        if not pairs:
            return *nothing, *(None for _ in ctx.inner)
        roots, arrived = zip(*pairs, strict=True)
        ctx.late.add(roots, arrived)
        if not ctx.inner:
            return nothing
        return *nothing, *torch.autograd.grad(roots, ctx.inner, arrived, retain_graph=True, allow_unused=True)


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    """The tensors among some values, and in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def _replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """A value with other tensors in the place of some."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, list | tuple | dict):
        return pytree.tree_map(lambda leaf: others.get(id(leaf), leaf), value)
    return value


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
