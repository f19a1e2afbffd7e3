"""Watches how a loss is computed, to find out by which number its mean over a microbatch was divided.

A mean over a batch is the mean of those over its microbatches, each weighted by the number that it was divided by. That
is most often the number of samples; but torch's losses over classes ignore targets, and weigh classes, wherever a loss
calls them, and a mask may pick some targets. So the operations of every call are followed from output and target to the
number that the loss returns. They tell which part of its samples a mean counts, which may differ from call to call;
whether samples are taken together in any other way is found by a trial (`penstock.stage.blocks.loss`).
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

from penstock.comm.p2p.trees import leaves_of
from penstock.partition.replay.stage_forward import DRAWING

Share = float | Tensor
"""Of a mean: the part of its samples that it counts; a tensor on a GPU."""


class _Data(NamedTuple):
    """A tensor that depends on the output or the target.

    Attributes:
        share: the part of its elements that masks have picked.
        averaged: it is a mean over some dimensions, perhaps over samples.
    """

    share: float = 1.0
    averaged: bool = False


class _Sum(NamedTuple):
    """A sum over samples.

    Attributes:
        size: of how many elements, the ones included that masks left out.
        share: the part of them that masks have picked.
        scaled: it was multiplied or divided by a number, or averaged before, so it may be a mean.
    """

    size: float
    share: float
    scaled: bool = False


class _Means(NamedTuple):
    """Means over samples, added up and multiplied by constants.

    Attributes:
        shares: of each; in the model that computes them, how many targets each counts.
        own: the model has computed all of them itself.
    """

    shares: tuple[Share, ...]
    own: bool = False


class _Unknown(NamedTuple):
    """A number that is not known to be a mean over samples.

    Attributes:
        why: what was seen.
    """

    why: str


_State = _Data | _Sum | _Means | _Unknown
_OTHERWISE = _Unknown("the model has computed it otherwise than by a mean of one of torch's losses")


class NoMeanError(Exception):
    """Why a number that a loss has returned has no weight."""


class LossWatch(TorchFunctionMode):
    """Follows the operations of one call of a loss, or those between the layers of a model that computes means itself.

    Args:
        output: of the model, as the loss gets it.
        target: its tensors, each with its dimension of samples; None if that belongs to no sample.
        samples: how many the model has computed.
        frame: has followed the model; None for itself, which follows means of torch's losses alone. Other numbers that
            a model adds to them are weighted alike.
        calm: in place of random numbers there is always the same one, and nothing is dropped.

    Attributes:
        way: the operations so far, as a number.
        differentiates: one of them took gradients.
        aligns: one of them was `ctc_loss`, which reads memory of others where targets are no classes.
    """

    def __init__(
        self,
        output: Any = (),
        target: Iterable[tuple[Tensor, int | None]] = (),
        samples: float = 1.0,
        frame: LossWatch | None = None,
        *,
        calm: bool = False,
    ) -> None:
        super().__init__()
        self.way, self.differentiates, self._frame, self._calm = 0, False, frame, calm
        self.aligns = False
        self._asked: list[float] = []  # of data, by code that has them as numbers of Python; NaN for any
        self._sizes = {samples}  # numbers that do not depend on data
        self._states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # None: depends on neither
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor):
                self._states[leaf] = _Data() if leaf.dim() or frame is None else frame.own(leaf, samples)
                self._sizes.add(leaf.numel())
        for leaf, dim in target:
            self._states[leaf] = None if dim is None else _Data()
            self._sizes.add(leaf.numel())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what its result is."""
        if self._calm and "dropout" in _name_of(func):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if self._calm and func.__name__ in DRAWING and isinstance(result, Tensor) and result.numel():
            result.fill_(0.5 if result.is_floating_point() else result.flatten()[0])
        self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what the result of an operation is; nothing before the first loss of a model."""
        name, given = _name_of(func), _given_to_loss(func, args, kwargs)
        if self._frame is None and not self._states and given is None:
            return
        self.way, self.aligns = hash((self.way, name)), self.aligns or name == "ctc_loss"
        if name == "setitem":
            self._states[args[0]] = self._after_writing(args[0], args[2])
        tensors = list(_tensors_in((*args, *kwargs.values())))
        found = [self._state_of(tensor) for tensor in tensors]
        if any(found):
            self._asked += _asked(name, args, result)
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(leaf, Tensor):
                continue
            if name == "grad":  # of a microbatch by itself: like a number that multiplies or is added
                self._states[leaf], self.differentiates = None, True
            elif self._asked and not self._calm and self._by_asked(name, (*args, *kwargs.values()), found):
                self._states[leaf] = _Unknown(f"{name} of a sum and a number that was taken of samples; use the tensor")
            elif not all(isinstance(state, _Data | None) for state in found):
                self._states[leaf] = _after_reduction(name, args, found, alone=self._frame is None)
            elif self._frame is None:
                self._states[leaf] = None if given is None else _after_own_loss(name, given)
            elif not any(found):
                self._states[leaf] = None
            else:
                data = [state for state in found if isinstance(state, _Data)]
                if len({state.share for state in data}) > 1:
                    self._states[leaf] = _Unknown(f"{name} takes together what different masks have picked")
                elif given is not None:
                    self._states[leaf] = _after_loss(name, given, data[0].share)
                else:
                    self._states[leaf] = _after_operation(name, args, data, tensors[0], leaf)

    def own(self, number: Tensor, samples: float) -> _State:
        """Return what a number is that the model has computed itself; one that is unknown may be added to means."""
        state = self._state_of(number) or _Means((), own=True)
        return state._replace(shares=tuple(n / samples for n in state.shares)) if isinstance(state, _Means) else state

    def mean_of(self, total: Tensor) -> tuple[Share, bool]:
        """Return the part of its samples that a loss counts as a mean over them; and whether the model has computed it.

        Raises:
            NoMeanError: it is not known to be a mean over samples.
        """
        state = self._state_of(total)
        means = _Means((1.0,)) if state is None else _added([state])
        if means is None:
            sums = "it is a sum, which was not divided by the number of what was added up"
            why = {_Sum: sums, _Data: "it is no mean over samples"}
            raise NoMeanError(state.why if isinstance(state, _Unknown) else why[type(state)])
        if not means.shares:
            raise NoMeanError(_OTHERWISE.why)
        first, *others = means.shares
        if not all(other is first or float(other) == float(first) for other in others):  # waits for a GPU
            raise NoMeanError("it adds means that are divided by different numbers (some ignore targets, or pick them)")
        return first, means.own

    def _state_of(self, tensor: Tensor) -> _State | None:
        """Return what is known of a tensor; of one that no operation of torch has made, if it has a graph: data."""
        if tensor in self._states or self._frame is None or tensor.grad_fn is None:
            state: _State | None = self._states.get(tensor, None)  # type: ignore[no-untyped-call]
            return state
        return _Data()

    def _by_asked(self, name: str, values: Sequence[Any], found: Sequence[_State | None]) -> bool:
        """Whether a sum is multiplied or divided by a number that code has taken of data, such as how many count."""
        sums = [state for state in found if isinstance(state, _Sum)]
        if not sums or name not in _DIVIDING | _MULTIPLYING:
            return False
        given = [value for value in values if isinstance(value, int | float)]
        given += [float(t) for t in _tensors_in(values) if self._state_of(t) is None and t.numel() == 1 and t.is_cpu]
        sizes = self._sizes.union(state.size for state in sums)
        odd = [number for number in given if number and number not in sizes and 1 / number not in sizes]
        return any(
            math.isnan(asked) or any(math.isclose(x, asked, rel_tol=1e-6) for x in (number, 1 / number))
            for number in odd
            for asked in self._asked
        )

    def _after_writing(self, into: Tensor, value: Any) -> _State | None:
        """Return what a tensor is after something was written into a part of it."""
        before, written = self._state_of(into), self._state_of(value) if isinstance(value, Tensor) else None
        if written is None or isinstance(before, _Unknown):
            return before
        if isinstance(written, _Unknown) or before is None or before == written:
            return written
        return _added([before, written]) or _Unknown("samples are written into another tensor")


def _after_operation(name: str, args: Sequence[Any], data: Sequence[_Data], source: Tensor, result: Tensor) -> _State:
    """Return what an operation on data gives."""
    share, averaged = data[0].share, any(state.averaged for state in data)
    if name in ("nanmean", "nansum"):
        return _Unknown(f"{name} leaves numbers out")
    if name == "masked_select" or (name == "getitem" and _is_mask(args[1])):
        share *= result.numel() / source.numel() if source.numel() else 1.0
    elif not result.dim():
        if name == "mean":
            return _Means((share,))
        if name in ("sum", "count_nonzero"):
            return _Sum(_size(source, share), share, averaged)
        return _Unknown(f"{name} takes samples together, or one by one, otherwise than by a mean or a sum")
    return _Data(share, averaged or name == "mean")


def _size(tensor: Tensor, share: float) -> float:
    """Return how many elements data had before masks picked some; 0 where none is left to tell."""
    return tensor.numel() / share if share else 0.0


def _added(states: Iterable[_State | None]) -> _Means | None:
    """Return the sum of means, and of sums that may be means; None if one of them is neither."""
    means = [_Means((state.share,)) if isinstance(state, _Sum) and state.scaled else state for state in states]
    known = [mean for mean in means if isinstance(mean, _Means)]
    own = all(mean.own for mean in known)
    return _Means(sum((mean.shares for mean in known), ()), own) if len(known) == len(means) else None


_MULTIPLYING = frozenset(("mul", "multiply", "rmul", "imul"))
_DIVIDING = frozenset(("div", "divide", "true_divide", "truediv", "idiv", "itruediv"))
_ADDING = frozenset(("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "stack", "cat", "concat", "hstack"))
_RESHAPING = frozenset(
    (
        "neg", "negative", "positive", "sum", "mean", "getitem", "squeeze", "unsqueeze", "reshape", "view", "flatten",
        "ravel", "expand", "clone", "contiguous", "to", "type", "float", "double", "half", "bfloat16", "detach",
        "requires_grad", "cpu", "cuda", "unbind",
    )
)  # fmt: skip
_PICKING = frozenset(("masked_select", "nonzero", "argwhere", "unique"))
_OVER_CLASSES = frozenset(("cross_entropy", "nll_loss", "linear_cross_entropy"))


def _after_reduction(
    name: str, args: Sequence[Any], found: Sequence[_State | None], *, alone: bool = False
) -> _State | None:
    """Return what an operation gives, one of whose tensors is a sum or a mean over samples."""
    # alone: no other tensor may multiply a mean
    states = [state for state in found if state is not None]
    first, constants = states[0], len(states) < len(found)
    unknown = next((state for state in states if isinstance(state, _Unknown)), None)
    if unknown is not None:
        return unknown
    if name == "detach" and isinstance(first, _Means):  # as a statistic that the loss keeps: like a number
        return None
    if name in _ADDING or name in _RESHAPING:
        constants = constants or (name in _ADDING and any(isinstance(arg, int | float) for arg in args))
        sums = {state[1:] for state in states if isinstance(state, _Sum)}
        if all(isinstance(state, _Sum) for state in states) and not constants and len(sums) == 1:
            return first
        return _added(states) or _not_linear(name)
    divides = name in _DIVIDING and found[0] is not None
    if len(states) == 1 and (divides or name in _MULTIPLYING) and not (alone and (constants or _is_whole(name, args))):
        if not isinstance(first, _Sum) or (first.share != 1 and not divides):
            return first
        if first.share == 1:
            return first._replace(scaled=True)
        return _Unknown("a sum of what a mask has picked is divided by a number; divide by the mask's sum")
    if divides and isinstance(first, _Sum) and len(states) == 2:
        return _after_masked_mean(first, states[1], args[1])
    return _not_linear(name)


def _not_linear(name: str) -> _Unknown:
    return _Unknown(f"{name} is applied to a sum or mean over its samples")


def _is_whole(name: str, args: Sequence[Any]) -> bool:
    """Whether a model multiplies its own mean by a whole number, which may be that of samples."""
    return name in _MULTIPLYING and any(isinstance(arg, int) and abs(arg) > 1 for arg in args)


def _after_masked_mean(total: _Sum, count: _State, divisor: Any) -> _State:
    """Return what the quotient of two sums is: a mean under a mask, if the divisor counts, or adds up, the mask."""
    plain = isinstance(count, _Sum) and not count.scaled and isinstance(divisor, Tensor)
    if not plain or divisor.numel() != 1 or divisor.requires_grad:
        return _Unknown("it is the quotient of two sums over samples")
    number = divisor.detach().reshape(())
    share = (float(number) if number.is_cpu else number.double()) / total.size if total.size else 0.0
    return _Means((share,))


def _asked(name: str, args: Sequence[Any], result: Any) -> list[float]:
    """Return the numbers that code gets by an operation on data, also as the length of a tensor; NaN for any."""
    if isinstance(result, Tensor):
        picks = name in _PICKING or (name == "getitem" and _is_mask(args[1]))
        return [result.numel(), *result.shape] if picks else []
    if name in ("tolist", "numpy", "array"):
        return [math.nan]
    asks = name in ("item", "int", "float", "index") and isinstance(result, int | float)
    return [float(result)] if asks else []


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


def _is_mask(index: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors_in((index,)))


@functools.cache
def _loss_arguments(func: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Return the arguments of one of torch's losses, all of which have a reduction, with their defaults; else None."""
    if getattr(func, "__module__", None) != F.__name__:
        return None
    parameters = inspect.signature(func).parameters
    return {name: p.default for name, p in parameters.items()} if "reduction" in parameters else None


def _given_to_loss(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the arguments of a call of one of torch's losses by name; None of other functions."""
    defaults = _loss_arguments(func)
    return None if defaults is None else {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _after_own_loss(name: str, given: Mapping[str, Any]) -> _State:
    """Return what one of torch's losses gives that a model has called: a mean with its number of targets."""
    state, target = _after_loss(name, given, 1.0), given.get("target")
    if not isinstance(state, _Means) or not isinstance(target, Tensor):
        return _OTHERWISE
    return _Means((state.shares[0] * target.numel(),), own=True)


def _after_loss(name: str, given: Mapping[str, Any], share: float) -> _State:
    """Return what one of torch's losses gives."""
    reduction, target = given["reduction"], given.get("target")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _reduction.legacy_get_string(given["size_average"], given["reduce"], emit_warning=False)
    if reduction == "none":
        return _Data(share)
    if name in ("mse_loss", "l1_loss") and given.get("weight") is not None:
        return _Unknown(f"{name} divides by the sum of its weights")
    if reduction == "sum":
        return _Sum(_size(target if isinstance(target, Tensor) else next(_tensors_in(given.values())), share), share)
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
