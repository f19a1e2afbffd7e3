"""Backward split into two halves: first the gradients of a stage's inputs (I), later those of its weights (W).

While a forward runs, proxies take the place of the weights (`__torch_function__`), so every operation that reads a
weight is intercepted. It is detached from the graph around it and gets a small graph of its own; linear maps need none,
as the formulas of their gradients are known. In the outer graph a Function takes its place: the backward (I) computes
the gradients of the operation's inputs only, and saves the gradient that arrived; W computes the gradients of the
weights from it. So nothing is computed twice. After I the outer graph is freed; the small graphs and one gradient for
each stay until W. Both halves together run the same kernels on the same numbers as a whole backward, and gradients are
added in the same order, so the bits are the same.

In-place operations, and weights passed to a custom autograd Function, are left in the outer graph: their gradients are
complete after I, and nothing is deferred. An operation with weights deep inside, such as attention with packed
projections, is traversed again by W. Compiled blocks run eagerly.
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
from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads, SavedTensor, WeightGradFunction
from penstock.stage.autograd.saved_bytes import SavedBytes

_EXACT = (torch.float32, torch.float64)
_KEEPING = frozenset({F.linear, torch.mul, F.layer_norm, F.conv1d, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul})
"""Operations whose gradients of the weights need their inputs."""


class WeightProxy(Tensor):
    """A proxy for a weight, or for a tensor computed from weights alone, that intercepts the operations that read it.

    It shares the memory of the weight. It never enters a graph, except through a custom autograd Function: then the
    gradients go on to the weight.

    Attributes:
        plain: the tensor that it represents.
        key: name of the weight; empty for a tensor computed from weights.
        owner: the set of proxies that it belongs to.
    """

    plain: Tensor
    key: str
    owner: ProxyWeights

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the represented tensors, detached from the graph if it also reads others."""
        if func is F.linear and not kwargs:
            linear = _split_linear(*args)
            if linear is not None:
                return linear
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, torch.autograd.backward):
            raise CapabilityError(
                "a block asks for the gradients of its own weights while it runs, which are not in its graph where the "
                "backward is made in two halves; take an order without I and W, such as 1f1b"
            )
        tensors: list[Tensor] = []
        _collect((*args, *kwargs.values()) if kwargs else args, tensors)
        proxies = [tensor for tensor in tensors if isinstance(tensor, WeightProxy)]
        plain = {id(proxy): proxy.plain for proxy in proxies}
        args = [_replaced(value, plain) for value in args]
        kwargs = {key: _replaced(value, plain) for key, value in kwargs.items()}
        owner = proxies[0].owner
        splitting = owner.splitting
        if splitting is None or not torch.is_grad_enabled() or _writes(func, kwargs):
            return func(*args, **kwargs)
        if len(proxies) < len(tensors):
            names = {id(proxy.plain): proxy.key for proxy in proxies}
            return splitting.run(func, args, kwargs, tensors, names)
        splitting.deferred.shared.update(proxy.key for proxy in proxies)
        return pytree.tree_map(owner.proxy_of, func(*args, **kwargs))


class ProxyWeights:
    """Proxies for the weights of a stage.

    Attributes:
        tensors: name -> proxy, to be bound to the modules instead of the weight.
        splitting: detaches the operations that read them; None while no forward is split.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.splitting: BackwardSplitter | None = None
        self.tensors = {name: self.proxy_of(leaf, name) for name, leaf in leaves.items()}

    def proxy_of(self, value: Any, name: str = "") -> Any:
        """Make a proxy for a tensor through which weights are trained; return other values as they are."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        proxy: WeightProxy = value.as_subclass(WeightProxy)
        proxy.plain, proxy.key, proxy.owner = value, name, self
        return proxy


