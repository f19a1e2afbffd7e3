"""However a batch is divided, an update takes the mean that plain torch takes over the whole batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import Pipeline
from penstock.errors import ConfigError
from penstock.stage.blocks.loss import WeighedLoss, check_loss
from support.pool import Pool

CLASSES, TOKENS, SAMPLES = 5, 4, 7
Loss = Callable[[Tensor, Tensor], Any]


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)]


def classes(ignored: float, value: int = -100) -> list[tuple[Tensor, Tensor]]:
    """Four batches of tokens; of the second and third one a microbatch of one sample has no target at all."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for t in range(4):
        targets = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < ignored] = value
        if t in (1, 2) and ignored:
            targets[-1] = value
        batches.append((torch.randn(SAMPLES, TOKENS, 3, generator=generator), targets))
    return batches


def tokens(ignored: float, value: int = -100) -> list[tuple[Tensor, Tensor]]:
    """The same, each token a sample."""
    return [(inputs.flatten(0, 1), targets.flatten()) for inputs, targets in classes(ignored, value)]


def numbers() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shapes = (SAMPLES, TOKENS, 3), (SAMPLES, TOKENS, CLASSES)
    return [tuple(torch.randn(s, generator=generator) for s in shapes) for _ in range(4)]  # type: ignore[misc]


def probabilities() -> list[tuple[Tensor, Tensor]]:
    return [(inputs, target.softmax(-1)) for inputs, target in numbers()]


def over_tokens(loss: Loss) -> Loss:
    """Without a way to see how it is made."""
    return lambda logits, targets: loss(logits.flatten(0, 1), targets.flatten())


class Focal(nn.Module):
    """A mean over all samples, whatever its buffers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", WEIGHTS)
        self.ignore_index, self.reduction = 2, "none"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(logits, targets, weight=self.weight, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


class OwnCriterion(nn.Module):
    """Contains a loss of torch that weighs classes and ignores one, and shifts the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = F.pad(targets, (0, 1), value=2)[..., 1:]
        loss: Tensor = 0.5 * self.criterion(logits.flatten(0, 1), shifted.flatten())
        return loss


