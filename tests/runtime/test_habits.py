"""The same script in plain torch and in a pipeline, for what PyTorch users do by habit (docs/habits.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from penstock.errors import PenstockError
from support.habits import DRAINED, HABITS, MICROBATCHES, PAGE, WAYS, Answer, Differs, Habit, Refused, Script, written
from support.pool import Pool


@dataclass
class Trained:
    """The mean loss of every batch, and the weights and buffers at the end."""

    losses: list[float]
    state: Mapping[str, Tensor]


def in_torch(script: Script) -> Trained:
    """Train in plain torch."""
    model = nn.Sequential()
    for name, block in script.blocks.items():
        model.add_module(name, block if isinstance(block, nn.Module) else Function(block))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = script.optimizer(named)
    scheduler = None if script.lr_scheduler is None else script.lr_scheduler(optimizer)
    losses: list[float] = []
    for number, (inputs, targets) in enumerate(script.batches):
        optimizer.zero_grad()
        count = MICROBATCHES if script.accumulates else 1
        pairs = list(zip(pieces(inputs, count), pieces(targets, count), strict=True))
        losses.append(0.0)
        for x, y in pairs:
            with script.around():
                result = script.loss(model(x), y)
            mean = (result[0] / result[1] if isinstance(result, tuple) else result) / len(pairs)
            mean.backward()
            losses[-1] += float(mean)
        script.before_step(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        script.after_step(model)
        script.in_loop(number, script.blocks)
    return Trained(losses, model.state_dict() if script.result is None else script.result[0](model))


def pieces(tree: Any, count: int) -> Iterator[Any]:
    """The microbatches of inputs, or of targets."""
    if count == 1:
        yield tree
        return
    leaves, spec = pytree.tree_flatten(tree)
    parts = [leaf.tensor_split(count) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    yield from (pytree.tree_unflatten(list(part), spec) for part in zip(*parts, strict=True))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def in_penstock(script: Script, way: str, group: Any = None) -> Trained:
    """Train with a pipeline of two stages, in this process or on two ranks."""
    options = {"stages": 2, "microbatches": MICROBATCHES, "partition": [2, len(script.blocks) - 2]}
    options |= WAYS[way] | script.options | {"group": group}
    with script.around():
        pipeline = penstock.Pipeline(
            script.blocks, loss=script.loss, optimizer=script.optimizer, lr_scheduler=script.lr_scheduler, **options
        )
        spans: Iterable[Any] = ([batch] for batch in script.batches) if way in DRAINED else [script.batches]
        losses = []
        for report in (report for span in spans for report in pipeline.run(span)):
            losses.append(report.loss)
            script.in_loop(report.batch, script.blocks)
    return Trained(losses, dict(pipeline.full_state_dict()) if script.result is None else script.result[1](pipeline))


def found(habit: Habit) -> dict[str, Answer]:
    """What comes of a habit in every way: None for the same numbers, a refusal by its message, or a difference."""
    answers: dict[str, Answer] = {}
    said: Trained | None = None
    for way in habit.answers:
        try:
            got = in_penstock(habit.script(), way)
        except PenstockError as error:
            answers[way] = Refused(str(error), "")
            continue
        said = in_torch(habit.script()) if said is None else said
        difference = compare(got, said)
        answers[way] = None if difference is None else Differs(difference)
    return answers


def compare(got: Trained, said: Trained) -> str | None:
    """The first difference; None where all numbers are the same, but for roundings."""
    if len(got.losses) != len(said.losses):
        return f"{len(got.losses)} batches, not {len(said.losses)}"
    if got.state.keys() != said.state.keys():
        return f"names {sorted(got.state.keys() ^ said.state.keys())}"
    losses = enumerate(zip(got.losses, said.losses, strict=True))
    single = any(tensor.dtype == torch.float32 for tensor in said.state.values())
    pairs = [(f"loss {i}", *torch.tensor(both, dtype=torch.float32 if single else torch.float64)) for i, both in losses]
    pairs += [(name, got.state[name], tensor) for name, tensor in said.state.items()]
    for name, a, b in pairs:
        exact = a.dtype in (torch.float64, torch.complex128) and b.dtype == a.dtype
        try:
            torch.testing.assert_close(
                a, b, rtol=1e-9 if exact else 1e-5, atol=1e-11 if exact else 1e-6, equal_nan=False
            )
        except AssertionError as error:
            return f"{name}: {error}".replace("\n", " ")
    return None


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


BETWEEN = ["trees", "kinds_of_tensors", "dict_inputs", "clamped_gradients_in_scale", "input_gradient", "tied_weights"]


@pytest.mark.parametrize("name", BETWEEN)
def test_a_habit_between_processes(pool: Pool, name: str) -> None:
    """The same numbers as in plain torch."""
    first, last = pool.submit(train_habit, name, ranks=2)
    assert compare(Trained(last.losses, first.state), in_torch(HABITS[name].script())) is None


@pytest.mark.parametrize("name", ["refilled_batches", "left_out_of_the_optimizer", "clamped_later"])
def test_a_habit_that_is_refused_between_processes(pool: Pool, name: str) -> None:
    """On one rank by its own words at least, and on no other by a time-out."""
    said = pool.submit(refusal, name, ranks=2, fresh=True)
    refused = HABITS[name].answers["1f1b"]
    assert isinstance(refused, Refused)
    assert any(refused.words in text for text in said), said
    assert all(said)


def refusal(group: dist.ProcessGroup | None, name: str) -> str:
    with pytest.raises(PenstockError) as caught:
        in_penstock(HABITS[name].script(), "1f1b", penstock.Group(group, 20.0))
    return str(caught.value)


def train_habit(group: Any, name: str) -> Trained:
    return in_penstock(HABITS[name].script(), "1f1b", group)


def test_the_page_has_every_habit() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python tests/support/habits.py"
    assert len({habit.says for habit in HABITS.values()}) == len(HABITS)
