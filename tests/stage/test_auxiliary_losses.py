"""Losses that blocks add on their way train as in plain torch that accumulates over the same microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import CapabilityError, ConfigError
from support.graph_cases import SHAPES, M, data as data_of_graph, sgd, squares
from support.schedules import make_schedule

WIDTH, CLASSES = 4, 5


class Alone(nn.Module):
    """Adds its parameter as a loss, and hands on what it gets."""

    tokenwise = True

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        penstock.auxiliary(self.w)
        return x


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("method", "stages", "recompute"),
    [("1f1b", 1, "none"), ("gpipe", 2, "block"), ("1f1b", 2, "stage"), ("2bw", 2, "none"), ("zb-h1", 2, "none")],
)
def test_an_auxiliary_loss_counts_once_whatever_the_microbatches(
    method: str, stages: int, recompute: Any, microbatches: int
) -> None:
    alone, rest = Alone(), nn.Linear(1, 1)
    pipeline = penstock.Pipeline(
        [alone, rest][: stages], method, stages=stages, microbatches=microbatches, loss=F.mse_loss, recompute=recompute,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
    )  # fmt: skip
    (report,) = pipeline.run([(torch.ones(8, 1), torch.ones(8, 1))])
    assert alone.w.item() == 2.0 - 1.0
    assert report.auxiliary == 2.0


class Expert(nn.Module):
    """A router, whose use of experts is to be even; the loss of a microbatch is no sum over its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH)
        self.tell: Any = penstock.auxiliary

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.tell(share.mean(0).square().sum(), 0.5)
        return x + (self.experts(x).tanh().unflatten(-1, (3, WIDTH)) * share.unsqueeze(-1)).sum(-2)


class Experts(nn.Module):
    """A model with auxiliary losses within layers, and between them: of a value that an earlier stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Expert(), Expert()
        self.gate, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.tell: Any = penstock.auxiliary

    def forward(self, x: Tensor) -> Tensor:
        gated = self.gate(x)
        h = self.second(self.first(gated.tanh()))
        output: Tensor = self.head(h)
        self.tell(gated.square().mean() * self.head.out_features, 0.1)
        return output

    def blocks(self) -> list[Any]:
        return [self.gate, self.first, self.second, self.head]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def data(batches: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Targets that are ignored, unevenly; all of one microbatch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches, 8, WIDTH, generator=generator).double()
    y = torch.randint(CLASSES, (batches, 8), generator=generator)
    y[:, :2], y[:, 4] = -100, -100
    return list(zip(x, y, strict=True))


def make(blocks: bool) -> Any:
    torch.manual_seed(0)
    model = Experts().double()
    return nn.Sequential(*model.blocks()) if blocks else model


def train_plainly(model: nn.Module, parts: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Train over the same microbatches, each weighted by its targets; gradients of auxiliary losses are added."""
    optimizer, reports = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for x, y in data():
        optimizer.zero_grad()
        total = beside = torch.zeros((), dtype=torch.float64)
        for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            told: list[Tensor] = []
            for module in model.modules():
                if hasattr(module, "tell"):
                    module.tell = lambda value, factor, told=told: told.append(value * factor)
            output, weight = model(inputs), (targets != -100).sum()
            beside = beside + sum(told) * weight
            total = total + F.cross_entropy(output, targets, reduction="sum")
        weight = (y != -100).sum()
        ((total + beside) / weight).backward()
        optimizer.step()
        reports.append((float(total.detach() / weight), float(beside.detach() / weight)))
    return reports, model.state_dict()


def pipeline_of(
    model: nn.Module, method: str, blocks: bool, microbatches: int = 4, **options: Any
) -> penstock.Pipeline:
    example = None if blocks else data()[0][0]
    return penstock.Pipeline(
        model, method, microbatches=microbatches, loss=loss, example=example,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.3, momentum=0.9), **options,
    )  # fmt: skip


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "model"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("1f1b", {"stages": 1}),
        ("1f1b", {"stages": 3}),
        ("gpipe", {"stages": 2, "recompute": "block"}),
        ("1f1b", {"stages": 2, "recompute": "stage"}),
        ("zb-h1", {"stages": 3}),
        ("interleaved", {"stages": 2}),
        ("1f1b", {"stages": 2, "max_grad_norm": 1e3}),
        ("1f1b", {"stages": 2, "microbatches": 2, "data_parallel": 2}),
    ],
)
def test_auxiliary_losses_of_experts_train_as_in_plain_torch(blocks: bool, method: str, options: Any) -> None:
    wanted, weights = train_plainly(make(blocks), 4)
    pipeline = pipeline_of(make(blocks), method, blocks, **options)
    found = [(report.loss, report.auxiliary) for report in pipeline.run(data())]
    assert found == [pytest.approx(each, rel=1e-12) for each in wanted]
    for name, weight in pipeline.full_state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-12, msg=name)