class Doubled(torch.autograd.Function):
    """An operation that torch does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def each_of(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss for each token, those of ignored targets included."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none").view(targets.shape)


def mean_under_mask(logits: Tensor, targets: Tensor) -> Tensor:
    counted = targets != -100
    return (each_of(logits, targets) * counted).sum() / counted.sum()


def mean_of_picked(logits: Tensor, targets: Tensor) -> Tensor:
    counted = targets != -100
    return F.cross_entropy(logits[counted], targets[counted])


def summed_in_place(output: Tensor, target: Tensor) -> Tensor:
    loss = torch.zeros(())
    for token in range(TOKENS):
        loss += F.mse_loss(output[:, token], target[:, token]) / TOKENS
    return loss


def means_in_a_tensor(output: Tensor, target: Tensor) -> Tensor:
    each = torch.zeros(TOKENS)
    for token in range(TOKENS):
        each[token] = F.mse_loss(output[:, token], target[:, token])
    return each.mean()


def samples_in_a_tensor(output: Tensor, target: Tensor) -> Tensor:
    each = torch.zeros(output.shape[:2])
    each[:] = (output - target).square().sum(-1) / 9
    return each.mean()


def means_over_other_targets_in_a_tensor(output: Tensor, target: Tensor) -> Tensor:
    each = torch.zeros(2)
    for token in range(2):
        each[token] = F.cross_entropy(output[:, token], target[:, token])
    return each.mean()


def writes_targets(output: Tensor, target: Tensor) -> Tensor:
    target[target == 3] = -100
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def counted(targets: Tensor) -> Tensor:
    return targets != -100


WEIGHTS = torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0])
CASES: dict[str, tuple[Loss, list[tuple[Tensor, Tensor]]]] = {
    "mean squares": (F.mse_loss, numbers()),
    "a module": (nn.SmoothL1Loss(), numbers()),
    "classes": (over_tokens(F.cross_entropy), classes(0)),
    "classes, some ignored": (over_tokens(F.cross_entropy), classes(0.5)),
    "a module that ignores": (nn.CrossEntropyLoss(), tokens(0.5)),
    "a module that ignores another class": (nn.CrossEntropyLoss(ignore_index=2), tokens(0.5, 2)),
    "weights of classes": (nn.CrossEntropyLoss(weight=WEIGHTS), tokens(0.3)),
    "weights and smooth labels": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), tokens(0.3)),
    "weights in a function": (partial(F.cross_entropy, weight=WEIGHTS, ignore_index=2), tokens(0.3, 2)),
    "a module with a weight of another kind": (Focal(), tokens(0)),
    "a loss of torch that divides by all samples": (nn.MultiMarginLoss(weight=WEIGHTS), tokens(0)),
    "a mean over samples of sums": (nn.KLDivLoss(reduction="batchmean"), probabilities()),
    "probabilities": (
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(0, 1).softmax(1)),
        numbers(),
    ),
    "a function that ignores another class": (over_tokens(partial(F.cross_entropy, ignore_index=2)), classes(0.5, 2)),
    "targets shifted by the loss": (
        lambda o, t: F.cross_entropy(o.flatten(0, 1).float(), F.pad(t, (0, 1), value=-100)[..., 1:].flatten()),
        classes(0.5),
    ),
    "a module that contains a loss": (OwnCriterion(), classes(0.3, 2)),
    "a mean under a mask": (mean_under_mask, classes(0.5)),
    "targets that a mask picks": (mean_of_picked, classes(0.5)),
    "a mean over all targets, the masked ones included": (
        lambda o, t: (each_of(o, t) * (t != -100)).mean(),
        classes(0.5),
    ),
    "numbers, of which -100 is one": (lambda o, t: F.mse_loss(o[..., 0], t / 100), classes(0.5)),
    "sums divided by the samples": (
        lambda o, t: (F.mse_loss(o, t, reduction="sum") + o.exp().sum()) * 0.02 / o.shape[0],
        numbers(),
    ),
    "a mean over samples, summed over the rest": (lambda o, t: 1 - (o - t).abs().mean(0).sum() / 9, numbers()),
    "probabilities of targets, by index": (
        lambda o, t: -o.flatten(0, 1).log_softmax(1)[torch.arange(t.numel()), t.flatten()].mean(),
        classes(0),
    ),
    "two means": (lambda o, t: F.mse_loss(o, t) + 0.1 * F.l1_loss(o, t), numbers()),
    "two means over the same targets": (
        lambda o, t: sum(F.cross_entropy(x.flatten(0, 1), t.flatten()) for x in (o, 2 * o)),
        classes(0.5),
    ),
    "means added in place": (summed_in_place, numbers()),
    "a sum times one over the number": (lambda o, t: F.mse_loss(o, t, reduction="sum") * (1 / t.numel()), numbers()),
    "a sum divided by a tensor": (lambda o, t: (o - t).abs().sum() / torch.tensor(len(o)) / 20, numbers()),
    "a mask that is counted": (
        lambda o, t: (each_of(o, t) * (t != -100)).sum() / (t != -100).count_nonzero(),
        classes(0.5),
    ),
    "means written into a tensor": (means_in_a_tensor, numbers()),
    "samples written into a tensor": (samples_in_a_tensor, numbers()),
    "halves of outputs": (
        lambda o, t: F.mse_loss(*(part.cumsum(-1) for part in torch.cat((o, t), -1).chunk(2, -1))),
        numbers(),
    ),
    "targets shifted along the sequence": (
        lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
        classes(0.5),
    ),
    "a mean over tokens that came first": (lambda o, t: (o - t).abs().transpose(0, 1).mean(0).mean(), numbers()),
    "smooth labels, some ignored": (over_tokens(partial(F.cross_entropy, label_smoothing=0.1)), classes(0.5)),
    "weights of positives": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, (t > 0).float(), pos_weight=WEIGHTS),
        numbers(),
    ),
    "a sum over tokens over the samples": (
        lambda o, t: F.kl_div((o / 2).log_softmax(-1), t.softmax(-1), reduction="sum") * 4 / o.size(0),
        numbers(),
    ),
    "probabilities of alignments": (
        lambda o, t: F.ctc_loss(
            o.log_softmax(-1).transpose(0, 1), t[:, :2].clamp(min=1), torch.full((len(o),), TOKENS), t[:, 0] % 2 + 1
        ),
        classes(0),
    ),
    "cosines": (lambda o, t: F.cosine_embedding_loss(o[:, 0], t[:, 0], torch.ones(len(o))), numbers()),
    "a mean over features under a mask": (
        lambda o, t: (o.square().mean(-1) * counted(t)).sum() / counted(t).sum(),
        classes(0.5),
    ),
    "means under a mask of each sample": (
        lambda o, t: ((each_of(o, t) * counted(t)).sum(1) / counted(t).sum(1).clamp(min=1)).mean(),
        classes(0.5),
    ),
    "a penalty under the same mask": (
        lambda o, t: (
            F.cross_entropy(o.flatten(0, 1), t.flatten())
            + 0.01 * (o.logsumexp(-1).square() * counted(t)).sum() / counted(t).sum()
        ),
        classes(0.5),
    ),
    "a penalty of weights": (lambda o, t: F.mse_loss(o, t) + 0.1 * WEIGHTS.square().sum(), numbers()),
    "targets that the loss writes": (writes_targets, classes(0)),
    "a sum of all, then numbers beside": (
        lambda o, t: ((each_of(o, t) * counted(t)).sum(), counted(t).sum(), {"correct": (o.argmax(-1) == t).sum()}),
        classes(0.5),
    ),
    "roots of means of each sample": (lambda o, t: (o - t).square().mean((1, 2)).sqrt().mean(), numbers()),
    "a mean of what an own Function made": (lambda o, t: Doubled.apply((o - t).abs()).mean(), numbers()),
}


def train_plainly(loss: Loss, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[Tensor]]:
    model = nn.Sequential(*make_blocks())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        found = loss(model(inputs), targets.clone())
        found = found[0] / found[1] if isinstance(found, tuple) else found
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("microbatches", [2, 7])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_in_parts_learns_what_plain_torch_learns_from_the_whole(case: str, microbatches: int) -> None:
    loss, batches = CASES[case]
    wanted, weights = train_plainly(loss, batches)
    pipeline = Pipeline(
        make_blocks(),
        method="1f1b",
        stages=2,
        microbatches=microbatches,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
    )
    assert [r.loss for r in pipeline.run(copy.deepcopy(batches))] == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(list(pipeline.full_state_dict().values()), weights, rtol=1e-5, atol=1e-6)


def weight_of(loss: Any, output: Any, target: Any) -> float:
    return float(WeighedLoss(loss, "stage 1")(output, target)[1])


def test_what_a_mean_counts() -> None:
    logits, classes = torch.zeros(2, 3, requires_grad=True), torch.tensor([1, -100])
    assert weight_of(F.mse_loss, torch.zeros(6, 2), torch.zeros(6, 2)) == 6
    assert weight_of(lambda output, _: output.mean(), logits, None) == 2  # the samples of the output
    assert weight_of(F.cross_entropy, torch.zeros(2, 5, 2), torch.tensor([[1, -100], [-100, -100]])) == 0.5
    assert weight_of(lambda o, t: F.cross_entropy(o, t["labels"]), logits, {"labels": classes}) == 1
    assert weight_of(lambda o, t: F.mse_loss(o[:, 0], t.float()), logits, classes) == 2  # which ignores no -100


class Averaged(nn.Module):
    """Keeps an average of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, output: Tensor, target: dict[str, Any]) -> Tensor:
        weights = torch.tensor([float(len(text)) for text in target["texts"]])
        found: Tensor = ((output - target["numbers"]).square().mean(1) * weights).mean()
        self.average += found.detach()
        return found


