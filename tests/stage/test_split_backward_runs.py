"""Pipelines whose backwards run in two halves: what they keep, compiled blocks, and where a backward is cut."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.ops.bound import BoundAction
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.setup.schedule_fitter import _halved
from penstock.schedule.ir.schedule import Op
from penstock.schedule.text_parser import parse_schedule
from support.cases import OPTIMIZERS, Residual
from support.halved_backwards import SAMPLES, TOKENS, WIDTH, Plain, gradients_of
from support.live_storage import LiveStorage
from support.schedules import make_schedule


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return ((output - target) ** 2).sum(), 1.0


LATE = """schedule late
rule flush
microbatches 3
nodes 0@0
rank 0: F0^t I0^t F1^t W0^t I1^t F2^t I2^t W1^t W2^t STEP[t]
"""
SPLIT = [(LATE, 1, 3), ("zb-h1", 1, 3), ("1f1b", 1, 3), ("zb-v", 1, 4), ("dualpipe-v", 1, 4), ("zb-v", 2, 5)]


@pytest.mark.parametrize(("method", "p", "m"), SPLIT)
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_the_account_of_activations_is_what_lives(
    method: str, p: int, m: int, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every pass: what operations have made and is alive is what the pipeline says, but for a few scalars.

    Where stages meet it may say more: what a stage hands on is counted there, too, when its own graph keeps it as well.
    """
    width, schedule = 32, parse_schedule(method) if method == LATE else make_schedule(method, p, m)
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
    balance = [9 - (schedule.num_stages - 1), *[1] * (schedule.num_stages - 1)]
    data = [[(torch.randn(64, width), torch.randn(64, width)) for _ in range(m)] for _ in range(4)]
    pipeline = Pipeline(
        [lambda x: x * 1.0, *layers],
        schedule,
        loss=squares,
        optimizer=OPTIMIZERS["sgd"],
        partition=balance,
        recompute=recompute,
    )
    for _ in pipeline.run(data[:2]):
        pass
    gaps: list[int] = []
    gc.collect()
    gc.disable()
    try:
        with LiveStorage() as tracker:
            real = BoundAction.act

            def act(self: BoundAction, *arguments: Any) -> None:
                real(self, *arguments)
                kinds = ("activations", "messages", "parked activations", "offloaded activations")
                said = sum(live.get(kind, 0) for live in pipeline.live_bytes().values() for kind in kinds)
                gaps.append(tracker.live - said)

            monkeypatch.setattr(BoundAction, "act", act)
            for _ in pipeline.run(data[2:]):
                pass
    finally:
        gc.enable()
    row = 64 * width * 4
    assert len(gaps) > 4 * m
    assert max(gaps) < row  # less than one activation
    if schedule.num_stages == 1 and (
        recompute == "none" or method != LATE
    ):  # else inputs count, which the data hold as well
        assert min(gaps) > -row
    assert all(live["activations"] == live.get("messages", 0) == 0 for live in pipeline.live_bytes().values())


def test_torch_s_checkpoint_inside_a_block() -> None:
    """It runs its forward again once, not for each operation that reads a weight; nothing is put off."""
    torch.manual_seed(2)
    inner, calls = Residual(), []
    inner.register_forward_pre_hook(lambda *_: calls.append(1))  # torch stops it before its end
    module = Plain(lambda s, x: checkpoint(s.inner, x, use_reentrant=False), inner=inner)
    x, at_once = torch.randn(SAMPLES, TOKENS, WIDTH), {name for name, _ in module.named_parameters()}
    whole, halves = gradients_of(module, x, False, set()), gradients_of(module, x, True, at_once)
    for key, value in whole.items():
        assert torch.equal(halves[key], value), key
    assert len(calls) == 4


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block() -> None:
    """What is compiled would be traced past the stages; it runs as it is."""
    torch.manual_seed(2)
    plain, x = Residual(), torch.randn(SAMPLES, TOKENS, WIDTH)
    whole = gradients_of(plain, x, False, set())
    compiled = torch.compile(plain, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    halves = gradients_of(compiled, x, True, set())
    for key, value in whole.items():
        assert torch.equal(halves[key if key in ("x", "y") else f"_orig_mod.{key}"], value), key


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_of_compiled_blocks() -> None:
    """Where halves are cut blocks run as they are, elsewhere compiled: the same numbers, to the bit."""
    used: set[int] = set()

    def compiled(block: nn.Module, number: int) -> Any:
        def backend(graph: Any, _inputs: Any) -> Any:
            used.add(number)
            return graph.forward

        return torch.compile(block, backend=backend)

    def train(method: str, change: Callable[[nn.Module, int], Any]) -> tuple[dict[str, Any], list[float | None]]:
        torch.manual_seed(4)
        blocks = [change(Residual(), number) for number in range(4)]
        schedule = make_schedule(method, 2, 4)
        pipeline = Pipeline(blocks, schedule, loss=squares, optimizer=OPTIMIZERS["sgd"], partition=[2, 2])
        data = [[tuple(torch.randn(2, SAMPLES, TOKENS, WIDTH)) for _ in range(4)] for _ in range(3)]
        losses = [report.loss for report in pipeline.run(data)]
        return {key.replace("_orig_mod.", ""): value for key, value in pipeline.state_dict().items()}, losses

    wanted, told = train("1f1b", lambda block, _: block)
    found, also_told = train("zb-h1", compiled)
    assert told == also_told
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert used == {0, 1}  # nobody waits for the gradient of the first stage's input, so its backwards stay whole


def test_a_backward_is_cut_where_somebody_waits_for_its_first_half() -> None:
    """Of a stage whose W follows its I at once, only if the I has something to send."""
    schedule = make_schedule("zb-h1", 4, 8)
    first = next(stage for stage in schedule.stages if stage.index == 0)
    period = [a for a in schedule.programs[0].period if a.op in (Op.I, Op.W)]
    at_once = [k.unit.first for k, following in pairwise(period) if (k.op, following.op) == (Op.I, Op.W)]
    assert at_once
    for sends in (True, False):
        halved = _halved(schedule, first, sends)
        assert all(bool(halved and halved((k, 0))) is sends for k in at_once)
