"""The same script in plain torch and in a pipeline, for what PyTorch users do by habit (docs/habits.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import support.habit_table
from penstock.runtime.pipeline import Pipeline
from support.habits import HABITS, PAGE, Refused, Trained, compare, found, in_penstock, in_torch, written
from support.pool import Pool

assert support.habit_table


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_as_in_plain_torch_or_as_the_page_says(name: str) -> None:
    habit = HABITS[name]
    for way, got in found(habit).items():
        said = habit.answers[way]
        assert type(got) is type(said), f"{way}: {got}"
        if isinstance(got, Refused):
            assert isinstance(said, Refused)
            assert said.words in got.words


BETWEEN = ["named_tuples", "dataclasses", "plain_values", "strided", "masks", "complex_numbers", "dict_targets"]


@pytest.mark.parametrize("name", [*BETWEEN, "inputs_that_require_grad", "input_gradient", "tied_weights"])
def test_a_habit_between_processes(pool: Pool, name: str) -> None:
    """The same numbers as in plain torch."""
    first, last = pool.submit(train_habit, name, ranks=2)
    assert compare(Trained(last.losses, first.state), in_torch(HABITS[name].script())) is None


def train_habit(group: dist.ProcessGroup | None, name: str) -> Trained:
    return in_penstock(HABITS[name].script(), "1f1b", group)


def test_the_page_has_every_habit() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python tests/support/habits.py"
    assert len(HABITS) > 100
    assert len({habit.says for habit in HABITS.values()}) == len(HABITS)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_what_a_block_with_torch_func_keeps_is_counted(recompute: Literal["none", "block"]) -> None:
    """torch.func refuses the hooks that count saved bytes; then they are counted in the graph, to the same number."""

    def peaks(block: Callable[[Tensor], Tensor]) -> list[int]:
        pipeline = Pipeline(
            {"first": nn.Linear(4, 6), "norm": nn.LayerNorm(6), "act": block, "head": nn.Linear(6, 4)},
            method="1f1b",
            stages=2,
            microbatches=2,
            loss=F.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            partition=(3, 1),
            recompute=recompute,
        )
        list(pipeline.run([(torch.randn(8, 4), torch.randn(8, 4))] * 2))
        return [peak["activations"] for peak in pipeline.peak_bytes().values()]

    def differentiating(x: Tensor) -> Tensor:
        torch.func.grad(torch.sum)(x.detach())
        return torch.sin(x).relu()

    assert peaks(differentiating) == peaks(lambda x: torch.sin(x).relu())
