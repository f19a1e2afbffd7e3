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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import _reduction, functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.comm.message.trees import leaves_of

Share = float | Tensor
"""Of a mean: the part of its samples that it counts; a tensor on a GPU."""


class _Data(NamedTuple):
    """A tensor that depends on the output or the target.

    Attributes:
        share: the part of its elements that masks have picked.
        aligned: its first dimension is that of samples, or of samples and what came behind.
    """

    share: float = 1.0
    aligned: bool = True


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
    """

    shares: tuple[Share, ...]


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
        target: likewise.
        own: the part of its samples that a mean counts which the model itself has computed, or why that is unknown.
    """

    def __init__(self, output: Any, target: Any, own: Share | str = 1.0) -> None:
        super().__init__()
        self._states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # None: depends on neither
        self._given = []  # shapes
        for leaf in (*leaves_of(output), *leaves_of(target)):
            if isinstance(leaf, Tensor):
                self._given.append(tuple(leaf.shape))
                self._states[leaf] = _Data() if leaf.dim() else None
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor) and not leaf.dim():  # a mean that the model has computed itself
                self._states[leaf] = _Unknown(own) if isinstance(own, str) else _Means((own,))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what its result is."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor):
                self._states[leaf] = self._state_after(func, args, kwargs, leaf)
        return result

    def share_of(self, total: Tensor) -> Share:
        """Return the part of its samples that the mean counts which the loss has returned.

        Raises:
            NoMeanError: it is not known to be a mean over samples.
        """
        if not any(self._given):  # nothing has samples
            return 1.0
        state = self._state_of(total)
        if state is None and total.requires_grad:
            state = _Unknown("it was computed by what is not an operation of torch, such as an autograd.Function")
        if state is None:
            return 1.0
        if isinstance(state, _Sum):
            raise NoMeanError("it is a sum, which was not divided by the number of what was added up")
        if isinstance(state, _Data):
            raise NoMeanError("it is no mean over samples")
        if isinstance(state, _Unknown):
            raise NoMeanError(state.why)
        first, *others = state.shares
        if not all(other is first or float(other) == float(first) for other in others):  # waits for a GPU
            raise NoMeanError("it adds means that are divided by different numbers (some ignore targets, or pick them)")
        return first

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
        name = getattr(func, "__name__", str(func)).strip("_")
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
        share, aligned = data[0].share, all(state.aligned for state in data)
        if any(state.share != share for state in data):
            return _Unknown(f"{name} takes together what different masks have picked")
        if (defaults := _loss_arguments(func)) is not None:
            given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
            return _after_loss(func, given, _Data(share, aligned))
        if name in ("mean", "sum", "nanmean", "nansum"):
            return _after_reduction_of(name, args, kwargs, _Data(share, aligned))
        if name in _PICKING or (name == "where" and len(args) == 1):
            return _Unknown(f"{name} returns as many numbers as the values ask for")
        if name == "masked_select" or (name == "getitem" and _is_mask(args[1])):
            return _Data(share * (result.numel() / args[0].numel() if args[0].numel() else 1.0), aligned)
        if name == "getitem":
            return _after_index(args[0], args[1], _Data(share, aligned))
        if name in _TAKING_APART:
            return _Unknown(f"{name} takes samples one by one, or some of them")
        if name in _MOVING:
            return _Data(share, aligned=False)
        sizes = {tensor.shape[0] for tensor in _tensors_in((*args, *kwargs.values())) if tensor.dim()}
        if name in _REVIEWING:
            shape = args[0].shape
            kept = result.dim() and any(result.shape[0] == math.prod(shape[:end]) for end in range(1, len(shape) + 1))
            return _Data(share, aligned and (kept or (result.dim() > 0 and result.shape[0] in self._samples)))
        if aligned and (not result.dim() or result.shape[0] not in sizes):
            return _Unknown(f"{name} takes samples together, otherwise than by a mean or a sum")
        return _Data(share, aligned)

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
            if all(isinstance(state, _Means) for state in states):
                return _Means(tuple(share for state in states if isinstance(state, _Means) for share in state.shares))
            constants = constants or (adds and any(isinstance(arg, int | float) for arg in args))
            sums = [state for state in states if isinstance(state, _Sum)]
            if len(sums) == len(states) and not constants and len({state.share for state in sums}) == 1:
                return first
        divides = name in _DIVIDING and len(args) == 2 and isinstance(args[0], Tensor)
        if len(states) == 1 and divides and isinstance(first, _Sum):
            if first.share != 1 and isinstance(args[1], int | float):  # of all samples, or of those that were picked?
                return _Unknown("a sum of what a mask has picked is divided by a number; divide by the mask's sum")
            if args[1] == math.prod(first.of) or self._counts(args[1]):
                return _Means((1.0,))
        if len(states) == 1 and (name in _MULTIPLYING or (divides and self._state_of(args[0]) is not None)):
            return first
        if divides and all(isinstance(state, _Sum) for state in states):
            return _after_masked_mean(first, args[1])
        return _Unknown(f"{name} is applied to a sum or mean over its samples")

    @property
    def _samples(self) -> set[int]:
        return {shape[0] for shape in self._given if shape}

    def _counts(self, number: Any) -> bool:
        """Whether a number is that of samples, or of samples and what is behind them."""
        if not isinstance(number, int | float):
            return False
        return any(number == math.prod(shape[:end]) for shape in self._given for end in range(1, len(shape) + 1))


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
_TAKING_APART = frozenset(("unbind", "select", "narrow", "split", "chunk", "tensor_split", "index_select", "take"))
_MOVING = frozenset(
    (
        "transpose",
        "permute",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "t",
        "get",
        "unsqueeze",
        "stack",
        "roll",
        "flip",
    )
)
_REVIEWING = frozenset(
    ("reshape", "view", "flatten", "unflatten", "ravel", "squeeze", "reshape_as", "view_as", "rearrange")
)
_PICKING = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive", "bincount"))
_OVER_CLASSES = frozenset(("cross_entropy", "nll_loss", "linear_cross_entropy"))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)


