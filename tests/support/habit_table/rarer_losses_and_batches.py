"""Losses that take gradients, write or hook, batches of rarer kinds, and what blocks write and send of rarer kinds."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils import data
from torch.utils.checkpoint import checkpoint

from support.habit_table.data_and_losses import DATA, F64, LOSSES, dataset
from support.habit_table.in_the_loop import LOOP, SETTLED
from support.habit_table.modules import HOOKS, SUMS
from support.habits import SAMPLES, WIDTH, Differs, Refused, Script, around, bodies, habit, linear, regression

IN_PLACE, KINDS, RATES = "In-place operations", "Between stages: kinds of tensors", "Learning rates"
Pair = namedtuple("Pair", ["inputs", "targets"])


def by(loss: Callable[[Tensor, Any], Any], **more: Any) -> Script:
    return Script(around(linear), regression(), loss=loss, **more)


# --- losses -----------------------------------------------------------------------------------------------------------


@habit(LOSSES)
def graph_kept_in_loss() -> Script:
    """`autograd.grad(part, output, retain_graph=True)` in the loss; gradients accumulated in plain torch, too."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = F.mse_loss(output, target)
        (gradient,) = torch.autograd.grad(mean, output, retain_graph=True)
        return mean * (1 + gradient.norm())

    return by(loss, accumulates=True)


BACKWARD = "it would add to gradients of the last stage alone; the pipeline makes the backward"


@habit(LOSSES, Refused("has called backward()", BACKWARD))
def backward_in_loss() -> Script:
    """`loss.backward(retain_graph=True)` in the loss."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = F.mse_loss(output, target)
        mean.backward(retain_graph=True)
        return mean

    return by(loss)


EARLY = "graphs have tensors in the place of parameters; read `module.weight` when the loss is called"


@habit(LOSSES, Refused("read module.weight when the loss is called", EARLY))
def gradient_by_a_weight() -> Script:
    """`autograd.grad(..., weight)` in the loss, of a weight that was read before."""
    blocks = around(linear)
    weight = blocks["head"].weight

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = F.mse_loss(output, target)
        return mean + torch.autograd.grad(mean, weight, create_graph=True)[0].square().sum()

    return Script(blocks, regression(), loss=loss, accumulates=True)


OF_HALVES = "the gradients of weights are not in the graph of the first half; use a method without halves, such as 1f1b"


@habit(LOSSES, zb_h1=Refused("made in two halves", OF_HALVES))
def gradient_by_the_last_weight() -> Script:
    """The same of `head.weight`, read in the loss; gradients accumulated in plain torch, too."""
    blocks = around(linear)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = F.mse_loss(output, target)
        return mean + 0.1 * torch.autograd.grad(mean, blocks["head"].weight, create_graph=True)[0].square().sum()

    return Script(blocks, regression(), loss=loss, accumulates=True)


NO_GRAPH = "nothing would be learnt; let the loss be in the graph of the output"


@habit(LOSSES, Refused("the loss has no graph", NO_GRAPH))
def detached_loss() -> Script:
    """A loss that detaches the output, or computes under `no_grad`."""
    return by(lambda output, target: F.mse_loss(output.detach(), target))


@habit(LOSSES, Refused("the loss must be a mean as a scalar tensor", "a number has no graph; leave `.item()` out"))
def loss_as_a_number() -> Script:
    """`loss.item()` in the loss."""
    return by(lambda output, target: F.mse_loss(output, target).item())


@habit(LOSSES)
def loss_in_place() -> Script:
    """A loss that writes into its output, and into its target."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        output -= target.mul_(2)
        return output.square().mean()

    return by(loss)


@habit(LOSSES)
def scaled_by_hooks() -> Script:
    """`register_hook` on the loss that scales its gradient, a loss of shape (1,), `checkpoint` around it."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = checkpoint(F.mse_loss, output, target, use_reentrant=False).reshape(1)
        found.register_hook(lambda gradient: gradient * 0.5)
        return found

    return by(loss)


@habit(HOOKS, Differs(SUMS))
def clamped_activations() -> Script:
    """`register_hook` on an activation that clamps its gradient."""

    class Clamped(nn.Linear):
        """Clamps the gradient of its output."""

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient.clamp(-0.002, 0.003))
            return y

    script = Script(around(lambda: Clamped(WIDTH, WIDTH, dtype=F64)), regression(), accumulates=True)
    script.blocks["second"] = linear()
    return script


@habit(LOSSES)
def focal_loss() -> Script:
    """A focal loss of classes, without reduction by torch."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    batches = [(x, y.argmax(1)) for x, y in regression()]
    return Script(around(linear), batches, loss=loss)


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class Labels:
    """Targets, of which some may be missing."""

    values: Tensor
    weights: Any = None


@habit(DATA)
def dataclass_targets() -> Script:
    """Targets that are a dataclass, with None for what is missing."""
    batches = [(x, Labels(y)) for x, y in regression()]
    return Script(around(linear), batches, loss=lambda output, target: F.mse_loss(output, target.values))


@habit(DATA)
def batches_as_named_tuples() -> Script:
    """Batches that are named tuples, and lists."""
    first, *others = regression()
    return Script(around(linear), [Pair(*first), *map(list, others)])


TRIPLE = "a batch is (inputs, targets); either may be a tuple"


@habit(DATA, Refused("has 3 parts", TRIPLE))
def batches_of_three() -> Script:
    """Batches of three tensors."""
    return Script(around(linear), [(x, y, torch.ones(SAMPLES)) for x, y in regression()])


