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
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.loss import _Loss
from torch.utils import _pytree as pytree

from penstock.checks import in_short
from penstock.comm.p2p.trees import doubled, leaves_of, part, sample_dims, without_marks
from penstock.errors import ConfigError
from penstock.partition.sequence_slices import EQUAL_SLICES, Slicing
from penstock.stage.blocks.loss_watch import LossWatch, NoMeanError, Share

LossFunction = Callable[[Any, Any], Any]
"""(output, target) -> the mean over the targets of a microbatch, as a scalar; or (sum, weight), or these and numbers.
"""
AUXILIARY = "auxiliary"  # the number of the losses that blocks add on their way
Counted = Sequence[tuple[float | Tensor | None, Any]]
"""How many targets losses have counted, None if that is not known, and their nodes in graphs."""
_NEAREST = 100  # nodes that are looked through for a loss in the graph of a model's own mean
_LINEAR = frozenset(
    f"{name}Backward"
    for name in (
        "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Sum", "Mean", "Stack", "Cat", "Unbind", "Select", "Squeeze",
        "Clone", "Unsqueeze", "View", "UnsafeView", "ReshapeAlias", "Expand", "Alias", "ToCopy", "Copy", "Where",
        "Addcmul",
    )
)  # fmt: skip
"""Nodes of graphs through which a mean stays one."""
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
    """

    numbers: Mapping[str, float | Tensor] = MappingProxyType({})

    def __init__(self, loss: LossFunction, where: str, whole: bool = False, slicing: Slicing = EQUAL_SLICES) -> None:
        self._loss, self._where, self._whole, self._slicing = loss, where, whole, slicing
        self._tried = False  # with parts of a microbatch
        self._adds_up: bool | None = None  # the weight, over slices of a sequence
        self._last: tuple[int, tuple[float, ...]] = -1, ()  # its batch, and how many elements of a sample it was of
        self._tells = False  # its weight; then nobody watches it, as compiled functions are slower meanwhile

    def __call__(
        self,
        output: Any,
        target: Any,
        *,
        piece: tuple[int, int] | None = None,
        batch: int = -1,
        counted: Counted | None = None,
    ) -> tuple[Tensor, float | Tensor]:
        """Return the sum of a microbatch and its weight, which is a tensor if what was counted is on a GPU.

        Args:
            output: of the model.
            target: of the microbatch, with the marks of the parts that belong to no sample.
            piece: (j, k) for slice j of k, whose share in the sequence only the loss knows.
            batch: its number; -1 where batches are not told apart, in an evaluation.
            counted: of a whole model's own losses; None of other blocks.

        Raises:
            ConfigError: the loss returned neither a scalar nor (sum, weight); or a scalar that is no mean over samples,
                or that is of a slice.
        """
        dims, marked = list(sample_dims(target)), target
        target = without_marks(target)
        own = 1.0 if self._tells else _own_share(counted, output, dims)
        watch = None if self._tells else LossWatch(output, dims, own)
        before = () if self._tried or self._whole else _writes(output, target)
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
        samples = _samples(output, dims)
        weight: Share = samples
        try:
            mean = watch.mean_of(total)
            weight = samples * mean.shares[0]
            untried = watch.has_samples and not (self._tried or self._whole)
            if untried and weight and before == _writes(output, target):  # else it cannot be called with them again
                self._tried = True
                self._try_parts(output, marked, own, (total.detach(), float(weight)), watch.divides_by_number)
            self._check_sizes(batch, [size / samples if samples else 0 for size in mean.sizes])
        except NoMeanError as error:
            if not self._whole:
                raise self._error(_no_mean(str(error))) from None
        if isinstance(weight, Tensor):  # to look at it would be to wait for the device
            return times_weight(total, weight, output), weight
        return (total * weight if weight else _zero(output, total)), weight

    def _try_parts(self, output: Any, target: Any, own: Share | str, mean: tuple[Tensor, float], divides: bool) -> None:
        """Make sure that the loss of all samples is the mean of those of two parts, each by its weight.

        It is not if a loss compares samples, or takes a number that depends on all of them or on how many there are, or
        divides by a constant that happens to be their number. One that draws random numbers is not compared.

        Args:
            output: of the model.
            target: with the marks of the parts that belong to no sample.
            own: as `LossWatch` takes it.
            mean: what the loss has returned, and its weight.
            divides: a sum was divided by a number, so the loss has to work with other samples.
        """
        samples, found = round(_samples(output, list(sample_dims(target)))), (float(mean[0]) * mean[1], mean[1])
        dim = next((dim for _, dim in sample_dims(target) if dim is not None), 0)
        of = functools.partial(_summed, _copy_of(self._loss), own)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
                if samples == 1:
                    found, pairs = of(doubled(output, dim), doubled(target)), [(output, target)] * 2
                else:
                    pairs = [(part(output, samples, k, dim), part(target, samples, k)) for k in (0, 1)]
                parts = [of(*pair) for pair in pairs]
                floats = [mean[0], torch.zeros(()), *filter(_is_float, leaves_of(output))]
                few = max(torch.finfo(tensor.dtype).eps for tensor in floats) ** 0.5
                together = sum(total for total, _ in parts), sum(weight for _, weight in parts)
                scales = max(abs(total) for total, _ in (found, *parts)), found[1]
                same = all(abs(a - b) <= few * c for a, b, c in zip(together, found, scales, strict=True))
                same = same or (samples > 1 and of(output, target)[0] != of(output, target)[0])
        except NoMeanError:
            raise
        except Exception as error:
            if not divides:
                return
            raise NoMeanError(f"a sum is divided by a number, and with other samples it fails ({error})") from None
        if not same:
            raise NoMeanError(
                "that of all samples is not the mean of those of two parts of them, so it compares samples, or takes a "
                "number that depends on how many there are"
            )

    def _of_slice(self, weight: float | Tensor, number: int, output: Any, target: Any) -> float | Tensor:
        """Return the weight of a slice: its own if it counts tokens; else that of the sequence, counted once."""
        if self._adds_up is None and weight:
            longer, targets = (doubled(tree, self._slicing.dimension, slices=True) for tree in (output, target))
            with torch.no_grad():
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

    def _check_sizes(self, batch: int, sizes: Sequence[float]) -> None:
        """Make sure that the means of all microbatches of a batch are of as many elements of each sample."""
        of, before = self._last
        self._last = batch, tuple(sizes)
        pairs = zip(sizes, before, strict=False)
        same = len(sizes) == len(before) and all(not a or not b or math.isclose(a, b) for a, b in pairs)
        if 0 <= batch == of and not same:
            raise NoMeanError(
                f"it is the mean over {_listed(sizes)} elements of each sample, and over {_listed(before)} in another "
                "microbatch of the batch"
            )

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


def _summed(loss: LossFunction, own: Share | str, output: Any, target: Any) -> tuple[float, float]:
    """Return the sum of a mean over some samples, and its weight."""
    dims = list(sample_dims(target))
    with LossWatch(output, dims, own) as watch:
        total = call_loss(loss, output, without_marks(target))
    weight = _samples(output, dims) * float(watch.mean_of(total).shares[0])
    return (float(total) * weight if weight else 0.0), weight


def _copy_of(loss: LossFunction) -> LossFunction:
    """Return a copy of a loss that is an object, such as a module, with the same parameters: to be called, and left."""
    held = loss.parameters() if isinstance(loss, nn.Module) else ()
    with suppress(Exception):  # it has what cannot be copied
        return copy.deepcopy(loss, {id(parameter): parameter for parameter in held})
    return loss


def _writes(*trees: Any) -> tuple[int, ...]:
    """Return how often tensors were written into."""
    return tuple(
        leaf._version
        for tree in trees
        for leaf in leaves_of(tree)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    )


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _own_share(counted: Counted | None, output: Any, target: Sequence[tuple[Tensor, int | None]]) -> Share | str:
    """Return the part of the samples that a mean counts which the model itself has computed, or why it has none."""
    if counted is None:
        return 1.0
    means = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and not leaf.dim()]
    nodes = linear = {node for _, node in counted}
    if means and means[0].grad_fn is not None:
        nodes, linear = _behind(means, nodes), _behind(means, nodes, _LINEAR)
    if any(node in nodes and node not in linear for _, node in counted):
        return "the model has computed it as a function of a mean of one of torch's losses"
    numbers = [number for number, node in counted if node in nodes]
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return "the model has computed it otherwise than by a mean of one of torch's losses"
    if any(float(other) != float(known[0]) for other in known[1:]):  # waits for a GPU
        return "the model adds means that are divided by different numbers"
    return known[0] / _samples(output, target)


def _behind(means: Sequence[Tensor], losses: Collection[Any], through: Collection[str] = ()) -> set[Any]:
    """Return the nearest nodes of the graph behind the numbers of a model, among which is that of a loss.

    Args:
        means: the numbers.
        losses: nodes, behind which nobody looks.
        through: names of nodes behind which one looks; all others, too, if there are none.
    """
    rest, found = deque(mean.grad_fn for mean in means), set[Any]()
    while rest and len(found) < _NEAREST:
        node = rest.popleft()
        if node is not None and node not in found:
            found.add(node)
            name, behind = node.name().rstrip("s").rstrip("0123456789"), [edge[0] for edge in node.next_functions]
            product = name in ("MulBackward", "DivBackward", "AddcmulBackward") and all(behind)
            if node not in losses and (not through or (name in through and not product)):
                rest += behind
    return found


def _listed(sizes: Sequence[float]) -> str:
    return " and ".join(f"{size:g}" for size in sizes)


def _samples(output: Any, target: Sequence[tuple[Tensor, int | None]]) -> float:
    """Return the length of the target's dimension of samples or, if that has none, of the output's first one."""
    dims = [*target, *sample_dims(output)]
    return float(next((leaf.shape[dim] for leaf, dim in dims if dim is not None), 1))


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
    """A loss sum and its weight, and numbers beside it."""

    total: float
    weight: float
    numbers: Mapping[str, float] = MappingProxyType({})


class UnreadLoss(NamedTuple):
    """The loss sum of a microbatch and its weight.

    Attributes:
        total: a number; or on a GPU, which one would have to wait for, a tensor of one element.
        weight: of the sum, likewise.
        numbers: beside it, likewise.
    """

    total: float | Tensor
    weight: float | Tensor
    numbers: Mapping[str, float | Tensor] = MappingProxyType({})


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
        read.append(Loss(total, weight, dict(zip(loss.numbers, beside, strict=True))))
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
