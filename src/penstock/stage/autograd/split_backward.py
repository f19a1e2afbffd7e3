"""The backward in two halves: first the gradients of a stage's inputs (I), later those of its weights (W).

While a forward runs, stand-ins take the places of the weights, so every operation that reads some comes here first. It
is cut off from the graph around it, with a small graph of its own; linear maps need none, as their gradients are known.
The backward through the outer graph asks it for the gradients of its inputs only, and leaves with it what arrived; W
asks all of them for the gradients of the weights. So nothing is computed twice; after I the outer graph is gone, and
what stays is what the small graphs hold, and a gradient for each. Everyone is asked the same on the same numbers as in
a whole backward, and the engine adds in the same order, so the bits are the same.

An operation that writes in place, and weights that a Function of the user's takes, are left in the outer graph: their
gradients are complete after I, and nothing is put off. An operation that has weights deep inside, such as attention
with packed projections, is walked through again by W. Compiled blocks run as if they were not compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.stage.autograd.deferred_weight_grads import Gradients, Late, Taken
from penstock.stage.autograd.saved_bytes import SavedBytes

_EXACT = (torch.float32, torch.float64)
_KEEPING = frozenset({F.linear, torch.mul, F.layer_norm, F.conv1d, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul})
"""Operations whose gradients of the weights need their inputs."""


class Watched(Tensor):
    """A stand-in for weights, or for what has been made of weights alone: whatever reads it comes here first.

    It shares their memory. It never enters a graph, except through a Function of the user's: then gradients go on to
    the weights.

    Attributes:
        plain: what it stands for.
        key: name of the weights; empty for what has been made of some.
        watch: where it belongs.
    """

    plain: Tensor
    key: str
    watch: StandIns

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on what is stood for, or stage it off from the graph."""
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, torch.autograd.backward):
            raise CapabilityError(
                "a block asks for the gradients of its own weights while it runs, which are not in its graph where the "
                "backward is made in two halves; take an order without I and W, such as 1f1b"
            )
        tensors: list[Tensor] = []
        _collect((*args, *kwargs.values()) if kwargs else args, tensors)
        stands = [tensor for tensor in tensors if isinstance(tensor, Watched)]
        plain = {id(stand): stand.plain for stand in stands}
        args = [_replaced(value, plain) for value in args]
        kwargs = {key: _replaced(value, plain) for key, value in kwargs.items()}
        watch = stands[0].watch
        splitting = watch.splitting
        if splitting is None or not torch.is_grad_enabled() or _writes(func, kwargs):
            return func(*args, **kwargs)
        if len(stands) < len(tensors):
            names = {id(stand.plain): stand.key for stand in stands}
            return splitting.run(func, args, kwargs, tensors, names)
        splitting.late.shared.update(stand.key for stand in stands)
        return pytree.tree_map(watch.stand_in, func(*args, **kwargs))


class StandIns:
    """Stand-ins for some weights.

    Attributes:
        tensors: name -> what is to be put in the place of the weights.
        splitting: what happens to operations that read them; None for nothing.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.splitting: Splitting | None = None
        self.tensors = {name: self.stand_in(leaf, name) for name, leaf in leaves.items()}

    def stand_in(self, value: Any, name: str = "") -> Any:
        """For a tensor through which weights are trained; other values as they are."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        stand: Watched = value.as_subclass(Watched)
        stand.plain, stand.key, stand.watch = value, name, self
        return stand