def _after_index(data: Tensor, index: Any, state: _Data) -> _State:
    """Return what indexing gives without a mask: the dimension of samples has to stay as it is."""
    first = index[0] if isinstance(index, tuple) and index else index
    if first is Ellipsis:
        others = (
            [part for part in index if part is not Ellipsis and part is not None] if isinstance(index, tuple) else []
        )
        whole = len(others) < data.dim()
    elif isinstance(first, slice):
        whole = first == slice(None)
    else:  # as in each[torch.arange(len(each)), target]
        whole = (
            isinstance(first, Tensor)
            and not first.is_floating_point()
            and first.dim() == 1
            and isinstance(index, tuple)
        )
        whole = whole and len(first) == len(data)
    return state if whole else _Unknown("indexing takes some samples")


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
        return _Means((share,))
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    return _Means((_counted(target, ignored, given["weight"], share),))


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
    if dims and len({dim % data.dim() for dim in dims}) < data.dim():  # over some dimensions
        if not state.aligned:
            return state if name == "mean" else _Unknown(f"{name} may be over samples, whose dimension has been moved")
        if all(dim % data.dim() for dim in dims):
            return state
    return _Means((state.share,)) if name == "mean" else _Sum(tuple(data.shape), state.share)


def _after_masked_mean(total: _State, divisor: Any) -> _State:
    """Return what the quotient of two sums is: a mean under a mask, if the divisor counts, or adds up, the mask."""
    if not isinstance(total, _Sum) or not isinstance(divisor, Tensor) or divisor.numel() != 1 or divisor.requires_grad:
        return _Unknown("it is the quotient of two sums over samples")
    number = math.prod(total.of)
    count = divisor.detach().reshape(())
    share = (float(count) if count.is_cpu else count.double()) / number if number else 1.0
    return _Means((share * total.share,))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
