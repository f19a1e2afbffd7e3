"""Habits with data and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import data

from support.habits import SAMPLES, UPDATES, WIDTH, Refused, Script, around, habit, linear, regression, tokens

DATA = "Data"
LOSSES = "Losses"
F64 = torch.float64


def dataset() -> data.TensorDataset:
    inputs, targets = zip(*regression(), strict=True)
    return data.TensorDataset(torch.cat(inputs), torch.cat(targets))


def loaded(**options: Any) -> Script:
    """Batches of a DataLoader."""
    return Script(around(nn.Tanh), data.DataLoader(dataset(), **{"batch_size": SAMPLES, **options}))


@habit(DATA)
def loader() -> Script:
    """A `DataLoader`, shuffled by a generator."""
    return loaded(shuffle=True, generator=torch.Generator().manual_seed(3))


@habit(DATA)
def loader_of_workers() -> Script:
    """A `DataLoader` with workers and `persistent_workers`."""
    return loaded(num_workers=1, persistent_workers=True, prefetch_factor=1)


@habit(DATA)
def pinned() -> Script:
    """A `DataLoader` with `pin_memory=True`."""
    return loaded(pin_memory=True)


@habit(DATA)
def short_last_batch() -> Script:
    """A short last batch."""
    return loaded(batch_size=7)


@habit(DATA)
def weighted_sampler() -> Script:
    """A `WeightedRandomSampler`."""
    generator = torch.Generator().manual_seed(3)
    return loaded(sampler=data.WeightedRandomSampler([0.5, 1.0] * (SAMPLES * UPDATES // 2), 16, generator=generator))


@habit(DATA)
def batch_sampler() -> Script:
    """A `BatchSampler`."""
    sampler = data.BatchSampler(data.SequentialSampler(dataset()), 6, drop_last=True)
    return Script(around(nn.Tanh), data.DataLoader(dataset(), batch_sampler=sampler))


class Stream(data.IterableDataset):
    """Samples one after the other."""

    def __iter__(self) -> Iterator[Any]:
        yield from dataset()


@habit(DATA)
def iterable_dataset() -> Script:
    """An `IterableDataset`."""
    return Script(around(nn.Tanh), data.DataLoader(Stream(), batch_size=SAMPLES))


@habit(DATA)
def generator_of_batches() -> Script:
    """A generator of batches."""
    return Script(around(nn.Tanh), (batch for batch in regression()))


@habit(DATA)
def dict_inputs() -> Script:
    """Inputs that are a dict of tensors."""
    batches = [({"x": x, "scale": x[:, :1]}, y) for x, y in regression()]
    return Script({"read": DictReader(), "second": nn.Tanh(), "third": linear(), "head": linear()}, batches)


class DictReader(nn.Module):
    """Reads two entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.layer(batch["x"]) * batch["scale"]
        return found


@habit(DATA)
def dict_targets() -> Script:
    """Targets that are a tuple of tensors."""
    batches = [(x, (y, y[:, :1])) for x, y in regression()]
    return Script(
        around(nn.Tanh), batches, lambda out, pair: (out - pair[0]).square().mean() + (out - pair[1]).abs().mean()
    )


@habit(DATA)
def integer_targets() -> Script:
    """uint8 inputs and bool targets."""
    batches = [((x * 10).abs().to(torch.uint8), y > 0) for x, y in regression()]
    blocks = {"read": lambda x: x.double() / 10, "first": linear(), "act": nn.Tanh(), "head": linear()}
    return Script(blocks, batches, lambda y, t: F.binary_cross_entropy_with_logits(y, t.double()))


# --- losses -----------------------------------------------------------------------------------------------------------


def judged_by(loss: Callable[[Any, Any], Any], batches: Any = None, **more: Any) -> Script:
    return Script(around(nn.Tanh), regression() if batches is None else batches, loss, **more)


def classes() -> list[tuple[Tensor, Tensor]]:
    return [(x, y.argmax(1)) for x, y in regression()]


def of_texts(output: Any, target: Any) -> Tensor:
    """A loss that weighs samples by their names."""
    weights = torch.tensor([float(name) for name in target["name"]], dtype=F64)
    found: Tensor = (weights[:, None] * (output - target["y"]).square()).mean()
    return found


@habit(DATA)
def texts() -> Script:
    """Texts beside tensors, which a `DataLoader` makes a list."""
    batches = [(x, {"y": y, "name": [str(i) for i in range(len(y))]}) for x, y in regression()]
    script = Script(around(nn.Tanh), batches, of_texts)
    script.accumulates = False
    return script


