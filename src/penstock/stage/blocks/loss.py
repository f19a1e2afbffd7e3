"""What a loss function returns for a microbatch, as a sum and its weight.

An update divides the sum over a batch by the weight of the batch. So a mean is multiplied by the number of samples that
it counts (`penstock.stage.blocks.loss_watch`), such as those whose targets the loss does not ignore. However a batch is
divided into microbatches, the result is the mean that plain torch takes over the whole batch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.loss import _Loss
from torch.utils import _pytree as pytree

from penstock.checks import in_short
from penstock.comm.p2p.trees import count_samples, leaves_of, picked, sample_dims, sample_size, without_marks
from penstock.errors import ConfigError
from penstock.partition.sequence_slices import EQUAL_SLICES, Slicing
from penstock.stage.blocks.loss_watch import LossWatch, NoMeanError, Share

LossFunction = Callable[[Any, Any], Any]
"""(output, target) -> the mean over the targets of a microbatch, as a scalar; or (sum, weight), or these and numbers.
"""
AUXILIARY = "auxiliary"  # the number of the losses that blocks add on their way
_EXACT, _LARGE = 1 << 19, 1 << 21  # elements of an output that is tried in float64, and with others in its place
_UNUSED = "appears to not have been used in the graph"  # torch's words of what `autograd.grad` is asked for
_MEANS = ("mean", "batchmean")  # the second one over samples: of KLDivLoss


def check_loss(loss: LossFunction | Mapping[int, LossFunction]) -> None:
    """Refuse what cannot be a loss, or returns what would be taken for something else.

    Args:
        loss: one for the last stage; or several, by stage.

    Raises:
        ConfigError: it is no function; or it is a module of torch that sums or does not reduce, or that has parameters
            to be trained, or whose mean may be divided by anything.
    """
    for one in loss.values() if isinstance(loss, Mapping) else (loss,):
        _check_one(one)


def _check_one(loss: Any) -> None:
    if isinstance(loss, type):
        raise ConfigError(f"loss is the class {loss.__name__}; pass an instance: loss={loss.__name__}()")
    if not callable(loss):
        raise ConfigError(
            f"loss must be a function (output, target) -> mean or (sum, weight), such as "
            f"torch.nn.functional.mse_loss; got {loss!r:.80}"
        )
    if isinstance(loss, nn.Module):
        trained = next((name for name, p in loss.named_parameters() if p.requires_grad), None)
        if trained is not None:
            raise ConfigError(
                f"loss has a parameter to be trained, {trained}, but optimizers step the parameters of blocks only; "
                "make it part of the last block, or freeze it with loss.requires_grad_(False)"
            )
    reduction = _reduction(loss)
    if reduction not in _MEANS:
        raise ConfigError(_reduces(reduction))
    if (scaler := _scaler_in(loss)) is not None:
        raise ConfigError(
            f"loss uses a GradScaler, {scaler}: it would scale gradients, and nobody divides them before the update. "
            "Leave it out; precision='fp16' brings a loss scale (Precision('fp16', loss_scale=LossScale(...)))"
        )


def call_loss(loss: LossFunction, output: Any, target: Any) -> Any:
    """Return what a loss returns; what it raises has a note with the shapes that it was given."""
    try:
        return loss(output, target)
    except Exception as error:
        if _UNUSED in str(error):
            raise ConfigError(
                f"the loss asks for a gradient by a tensor that is not in its graph: {error} In a run, modules compute "
                "with tensors of the pipeline's: read module.weight when the loss is called, not before, and only of "
                "blocks of the last stage"
            ) from error
        shapes = " and ".join(in_short(pytree.tree_map(_shape, value)) for value in (output, target))
        error.add_note(f"raised by the loss, whose output and target of a microbatch are {shapes}")
        raise


def _shape(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__


def _scaler_in(loss: Any) -> str | None:
    """Return the name of an enabled GradScaler that a function names, or the object of a method has."""
    owner = getattr(loss, "__self__", None) if not isinstance(loss, nn.Module) else loss
    found: dict[str, Any] = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    function = getattr(loss, "__func__", loss)
    if inspect.isfunction(function):
        with suppress(ValueError):  # a variable that it names has no value yet
            names = inspect.getclosurevars(function)
            found |= {**names.globals, **names.nonlocals}
    scalers = (name for name, value in found.items() if isinstance(value, torch.amp.GradScaler) and value.is_enabled())
    return next(scalers, None)


def _reduces(reduction: str) -> str:
    return (
        f"loss has reduction={reduction!r}, but an update takes the mean over its batch; use reduction='mean', or "
        "return the sum with the number that it is divided by:\n"
        "    summed = torch.nn.MSELoss(reduction='sum')\n"
        "    pipeline = penstock.Pipeline(..., loss=lambda output, target: (summed(output, target), "
        "target.numel()))"
    )


def _reduction(loss: Any) -> str:
    """The reduction of a loss of torch, be it a module or a function with some arguments filled in."""
    if isinstance(loss, functools.partial) and getattr(loss.func, "__module__", None) == F.__name__:
        return str(loss.keywords.get("reduction", "mean"))
    return loss.reduction if isinstance(loss, _Loss) else "mean"


class WeighedLoss:
    """A loss as a sum and its weight.

    Args:
        loss: the function.
        where: its stage, for messages.
        whole: it gets whole batches, so whatever it returns is what plain torch computes of them.
        slicing: how sequences are cut where it gets slices.

    Attributes:
        numbers: what it has returned beside sum and weight when it was last called.
        size: how many elements of each sample its mean is of, as of the last call; 0 if that is not known.
        frame: follows what the model itself computes.
    """

    numbers: Mapping[str, float | Tensor] = MappingProxyType({})
    size = 0.0

    def __init__(self, loss: LossFunction, where: str, whole: bool = False, slicing: Slicing = EQUAL_SLICES) -> None:
        self._loss, self._where, self._whole, self._slicing = loss, where, whole, slicing
        self._tried = set[int]()  # ways through the loss
        self._adds_up: bool | None = None  # the weight, over slices of a sequence
        self._tells = False  # its weight; then nobody watches it, as compiled functions are slower meanwhile
        self.frame = LossWatch()

    def __call__(
        self, output: Any, target: Any, *, piece: tuple[int, int] | None = None
    ) -> tuple[Tensor, float | Tensor]:
        """Return the sum of a microbatch and its weight, which is a tensor if what was counted is on a GPU.

        Args:
            output: of the model.
            target: of the microbatch, with the marks of the parts that belong to no sample.
            piece: (j, k) for slice j of k, whose share in the sequence only the loss knows.

        Raises:
            ConfigError: the loss returned neither a scalar nor (sum, weight); or a scalar that is no mean over samples,
                or that is of a slice.
        """
        marked, target = target, without_marks(target)
        samples = float(count_samples(output, marked) or 1)
        watch = None if self._tells else LossWatch(output, sample_dims(marked), samples, self.frame)
        with watch or nullcontext():
            result = call_loss(self._loss, output, target)
        pair = isinstance(result, tuple) and (len(result) == 2 or (len(result) == 3 and isinstance(result[2], Mapping)))
        total = result[0] if pair else result
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise self._error(
                f"the loss must be a mean as a scalar tensor, or (sum, weight); got {_named(result)}"
                + " (the loss of a model of transformers is None without labels among its inputs)" * (result is None)
            )
        if pair:
            if self.numbers.keys() != (numbers := self._given_numbers(*result[2:])).keys() and self._tells:
                raise self._error(f"the loss returned the numbers {[*self.numbers]} before, and {[*numbers]} now")
            self._tells, self.numbers = True, numbers
            given = self._given_weight(result[1])
            return total, given if piece is None else self._of_slice(given, piece[0], output, marked)
        if piece is not None:
            raise self._error(
                "with slices of sequences the loss must return (sum, weight), such as the sum over the tokens and "
                "their number; it returned a scalar"
            )
        if watch is None:
            raise self._error(
                "the loss returned (sum, weight) before, and one number now; let it return the same always"
            )
        weight: Share = samples
        try:
            share, own = watch.mean_of(total)
            weight, self.size = samples * share, 0.0 if own else sample_size(output, marked, samples)
            if not (self._whole or watch.way in self._tried or watch.differentiates) and weight:
                self._tried.add(watch.way)
                _LossTrial(self._loss, self.frame, output, marked).run()
        except NoMeanError as error:
            if not self._whole:
                raise self._error(_no_mean(str(error))) from None
        if isinstance(weight, Tensor):  # to look at it would be to wait for the device
            return times_weight(total, weight, output), weight
        return (total * weight if weight else _zero(output, total)), weight

    def _of_slice(self, weight: float | Tensor, number: int, output: Any, target: Any) -> float | Tensor:
        """Return the weight of a slice: its own if it counts tokens; else that of the sequence, counted once."""
        if self._adds_up is None and weight:
            along = self._slicing.dimension
            with torch.no_grad():
                longer, targets = (picked(tree, 1, (0, 0), along, slices=True) for tree in (output, target))
                _, twice = call_loss(self._loss, longer, without_marks(targets))
            ratio = float(self._given_weight(twice)) / float(weight)
            if not any(math.isclose(ratio, known, rel_tol=1e-6) for known in (1, 2)):
                raise self._error(
                    f"the loss returned the weight {float(weight):g} for a slice, and {ratio:g} times that for one "
                    "with each token twice, so it counts neither tokens nor samples, and those of slices do not add up "
                    "to that of a sequence; let it count every token (and the data shift targets)"
                )
            self._adds_up = ratio > 1.5
        return weight if self._adds_up is not False or not number else 0.0

    def _given_weight(self, given: Any) -> float | Tensor:
        if not _is_number(given):
            raise self._error(
                f"the loss returned (loss, {_named(given)}), but the second of two is the weight of a sum, a number; "
                "return the loss alone"
            )
        if isinstance(given, Tensor) and not given.is_cpu:
            return given.detach().reshape(()).double()  # `read_losses` looks at it
        weight = float(given.detach() if isinstance(given, Tensor) else given)
        if not weight >= 0:
            raise self._error(_negative(weight))
        return weight

    def _given_numbers(self, given: Mapping[Any, Any] = MappingProxyType({})) -> dict[str, float | Tensor]:
        if AUXILIARY in given or not all(map(_is_number, given.values())):
            raise self._error(
                "the third of what the loss returns is a dict of numbers to be added up over microbatches, such as "
                f"{{'correct': n}}; {AUXILIARY!r} is the name of those of blocks; got {in_short(given)}"
            )
        return {str(name): unread(each) if isinstance(each, Tensor) else float(each) for name, each in given.items()}

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self._where}: {text}")


class _LossTrial:
    """Makes sure that the loss of two samples is the mean of those of each, weighted as it is found to be.

    It is not if a loss compares samples, or takes a number that depends on all of them or on how many there are. The
    two are of a microbatch; in variants of them outputs are others, and some targets zero or ignored, as microbatches
    without padding say little about others.

    Args:
        loss: the function.
        frame: has followed what the model itself has computed.
        output: of the microbatch.
        target: of it, with the marks of the parts that belong to no sample.
    """

    def __init__(self, loss: LossFunction, frame: LossWatch, output: Any, target: Any) -> None:
        self._loss, self._frame, self._samples = _copy_of(loss), frame, count_samples(output, target) or 0
        self._dim = next((dim for _, dim in sample_dims(target) if dim is not None), 0)
        self._given = output, target
        self._aligns = False

    @torch.enable_grad()
    def run(self) -> None:
        """Try two samples.

        Raises:
            NoMeanError: the loss is no mean over samples.
        """
        if not self._samples:
            return
        given = _changed(self._given, Tensor.detach)
        pair = self._picked(given, self._samples, (0, 1) if self._samples > 1 else (0, 0))
        size = sum(leaf.numel() for leaf in leaves_of(pair[0]) if isinstance(leaf, Tensor))
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # by who counts
        with unseen, torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            for number, variant in enumerate(_variants(pair, size)):
                if number > (3 if size <= _LARGE else 0) and self._aligns:  # other targets
                    break
                wide = _changed(variant, lambda leaf: leaf.double() if _is_float(leaf) else leaf)
                if size > _EXACT or not self._try(wide):
                    self._try(variant, must=not number)

    def _picked(self, pair: Any, samples: int, which: Sequence[int]) -> Any:
        output, target = pair
        return picked(output, samples, which, self._dim), picked(target, samples, which)

    def _try(self, pair: Any, *, must: bool = False) -> bool:
        """Try a pair of an output and a target; False if that is not possible, unless it must be."""
        found: list[tuple[float, float, float]] = []
        try:
            found = [self._of(*self._picked(pair, 2, (k,))) for k in (0, 1)]
            found.append(self._of(*pair))
        except NoMeanError:
            if must or found:
                raise
            return False
        except Exception as error:
            if must:
                raise NoMeanError(f"with one or two of the samples by themselves it fails ({error})") from None
            return False
        totals, weights, few = zip(*found, strict=True)
        same = (abs(a + b - both) <= max(few) * max(abs(a), abs(b), abs(both)) for a, b, both in (totals, weights))
        if math.isfinite(totals[2]) and not all(same):
            if self._of(*pair) != found[2]:
                raise NoMeanError("it returns another number when it is called again")
            raise NoMeanError(
                "that of two samples is not the mean of those of each, so it compares samples, or takes a number that "
                "depends on how many there are"
            )
        return True

    def _of(self, output: Any, target: Any) -> tuple[float, float, float]:
        """Return a sum over samples, its weight, and how exact they are."""
        target = _changed(target, Tensor.clone)
        output = _changed(output, lambda leaf: leaf.detach().requires_grad_(_is_float(leaf)).clone())
        torch.default_generator.manual_seed(0)
        with LossWatch(output, sample_dims(target), self._samples, self._frame, calm=True) as watch:
            total = call_loss(self._loss, output, without_marks(target))
        self._aligns |= watch.aligns
        weight = (count_samples(output, target) or 1) * float(watch.mean_of(total)[0])
        coarse = max(torch.finfo(leaf.dtype).eps for leaf in (total, *leaves_of(output)) if _is_float(leaf))
        return (float(total) * weight if weight else 0.0), weight, max(1e-5, coarse**0.5)


def _variants(pair: Any, size: int) -> Iterator[Any]:
    """Yield an output and target of two samples, and others that are made of them, the second one's more so.

    Of a large output only targets are changed: to make others would take seconds, and several times its memory.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: Tensor) -> Tensor:
        noise = torch.rand(leaf.shape, generator=generator) * (1 + 3 * _second(leaf))
        return (leaf.cpu() + 3 * noise - 1).to(leaf.device) if _is_float(leaf) else leaf

    def weaker(leaf: Tensor) -> Tensor:
        share = 0.5 + torch.rand(leaf.shape, generator=generator) / 2
        return (leaf.cpu() * share).to(leaf.device) if _is_float(leaf) else leaf

    def some(leaf: Tensor, value: int | None) -> Tensor:
        fits = value == 0 or (value and leaf.dtype.is_signed and not _is_float(leaf))
        odd = torch.arange(leaf.numel()).view(leaf.shape) % 2 == 1
        return leaf.cpu().masked_fill(_second(leaf) & odd, value or 0).to(leaf.device) if fits else leaf

    yield pair
    if size > _LARGE:
        yield from ((pair[0], _changed(pair[1], functools.partial(some, value=value))) for value in (0, -100))
        return
    for value in (None, 0, -100):
        for other in (moved, moved, weaker):  # what is a probability must stay one
            yield _changed(pair[0], other), _changed(pair[1], functools.partial(some, value=value))