@habit(DATA)
def one_target_for_all() -> Script:
    """A scalar as target, expanded targets, targets that require gradients."""
    batches = [
        (x, (torch.tensor(0.5, dtype=F64), y[:1].expand(SAMPLES, WIDTH).requires_grad_())) for x, y in regression()
    ]
    return Script(around(linear), batches, loss=lambda output, target: (output - target[0] * target[1]).square().mean())


EMPTY = "an update needs a sample for each microbatch; leave such batches out"


@habit(DATA, Refused("has 0 samples, too few", EMPTY))
def batch_without_samples() -> Script:
    """A batch without samples."""
    return Script(around(linear), [(x[:k], y[:k]) for k, (x, y) in zip((8, 0, 8), regression(), strict=True)])


REFILLED = "batches are read ahead, as by a `DataLoader` with workers; yield new tensors, such as `x.clone()`"


class Refilling:
    """Yields the same tensors again and again, with other values."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = torch.empty(SAMPLES, WIDTH, dtype=F64), torch.empty(SAMPLES, WIDTH, dtype=F64)
        for inputs, targets in regression():
            yield x.copy_(inputs), y.copy_(targets)


@habit(DATA, **{"1f1b": Refused("was written into by the loader", REFILLED)})
def refilled_batches() -> Script:
    """A generator that refills one tensor."""
    return Script(around(linear), Refilling())  # type: ignore[arg-type]


@habit(DATA)
def joined_datasets() -> Script:
    """`ConcatDataset` of `Subset`s, with a `collate_fn` that writes."""

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        return inputs, targets.clamp_(-1, 1)

    parts = data.ConcatDataset([data.Subset(dataset(), range(8, 24)), data.Subset(dataset(), range(8))])
    return Script(around(linear), data.DataLoader(parts, batch_size=SAMPLES, collate_fn=collate))


# --- what blocks write and send ---------------------------------------------------------------------------------------


@habit(IN_PLACE)
def written_input() -> Script:
    """`x.mul_(2)` on what the stage before sent."""
    return Script({"first": linear(), "second": linear(), "third": lambda x: x.mul_(2), "head": linear()}, regression())


@habit(KINDS)
def no_gradients_between() -> Script:
    """Only whole numbers between two stages (`argmax`), so that the first one learns nothing."""
    return Script({"first": linear(), "second": lambda x: x.argmax(1), "third": nn.Embedding(WIDTH, WIDTH, dtype=F64),
                   "head": linear()}, regression())  # fmt: skip


@habit(KINDS)
def bfloat_between() -> Script:
    """bfloat16 between two stages of float64; gradients accumulated in plain torch, too."""
    return Script(bodies(lambda x: x.bfloat16(), lambda x: x.double()), regression(), accumulates=True)


@habit(KINDS)
def lazy_conjugates() -> Script:
    """`conj()` and its imaginary part between stages, which torch computes later."""

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.view_as_complex(x.view(-1, WIDTH // 2, 2)).conj()
        return y, y.imag

    join = lambda pair: torch.cat([pair[0].real, pair[1]], 1)  # noqa: E731
    return Script(bodies(halves, join), regression())


# --- rates and the loop -----------------------------------------------------------------------------------------------


class Decaying(lr_scheduler.LRScheduler):
    """Sets rates and weight decays."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (1 + self.last_epoch)
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


@habit(RATES)
def own_scheduler() -> Script:
    """A scheduler of one's own (`class Decaying(LRScheduler)`), which sets weight decay, too."""
    return Script(around(linear), regression(), lr_scheduler=Decaying)


@habit(RATES)
def rarer_schedulers() -> Script:
    """`PolynomialLR`, `MultiplicativeLR` and `LinearLR` by `ChainedScheduler`."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.PolynomialLR(optimizer, 5), lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9)]
        return lr_scheduler.ChainedScheduler([*parts, lr_scheduler.LinearLR(optimizer, 0.5)], optimizer=optimizer)

    return Script(around(linear), regression(), lr_scheduler=make)


class Halving:
    """Halves rates, and is no scheduler of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Halve them."""
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


@habit(
    RATES, Refused("not a scheduler of torch", "updates lie ahead of it; derive from `LRScheduler`, or use `LambdaLR`")
)
def scheduler_of_no_class() -> Script:
    """An object with a `step` that sets rates."""
    return Script(around(linear), regression(), lr_scheduler=Halving)


REPLACED = "the run computes with tensors in their place; change modules between two runs"


@habit(LOOP, Refused("another tensor was put in the place of third.weight", REPLACED))
def replaced_later() -> Script:
    """A parameter is replaced (`layer.weight = nn.Parameter(...)`), or parametrized."""

    def replace(number: int, blocks: dict[str, Any]) -> None:
        blocks["third"].weight = nn.Parameter(torch.eye(WIDTH, dtype=F64))

    return Script(around(linear), regression(), in_loop=replace)


@habit(LOOP, Refused("third.weight requires gradients now", SETTLED))
def thawed_later() -> Script:
    """A frozen layer is trained from some batch on (gradual unfreezing)."""
    script = Script(around(linear), regression())
    script.blocks["third"].requires_grad_(False)

    def thaw(number: int, blocks: dict[str, Any]) -> None:
        blocks["third"].requires_grad_(True)

    script.in_loop = thaw
    return script


CLEARED = "later microbatches add to them already; gradients need no zeroing"


@habit(LOOP, Refused("weight was changed in the loop over reports", CLEARED))
def zeroed_later() -> Script:
    """`model.zero_grad()` after the batch."""

    def zero(number: int, blocks: dict[str, Any]) -> None:
        for block in blocks.values():
            block.zero_grad()

    return Script(around(linear), regression(), in_loop=zero)