class Splitting:
    """While it is active, operations that read weights are cut off from the graph.

    Args:
        watch: the weights, whose stand-ins are in their places.
        counter: counts what the graphs save; what the small ones save counts as late.
        moves: what graphs save may be moved away, so that nothing else may keep it.
    """

    def __init__(self, watch: StandIns, counter: SavedBytes | None = None, moves: bool = False) -> None:
        self._watch, self._counter, self._moves = watch, counter, moves
        self.late = Late()
        self.gate = torch.zeros((), requires_grad=True)
        self._eager: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> Splitting:
        """Begin a forward; what is compiled runs as if it were not: what happens here would be traced, and lost."""
        if "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        self._watch.splitting = self
        return self

    def __exit__(self, *failure: Any) -> None:
        """The forward is over, or has failed."""
        self._watch.splitting = self._counter = None
        self.late.expected = True
        self._eager.__exit__(*failure)

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        names: Mapping[int, str],
    ) -> Any:
        """Run an operation that reads weights, cut off from the graph of the other tensors that it reads.

        Args:
            func, args, kwargs: the operation.
            tensors: all that it reads.
            names: of the weights among them, by identity; empty for what has been made of some.
        """
        others = [tensor for tensor in tensors if not isinstance(tensor, Watched)]
        if func is F.rms_norm and others and all(tensor.dtype in _EXACT for tensor in tensors):
            return self._rms_norm(names, *args, **kwargs)
        if func is F.linear and self._is_plain(*args, **kwargs, names=names):
            return self._linear(names, *args, **kwargs)
        self.late.shared.update(names.values())
        return self._cut_off(func, args, kwargs, others)

    def _is_hooked(self) -> bool:
        """Whether somebody looks at what graphs save: to move it away, or to make it again (torch's checkpoint)."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return self._moves or (hooks is not None and (self._counter is None or hooks[0] is not self._counter.pack_hook))

    def _rms_norm(
        self,
        names: Mapping[int, str],
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor,
        eps: float | None = None,
    ) -> Tensor:
        """In its two steps. The first uses its input twice; were it cut off, gradients would be added otherwise."""
        normed = F.rms_norm(input, list(normalized_shape), None, eps)
        if self._is_hooked() or not normed.requires_grad or not names.get(id(weight)):
            self.late.shared.update(names.values())
            scaled: Tensor = self._cut_off(torch.mul, (normed, weight), {}, [normed])
            return scaled
        name, kept, shape = names[id(weight)], Taken(normed), weight.shape
        result = normed * weight.detach()
        self._put_off(result, kept, [name], lambda g: [(name, (g * kept.tensor).sum_to_size(shape))])
        return result

    def _is_plain(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *, names: Mapping[int, str]) -> bool:
        """Whether this module itself can give the gradients of a linear map's weights, to the bit."""
        return (
            not self._is_hooked()
            and type(input) is Tensor
            and input.requires_grad
            and input.dim() in (2, 3)
            and input.numel() > 0
            and input.is_contiguous()
            and input.dtype == weight.dtype
            and input.is_floating_point()
            and not torch.is_autocast_enabled(input.device.type)
            and weight.dim() == 2
            and bool(names.get(id(weight)))
            and (bias is None or bias.shape == weight.shape[:1])
            and (bias is None or bool(names.get(id(bias))))
        )

    def _linear(self, names: Mapping[int, str], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear map, the most frequent of all: it needs no graph of its own."""
        flat = input.view(-1, input.shape[-1])
        kept, read = Taken(flat), [names[id(w)] for w in (weight, bias) if w is not None]

        def gradients(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
            yield read[0], gradient.t().mm(kept.tensor)
            if bias is not None:
                yield read[1], gradient.sum(0)

        columns = weight.detach().t()
        rows = flat.mm(columns) if bias is None else torch.addmm(bias.detach(), flat, columns)
        self._put_off(rows, kept, read, gradients)
        return rows.view(*input.shape[:-1], -1) if input.dim() > 2 else rows

    def _put_off(self, result: Tensor, kept: Taken, read: Sequence[str], gradients: Gradients) -> None:
        """Let the gradients of weights wait for that of a result."""
        late = self.late
        late.read(read)
        if self._counter is not None:
            with self._counter.apart():
                self._counter.add([kept.tensor])
        # Not a hook of the tensor, which a write into a view of it would leave behind.
        assert result.grad_fn is not None

        def arrive(arrived: tuple[Tensor | None, ...]) -> None:
            if arrived[0] is not None:
                late.add_plain(gradients, arrived[0])

        result.grad_fn.register_prehook(arrive)

    def _cut_off(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Tensor]
    ) -> Any:
        distinct = {id(tensor): tensor for tensor in others if tensor.requires_grad}
        outer = list(distinct.values())
        opened: Sequence[Tensor]
        inner: Sequence[Any]
        if func in _KEEPING and not self._moves:  # leaves: they live as long as the small graph, as their memory does
            opened = inner = [tensor.detach().requires_grad_() for tensor in outer]
        else:
            index = [tensor.detach() for tensor in outer]  # or the way back would lead on into the outer graph
            opened = _Open.apply(self.gate, *index) if outer else ()  # type: ignore[no-untyped-call]
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
