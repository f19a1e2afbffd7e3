"""The reference against plain torch loops and recurrences worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, DataError
from support.cases import BALANCE, FLUSH, METHODS, OPTIMIZERS, cut, make_blocks, token_loss
from support.own_methods import train_reference


class Times(nn.Module):
    """w x, with one weight."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target) ** 2 / 2


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def of(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def test_delays_on_a_quadratic() -> None:
    """f(w) = w^2 / 2 has the gradient w: flush w' = w - a w, 2bw w' = w - a (w one update ago)."""
    batches = [[(of(1.0), of(0.0))]] * 5
    wanted = {"gpipe": [1.0], "2bw": [1.0, 0.9]}
    for _ in range(5):
        wanted["gpipe"].append(0.9 * wanted["gpipe"][-1])
    for _ in range(4):
        wanted["2bw"].append(wanted["2bw"][-1] - 0.1 * wanted["2bw"][-2])
    wanted["2bw"][2] = 0.9 - 0.1 * 1.0
    for method, weights in wanted.items():
        result = train_reference([{"a": Times(1.0)}], half_square, batches, method=method, optimizer=sgd)
        assert [float(version["a.w"]) for version in result.versions] == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_stash_on_a_product(m: int) -> None:
    """y = c b a x on three stages: the first reads what it had two microbatches ago, the second one ago."""
    xs = [[0.5 + 0.1 * k + 0.3 * t for k in range(m)] for t in range(5)]
    versions = [[0.9], [1.1], [0.7]]
    for t in range(5):
        sums = [0.0, 0.0, 0.0]
        for k in range(m):
            g = t * m + k
            a, b, c = (weights[max(0, g - ahead) // m] for weights, ahead in zip(versions, (2, 1, 0), strict=True))
            x = xs[t][k]
            slope = (a * b * c * x - 1.0) / m
            for stage, factor in enumerate((b * c * x, a * c * x, a * b * x)):
                sums[stage] += slope * factor
        for weights, total in zip(versions, sums, strict=True):
            weights.append(weights[-1] - 0.1 * total)
    stages = [{"a": Times(0.9)}, {"b": Times(1.1)}, {"c": Times(0.7)}]
    batches = [[(of(x), of(1.0)) for x in batch] for batch in xs]
    result = train_reference(stages, half_square, batches, method="stash", optimizer=sgd)
    for name, weights in zip(("a.w", "b.w", "c.w"), versions, strict=True):
        assert [float(version[name]) for version in result.versions] == pytest.approx(weights, rel=1e-12)


def test_a_drain_refills_the_delays_of_stash() -> None:
    stages = [{"a": Times(0.9)}, {"b": Times(1.1)}]
    batches = [[(of(1.0), of(1.0))]] * 4
    weights = [(0.9, 1.1)]
    reads = [(0, 0), (0, 1), (2, 2), (2, 3)]  # drained before batch 2
    for first, second in reads:
        a, b = weights[first][0], weights[second][1]
        slope = a * b - 1.0
        weights.append((weights[-1][0] - 0.1 * slope * b, weights[-1][1] - 0.1 * slope * a))
    result = train_reference(stages, half_square, batches, method="stash", optimizer=sgd, drains=[2])
    for version, wanted in zip(result.versions, weights, strict=True):
        assert (float(version["a.w"]), float(version["b.w"])) == pytest.approx(wanted, rel=1e-12)


def test_weights_and_skips() -> None:
    """The mean over all that counts; a batch where nothing counts changes neither weights nor schedule."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return target * output, float(target)

    batches = [[(of(2.0), of(1.0)), (of(4.0), of(3.0))], [(of(1.0), of(0.0))] * 2, [(of(1.0), of(1.0))] * 2]
    result = train_reference(
        *([{"a": Times(1.0)}], loss, batches), method="1f1b", optimizer=sgd, rate=lambda n: 1.0 - n / 2, divisor=5.0
    )
    assert result.losses[0] == (2 + 3 * 4) / 4
    assert result.losses[1] != result.losses[1]  # nan
    assert result.weights == [4.0, 0.0, 2.0]
    assert [float(g["a.w"]) for g in result.gradients if g] == pytest.approx([3.5, 1.0])
    assert [float(v["a.w"]) for v in result.versions] == pytest.approx([1.0, 0.65, 0.65, 0.6])
    assert result.gradients[1] == {}


@pytest.mark.parametrize("method", FLUSH)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_flush_is_plain_training(method: str, optimizer: str) -> None:
    """One module, one optimizer, the mean over the batch; whatever the cut and the number of microbatches."""
    batches = tokens()
    model = plain_model()
    losses, weights = train_plainly(model, optimizer, batches)
    for depth, m in ((1, 1), (2, 3), (4, 6)):
        result = train_reference(
            cut(make_blocks("mixed"), BALANCE[depth]),
            token_loss,
            [split(batch, m) for batch in batches],
            method=method,
            optimizer=OPTIMIZERS[optimizer],
            divisor=20.0,
        )
        assert result.losses == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(result.versions[-1][name], weight, rtol=1e-4, atol=1e-5)


def tokens() -> list[tuple[Tensor, Tensor]]:
    """Batches of 6 samples with gaps in the targets."""
    g = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(5):
        inputs, targets = torch.randint(13, (6, 4), generator=g), torch.randint(13, (6, 4), generator=g)
        targets[torch.rand(6, 4, generator=g) < 0.3] = -100
        batches.append((inputs, targets))
    return batches


def split(batch: tuple[Tensor, Tensor], m: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.chunk(m) for part in batch), strict=True))


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


def plain_model() -> nn.Sequential:
    model = nn.Sequential()
    for name, block in make_blocks("mixed").items():
        model.add_module(name, block if isinstance(block, nn.Module) else Function(block))
    return model


def train_plainly(
    model: nn.Sequential, optimizer: str, batches: list[tuple[Tensor, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    made = OPTIMIZERS[optimizer](list(model.named_parameters()))
    losses = []
    for inputs, targets in batches:
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def test_the_model_given_is_not_touched() -> None:
    blocks = make_blocks("mixed")
    before = copy.deepcopy(blocks["head"].state_dict())
    batches = [split(batch, 2) for batch in tokens()]
    train_reference([blocks], token_loss, batches, method="gpipe", optimizer=sgd)
    assert all(torch.equal(before[name], value) for name, value in blocks["head"].state_dict().items())


def test_unknown_method_and_uneven_batches() -> None:
    stages, batch = [{"a": Times(1.0)}], [(of(1.0), of(1.0))]
    with pytest.raises(ConfigError, match="unheard-of.*" + METHODS[0]):
        train_reference(stages, half_square, [batch], method="unheard-of", optimizer=sgd)
    with pytest.raises(DataError, match="batch 1 has 2 microbatches"):
        train_reference(stages, half_square, [batch, batch * 2], method="2bw", optimizer=sgd)


def test_gradients_are_those_that_the_optimizer_was_given() -> None:
    """Nesterov's momentum for many tensors at once, as torch computes it on a GPU, works in the gradient's memory."""

    def nesterov(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, foreach=True)

    batches = [[(of(1.0), of(0.0))]] * 2
    result = train_reference([{"a": Times(1.0)}], half_square, batches, method="gpipe", optimizer=nesterov)
    assert [float(given["a.w"]) for given in result.gradients] == pytest.approx([1.0, 1.0 - 0.1 * 1.9], rel=1e-12)