class BackwardSplitter:
    """Context of one forward, in which operations that read weights are detached from the graph.

    Args:
        proxies: of the weights, bound to the modules.
        counter: counts the bytes that graphs save; those of the small graphs count as deferred.
        moves: saved tensors may be moved away, so that nothing else may keep them alive.

    Attributes:
        deferred: the detached operations.
    """

    def __init__(self, proxies: ProxyWeights, counter: SavedBytes | None = None, moves: bool = False) -> None:
        self._proxies, self._counter, self._moves = proxies, counter, moves
        self.deferred = DeferredWeightGrads()
        self._gate: Tensor | None = None
        self._eager: AbstractContextManager[Any] | None = None

    @property
    def gate(self) -> Tensor:
        """A scalar leaf through which detached operations require gradients, whatever their inputs."""
        if self._gate is None:
            self._gate = torch.zeros((), requires_grad=True)
        return self._gate

    def __enter__(self) -> BackwardSplitter:
        """Begin a forward. Compiled blocks run eagerly: tracing would lose the side effects of the interception."""
        if "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
        self._proxies.splitting = self
        return self

    def __exit__(self, *failure: Any) -> None:
        """End the forward, or give it up."""
        self._proxies.splitting = self._counter = None
        self.deferred.expected = True
        if self._eager is not None:
            self._eager.__exit__(*failure)

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        names: Mapping[int, str],
    ) -> Any:
        """Run an operation that reads weights, detached from the graph of the other tensors that it reads.

        Args:
            func, args, kwargs: the operation, on the tensors that proxies represent.
            tensors: all tensors that it reads, proxies included.
            names: names of the weights among them, by identity; empty for tensors computed from weights.
        """
        others = [tensor for tensor in tensors if not isinstance(tensor, WeightProxy)]
        if func is F.rms_norm and others and all(tensor.dtype in _EXACT for tensor in tensors):
            return self._rms_norm(names, *args, **kwargs)
        if func is F.linear and self._is_plain(*args, **kwargs, names=names):
            return self._linear(names, *args, **kwargs)
        self.deferred.shared.update(names.values())
        return self._detach(func, args, kwargs, others)

    def linear(self, input: Tensor, weight: WeightProxy, bias: WeightProxy | None) -> Tensor | None:
        """Run a linear map like `run`, at less cost; None if that has to do it."""
        names = {id(weight.plain): weight.key}
        if bias is not None:
            names[id(bias.plain)] = bias.key
        plain = None if bias is None else bias.plain
        if not self._is_plain(input, weight.plain, plain, names=names):
            return None
        return self._linear(names, input, weight.plain, plain)

    def _is_hooked(self) -> bool:
        """Return True if others act on saved tensors: to move them away, or to recompute them (torch's checkpoint)."""
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
        """Run RMS norm as normalisation and scaling, and detach only the latter.

        The normalisation uses its input twice; if it were detached, gradients would be added in another order.
        """
        normed = F.rms_norm(input, list(normalized_shape), None, eps)
        if self._is_hooked() or not normed.requires_grad or not names.get(id(weight)):
            self.deferred.shared.update(names.values())
            scaled: Tensor = self._detach(torch.mul, (normed, weight), {}, [normed])
            return scaled
        name, kept, shape = names[id(weight)], SavedTensor(normed), weight.shape
        result = normed * weight.detach()
        self._defer(result, kept, [name], lambda g: [(name, (g * kept.tensor).sum_to_size(shape))])
        return result

    def _is_plain(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *, names: Mapping[int, str]) -> bool:
        """Return True if `_linear` computes a linear map and the gradients of its weights to the same bits as torch."""
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
        """Run a linear map without a graph of its own; it is the most frequent operation on weights."""
        flat = input.view(-1, input.shape[-1])
        kept, read = SavedTensor(flat), [names[id(w)] for w in (weight, bias) if w is not None]

        def gradients(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
            yield read[0], gradient.t().mm(kept.tensor)
            if bias is not None:
                yield read[1], gradient.sum(0)

        columns = weight.detach().t()
        rows = flat.mm(columns) if bias is None else torch.addmm(bias.detach(), flat, columns)
        self._defer(rows, kept, read, gradients)
        return rows.view(*input.shape[:-1], -1) if input.dim() > 2 else rows

    def _defer(self, result: Tensor, kept: SavedTensor, read: Sequence[str], gradients: WeightGradFunction) -> None:
        """Defer the gradients of weights, to be computed from the gradient of a result."""
        deferred = self.deferred
        deferred.read(read)
        if self._counter is not None:
            with self._counter.counting_deferred():
                self._counter.add([kept.tensor])
        # Not a hook of the tensor, which a write into a view of it would leave behind.
        assert result.grad_fn is not None

        def arrive(arrived: tuple[Tensor | None, ...]) -> None:
            if arrived[0] is not None:
                deferred.add_plain(gradients, arrived[0])

        result.grad_fn.register_prehook(arrive)

    def _detach(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], others: Sequence[Tensor]
    ) -> Any:
        """Run an operation in a small graph of its own and put a Function in its place in the outer graph."""
        distinct = {id(tensor): tensor for tensor in others if tensor.requires_grad}
        outer = list(distinct.values())
        opened: Sequence[Tensor]
        inner: Sequence[Any]
        if func in _KEEPING and not self._moves:  # leaves: they live as long as the small graph, as their memory does
            opened = inner = [tensor.detach().requires_grad_() for tensor in outer]
        else:
            index = [tensor.detach() for tensor in outer]  # or the way back would lead on into the outer graph
            opened = _DetachInputs.apply(self.gate, *index) if outer else ()  # type: ignore[no-untyped-call]
            inner = [get_gradient_edge(tensor) for tensor in opened]
        inside = dict(zip(distinct, opened, strict=True))
        args = [_replaced(value, inside) for value in args]
        kwargs = {key: _replaced(value, inside) for key, value in kwargs.items()}
        with nullcontext() if self._counter is None else self._counter.counting_deferred():
            result = func(*args, **kwargs)
        made: list[Tensor] = []
        _collect((result,), made)
        made = [tensor for tensor in made if tensor.requires_grad]
        if not made:
            return result
        joined = _DetachedOp.apply(self.deferred, inner, made, self.gate, *outer)  # type: ignore[no-untyped-call]
        if result is made[0]:
            return joined[0]
        outside = {id(tensor): out for tensor, out in zip(made, joined, strict=True)}
        return pytree.tree_map(lambda leaf: outside.get(id(leaf), leaf), result)


