"""The same script in plain torch and in a pipeline, for what PyTorch users do by habit (docs/habits.md)."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import support.habit_table
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