@pytest.mark.parametrize("samples", [1, 4])
def test_a_loss_is_tried_on_a_copy(samples: int) -> None:
    """On halves of the numbers and of the texts of a microbatch."""
    loss, texts = Averaged(), ["a", "bcd", "ef", "ghij"][:samples]
    total, weight = WeighedLoss(loss, "stage 1")(
        torch.rand(samples, 3), {"numbers": torch.rand(samples, 3), "texts": texts}
    )
    assert weight == samples
    assert float(loss.average) == pytest.approx(float(total) / samples)


@pytest.mark.parametrize("weight", [3, 3.0, np.int64(3), torch.tensor(3), torch.tensor([3.0], requires_grad=True)])
def test_a_sum_comes_with_its_weight(weight: Any) -> None:
    total = torch.tensor(6.0)
    assert WeighedLoss(lambda *_: (total, weight), "stage 1")(None, None) == (total, 3.0)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (1.5, "stage 1: the loss must be a mean as a scalar tensor, or .sum, weight.; got float"),
        (torch.zeros(3), r"got a tensor of shape \(3,\)"),
        ({"loss": torch.tensor(1.0)}, "got dict"),
        ((torch.tensor(1.0), torch.zeros(2, 2), 3), "got tuple"),
        (
            (torch.tensor(1.0), torch.zeros(2, 2)),
            r"returned \(loss, a tensor of shape \(2, 2\)\).*return the loss alone",
        ),
        ((torch.tensor(1.0), {"accuracy": 1}), r"returned \(loss, dict\)"),
        ((torch.tensor(1.0), -1), "must not be negative, got -1"),
        ((torch.tensor(1.0), float("nan")), "must not be negative, got nan"),
    ],
)
def test_what_is_no_loss(result: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        WeighedLoss(lambda *_: result, "stage 1")(torch.zeros(2), torch.zeros(2))


SCALER = torch.amp.GradScaler("cpu")


class Scaling:
    """Has a scaler, as trainers do."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

    def loss(self, output: Any, target: Any) -> Any:
        return self.scaler.scale(F.mse_loss(output, target))


def test_a_scaler_that_is_off_is_no_trouble() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    check_loss(lambda output, target: scaler.scale(F.mse_loss(output, target)))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.MSELoss, r"loss is the class MSELoss; pass an instance: loss=MSELoss\(\)"),
        ("mse", "loss must be a function .*got 'mse'"),
        (nn.MSELoss(reduction="sum"), r"(?s)reduction='sum'.*target.numel\(\)"),
        (partial(F.mse_loss, reduction="none"), "reduction='none'"),
        (Weighted(), "loss has a parameter to be trained, scale"),
        (lambda output, target: SCALER.scale(F.mse_loss(output, target)), "loss uses a GradScaler, SCALER.*fp16"),
        (Scaling().loss, "loss uses a GradScaler, scaler"),
        ({0: F.mse_loss, 1: None}, "loss must be a function .*got None"),
    ],
    ids=[
        "class",
        "text",
        "sum",
        "none",
        "parameters",
        "scaled",
        "a method that scales",
        "by stage",
    ],
)
def test_losses_that_are_refused_before_anything_starts(loss: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_loss(loss)
    with pytest.raises(ConfigError, match=said):
        Pipeline(make_blocks(), method="1f1b", stages=2, microbatches=2, loss=loss, optimizer=torch.optim.SGD)


class OwnSum(nn.Module):
    """Named as torch names it, but no class of torch's losses."""

    def __init__(self, reduction: str, weight: float | None = None) -> None:
        super().__init__()
        self.reduction, self.weight = reduction, weight

    def forward(self, output: Tensor, target: Tensor) -> Any:
        total = (output - target).square().sum()
        return total if self.weight is None else (total, self.weight)


def own_sum(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.mse_loss(output, target, reduction=reduction)


@pytest.mark.parametrize("loss", [OwnSum("mean"), partial(own_sum, reduction="sum")], ids=["module", "partial"])
def test_a_loss_of_the_users_that_sums_must_say_of_what(loss: Any) -> None:
    """Else it would count as a mean, and the update would be too large by the number of samples."""
    output, target = torch.ones(2, 3), torch.zeros(2, 3)
    check_loss(loss)  # until it is called, it might return (sum, weight)
    with pytest.raises(ConfigError, match=r"(?s)stage 1: .*it is a sum.*return \(each \* mask\).sum\(\), mask.sum\(\)"):
        WeighedLoss(loss, "stage 1")(output, target)


UNKNOWN: dict[str, tuple[Loss, str]] = {
    "a sum": (lambda o, t: each_of(o, t).sum(), "it is a sum"),
    "a sum divided by a constant": (lambda o, t: each_of(o, t).sum() / 7.5, "two samples"),
    "a root of a mean": (lambda o, t: each_of(o, t).mean().sqrt(), "sqrt"),
    "a norm": (lambda o, t: each_of(o, t).norm(), "norm takes samples together"),
    "a mask of at least one": (
        lambda o, t: (each_of(o, t) * (t != -100)).sum() / (t != -100).sum().clamp(min=1),
        "clamp",
    ),
    "targets that nonzero picks": (lambda o, t: each_of(o, t)[(t != -100).nonzero()[:, 0]].mean(), "two samples"),
    "a quotient of outputs": (lambda o, t: (o[..., 0] * t).sum() / o.sum(), "quotient of two sums"),
    "means over different targets": (
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()) + o.square().mean(),
        "different numbers",
    ),
    "picked by two masks": (lambda o, t: torch.cat((o[t > 1], o[t > 2])).mean(), "different masks"),
    "picked and other targets": (lambda o, t: torch.cat((o[t > 1], o.flatten(0, 1))).mean(), "different masks"),
    "a loss for each sample, added up": (
        lambda o, t: sum(F.cross_entropy(a, b) for a, b in zip(o, t, strict=True)),
        "different numbers",
    ),
    "a sum of picked targets, divided by the samples": (
        lambda o, t: F.cross_entropy(o[t > 0], t[t > 0], reduction="sum") / len(o),
        "divide by the mask's sum",
    ),
    "one sample": (lambda o, t: F.cross_entropy(o[0], t[0]), "two samples"),
    "some samples": (lambda o, t: F.cross_entropy(o[:1].flatten(0, 1), t[:1].flatten()), "two samples"),
    "targets gathered under a mask": (lambda o, t: -o[t != -100, t[t != -100]].mean(), "different masks"),
    "weights of mean squares": (lambda o, t: F.mse_loss(o[..., 0], t.float(), weight=t.abs() + 1.0), "its weights"),
    "a sum over another dimension than it seems": (
        lambda o, t: each_of(o, t).transpose(0, 1).mean(0).sum(),
        "two samples",
    ),
    "a sum over what may be samples": (lambda o, t: each_of(o, t).T.sum(1).mean(), "two samples"),
    "a constant that is the number of samples": (lambda o, t: each_of(o, t).sum() / 2, "two samples"),
    "one over such a constant": (lambda o, t: each_of(o, t).flatten(1).sum() * 0.5, "two samples"),
    "a number that goes with one size": (
        lambda o, t: (each_of(o, t) * torch.ones(2, 1)).sum() / len(o),
        "two samples",
    ),
    "one sample of each token": (lambda o, t: each_of(o, t).T[:, 0].mean(), "two samples"),
    "norms over samples": (lambda o, t: each_of(o, t).T.norm(dim=1).mean(), "two samples"),
    "roots of means over samples": (lambda o, t: each_of(o, t).T.mean(1).sqrt().mean(), "two samples"),
    "means over other targets, in a tensor": (means_over_other_targets_in_a_tensor, "different numbers"),
    "a mean of one": (lambda o, t: each_of(o, t).unsqueeze(0).mean(0).sum(), "two samples"),
    "largest of all samples": (lambda o, t: o.amax(0).mean(), "two samples"),
    "largest few": (lambda o, t: each_of(o, t).flatten().topk(3).values.mean(), "two samples"),
    "a mean times its samples": (lambda o, t: o.square().mean() * len(o), "two samples"),
    "a sum over a mask's sum and its samples": (
        lambda o, t: (each_of(o, t) * (t != -100)).sum() / ((t != -100).sum() * len(o)),
        "quotient of two sums",
    ),
    "probabilities over samples": (lambda o, t: o.softmax(0).square().mean(), "two samples"),
    "samples in turn": (lambda o, t: (o.roll(1, 0) * t[..., None]).mean(), "two samples"),
    "sums up to each sample": (lambda o, t: o.cumsum(0).square().mean(), "two samples"),
    "distances of samples": (lambda o, t: torch.cdist(o[:, 0], o[:, 1]).mean(), "two samples"),
    "pairs of samples": (lambda o, t: (o[:, None] - o[None]).square().mean(), "two samples"),
    "a mean times what it is itself": (lambda o, t: o.square().mean() * o.square().mean().item(), "two samples"),
    "samples of a normal spread": (
        lambda o, t: F.batch_norm(o, None, None, training=True).exp().mean(),
        "two samples",
    ),
    "a mean without what is not a number": (lambda o, t: each_of(o, t).nanmean(), "nanmean"),
    "as many samples as there are": (lambda o, t: F.cross_entropy(o[:, 0] @ o[:, 0].T, torch.arange(2)), "fails"),
    "a spread over samples": (lambda o, t: o.square().mean() + (1 - o.mean(1).std(0)).relu().mean(), "two samples"),
    "a mean that counts, unless it is small": (lambda o, t: (o.square().mean() - 9).clamp(min=0), "clamp"),
    "weights by the classes of a batch": (
        lambda o, t: F.cross_entropy(
            o.flatten(0, 1), t.flatten(), weight=t.clamp(min=0).flatten().bincount(minlength=5) / t.numel()
        ),
        "two samples",
    ),
}  # fmt: skip


RANDOM: dict[str, tuple[Loss, str]] = {
    "a whole sum that draws random numbers": (lambda o, t: F.dropout(each_of(o, t)).sum() / 4, "two samples"),
    "samples in another order by chance": (lambda o, t: (o * o[torch.randperm(len(o))]).mean(), "two samples"),
    "one sample of all, by chance": (lambda o, t: o[torch.randint(len(o), ())].square().mean(), "two samples"),
}


@pytest.mark.parametrize("case", [*UNKNOWN, *RANDOM])
def test_a_number_that_is_no_known_mean_over_samples_is_refused(case: str) -> None:
    loss, said = {**UNKNOWN, **RANDOM}[case]
    torch.manual_seed(1)
    targets = torch.tensor([[1, -100, 3], [2, 4, 0]])
    with pytest.raises(ConfigError, match=rf"(?s)stage 1: .*{said}.*return \(each \* mask\).sum\(\), mask.sum\(\)"):
        WeighedLoss(loss, "stage 1")(torch.randn(2, 3, 5, requires_grad=True), targets)


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_whole_batch_is_its_own_divisor(case: str) -> None:
    """Whatever the loss is: with one microbatch in all there is nothing to weigh."""
    loss, _ = UNKNOWN[case]
    torch.manual_seed(1)
    batch = torch.randn(2, 3, 3), torch.tensor([[1, -100, 3], [2, 4, 0]])
    wanted, weights = train_plainly(loss, [batch])
    pipeline = Pipeline(
        make_blocks(), "1f1b", stages=2, microbatches=1, loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
    )  # fmt: skip
    assert [r.loss for r in pipeline.run([batch])] == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(list(pipeline.full_state_dict().values()), weights, rtol=1e-5, atol=1e-6)
    found = pipeline.evaluate([batch, batch])
    assert found is not None
    plain = nn.Sequential(*make_blocks())
    plain.load_state_dict(pipeline.full_state_dict())
    assert found[0] == pytest.approx(loss(plain(batch[0]), batch[1]).item())


def mean_of_each_token(output: Tensor, target: Tensor) -> Tensor:
    each = each_of(output, target) * counted(target)
    return (each.sum(0) / counted(target).sum(0)).mean()


LATER: dict[str, Loss] = {
    "a number of targets in Python": lambda o, t: (each_of(o, t) * counted(t)).sum() / int(counted(t).sum()),
    "a number of targets in NumPy": lambda o, t: (each_of(o, t) * counted(t)).sum() / counted(t).numpy().sum(),
    "places of targets": lambda o, t: each_of(o, t).flatten()[counted(t).flatten().nonzero()[:, 0]].mean(),
    "means of each token": mean_of_each_token,
    "means of each sample": lambda o, t: sum(F.cross_entropy(a, b) for a, b in zip(o, t, strict=True)) / len(o),
    "the longest sample": lambda o, t: each_of(o, t)[:, : int(counted(t).sum(1).max())].mean(),
    "an own Function of what a mask picked": lambda o, t: (
        Doubled.apply((each_of(o, t) * counted(t)).sum(0)) / counted(t).sum(0)
    ).mean(),
}


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("case", LATER)
def test_a_loss_that_padding_would_make_wrong_is_refused_before_any_padding_comes(case: str, samples: int) -> None:
    torch.manual_seed(1)
    targets = torch.randint(CLASSES, (samples, TOKENS))
    with pytest.raises(ConfigError, match="different numbers|two samples|as it divides"):
        WeighedLoss(LATER[case], "stage 1")(torch.zeros(samples, TOKENS, CLASSES, requires_grad=True), targets)


PAD = CLASSES - 1  # one of the classes, so nobody knows it before it comes


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


ASKED: dict[str, Loss] = {
    "item": lambda o, t: summed(o, t) / (t != PAD).sum().item(),
    "one over an int": lambda o, t: summed(o, t) * (1 / max(1, int((t != PAD).sum()))),
    "a float, in a tensor": lambda o, t: summed(o, t) / torch.tensor(float((t != PAD).sum())),
    "the length of what a mask picks": lambda o, t: summed(o, t) / len(t[t != PAD]),
    "NumPy": lambda o, t: summed(o, t) / int((t.numpy() != PAD).sum()),
    "a list": lambda o, t: summed(o, t) / sum(each != PAD for row in t.tolist() for each in row),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_number_taken_of_samples_is_no_constant_when_padding_comes(case: str) -> None:
    torch.manual_seed(1)
    output, targets = torch.zeros(2, TOKENS, CLASSES, requires_grad=True), torch.randint(PAD, (2, TOKENS))
    loss = WeighedLoss(ASKED[case], "stage 1")
    assert loss(output, targets)[1] == 2
    targets[1, 1:] = PAD
    with pytest.raises(ConfigError, match="number that was taken of samples"):
        loss(output, targets)


def test_a_number_taken_of_samples_for_a_log_is_no_trouble() -> None:
    log: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        each = each_of(output, target)
        log.extend(((output.argmax(-1) == target).sum().item(), each.sum().item(), len(target[target == 1])))
        return each[:, :-1].sum() / each[:, :-1].numel()

    output, targets = torch.rand(2, TOKENS, CLASSES, requires_grad=True), torch.arange(2 * TOKENS).view(2, -1) % CLASSES
    for _ in range(2):
        assert WeighedLoss(loss, "stage 1")(output, targets)[1] == 2


def test_what_comes_later_is_tried_by_itself() -> None:
    """A branch of the loss that the first microbatch did not take."""
    weighed = WeighedLoss(lambda o, t: F.mse_loss(o, t) * (len(o) if t.max() > 5 else 1), "stage 1")
    assert weighed(torch.ones(2, 3), torch.ones(2, 3))[1] == 2
    with pytest.raises(ConfigError, match="two samples"):
        weighed(torch.ones(2, 3), 9 * torch.ones(2, 3))


def pipelined(loss: Loss, width: int) -> Pipeline:
    return Pipeline(
        make_blocks(), "1f1b", stages=2, microbatches=4 // width, data_parallel=width, loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
    )  # fmt: skip


def of_lengths(shapes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(*shape, 3, generator=generator), torch.rand(*shape, CLASSES, generator=generator))
        for shape in shapes
    ]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        lambda o, t: (o - t).square().sum() / o.numel(),
        lambda o, t: F.mse_loss(o, t) + F.l1_loss(o[:, 0], t[:, 0]),
        lambda o, t: ((o - t).square() * (t > 0)).sum() / (t > 0).sum(),
    ],
)
def test_means_over_other_numbers_of_elements_in_a_batch_are_refused(loss: Loss, width: int) -> None:
    """Such as of sequences padded to different lengths, be they of one pipeline or of several side by side."""
    alike, unlike = of_lengths([(2, 4), (1, 4), (3, 4), (2, 4)]), of_lengths([(2, 4), (2, 4), (2, 6), (1, 6)])
    pipeline, longer = pipelined(loss, width), of_lengths([(2, 6)] * 4)
    assert [r.weight for r in pipeline.run([alike, longer])][1] == pytest.approx(8, abs=1)
    with pytest.raises(ConfigError, match=r"batch 2: samples of some microbatches have other shapes.*\(sum, weight\)"):
        list(pipeline.run([unlike]))


