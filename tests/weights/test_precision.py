"""Low precision: versions are cast once, updates and gradients stay in float32, bit for bit as the reference says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.options.passes import PrecisionName
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.choice import method
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.verify.reference import Scaling
from support.cases import (
    ONE_OF_EACH,
    WIDTH,
    Case,
    Named,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    mean_loss,
    train,
    train_on_ranks,
)
from support.pool import Pool
from support.smallest_batch import least

LOW: tuple[PrecisionName, ...] = ("bf16", "fp16")
CALM = Scaling(2.0**10, 2.0, 0.5, 2)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ONE_OF_EACH)
def test_low_precision_equals_the_reference(
    pool: Pool, method: str, depth: int, precision: PrecisionName, device: str
) -> None:
    m, scaling = max(least(method, depth), 2), CALM if precision == "fp16" else None
    case = Case(method, depth, m, spans=(4, 3), precision=precision, scaling=scaling, device=device)
    wanted = expected(case)
    assert_same(train(None, case), wanted)
    if (depth, precision, device) == (2, "bf16", "cpu"):
        assert_same(train_on_ranks(pool, case), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["block", "stage"])
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_together_with_everything_else(method: str, recompute: RecomputeMode) -> None:
    case = Case(method, 2, 2, precision="bf16", recompute=recompute, clip=0.5, width=2, tied=True, spans=(5,))
    found, wanted = train(None, case), expected(case)
    found.gradients = found.gradients[: len(wanted.gradients)]
    assert_same(found, wanted)


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.fixed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fixed(self.map(x))
        self.seen.add((x.dtype, self.map.weight.dtype, self.fixed.weight.dtype, y.dtype))
        return y


def test_what_passes_see_and_what_is_left_afterwards() -> None:
    """Trained and frozen parameters, and floating-point inputs; the modules get their own back."""
    seeing = Seeing()
    pipeline = make_pipeline(
        Case("2bw", 2, 2), blocks=[seeing, nn.Linear(WIDTH, 3)], balance=None, precision="bf16",
        loss=lambda y, target: mean_loss(y.float(), target),
    )  # fmt: skip
    batches = [[(torch.randn(2, WIDTH), torch.tensor([0, 2]))] * 2 for _ in range(3)]
    list(pipeline.run(batches))
    assert seeing.seen == {(torch.bfloat16,) * 4}
    assert {p.dtype for p in seeing.parameters()} == {torch.float32}
    assert {t.dtype for t in pipeline.state_dict().values()} == {torch.float32}
    assert pipeline.evaluate(batches) is not None
    assert seeing.seen == {(torch.bfloat16,) * 4}


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=1e-3)


@pytest.mark.parametrize(
    ("method", "precision", "wanted"),
    [("1f1b", "fp32", 16), ("2bw", "fp32", 20), ("1f1b", "bf16", 18), ("2bw", "bf16", 24)],
)
def test_bytes_per_parameter(method: str, precision: PrecisionName, wanted: int) -> None:
    """By the live-byte ledger, without the scratch of updates, which has a constant size."""
    width = 256
    blocks: list[Any] = [nn.Linear(width, width, bias=False) for _ in range(4)]
    pipeline = make_pipeline(
        Case(method, 2, 4), blocks=blocks, balance=None, precision=precision, optimizer=adam,
        loss=lambda y, target: ((y.float() - target).square().sum(), 1.0),
    )  # fmt: skip
    batches = [[(torch.randn(2, width), torch.randn(2, width))] * 4 for _ in range(4)]
    list(pipeline.run(batches))
    parameters = 2 * width * width
    kinds = ("weights", "master weights", "gradients", "idle buffers", "optimizer")
    for live in pipeline.live_bytes().values():
        held = sum(live.get(kind, 0) for kind in kinds)
        scratch = 4 * parameters if (method, precision) == ("2bw", "fp32") else 0
        assert held - scratch == pytest.approx(wanted * parameters, rel=0.001)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="got torch.bfloat16; write precision='bf16'"):
        make_pipeline(Case("1f1b", 2, 2), precision=torch.bfloat16)
    with pytest.raises(ConfigError, match="precision must be one of fp32, bf16, fp16; got 'fp8'"):
        make_pipeline(Case("1f1b", 2, 2), precision="fp8")


def test_float16_comes_with_a_loss_scale() -> None:
    case = Case("1f1b", 2, 2, spans=(2,), skips=())
    pipeline = make_pipeline(case, precision="fp16")
    reports = list(pipeline.run(make_batches(case)))
    scales = [d.scale for report in reports for d in report.decided] + [d.scale for d in pipeline.decided()]
    assert scales == [65536.0, 65536.0]


def test_weights_that_are_written_between_runs_count() -> None:
    case = Case("1f1b", 2, 2, spans=(1,), skips=())
    first, second = (make_pipeline(case, precision="bf16") for _ in range(2))
    with torch.no_grad():
        for weights in second.state_dict().values():
            weights.mul_(2)
    batches = make_batches(case)
    assert first.evaluate(batches) != second.evaluate(batches)


def test_the_gradient_of_a_loss_in_low_precision_is_not_rounded() -> None:
    """1 / 3 has no short binary form."""
    case = Case("1f1b", 2, 3, spans=(2,), skips=(), loss="mean", precision="bf16")
    low = make_pipeline(case, loss=lambda y, target: mean_loss(y.float(), target).bfloat16(), max_grad_norm=100.0)
    full = make_pipeline(case, loss=lambda y, target: mean_loss(y.float(), target), max_grad_norm=100.0)
    norms = []
    for pipeline in (low, full):
        list(pipeline.run(make_batches(case)[:1]))
        norms.append(pipeline.decided()[-1].norm)
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    ("chosen", "precision", "kind"),
    [
        ("1f1b", "bf16", "trained"),
        ("2bw", "fp16", "trained"),
        ("2bw", "bf16", "instance"),
        ("1f1b", "fp16", "frozen"),
        (method("pipemare", reschedule=0), "bf16", "trained"),
    ],
)
def test_running_statistics_stay_in_float32(chosen: Any, precision: PrecisionName, kind: str) -> None:
    """As under autocast; and they follow those of plain torch."""

    def make() -> dict[str, nn.Module]:
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True) if kind == "instance" else nn.BatchNorm1d(4)
        return {
            "first": nn.Linear(4, 12),
            "shape": nn.Unflatten(1, (4, 3)),
            "norm": norm.requires_grad_(kind != "frozen"),
            "head": nn.Sequential(nn.Flatten(), nn.Linear(12, 2)),
        }

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).square().mean()

    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(4)]
    pipeline = Pipeline(
        make(),
        method=chosen,
        stages=2,
        microbatches=2,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
        precision=precision,
        partition=(1, 3),
        ema_decay=0.5,
    )
    assert len(list(pipeline.run(batches))) == 4
    for averaged in (False, True):
        assert pipeline.evaluate(batches, averaged=averaged)[0] > 0
    model = nn.Sequential(*make().values())
    for x, _ in batches:  # the weights hardly move
        for part in x.chunk(2):
            model(part)
    found = pipeline.state_dict()
    for name in ("running_mean", "running_var"):
        assert found[f"norm.{name}"].dtype == torch.float32
        torch.testing.assert_close(found[f"norm.{name}"], model.state_dict()[f"2.{name}"], rtol=0.05, atol=0.02)
    assert found["norm.weight"].dtype == torch.float32
