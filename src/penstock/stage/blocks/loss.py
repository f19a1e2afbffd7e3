"""What a loss function returns for a microbatch, as a sum and its weight.

An update divides the sum over a batch by the weight of the batch. So a mean is multiplied by what torch divided by:
the number of samples, less the share of targets that the loss ignores. However a batch is divided into microbatches,
the result is the mean that plain torch takes over the whole batch.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.loss import _Loss
from torch.utils import _pytree as pytree

from penstock.checks import in_short
from penstock.comm.message.trees import leaves_of
from penstock.errors import ConfigError

LossFunction = Callable[[Any, Any], Any]
"""(output, target) -> the mean over the targets of a microbatch, as a scalar; or (sum, weight)."""
_IGNORED = -100  # the default of torch's losses over classes
_OVER_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
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
        _check_own_forward(loss)
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


def _check_own_forward(loss: nn.Module) -> None:
    """Refuse a class made from a loss over classes whose forward may divide by something else."""
    if not isinstance(loss, _OVER_CLASSES) or _is_over_classes(loss):
        return
    differing = "weight" if loss.weight is not None else "ignore_index" if loss.ignore_index != _IGNORED else None
    if differing is not None:
        kind = next(known.__name__ for known in _OVER_CLASSES if isinstance(loss, known))
        raise ConfigError(
            f"loss is a {type(loss).__name__}, a {kind} with a forward of its own and with {differing}, so it is not "
            "known what its mean is divided by; return (sum, weight) from a function, such as the sum over targets and "
            "the sum of the weights of their classes"
        )


def _is_over_classes(loss: Any) -> bool:
    """Whether a module is torch's own loss over classes, whose mean is divided by the weights of classes."""
    forwards = [kind.forward for kind in _OVER_CLASSES]
    return isinstance(loss, _OVER_CLASSES) and type(loss).forward in forwards and "forward" not in vars(loss)


def _reduction(loss: Any) -> str:
    """The reduction of a loss of torch, be it a module or a function with some arguments filled in."""
    if isinstance(loss, functools.partial) and getattr(loss.func, "__module__", None) == F.__name__:
        return str(loss.keywords.get("reduction", "mean"))
    return loss.reduction if isinstance(loss, _Loss) else "mean"


def _own_reduction(loss: Any) -> Any:
    """The reduction that a loss of the user's names as torch does; it may return (sum, weight) all the same."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get("reduction")
    return getattr(loss, "reduction", None)


def _over_classes(loss: Any) -> tuple[int, Any]:
    """Return the class that a loss of torch ignores, and its weights of classes or None."""
    if isinstance(loss, functools.partial) and loss.func in (F.cross_entropy, F.nll_loss):
        return loss.keywords.get("ignore_index", _IGNORED), loss.keywords.get("weight")
    return (loss.ignore_index, loss.weight) if _is_over_classes(loss) else (_IGNORED, None)


def sum_and_weight(
    result: Any, loss: LossFunction, output: Any, target: Any, where: str, known: float | Tensor | None = None
) -> tuple[Tensor, float | Tensor]:
    """Return a loss as a sum and its weight, which is a tensor if the targets that were counted are on a GPU.

    Args:
        result: what the loss function returned.
        loss: the function.
        output: what it was called with.
        target: and this.
        where: the stage, for messages.
        known: the weight of a mean, where targets have been counted already.

    Raises:
        ConfigError: the result is neither a scalar nor (sum, weight), or a scalar of a loss with reduction="sum".
    """
    told = isinstance(result, tuple) and len(result) == 2
    total = result[0] if told else result
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ConfigError(
            f"{where}: the loss must be a mean as a scalar tensor, or (sum, weight); got {_named(result)}"
        )
    if not told:
        reduction = _own_reduction(loss)
        if reduction == "sum":
            raise ConfigError(f"{where}: {_reduces(reduction)}")
        weight = count_targets(loss, output, target) if known is None else known
        if isinstance(weight, Tensor):  # to look at it would be to wait for the device
            return _weighted(total, weight, output), weight
        return (total * weight if weight else _zero(output, total)), weight
    given = result[1]
    if not isinstance(given, numbers.Real) and not (isinstance(given, Tensor) and given.numel() == 1):
        raise ConfigError(
            f"{where}: the loss returned (loss, {_named(given)}), but the second of two is the weight of a sum, a "
            "number; return the loss alone"
        )
    if isinstance(given, Tensor) and not given.is_cpu:
        return total, given.detach().reshape(()).double()  # `read_losses` looks at it
    weight = float(given.detach() if isinstance(given, Tensor) else given)
    if not weight >= 0:
        raise ConfigError(f"{where}: {_negative(weight)}")
    return total, weight


def count_targets(loss: LossFunction, output: Any, target: Any) -> float | Tensor:
    """Return how much the mean over a microbatch counts: its samples, less the share of targets that are ignored.

    Samples are the length of the first dimension of the target (or, if that has none, of the output). Of targets that
    are classes, those that torch's losses ignore do not count (-100, or the `ignore_index` of the loss), and others do
    with the weight of their class, if `loss` is torch's cross entropy or negative log likelihood with such.
    """
    leaves = (*leaves_of(target), *leaves_of(output))
    known = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if known is None:
        return 1.0
    samples = float(known.shape[0])
    if known.dtype != torch.int64 or not known.numel():
        return samples
    ignored, weights = _over_classes(loss)
    counted = known != ignored
    if not isinstance(weights, Tensor):
        total = counted.sum()
    elif known.is_cpu:
        total = weights.detach()[known[counted]].double().sum()
    else:  # of the same shape whatever is ignored, so that the host need not wait for their number
        total = weights.detach().double()[known.where(counted, 0)].where(counted, 0.0).sum()
    return samples * ((float(total) if total.is_cpu else total.double()) / known.numel())


def _weighted(total: Tensor, weight: Tensor, output: Any) -> Tensor:
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
    return sum(zeros, torch.zeros((), dtype=total.dtype, device=total.device)) if zeros else total.detach() * 0


def _negative(weight: float) -> str:
    return f"the weight of a loss must not be negative, got {weight}"


def _named(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Loss(NamedTuple):
    """A loss sum and its weight."""

    total: float
    weight: float


class UnreadLoss(NamedTuple):
    """The loss sum of a microbatch and its weight.

    Attributes:
        total: a number; or on a GPU, which one would have to wait for, a tensor of one element.
        weight: of the sum, likewise.
    """

    total: float | Tensor
    weight: float | Tensor


def read_losses(losses: Sequence[UnreadLoss]) -> list[Loss]:
    """Read the sums and weights of several microbatches, waiting for a GPU once.

    Raises:
        ConfigError: a weight is negative.
    """
    on_gpu = [value.double() for loss in losses for value in loss if isinstance(value, Tensor)]
    if on_gpu:
        numbers = iter(torch.stack(on_gpu).tolist())
        read = [Loss(*(next(numbers) if isinstance(value, Tensor) else value for value in loss)) for loss in losses]
    else:
        read = [Loss._make(loss) for loss in losses]
    wrong = next((loss.weight for loss in read if not loss.weight >= 0), None)
    if wrong is not None:
        raise ConfigError(_negative(wrong))
    return read


def unread(total: Tensor) -> float | Tensor:
    """A loss sum as a number, where that is there; else a copy, so that no larger tensor lives on with a view of it."""
    return float(total.detach()) if total.is_cpu else total.detach().reshape(()).clone()