def _second(leaf: Tensor) -> Tensor:
    """Return which elements are in the second half of a tensor."""
    return torch.arange(leaf.numel()).view(leaf.shape) * 2 >= leaf.numel()


def _changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors of a tree, but for single numbers."""
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf, tree)


def _copy_of(loss: LossFunction) -> LossFunction:
    """Return a copy of a loss that is an object, such as a module, with the same parameters: to be called, and left."""
    loss = getattr(loss, "_orig_mod", getattr(loss, "_torchdynamo_orig_callable", loss))  # what was compiled
    held = loss.parameters() if isinstance(loss, nn.Module) else ()
    with suppress(Exception):  # it has what cannot be copied
        return copy.deepcopy(loss, {id(parameter): parameter for parameter in held})
    return loss


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _no_mean(why: str) -> str:
    return (
        f"the loss returned one number, and how much that counts among those of other microbatches is unknown: {why}. "
        "(The sum of a mask divides as it is, without clamp or epsilon.) Return a sum, and the number that it is to be "
        "divided by, such as\n"
        "    each = torch.nn.functional.cross_entropy(output, target, reduction='none')\n"
        "    return (each * mask).sum(), mask.sum()"
    )


def times_weight(total: Tensor, weight: Tensor, output: Any) -> Tensor:
    """Multiply a mean by its weight, to the bits as by a number; without targets it is zero, and so are gradients."""
    for leaf in leaves_of(output):  # a mean over nothing would give it NaN
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda gradient: torch.where(weight > 0, gradient, 0.0))  # type: ignore[no-untyped-call]
    wide = torch.promote_types(total.dtype, torch.float32)
    return torch.where(weight > 0, (total.to(wide) * weight.to(wide)).to(total.dtype), 0.0)


def _zero(output: Any, total: Tensor) -> Tensor:
    """A loss without targets, as zero: torch's mean over none is NaN, which the backward would spread."""
    outputs = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    zeros: list[Tensor] = [leaf.flatten()[:0].sum().real for leaf in outputs]  # of no elements: 0 * inf is NaN
    return sum(zeros, torch.zeros((), dtype=total.dtype, device=total.device))