def without_target(output: Tensor, target: Any) -> Tensor:
    assert target is None
    return output.square().mean()


@habit(DATA)
def no_targets() -> Script:
    """No targets (`(x, None)`)."""
    return Script(around(nn.Tanh), [(x, None) for x, _ in regression()], without_target)


NUMBERED = "reports have numbers; leave `enumerate` out"


@habit(DATA, Refused("leave enumerate out", NUMBERED))
def enumerated() -> Script:
    """`enumerate(loader)`."""
    return Script(around(nn.Tanh), list(enumerate(regression())))


@habit(LOSSES)
def mse_module() -> Script:
    """`nn.MSELoss()`."""
    return judged_by(nn.MSELoss())


@habit(LOSSES)
def robust() -> Script:
    """`l1_loss`, `huber_loss`, `smooth_l1_loss`."""
    return judged_by(lambda y, t: F.l1_loss(y, t) + F.huber_loss(y, t) + F.smooth_l1_loss(y, t))


@habit(LOSSES)
def smoothed() -> Script:
    """`CrossEntropyLoss` with label smoothing."""
    return judged_by(nn.CrossEntropyLoss(label_smoothing=0.1), classes())


@habit(LOSSES)
def class_weights() -> Script:
    """`CrossEntropyLoss(weight=...)`: a mean over the weights of classes."""
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    return judged_by(nn.CrossEntropyLoss(weight=weight), classes())


@habit(LOSSES)
def ignored_targets() -> Script:
    """`CrossEntropyLoss` with ignored targets (-100)."""
    batches = [(x, torch.where(torch.arange(SAMPLES) % 3 == 1, -100, t)) for x, t in classes()]
    return judged_by(nn.CrossEntropyLoss(), batches)


@habit(LOSSES)
def soft_targets() -> Script:
    """`cross_entropy` with probabilities as targets, `kl_div`."""
    batches = [(x, y.softmax(1)) for x, y in regression()]
    return judged_by(lambda y, t: F.cross_entropy(y, t) + F.kl_div(y.log_softmax(1), t, reduction="batchmean"), batches)


@habit(LOSSES)
def binary() -> Script:
    """`BCEWithLogitsLoss(pos_weight=...)`."""
    batches = [(x, (y > 0).double()) for x, y in regression()]
    return judged_by(nn.BCEWithLogitsLoss(pos_weight=torch.full((WIDTH,), 2.0, dtype=F64)), batches)


@habit(LOSSES)
def masked() -> Script:
    """A sum under a mask and the number of its elements, as (sum, weight)."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mask = target > 0
        return ((output - target).square() * mask).sum(), mask.sum()

    return judged_by(loss)


SUMS = "a sum is not a mean over samples; return (sum, weight)"


@habit(LOSSES, Refused("sum", SUMS))
def summed() -> Script:
    """`MSELoss(reduction="sum")`."""
    return judged_by(nn.MSELoss(reduction="sum"))


@habit(LOSSES, Refused("reduction='mean'", "a loss is one number for each microbatch; return (sum, weight)"))
def unreduced() -> Script:
    """`MSELoss(reduction="none")`."""
    return judged_by(nn.MSELoss(reduction="none"))


class Learnt(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * self.scale - target).square().mean()


@habit(
    LOSSES, Refused("part of the last block", "no optimizer steps a loss; make it part of the last block, or freeze it")
)
def learnt_loss() -> Script:
    """A loss with parameters."""
    return judged_by(Learnt())


@habit(LOSSES)
def auxiliary() -> Script:
    """An auxiliary loss that travels with the activations, as a pair."""
    blocks = {
        "first": linear(),
        "second": WithPenalty(),
        "third": PairApplied(nn.Tanh()),
        "head": PairApplied(linear()),
    }
    return Script(blocks, regression(), lambda pair, target: F.mse_loss(pair[0], target) + 0.1 * pair[1])


class WithPenalty(nn.Module):
    """Adds the size of its output as a second value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.square().mean()


class PairApplied(nn.Module):
    """Applies a module to the first of two values."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.module(pair[0]), pair[1]


@habit(LOSSES)
def margins() -> Script:
    """`TripletMarginLoss`, `CosineEmbeddingLoss` on parts of the output."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.TripletMarginLoss()(output, target, -target) + nn.CosineEmbeddingLoss()(
            output, target, torch.ones(output.shape[0])
        )

    return judged_by(loss)


