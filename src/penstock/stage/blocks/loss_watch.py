"""Watches the call of a loss, to find out by which number its mean over a microbatch was divided.

A mean over a batch is the mean of those over its microbatches, each weighted by the number that it was divided by. That
is most often the number of samples; but torch's losses over classes ignore targets, and weigh classes, wherever a loss
calls them, and a mask may pick some targets. So the operations of every call are followed from output and target to the
number that the loss returns. A number that is not seen to be such a mean has no weight.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import _reduction, functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.comm.p2p.trees import leaves_of

Share = float | Tensor
"""Of a mean: the part of its samples that it counts; a tensor on a GPU."""


class _Data(NamedTuple):
    """A tensor that depends on the output or the target.

    Attributes:
        share: the part of its elements that masks have picked.
        dim: its dimension of samples, or the first one if that is of samples and what came behind; None if unknown.
    """

    share: float = 1.0
    dim: int | None = 0

    def size_of(self, tensor: Tensor) -> float:
        """Return how many elements it had before masks picked some; 0 where none is left to tell."""
        return tensor.numel() / self.share if self.share else 0


class _Sum(NamedTuple):
    """A sum over samples.

    Attributes:
        of: the shape of the tensor that was added up.
        share: the part of its elements that masks had picked.
    """

    of: tuple[int, ...]
    share: float


class _Means(NamedTuple):
    """Means over samples, added up and multiplied by constants.

    Attributes:
        shares: of each.
        sizes: how many elements each is of, the ones included that masks left out.
    """

    shares: tuple[Share, ...]
    sizes: tuple[float, ...] = ()


class _Unknown(NamedTuple):
    """A number that is not known to be a mean over samples.

    Attributes:
        why: what was seen.
    """

    why: str


_State = _Data | _Sum | _Means | _Unknown


class LossWatch(TorchFunctionMode):
    """Follows the operations of one call of a loss; a context around it.

    Args:
        output: of the model, as the loss gets it.
        target: its tensors, each with its dimension of samples; None if that belongs to no sample.
        own: the part of its samples that a mean counts which the model itself has computed, or why that is unknown.

    Attributes:
        divides_by_number: a sum was divided by a number that is one of samples, but might be a constant as well.
    """

    def __init__(self, output: Any, target: Sequence[tuple[Tensor, int | None]], own: Share | str = 1.0) -> None:
        super().__init__()
        self._states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # None: depends on neither
        self._own, self.divides_by_number = own, False
        self._given = [(tuple(leaf.shape), dim) for leaf, dim in target if dim is not None]
        common, counts = (self._given or [((), 0)])[0][1], self._counts
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor):
                like = leaf.dim() > common and (not counts or leaf.shape[common] in counts)
                self._given += [(tuple(leaf.shape), common)] if like else []
                self._states[leaf] = _Data(dim=common if like else None)
                if not leaf.dim():  # a mean that the model has computed itself
                    self._states[leaf] = _Unknown(own) if isinstance(own, str) else _Means((own,))
        for leaf, dim in target:
            self._states[leaf] = None if dim is None else _Data(dim=dim)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what its result is."""
        kwargs = kwargs or {}
        result = _call_from_the_loss(func, args, kwargs)
        if _name_of(func) == "setitem":
            self._states[args[0]] = self._after_writing(*args)
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor):
                self._states[leaf] = self._state_after(func, args, kwargs, leaf)
        return result

    def mean_of(self, total: Tensor) -> _Means:
        """Return which means over samples the loss has added up: of alike parts of their samples.

        Raises:
            NoMeanError: it is not known to be a mean over samples.
        """
        state = self._state_of(total) if self.has_samples or self._own != 1 else None  # else nothing has samples
        if state is None and self._given and total.requires_grad:
            state = _Unknown("it was computed by what is not an operation of torch, such as an autograd.Function")
        if state is None:
            return _Means((1.0,))
        if isinstance(state, _Sum):
            raise NoMeanError("it is a sum, which was not divided by the number of what was added up")
        if isinstance(state, _Data):
            raise NoMeanError("it is no mean over samples")
        if isinstance(state, _Unknown):
            raise NoMeanError(state.why)
        first, *others = state.shares
        if not all(other is first or float(other) == float(first) for other in others):  # waits for a GPU
            raise NoMeanError("it adds means that are divided by different numbers (some ignore targets, or pick them)")
        return state

    @property
    def has_samples(self) -> bool:
        """Whether something of output or target belongs to samples."""
        return bool(self._given)

    def _state_of(self, tensor: Tensor) -> _State | None:
        """Return what is known of a tensor; of one that no operation of torch has made, if it has a graph: data."""
        if tensor in self._states:
            known: _State | None = self._states[tensor]
            return known
        return None if tensor.grad_fn is None else _Data()

    def _state_after(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor
    ) -> _State | None:
        """Return what the result of an operation is; None if it depends on neither output nor target."""
        name = _name_of(func)
        found = [self._state_of(tensor) for tensor in _tensors_in((*args, *kwargs.values()))]
        states = [state for state in found if state is not None]
        if not states or name == "grad":  # of a microbatch by itself: like a number that multiplies or is added
            return None
        unknown = next((state for state in states if isinstance(state, _Unknown)), None)
        if unknown is not None:
            return unknown
        if not all(isinstance(state, _Data) for state in states):
            return self._after_reduction(name, args, states, constants=len(states) < len(found))
        data = [state for state in states if isinstance(state, _Data)]
        share, dims = data[0].share, {state.dim for state in data}
        dim = dims.pop() if len(dims) == 1 else None
        state = _Data(share, dim)
        if any(state.share != share for state in data):
            return _Unknown(f"{name} takes together what different masks have picked")
        if (defaults := _loss_arguments(func)) is not None:
            given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
            return _after_loss(func, given, state)
        if name in ("mean", "sum", "nanmean", "nansum", "count_nonzero"):
            return _after_reduction_of(name, args, kwargs, state)
        if name == "batch_norm":
            return _Unknown(f"{name} takes samples together")
        if name in _PICKING or (name == "where" and len(args) == 1):
            return _Unknown(f"{name} returns as many numbers as the values ask for")
        if name == "masked_select" or (name == "getitem" and _is_mask(args[1])):
            return _Data(share * (result.numel() / args[0].numel() if args[0].numel() else 1.0), dim)
        if name == "getitem":
            return _after_index(args[0], args[1], state)
        if name in _TAKING_APART or name in _MOVING or name == "take":
            return _after_view(name, args, kwargs, result, state)
        tensors = [tensor for tensor in _tensors_in((*args, *kwargs.values())) if tensor.dim() > (dim or 0)]
        if name in _REVIEWING:
            shape, seen = args[0].shape, result.shape
            if dim == 0:
                kept = bool(seen) and seen[0] in {*self._samples, *accumulate(shape, mul)}
            else:
                kept = dim is not None and seen[: dim + 1] == shape[: dim + 1]
            return _Data(share, dim if kept else None)
        if dim is None:
            together = result.numel() < max((tensor.numel() for tensor in tensors), default=0)
        else:
            together = result.dim() <= dim or result.shape[dim] not in {tensor.shape[dim] for tensor in tensors}
        return _Unknown(f"{name} takes samples together, otherwise than by a mean or a sum") if together else state

    def _after_writing(self, into: Tensor, index: Any, value: Any) -> _State | None:
        """Return what a tensor is after something was written into a part of it."""
        before, written = self._state_of(into), self._state_of(value) if isinstance(value, Tensor) else None
        if written is None or isinstance(before, _Unknown):
            return before
        if isinstance(written, _Means) and (before is None or isinstance(before, _Means)):
            return _added([before, written] if before else [written])
        plain = before is None or (isinstance(before, _Data) and before.share == 1)
        if isinstance(written, _Data) and plain and into.dim() and into.shape[0] in self._samples:
            return _Data() if _is_mask(index) else _after_index(into, index, _Data())
        return written if isinstance(written, _Unknown) else _Unknown("samples are written into another tensor")

    def _after_reduction(
        self, name: str, args: tuple[Any, ...], states: list[_State], constants: bool
    ) -> _State | None:
        """Return what an operation gives, one of whose arguments is a sum or a mean over samples.

        Args:
            name: of the operation.
            args: of it.
            states: of those of its arguments that depend on output or target.
            constants: other tensors are among its arguments.
        """
        first, adds = states[0], name in _ADDING
        if name == "detach" and isinstance(first, _Means):  # as a statistic that the loss keeps: like a number
            return None
        if adds or name in _RESHAPING:
            means = [state for state in states if isinstance(state, _Means)]
            if len(means) == len(states):
                return _added(means)
            constants = constants or (adds and any(isinstance(arg, int | float) for arg in args))
            sums = [state for state in states if isinstance(state, _Sum)]
            if len(sums) == len(states) and not constants and len({state.share for state in sums}) == 1:
                return first
        divides = name in _DIVIDING and len(args) == 2 and isinstance(args[0], Tensor)
        if len(states) == 1 and divides and isinstance(first, _Sum):
            if first.share != 1 and isinstance(args[1], int | float):  # of all samples, or of those that were picked?
                return _Unknown("a sum of what a mask has picked is divided by a number; divide by the mask's sum")
            if self._is_count(_number(args[1]), first.of):
                return _Means((1.0,), (math.prod(first.of),))
        if len(states) == 1 and name in _MULTIPLYING and isinstance(first, _Sum) and first.share == 1:
            factor = next(
                (_number(arg) for arg in args if not isinstance(arg, Tensor) or not self._state_of(arg)), None
            )
            if factor and self._is_count(1 / factor, first.of):
                return _Means((1.0,), (math.prod(first.of),))
        if len(states) == 1 and (name in _MULTIPLYING or (divides and self._state_of(args[0]) is not None)):
            return first
        if divides and all(isinstance(state, _Sum) for state in states):
            return _after_masked_mean(first, args[1])
        return _Unknown(f"{name} is applied to a sum or mean over its samples")

    @property
    def _samples(self) -> set[int]:
        return {shape[dim] for shape, dim in self._given}

    @property
    def _counts(self) -> set[int]:
        """The numbers of samples, and of samples and what is behind them."""
        return {count for shape, dim in self._given for count in (shape[dim], *[*accumulate(shape, mul)][dim:])}

    def _is_count(self, number: float | None, of: tuple[int, ...]) -> bool:
        counts = (math.prod(of), *self._counts)
        found = number is not None and any(math.isclose(number, count, rel_tol=1e-12) for count in counts)
        self.divides_by_number |= found
        return found


