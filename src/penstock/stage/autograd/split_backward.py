"""Backward split into two halves: first the gradients of a stage's inputs (I), later those of its weights (W).

While a forward runs, proxies take the place of the weights (`__torch_function__`), so every operation that reads a
weight is intercepted. It is detached from the graph around it and gets a small graph of its own; linear maps and norms
need none, as the formulas of their gradients are known (`known_weight_grads`). In the outer graph a Function takes its
place: the backward (I) computes the gradients of the operation's inputs only, and saves the gradient that arrived; W
computes the gradients of the weights from it. So nothing is computed twice. After I the outer graph is freed; the small
graphs and one gradient for each stay until W. Both halves together run the same kernels on the same numbers as a whole
backward, and gradients are added in the same order, so the bits are the same.

In-place operations, weights passed to a custom autograd Function, and what torch's checkpoint runs again (which it
would for each operation by itself) are left in the outer graph: their gradients are complete after I, and nothing is
deferred. An operation with weights deep inside, such as attention with packed projections, is traversed again by W.
Compiled blocks run eagerly.
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

from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads, SavedTensor, WeightGradFunction
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.autograd.weight_proxy import ProxyWeights, WeightOperation, WeightProxy, collect_tensors, replaced

_KEEPING = frozenset({F.linear, torch.mul, F.layer_norm, F.conv1d, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul})
"""Operations whose gradients of the weights need their inputs."""
EXACT = (torch.float32, torch.float64)
"""Types of numbers in which norms compute without conversions."""


class BackwardSplitter:
    """Context of one forward, in which operations that read weights are detached from the graph.

    Args:
        proxies: of the weights, bound to the modules.
        counter: counts the bytes that graphs save; those of the small graphs count as deferred.
        moves: saved tensors may be moved away, so that nothing else may keep them alive.

    Attributes:
        deferred: the detached operations.
        known: runs operations that need no graph of their own; its functions return None where they do.
    """

    def __init__(self, proxies: ProxyWeights, counter: SavedBytes | None = None, moves: bool = False) -> None:
        self._proxies, self._counter, self._moves = proxies, counter, moves
        self.deferred = DeferredWeightGrads()
        self.known = KnownWeightGrads(self.deferred, counter, moves).functions()
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

    def run(self, operation: WeightOperation) -> Any:
        """Run an operation that reads weights, detached from the graph of the other tensors that it reads."""
        func, args, kwargs, tensors, names = operation
        if _is_recomputed():
            return func(*args, **kwargs)
        self.share(names.values())
        if func is F.rms_norm and _is_exact(tensors):
            return self._rms_norm(*args, **kwargs)
        return self._detach(func, args, kwargs, [tensor for tensor in tensors if not isinstance(tensor, WeightProxy)])

    def _rms_norm(
        self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float | None = None
    ) -> Tensor:
        """Run RMS norm as normalisation and scaling, and detach only the latter.

        The normalisation uses its input twice; if it were detached, gradients would be added in another order.
        """
        normed = F.rms_norm(input, list(normalized_shape), None, eps)
        scaled: Tensor = self._detach(torch.mul, (normed, weight), {}, [normed])
        return scaled

    def share(self, names: Iterable[str]) -> None:
        """Note weights whose gradients are summed before they are added to those of other microbatches."""
        self.deferred.shared.update(names)

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
        args = [replaced(value, inside) for value in args]
        kwargs = {key: replaced(value, inside) for key, value in kwargs.items()}
        with nullcontext() if self._counter is None else self._counter.counting_deferred():
            result = func(*args, **kwargs)
        made: list[Tensor] = []
        collect_tensors((result,), made)
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


def _is_recomputed() -> bool:
    """Return whether torch's checkpoint keeps what operations save, and runs them again in each backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _is_exact(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors have the same numbers, with which norms compute without conversions."""
    kinds = {tensor.plain.dtype if isinstance(tensor, WeightProxy) else tensor.dtype for tensor in tensors}
    return len(kinds) == 1 and kinds.issubset(EXACT)


# Operations that read weights most often, whose weight gradients have known formulas.
#
# They stay in the outer graph, with a weight that wants no gradient: I computes the gradient of the input there, with
# the kernel of a whole backward, and a hook keeps the gradient that arrives at the output; W computes the gradients of
# the weights from it, again with the same kernels. No small graph is made, and little Python runs, which counts in
# passes of few tokens.


