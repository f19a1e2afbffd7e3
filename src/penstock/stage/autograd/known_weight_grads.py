"""Operations that read weights most often, whose weight gradients have known formulas.

They stay in the outer graph, with a weight that wants no gradient: I computes the gradient of the input there, with the
kernel of a whole backward, and a hook keeps the gradient that arrives at the output; W computes the gradients of the
weights from it, again with the same kernels. No small graph is made, and little Python runs, which counts in passes of
few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads, SavedTensor, WeightGradFunction
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.autograd.weight_proxy import WeightProxy

EXACT = (torch.float32, torch.float64)
"""Types of numbers in which norms compute without conversions."""


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