@pytest.mark.parametrize("width", [1, 2])
def test_other_numbers_of_samples_in_microbatches_are_weighted(width: int) -> None:
    batch = of_lengths([(1, 4), (3, 4), (2, 4), (5, 4)])
    wanted, weights = train_plainly(F.mse_loss, [tuple(map(torch.cat, zip(*batch, strict=True)))])  # type: ignore[list-item]
    pipeline = pipelined(F.mse_loss, width)
    assert [report.loss for report in pipeline.run([batch])] == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(list(pipeline.full_state_dict().values()), weights, rtol=1e-5, atol=1e-6)


class Tokenwise(nn.Linear):
    tokenwise = True


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (F.mse_loss(o, t, reduction="sum"), t.numel()),
        lambda o, t: (F.mse_loss(o, t, reduction="sum"), len(o)),
        lambda o, t: (((o - t).abs() * (t > 0)[..., :1]).sum(), (t > 0)[..., 0].sum()),
        lambda o, t: (F.mse_loss(o, t, reduction="sum"), 1.0),
    ],
    ids=["elements", "samples", "masked tokens", "one"],
)
def test_the_weight_of_slices_is_that_of_their_sequences(loss: Loss, slices: int) -> None:
    blocks = [Tokenwise(3, 4), Tokenwise(4, CLASSES)]
    plain, batch = copy.deepcopy(nn.Sequential(*blocks)), numbers()[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    found = [loss(plain(x), y) for x, y in zip(*(part.tensor_split(2) for part in batch), strict=True)]
    mean = sum(total for total, _ in found) / sum(weight for _, weight in found)
    mean.backward()
    optimizer.step()
    pipeline = Pipeline(
        blocks, penstock.method("seq1f1b", slices=slices), stages=2, microbatches=2, loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    )  # fmt: skip
    assert [r.loss for r in pipeline.run([batch])] == pytest.approx([mean.item()], rel=1e-6)
    torch.testing.assert_close(list(pipeline.full_state_dict().values()), [p.detach() for p in plain.parameters()])


def test_a_loss_that_shifts_within_slices_is_refused() -> None:
    def shifts(output: Tensor, target: Tensor) -> Any:
        return F.mse_loss(output[:, :-1], target[:, 1:], reduction="sum"), target[:, 1:].numel()

    with pytest.raises(ConfigError, match="the weight 5 for a slice, and 3 times that .* neither tokens nor samples"):
        WeighedLoss(shifts, "stage 1")(torch.ones(1, 2, 5), torch.ones(1, 2, 5), piece=(0, 2))


def train_without_targets(group: Any) -> tuple[list[Any], list[Tensor], Any]:
    """Batches of two microbatches, of which one, then both have no target; what reports, weights and evaluation say."""
    batches = classes(0)[:2]
    batches[0][1][:4], batches[1][1][:] = -100, -100
    pipeline = Pipeline(
        make_blocks(), "1f1b", stages=2, microbatches=2, loss=over_tokens(F.cross_entropy), group=group,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
    )  # fmt: skip
    losses = [(report.loss, report.weight) for report in pipeline.run(batches)]
    return losses, list(pipeline.full_state_dict().values()), pipeline.evaluate(batches[1:])


def test_batches_without_targets_change_nothing_in_processes_either(pool: Pool) -> None:
    loss, (inputs, targets) = over_tokens(F.cross_entropy), classes(0)[0]
    targets[:4] = -100
    (mean,), weights = train_plainly(loss, [(inputs, targets)])
    first, last = pool.submit(train_without_targets, ranks=2)
    for losses, found in ((last[0], first), (train_without_targets(None)[0], train_without_targets(None))):
        assert losses == [(pytest.approx(mean, rel=1e-6), 3.0), (None, 0.0)]
        torch.testing.assert_close(found[1], weights, rtol=1e-5, atol=1e-6)
        assert found[2] is None


def identity() -> nn.Linear:
    linear = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))
    return linear


