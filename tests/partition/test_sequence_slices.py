"""Slices of sequences: the gradients of whole sequences, up to the rounding of sums that are taken in another order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError, DataError
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import GPTConfig
from penstock.options.parallelism import Partition
from penstock.options.run import Group
from penstock.partition.sequence_slices import Slicing, equal_lengths, equal_time_lengths
from penstock.runtime.pipeline import Pipeline
from support.cases import token_loss
from support.grouped import grouped
from support.pool import Pool
from support.schedules import make_schedule

LENGTH, WIDTH, VOCABULARY = 12, 8, 13
UNEQUAL = Slicing(lengths=lambda length, k: [length - 2 * (k - 1), *[2] * (k - 1)])


class Sums(nn.Module):
    """y = x + W s, where s sums all tokens so far: what is carried is one vector, and a number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_slice(x, None)[0]

    def forward_slice(self, x: Tensor, carry: Any) -> tuple[Tensor, Any]:
        total, count = (torch.zeros_like(x[:, :1]), 0) if carry is None else (carry["total"], carry["count"])
        sums = total + x.cumsum(1)
        weight = torch.arange(count + 1, count + x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + torch.tanh(self.map(sums / weight)), {"total": sums[:, -1:], "count": count + x.shape[1]}


def model() -> dict[str, nn.Module]:
    config = GPTConfig(layers=2, width=WIDTH, heads=2, context=LENGTH, vocabulary=VOCABULARY)
    blocks = {name: block.make() for name, block in gpt_blocks(config, seed=3).items()}
    torch.manual_seed(7)
    middle = {"sums": Sums(), "mlp": nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())}
    head = blocks.pop("head")
    return {name: block.double() for name, block in {**blocks, **middle, "head": head}.items()}


def data(batches: int, m: int) -> list[list[tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (batches, m, 2, LENGTH + 1), generator=g)
    return [[(t[:, :-1], t[:, 1:]) for t in batch] for batch in tokens]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.5, momentum=0.5)


def plain(batches: int, m: int) -> dict[str, Tensor]:
    """As everybody writes it."""
    network = nn.ModuleDict({name.replace(".", "_"): block for name, block in model().items()})
    optimizer = sgd(network.parameters())
    for batch in data(batches, m):
        for tokens, targets in batch:
            x = tokens
            for block in network.values():
                x = block(x)
            (F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum") / (m * targets.numel())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in zip(_names(), network.parameters(), strict=True)}


def _names() -> list[str]:
    return [f"{block}.{name}" for block, module in model().items() for name, _ in module.named_parameters()]


def exact_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, float(targets.numel())


def trained(
    group: dist.ProcessGroup | None, method: str, p: int, m: int, slices: int, batches: int, **more: Any
) -> tuple[dict[str, Tensor], list[float]]:
    schedule = make_schedule(method, p, m, options={"slices": slices})
    pipeline = Pipeline(model(), schedule, loss=exact_loss, optimizer=sgd, group=Group(group, 20.0), **grouped(more))
    losses = [report.loss for report in pipeline.run(data(batches, m)) if report.loss is not None]
    for stage in pipeline.stages.values():
        passes = stage.passes
        assert not any((passes.flights, passes.carry, passes.carry_gradients))
    return {name: value.clone() for name, value in pipeline.state_dict().items()}, losses


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["seq1f1b", "terapipe"])
@pytest.mark.parametrize(("p", "m", "slices"), [(1, 2, 3), (2, 1, 2), (2, 3, 4), (3, 4, 2), (4, 2, 3)])
def test_sequence_slices_in_one_process(method: str, p: int, m: int, slices: int) -> None:
    for slicing in (Slicing(), UNEQUAL):
        found, losses = trained(None, method, p, m, slices, 4, slicing=slicing)
        assert_close(found, plain(4, m))
        assert len(losses) == 4


@pytest.mark.parametrize(
    ("method", "p", "m", "slices"), [("seq1f1b", 2, 3, 3), ("seq1f1b", 4, 4, 2), ("terapipe", 4, 2, 2)]
)
def test_sequence_slices_on_ranks(pool: Pool, method: str, p: int, m: int, slices: int) -> None:
    parts = pool.submit(partial(trained, max_grad_norm=100.0), method, p, m, slices, 4, ranks=p)
    alone, losses = trained(None, method, p, m, slices, 4, max_grad_norm=100.0)
    state = {name: value for found, _ in parts for name, value in found.items()}
    assert state.keys() == alone.keys()
    assert all(torch.equal(state[name], value) for name, value in alone.items())
    assert parts[-1][1] == losses
    assert_close(state, plain(4, m))