def _added(means: Sequence[_Means]) -> _Means:
    return _Means(tuple(s for mean in means for s in mean.shares), tuple(s for mean in means for s in mean.sizes))


class NoMeanError(Exception):
    """Why a number that a loss has returned has no weight."""


_MULTIPLYING = frozenset(("mul", "multiply", "rmul", "imul"))
_DIVIDING = frozenset(("div", "divide", "true_divide", "truediv", "idiv", "itruediv"))
_ADDING = frozenset(("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "stack", "cat", "concat", "hstack"))
_RESHAPING = frozenset(
    (
        "neg", "negative", "positive", "sum", "mean", "getitem", "squeeze", "unsqueeze", "reshape", "view", "flatten",
        "ravel", "expand", "clone", "contiguous", "to", "type", "float", "double", "half", "bfloat16", "detach",
        "requires_grad", "cpu", "cuda",
    )
)  # fmt: skip
_TAKING_APART = {  # and which argument is the dimension
    "unbind": 1, "select": 1, "narrow": 1, "index_select": 1, "split": 2, "chunk": 2, "tensor_split": 2,
}  # fmt: skip
_MOVING = frozenset(
    (
        "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "get", "unsqueeze", "stack", "roll",
        "flip",
    )
)  # fmt: skip
_REVIEWING = frozenset(
    ("reshape", "view", "flatten", "unflatten", "ravel", "squeeze", "reshape_as", "view_as", "rearrange")
)
_PICKING = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive", "bincount"))
_TORCH = str(Path(torch.__file__).parent)
_OVER_CLASSES = frozenset(("cross_entropy", "nll_loss", "linear_cross_entropy"))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


def _number(value: Any) -> float | None:
    """Return a number, be it a tensor on the host."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.is_cpu and not value.requires_grad else None
    return value if isinstance(value, int | float) else None


def _after_index(data: Tensor, index: Any, state: _Data) -> _State:
    """Return what indexing gives without a mask: all samples have to stay, in their order."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = len([part for part in parts if part is not None and part is not Ellipsis])
    gap = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[gap : gap + 1] = [slice(None)] * (data.dim() - taken)
    place = dim = 0  # of the data, and of the result
    for part in parts:
        if place == state.dim and part is not None:
            by_place = isinstance(part, Tensor) and not part.is_floating_point() and part.dim() == 1 and taken > 1
            if (isinstance(part, slice) and part == slice(None)) or (by_place and not dim and len(part) == len(data)):
                return _Data(state.share, dim)  # the second one as in each[torch.arange(len(each)), target]
            break
        if part is not None and not isinstance(part, int | slice):
            break
        place, dim = place + (part is not None), dim + (not isinstance(part, int))
    return _Unknown("indexing takes some samples" if state.dim == place else "indexing may take some samples")


def _after_view(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor, state: _Data) -> _State:
    """Return what an operation gives that moves dimensions, or takes parts along one."""
    data, dim = args[0], state.dim
    if name in _TAKING_APART:
        place = _TAKING_APART[name]
        along = kwargs.get("dim", args[place] if len(args) > place else 0)
        if dim is not None and isinstance(along, int) and along % data.dim() != dim:
            return _Data(state.share, dim - (name in ("unbind", "select") and along % data.dim() < dim))
    if name in _TAKING_APART or name == "take":
        return _Unknown(f"{name} takes samples one by one, or some of them")
    if dim is None or not isinstance(data, Tensor) or result.data_ptr() != data.data_ptr():
        return _Data(state.share, None)
    like = data.shape[dim], data.stride(dim)
    found = [d for d in range(result.dim()) if (result.shape[d], result.stride(d)) == like]
    return _Data(state.share, dim if dim in found else found[0] if len(found) == 1 else None)


def _operation(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@functools.lru_cache(maxsize=256)
def _operation_at(file: str, line: int) -> CodeType:
    return _operation.__code__.replace(co_filename=file, co_firstlineno=line - 1)


def _call_from_the_loss(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call an operation as from the line of the loss that asks for it, which torch's warnings then name."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return FunctionType(_operation_at(frame.f_code.co_filename, frame.f_lineno), frame.f_globals)(func, args, kwargs)


@functools.cache
def _loss_arguments(func: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Return the arguments of one of torch's losses, all of which have a reduction, with their defaults; else None."""
    if getattr(func, "__module__", None) != F.__name__:
        return None
    parameters = inspect.signature(func).parameters
    return {name: p.default for name, p in parameters.items()} if "reduction" in parameters else None


def counted_by(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float | Tensor | None]:
    """Return the number by which one of torch's losses divides, None if it is not known; nothing of other functions."""
    if (defaults := _loss_arguments(func)) is None:
        return []
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    found, target = _after_loss(func, given, _Data()), given.get("target")
    if not isinstance(found, _Means) or not isinstance(target, Tensor) or given["reduction"] != "mean":
        return [None]
    return [found.shares[0] * target.numel()]


def _after_loss(func: Callable[..., Any], given: Mapping[str, Any], data: _Data) -> _State:
    """Return what one of torch's losses gives.

    Args:
        func: the loss.
        given: its arguments by name.
        data: what is known of its input and target.
    """
    share, name = data.share, func.__name__
    reduction = given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _reduction.legacy_get_string(given["size_average"], given["reduce"], emit_warning=False)
    target = given.get("target")
    if reduction == "none":
        return data
    if name in ("mse_loss", "l1_loss") and given.get("weight") is not None:
        return _Unknown(f"{name} divides by the sum of its weights")
    if reduction == "sum":
        return _Sum(tuple(target.shape) if isinstance(target, Tensor) else (), share)
    if name not in _OVER_CLASSES or target is None or target.is_floating_point():  # of probabilities
        return _Means((share,), (data.size_of(next(_tensors_in(given.values()))),))
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    return _Means((_counted(target, ignored, given["weight"], share),), (data.size_of(target),))


def _counted(target: Tensor, ignore_index: int, weights: Tensor | None, share: float) -> Share:
    """Return the part that the targets which are not ignored have of all, each with the weight of its class."""
    if not target.numel():
        return share
    counted = target != ignore_index
    if weights is not None:  # of the same shape whatever is ignored, so that the host need not wait for their number
        counted = weights.detach().double()[target.where(counted, 0)].where(counted, 0.0)
    total = counted.sum()
    return (float(total) if total.is_cpu else total.double()) / target.numel() * share


def _after_reduction_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: _Data) -> _State:
    """Return what a mean or sum of data gives; one over other dimensions than that of samples, the first, is data."""
    data = args[0] if args else kwargs["input"]
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if isinstance(dims, int):
        dims = (dims,)
    if name.startswith("nan"):
        return _Unknown(f"{name} leaves numbers out")
    if not data.dim():
        return _Unknown(f"{name} is of one number")
    over = {dim % data.dim() for dim in dims or ()}
    if 0 < len(over) < data.dim():  # over some dimensions
        if state.dim is None:
            return _Unknown(f"{name} may be over samples, whose dimension has been moved")
        if state.dim not in over:
            keeps = kwargs.get("keepdim", len(args) > 2 and args[2])
            return _Data(state.share, state.dim - (0 if keeps else len([dim for dim in over if dim < state.dim])))
    return _Means((state.share,), (state.size_of(data),)) if name == "mean" else _Sum(tuple(data.shape), state.share)


def _after_masked_mean(total: _State, divisor: Any) -> _State:
    """Return what the quotient of two sums is: a mean under a mask, if the divisor counts, or adds up, the mask."""
    if not isinstance(total, _Sum) or not isinstance(divisor, Tensor) or divisor.numel() != 1 or divisor.requires_grad:
        return _Unknown("it is the quotient of two sums over samples")
    number = math.prod(total.of)
    count = divisor.detach().reshape(())
    share = (float(count) if count.is_cpu else count.double()) / number if number else 1.0
    return _Means((share * total.share,), (number / total.share if total.share else 0,))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