def test_other_targets_are_ignored_in_every_batch() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [0.0, 0.0]]])
    many, one = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0, 0], [1, 0]])
    pipeline = Pipeline(
        [identity(), identity()], "1f1b", stages=2, microbatches=2,
        loss=lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), ignore_index=0),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
    )  # fmt: skip
    found = [report.loss for report in pipeline.run((logits, t) for t in (torch.tensor([[1, 1], [1, 0]]), many, one))]
    two, three = math.log(2), math.log(1 + math.exp(3))
    assert found == pytest.approx([1.478293904, (2 * two + three) / 3, three], rel=1e-6)


def test_a_loss_of_the_users_that_says_its_weight_may_sum() -> None:
    total, weight = WeighedLoss(OwnSum("sum", 6.0), "stage 1")(torch.ones(2, 3), torch.zeros(2, 3))
    assert (float(total), weight) == (6.0, 6.0)


def test_a_frozen_loss_is_no_trouble() -> None:
    check_loss(Weighted().requires_grad_(False))


def test_an_infinite_output_without_targets_is_a_loss_of_zero() -> None:
    """Logits that are masked by -inf are common, and zero times infinity is no number."""
    output = torch.tensor([[0.0, -torch.inf], [1.0, 2.0]], requires_grad=True)
    target = torch.tensor([-100, -100])
    total, weight = WeighedLoss(F.cross_entropy, "stage 1")(output, target)
    total.backward()
    assert (float(total.detach()), weight) == (0.0, 0.0)
    assert output.grad is not None
    assert torch.equal(output.grad, torch.zeros(2, 2))