def test_with_recompute() -> None:
    once, losses = trained(None, "seq1f1b", 2, 3, 3, 3)
    again, same = trained(None, "seq1f1b", 2, 3, 3, 3, recompute="stage")
    assert losses == same
    assert all(torch.equal(again[name], value) for name, value in once.items())


def test_what_the_last_slice_hands_on_dies_with_it() -> None:
    """No account of activations is left open."""
    schedule = make_schedule("seq1f1b", 2, 3, options={"slices": 3})
    pipeline = Pipeline(model(), schedule, loss=exact_loss, optimizer=sgd)
    for _ in pipeline.run(data(2, 3)):
        pass
    assert all(live["activations"] == 0 for live in pipeline.live_bytes().values())


class Neighbours(nn.Module):
    """A layer of a graph network: each stage sees itself and the stage so many places before it."""

    def __init__(self, distance: int) -> None:
        super().__init__()
        self.distance, self.map = distance, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_slice(x, None)[0]

    def forward_slice(self, x: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        before = x.new_zeros(self.distance, WIDTH) if carry is None else carry
        known = torch.cat((before, x))
        return torch.tanh(self.map(torch.cat((x, known[: len(x)]), dim=-1))), known[-self.distance :]


def test_chunks_of_a_graph_that_depend_on_each_other() -> None:
    """GNNPipe's pattern (arXiv 2308.10087): the microbatch is a whole graph, chunks need what others made."""

    def layers() -> list[nn.Module]:
        torch.manual_seed(4)
        return [Neighbours(distance).double() for distance in (1, 5, 3, 2)]  # five stages before: beyond the last chunk

    def loss(x: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return ((x - target) ** 2).sum(), float(len(x))

    g = torch.Generator().manual_seed(2)
    graph, target = (torch.randn(12, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    plain_layers = nn.Sequential(*layers())
    optimizer = sgd(plain_layers.parameters())
    for _ in range(3):
        total, weight = loss(plain_layers(graph), target)
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule = make_schedule("seq1f1b", 2, 1, options={"slices": 4})
    pipeline = Pipeline(
        layers(),
        schedule,
        loss=loss,
        optimizer=sgd,
        partition=Partition(slicing=Slicing(dimension=0), balance=[2, 2]),
    )
    for _ in pipeline.run([[(graph, target)]] * 3):
        pass
    found = list(pipeline.state_dict().values())
    for mine, theirs in zip(found, plain_layers.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_lengths() -> None:
    assert equal_lengths(10, 4) == [3, 3, 2, 2]
    assert equal_time_lengths(0.0)(12, 4) == [3, 3, 3, 3]
    lengths = equal_time_lengths(0.01)(1000, 4)
    assert sum(lengths) == 1000
    assert lengths == sorted(lengths, reverse=True)
    ends = [sum(lengths[: j + 1]) for j in range(4)]
    costs = [end + 0.01 * end * end for end in ends]
    assert all(abs(cost - costs[-1] * (j + 1) / 4) <= 11 for j, cost in enumerate(costs))  # a token costs 21 at most
    assert equal_time_lengths(1.0)(4, 4) == [1, 1, 1, 1]


class Shifted(nn.Linear):
    """Of the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 1, 0))[:, :-1])


class Summed(nn.Sequential):
    """Over all tokens before."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.cumsum(1)


def test_a_block_that_does_not_say_how_is_refused() -> None:
    schedule = make_schedule("seq1f1b", 1, 1)
    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: x.cumsum(1)  # type: ignore[method-assign]
    mixing = (torch.tanh, nn.MultiheadAttention(8, 2), Shifted(8, 8), Summed(nn.Linear(8, 8)), replaced)
    for block in (*mixing, nn.Sequential(nn.Linear(8, 8), nn.LayerNorm((12, 8))), nn.Sequential(Shifted(8, 8))):
        with pytest.raises(ConfigError, match=r"stage 0 on rank 0: block 'mixer' .* forward_slice"):
            Pipeline({"mixer": block}, schedule, loss=token_loss, optimizer=sgd)


def test_sequences_that_are_too_short() -> None:
    schedule = make_schedule("terapipe", 1, 1, options={"slices": 20})
    pipeline = Pipeline(model(), schedule, loss=exact_loss, optimizer=sgd)
    with pytest.raises(DataError, match="a sequence of 12 cannot be cut into 20 slices"):
        list(pipeline.run(data(1, 1)))


def test_recompute_by_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute"):
        Pipeline(model(), make_schedule("seq1f1b", 2, 2), loss=exact_loss, optimizer=sgd, recompute="block")