class _DetachInputs(torch.autograd.Function):
    """Detaches the inputs of an operation. (Leaves instead would live as long as the graph, needed or not.)"""

    @staticmethod
    def forward(_ctx: Any, _gate: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the same tensors, detached."""
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        """Return no gradients: backwards of the small graph end at the outputs."""
        return (None,) * (1 + len(gradients))


class _DetachedOp(torch.autograd.Function):
    """Takes the place of a detached operation in the outer graph."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredWeightGrads,
        inner: Sequence[Any],
        outputs: list[Tensor],
        _gate: Tensor,
        *_inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the operation, detached from its own graph."""
        ctx.set_materialize_grads(False)
        ctx.deferred, ctx.inner, ctx.roots = deferred, inner, [get_gradient_edge(tensor) for tensor in outputs]
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the gradients of the operation's inputs, and defer those of its weights."""
        pairs = [(root, g) for root, g in zip(ctx.roots, gradients, strict=True) if g is not None]
        nothing = (None, None, None, None)
        if not pairs:
            return *nothing, *(None for _ in ctx.inner)
        roots, arrived = zip(*pairs, strict=True)
        ctx.deferred.add(roots, arrived)
        if not ctx.inner:
            return nothing
        return *nothing, *torch.autograd.grad(roots, ctx.inner, arrived, retain_graph=True, allow_unused=True)


def _split_linear(input: object, weight: object, bias: object = None) -> Tensor | None:
    """Run the most frequent operation of all, a linear map of weights, without looking for proxies everywhere."""
    if type(input) is not Tensor or type(weight) is not WeightProxy:
        return None
    if bias is not None and type(bias) is not WeightProxy:
        return None
    splitting = weight.owner.splitting
    if splitting is None or not torch.is_grad_enabled():
        return None
    return splitting.linear(input, weight, bias)


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    """Append the tensors among some values, and in lists, tuples and dicts of them, to `found`."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def _replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """Replace tensors in a value, by identity."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, list | tuple | dict):
        return pytree.tree_map(lambda leaf: others.get(id(leaf), leaf), value)
    return value


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