@pytest.mark.parametrize(("precision", "format"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("stages", [1, 2])
def test_in_low_precision_a_loss_is_computed_in_float32_as_under_autocast(
    precision: Any, format: torch.dtype, stages: int
) -> None:
    """torch's loss over classes would return 8 bits of mantissa, of a sum over all of them."""
    seen: list[torch.dtype] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.cross_entropy(output, target)

    blocks, batches = make_blocks(), tokens(0.0)
    plain = nn.Sequential(*make_blocks())
    pipeline = Pipeline(
        blocks, "1f1b", stages=stages, microbatches=1, loss=loss, precision=precision,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    (report,) = pipeline.run(batches[:1])
    inputs, targets = batches[0]
    wanted = F.cross_entropy(plain.to(format)(inputs.to(format)).float(), targets)
    assert seen == [torch.float32]
    assert report.loss == pytest.approx(wanted.item(), rel=1e-6)
    mean, _ = pipeline.evaluate(batches[1:2]) or (0.0, 0.0)
    assert mean != torch.tensor(mean).to(format).item()


def test_in_full_precision_a_loss_gets_what_the_model_returns() -> None:
    seen: list[torch.dtype] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.mse_loss(output, target)

    blocks = [nn.Linear(3, 3).double(), nn.Linear(3, 3).double()]
    pipeline = Pipeline(
        blocks, "1f1b", stages=2, microbatches=1, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    list(pipeline.run([(torch.zeros(2, 3).double(), torch.zeros(2, 3).double())]))
    assert seen == [torch.float64]