class KnownWeightGrads:
    """Runs operations on proxies of weights whose weight gradients have known formulas, in one forward.

    Its functions take the arguments of the operations, and return None where they would not have the bits of torch, or
    where something else acts on saved tensors.

    Args:
        deferred: takes the gradients that arrive.
        counter: counts the bytes that W needs.
        moves: saved tensors may be moved away, so that nothing else may keep them alive.
    """

    def __init__(self, deferred: DeferredWeightGrads, counter: SavedBytes | None, moves: bool) -> None:
        self._deferred, self._counter, self._moves = deferred, counter, moves

    def functions(self) -> dict[Callable[..., Any], Callable[..., Tensor | None]]:
        """Return what runs each of these operations."""
        return {F.linear: self.linear, F.rms_norm: self.rms_norm, F.layer_norm: self.layer_norm}

    def linear(self, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
        """Run a linear map."""
        if not self._takes(input, weight) or weight.detached.dim() != 2 or input.dim() not in (2, 3):
            return None
        if input.dim() == 3 and input.stride(0) != input.size(1) * input.stride(1):
            return None  # one sample, transposed: torch multiplies matrices one by one if the weight wants no gradient
        names: Sequence[str] = (weight.key,)
        if bias is None:
            result = F.linear(input, weight.detached)
        else:
            if not self._is_of(bias, weight) or bias.detached.shape != weight.detached.shape[:1]:
                return None
            result, names = F.linear(input, weight.detached, bias.detached), (weight.key, bias.key)
        kept = SavedTensor(input)

        def gradients(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
            rows, read = gradient.flatten(0, -2), kept.tensor
            yield names[0], rows.t().mm(read.flatten(0, -2))
            if len(names) > 1:
                yield names[1], rows.sum(0)

        self._defer(result, [kept], names, gradients)
        return result

    def rms_norm(
        self, input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
    ) -> Tensor | None:
        """Run RMS norm as normalisation and scaling, as torch does, so that only the latter reads the weight."""
        if not self._takes(input, weight) or input.dtype not in EXACT:
            return None
        normed = torch.rms_norm(input, normalized_shape, None, eps)
        result: Tensor = normed * weight.detached
        kept, name = SavedTensor(normed), weight.key
        shape = weight.detached.shape
        self._defer(result, [kept], (name,), lambda g: [(name, (g * kept.tensor).sum_to_size(shape))])
        return result

    def layer_norm(
        self, input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor | None:
        """Run layer norm with a weight and a bias."""
        if not self._takes(input, weight) or not self._is_of(bias, weight):
            return None
        scale, shift, names = weight.detached, bias.detached, (weight.key, bias.key)
        result, mean, rstd = torch.native_layer_norm(input, normalized_shape, scale, shift, eps)
        kept = [SavedTensor(input), SavedTensor(mean), SavedTensor(rstd)]

        def gradients(gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
            read = [each.tensor for each in kept]
            _, *found = torch.ops.aten.native_layer_norm_backward(
                gradient, read[0], normalized_shape, *read[1:], scale, shift, [False, True, True]
            )
            yield from zip(names, found, strict=True)

        self._defer(result, kept, names, gradients)
        return result

    def is_hooked(self) -> bool:
        """Return True if others act on saved tensors: to move them away, or to recompute them (torch's checkpoint)."""
        if self._moves:
            return True
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and (self._counter is None or hooks[0] is not self._counter.pack_hook)

    def _takes(self, input: Any, weight: Any) -> bool:
        """Return True if the gradients of an operation are those of torch to the bit."""
        return (
            type(input) is Tensor
            and type(weight) is WeightProxy
            and bool(weight.key)
            and input.requires_grad
            and input.dtype is weight.detached.dtype
            and not input.is_complex()
            and input.is_contiguous()
            and not torch.is_autocast_enabled(input.device.type)
            and not self.is_hooked()
        )

    @staticmethod
    def _is_of(bias: Any, weight: WeightProxy) -> bool:
        """Return True for a bias that is a weight of its own, of the numbers of another."""
        return type(bias) is WeightProxy and bool(bias.key) and bias.detached.dtype is weight.detached.dtype

    def _defer(
        self, result: Tensor, kept: Sequence[SavedTensor], names: Sequence[str], gradients: WeightGradFunction
    ) -> None:
        """Defer the gradients of weights, to be computed from the gradient of a result."""
        deferred = self._deferred
        deferred.read(names)
        if self._counter is not None:
            with self._counter.counting_deferred():
                self._counter.add([each.tensor for each in kept])
        # Of the node, and of a view's base: a write in place would leave hooks of the tensor and of the view behind.
        node = (result if result._base is None else result._base).grad_fn
        assert node is not None

        def arrive(_made: object, arrived: tuple[Tensor | None, ...]) -> None:
            if arrived[0] is not None:
                deferred.add_plain(gradients, arrived[0])

        node.register_hook(arrive)  # after the node: hooks of the user before it may change what arrives
