"""A model without any trained parameter is refused when it is to be trained, and can be evaluated."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from penstock import ConfigError, Group, Pipeline
from support.pool import Pool

BATCHES = [(torch.ones(8, 4), torch.zeros(8, 4))] * 3


def make(blocks: list[nn.Module], group: dist.ProcessGroup | None = None) -> Pipeline:
    return Pipeline(
        blocks,
        method="2bw",
        stages=2,
        microbatches=2,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        group=Group(group, 20.0),
    )


def frozen(*trained: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4).requires_grad_(number in trained) for number in range(2)]


FROZEN = "all 4 parameters have requires_grad=False"


@pytest.mark.parametrize(
    ("blocks", "why"), [(frozen(), FROZEN), ([nn.ReLU(), nn.Tanh()], "the blocks have no parameters")]
)
def test_it_is_refused_before_the_first_batch(blocks: list[nn.Module], why: str) -> None:
    pipeline = make(blocks)
    said = f"run() has nothing to train: {why}; set requires_grad=True on what is to be trained before"
    with pytest.raises(ConfigError, match=re.escape(said)):
        next(pipeline.run(BATCHES))
    assert pipeline.batches == 0
    found = pipeline.evaluate(BATCHES)  # the pipeline is as it was
    assert found is not None
    assert found[1] == 24


def refused(group: dist.ProcessGroup, *trained: int) -> str | int:
    pipeline = make(frozen(*trained), group)
    try:
        return len(list(pipeline.run(BATCHES)))
    except ConfigError as error:
        return str(error)


def test_all_ranks_refuse_it(pool: Pool) -> None:
    one, other = pool.submit(refused, ranks=2)
    assert one == other
    assert FROZEN in one
    assert pool.submit(refused, 1, ranks=2) == [3, 3]  # one trained stage is enough