def test_an_evaluation_reports_auxiliary_losses_beside_its_loss() -> None:
    (wanted, *_), _ = train_plainly(make(False), 4)
    found = pipeline_of(make(False), "1f1b", False, stages=2).evaluate(data()[:1])
    assert found is not None
    assert (found.mean, found.numbers["auxiliary"] / found.weight) == pytest.approx(wanted, rel=1e-12)


def test_a_loss_scale_holds_for_auxiliary_losses() -> None:
    class Squares(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            penstock.auxiliary(h.float().square().mean(), 0.5)
            return h

    x, y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)), torch.zeros(8, WIDTH)
    weights = []
    for precision in ("fp32", penstock.Precision("fp16", loss_scale=penstock.LossScale(256.0))):
        torch.manual_seed(0)
        first = Squares(WIDTH, WIDTH)
        pipeline = penstock.Pipeline(
            [first, nn.Linear(WIDTH, WIDTH)], "1f1b", stages=2, microbatches=2, loss=F.mse_loss, precision=precision,
            optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        )  # fmt: skip
        assert not any(report.decided[0].skipped for report in pipeline.run([(x, y)]) if report.decided)
        weights.append(first.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=2e-3, atol=2e-3)


def test_slices_of_sequences_weigh_auxiliary_losses_by_what_their_loss_counts() -> None:
    def counted(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return F.mse_loss(output, target, reduction="sum"), target.numel()

    alone = Alone()
    pipeline = penstock.Pipeline(
        [alone, nn.Linear(3, 3)], "seq1f1b", stages=2, microbatches=2, loss=counted,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
    )  # fmt: skip
    (report,) = pipeline.run([(torch.ones(4, 5, 3), torch.ones(4, 5, 3))])
    assert (alone.w.item(), report.auxiliary) == (1.0, 2.0)


class Telling(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any) -> Any:
        h = self.block(x)
        penstock.auxiliary(h.square().mean(), 0.5)
        return h


def test_auxiliary_losses_ahead_of_a_join_are_refused() -> None:
    shape = SHAPES["branches"]
    blocks = {key: Telling(block) for key, block in shape.blocks().items()}
    schedule = make_schedule(shape.order, shape.num_stages, M)
    pipeline = penstock.Pipeline(blocks, schedule, loss=squares, optimizer=sgd)
    with pytest.raises(CapabilityError, match="joins what several stages return"):
        list(pipeline.run(data_of_graph(shape, 1)))


def test_stages_that_are_measured_alone_may_add_losses() -> None:
    found = penstock.choose_recompute(
        make(True), (data()[0][0][:2], data()[0][1][2:4]), 1e9, method="1f1b", stages=2, microbatches=4, loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    assert found.recompute in ("none", ("none", "none"))


def test_outside_of_a_pipeline_an_auxiliary_loss_is_returned_for_the_caller_to_add() -> None:
    w = nn.Parameter(torch.tensor(2.0))
    penstock.auxiliary(w, 0.5).backward()
    assert w.grad == 0.5


class Kept(nn.Linear):
    def told(self, x: Tensor) -> Tensor:
        penstock.auxiliary(x.sum())
        return super().forward(x)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.told, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Kept(1, 1), "use_reentrant=False"),
        (lambda x: penstock.auxiliary(x), r"tensor of shape \(4, 1\)"),
        (lambda x: penstock.auxiliary(1.0), "got float"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_auxiliary_loss_is_refused(block: Any, said: str) -> None:
    pipeline = penstock.Pipeline(
        [nn.Linear(1, 1), block], "1f1b", stages=2, microbatches=2, loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        list(pipeline.run([(torch.ones(8, 1), torch.ones(8, 1))]))