def _negative(weight: float) -> str:
    return f"the weight of a loss must not be negative, got {weight}"


def _named(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Loss(NamedTuple):
    """A loss sum and its weight, numbers beside it, and how many elements of each sample its mean is of."""

    total: float
    weight: float
    numbers: Mapping[str, float] = MappingProxyType({})
    size: float = 0.0


class UnreadLoss(NamedTuple):
    """The loss sum of a microbatch and its weight.

    Attributes:
        total: a number; or on a GPU, which one would have to wait for, a tensor of one element.
        weight: of the sum, likewise.
        numbers: beside it, likewise.
        size: how many elements of each sample it is the mean of; 0 if that is not known.
    """

    total: float | Tensor
    weight: float | Tensor
    numbers: Mapping[str, float | Tensor] = MappingProxyType({})
    size: float = 0.0


def read_losses(losses: Sequence[UnreadLoss]) -> list[Loss]:
    """Read the sums and weights of several microbatches, waiting for a GPU once.

    Raises:
        ConfigError: a weight is negative.
    """
    values = [(*loss[:2], *loss.numbers.values()) for loss in losses]
    on_gpu = [value.double() for row in values for value in row if isinstance(value, Tensor)]
    there = iter(torch.stack(on_gpu).tolist() if on_gpu else ())
    read = []
    for loss, row in zip(losses, values, strict=True):
        total, weight, *beside = [next(there) if isinstance(value, Tensor) else value for value in row]
        read.append(Loss(total, weight, dict(zip(loss.numbers, beside, strict=True)), loss.size if weight else 0.0))
    wrong = next((loss.weight for loss in read if not loss.weight >= 0), None)
    if wrong is not None:
        raise ConfigError(_negative(wrong))
    return read


def unread(total: Tensor) -> float | Tensor:
    """A loss sum as a number, where that is there; else a copy, so that no larger tensor lives on with a view of it."""
    return float(total.detach()) if total.is_cpu else total.detach().reshape(()).clone()


def summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of numbers, name by name."""
    return {
        name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(n for part in parts for n in part)
    }