@habit(LOSSES)
def connectionist() -> Script:
    """`CTCLoss`."""
    blocks = {"table": nn.Embedding(WIDTH, WIDTH, dtype=F64), "first": linear(), "second": nn.Tanh(), "head": linear()}
    batches = [(x.repeat(1, 2), y[:, :2].clamp(min=1)) for x, y in tokens()]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        lengths = torch.full((len(target),), 6), torch.full((len(target),), 2)
        losses = F.ctc_loss(output.log_softmax(2).transpose(0, 1), target, *lengths, reduction="none")
        return losses.mean()

    return Script(blocks, batches, loss)


IN_A_BATCH = "the loss compares the samples of a microbatch; return (sum, weight), as with accumulated gradients"


@habit(LOSSES, Refused("how much that counts", IN_A_BATCH))
def contrastive() -> Script:
    """A contrastive loss over the samples of a batch."""
    return judged_by(contrast)


def contrast(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(len(target)))


@habit(LOSSES, Refused("scalar", "a loss is a number, or (sum, weight); return the sum of its parts"))
def loss_parts() -> Script:
    """A loss that returns a dict of its parts."""
    return judged_by(lambda output, target: {"fit": F.mse_loss(output, target)})


@habit(LOSSES)
def teacher() -> Script:
    """Distillation: a frozen teacher in the loss."""
    model = linear().requires_grad_(False)
    return judged_by(lambda output, target: F.mse_loss(output, model(target)))


@habit(LOSSES)
def targets_that_require_grad() -> Script:
    """Targets that are results of a model that is not trained here."""
    model = linear()
    return judged_by(F.mse_loss, [(x, model(y)) for x, y in regression()])


@habit(DATA, Refused("a batch is a pair", "targets of a dict are its `labels`; name them so in the `collate_fn`"))
def dict_batches() -> Script:
    """Batches that are one dict, whose targets are not named `labels`."""
    return Script(around(nn.Tanh), [{"x": x, "targets": y} for x, y in regression()])


@habit(DATA, Refused("too few", "a batch has fewer samples than microbatches; use `drop_last=True`"))
def too_short() -> Script:
    """A last batch of one sample, with two microbatches."""
    return loaded(batch_size=SAMPLES * UPDATES - 1)


@habit(DATA)
def dataclass_inputs() -> Script:
    """Inputs that are a dataclass of tensors."""
    batches = [(Example(x, x[:, :1]), y) for x, y in regression()]
    return Script({"read": ExampleReader(), "second": nn.Tanh(), "third": linear(), "head": linear()}, batches)


@dataclass
class Example:
    """A sample."""

    x: Tensor
    scale: Tensor


class ExampleReader(nn.Module):
    """Reads two fields."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, batch: Example) -> Tensor:
        found: Tensor = self.layer(batch.x) * batch.scale
        return found


@habit(DATA)
def shuffled_without_generator() -> Script:
    """A `DataLoader(shuffle=True)` without a generator of its own."""
    x, y = (torch.cat(parts) for parts in zip(*regression(), strict=True))
    return Script(around(nn.Tanh), data.DataLoader(data.TensorDataset(x, y), batch_size=SAMPLES, shuffle=True))


@habit(LOSSES, Refused("how much that counts", IN_A_BATCH))
def running_loss() -> Script:
    """A loss with a running mean in a buffer."""
    return judged_by(RunningLoss())


class RunningLoss(nn.Module):
    """Divides by the mean of the losses before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / self.mean


PENALTY = "the loss has the weights of its own stage only; use the `weight_decay` of the optimizer, or a step hook"


@habit(LOSSES, Refused("belongs to no module", PENALTY))
def penalty_of_weights() -> Script:
    """A penalty of all weights in the loss (`sum(p.square().sum() for p in model.parameters())`)."""
    script = judged_by(F.mse_loss)
    weights = [p for block in script.blocks.values() if isinstance(block, nn.Module) for p in block.parameters()]
    script.loss = lambda y, t: F.mse_loss(y, t) + 0.1 * sum(p.square().sum() for p in weights)
    return script


SCALED = "nobody would divide by the scale; `precision='fp16'` brings a loss scale"


@habit(LOSSES, Refused("GradScaler", SCALED))
def scaled_by_hand() -> Script:
    """`GradScaler.scale` in the loss."""
    scaler = torch.amp.GradScaler("cpu")
    return judged_by(lambda output, target: scaler.scale(F.mse_loss(output, target)))
