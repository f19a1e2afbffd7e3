"""Stages with frozen or shared parameters, with unused ones, with functions alone, with nothing to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import ConfigError
from support.cases import (
    BALANCE,
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Case,
    Outcome,
    Recording,
    Residual,
    as_outcome,
    assert_same,
    finish,
    make_batches,
    make_pipeline,
    mixed,
    reference_of,
    together,
)
from support.pool import Pool


class Shared(nn.Module):
    """Two layers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x)))
        return y


def half(x: Tensor) -> Tensor:
    return x / 2


def frozen_table() -> dict[str, Any]:
    """The first stage trains nothing, and its output wants no gradient."""
    return mixed() | {"table": nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)}


def partly_frozen() -> dict[str, Any]:
    blocks = mixed()
    blocks["first"].wide.requires_grad_(False)
    blocks["norm"].bias.requires_grad_(False)
    return blocks


def shared_in_a_block() -> dict[str, Any]:
    return mixed() | {"second": Shared()}


def shared_between_blocks() -> dict[str, Any]:
    """`norm` and `second` stand on one stage at every depth tested."""
    blocks = mixed() | {"norm": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    blocks["second"].weight = blocks["norm"].weight
    return blocks


def functions() -> dict[str, Any]:
    """A stage of functions alone."""
    return mixed() | {"norm": torch.relu, "tanh": half, "second": torch.sigmoid}


def unused_parameter() -> dict[str, Any]:
    """A parameter without a gradient counts as one with a gradient of zero, so that weight decay acts on it."""
    block = Residual()
    block.extra = nn.Parameter(torch.ones(3))
    return mixed() | {"second": block}


KINDS = [frozen_table, partly_frozen, shared_in_a_block, shared_between_blocks, functions, unused_parameter]


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("make", KINDS)
def test_kinds_of_stages(method: str, make: Callable[[], dict[str, Any]]) -> None:
    for depth, m in ((1, 2), (4, 3)):
        case = Case(method, depth, m, spans=(4,), skips=())
        balance = (1, 2, 2, 1) if depth == 4 else BALANCE[depth]
        found, result = train_kind(None, case, make, balance), reference_of(case, make, balance)
        assert_same(found, as_outcome(result))


@pytest.mark.parametrize("method", ["zb-h1", "zb-v", "dualpipe-v", "zb-h2-post"])
@pytest.mark.parametrize("make", KINDS)
def test_kinds_of_stages_where_backwards_have_two_halves(method: str, make: Callable[[], dict[str, Any]]) -> None:
    case = Case(method, 2, 4, spans=(4,), skips=())
    balance = BALANCE[2] if case.schedule.num_stages == 2 else (1, 2, 2, 1)
    found, wanted = train_kind(None, case, make, balance), as_outcome(reference_of(case, make, balance))
    if method == "zb-h2-post":  # whose optimizers are handed a gradient again where it is rejected
        found.gradients = wanted.gradients = []
    found.decided = []
    assert_same(found, wanted)


@pytest.mark.parametrize("make", [frozen_table, shared_between_blocks, functions])
def test_kinds_of_stages_on_ranks(pool: Pool, make: Callable[[], dict[str, Any]]) -> None:
    case, balance = Case("2bw", 4, 3, spans=(4,), skips=(1,)), (1, 2, 2, 1)
    outcomes = pool.submit(train_kind, case, make, balance, ranks=4)
    assert_same(together(outcomes), as_outcome(reference_of(case, make, balance)))


def train_kind(
    group: dist.ProcessGroup | None, case: Case, make: Callable[[], dict[str, Any]], balance: tuple[int, ...]
) -> Outcome:
    torch.manual_seed(5)
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, group, blocks=make(), balance=balance, optimizer=recording)
    outcome = Outcome([(r.batch, r.loss, r.weight) for r in pipeline.run(make_batches(case))])
    return finish(outcome, pipeline, recording)


def test_frozen_parameters_stay_as_they_are() -> None:
    blocks = partly_frozen()
    before = blocks["first"].wide.weight.clone()
    pipeline = make_pipeline(Case("2bw", 2, 2), blocks=blocks)
    list(pipeline.run(make_batches(Case("2bw", 2, 2))))
    assert blocks["first"].wide.weight.equal(before)
    assert pipeline.state_dict()["first.wide.weight"].equal(before)
    trained = {name for stage in pipeline.stages.values() for name in stage.module.tensors.trained}
    assert "first.wide.weight" not in trained
    assert sum(live["frozen parameters and buffers"] for live in pipeline.live_bytes().values()) == 4 * (
        2 * WIDTH * WIDTH + 2 * WIDTH + WIDTH
    )


def test_shared_parameters_go_by_their_first_name() -> None:
    blocks = shared_between_blocks()
    pipeline = make_pipeline(Case("2bw", 2, 2), blocks=blocks)
    list(pipeline.run(make_batches(Case("2bw", 2, 2))))
    state = pipeline.state_dict()
    assert "norm.weight" in state
    assert "second.weight" not in state
    assert "second.bias" in state
    assert blocks["second"].weight is blocks["norm"].weight


def test_a_model_with_nothing_to_train() -> None:
    pipeline = make_pipeline(Case("1f1b", 3, 2), blocks=[half] * 6, loss=lambda out, target: (out.sum() * 2, 2.0))
    batch = [(torch.ones(2), 0.0)] * 2
    with pytest.raises(ConfigError, match="nothing to train: the blocks have no parameters"):
        list(pipeline.run([batch] * 3))
    assert pipeline.evaluate([batch] * 3) == (2 / 64, 12.0)  # two samples in each of two microbatches
    assert pipeline.optimizers() == {}
