"""What PyTorch users do by habit: the same script in plain torch and in Penstock, and what comes of it.

Each habit of `support.habit_table` is a function that makes a script: blocks, batches, a loss, an optimizer. `in_torch`
trains it as one does without pipelines, `in_penstock` with a pipeline of two stages, in each of the ways of `WAYS`.
`python tests/support/habits.py` writes the tables in docs/habits.md anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import penstock
from penstock.errors import PenstockError

PAGE = Path(__file__).parents[2] / "docs" / "habits.md"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"method": "1f1b"},
    "zb-h1": {"method": "zb-h1"},
    "recompute": {"method": "1f1b", "recompute": "block"},
    "newest": {"method": "newest"},
    "stash": {"method": "stash"},
}
"""Graphs that are kept; backwards in two halves; forwards run again; backwards that look weights up; updates that write
the new weights beside the old ones."""
DRAINED = ("newest", "stash")
"""Ways that are drained after every batch, so that they must give the numbers of plain torch, too."""
_GRAPHS = ("1f1b", "zb-h1", "recompute", "newest")
SECTIONS: Mapping[str, Sequence[str]] = {
    "Layers": _GRAPHS,
    "Frozen and shared parts": _GRAPHS,
    "Hooks and parametrizations": _GRAPHS,
    "Ways of running a block": _GRAPHS,
    "Gradients by hand": _GRAPHS,
    "In-place operations": _GRAPHS,
    "Randomness": _GRAPHS,
    "Precision": _GRAPHS,
    "Between stages: trees": _GRAPHS,
    "Between stages: kinds of tensors": _GRAPHS,
    "Optimizers": ("1f1b", "stash"),
    "Learning rates": ("1f1b", "stash"),
    "Updates": ("1f1b", "stash"),
    "Data": ("1f1b", "stash"),
    "In the loop": ("1f1b", "stash"),
    "State kept on modules": _GRAPHS,
    "Losses": ("1f1b", "zb-h1"),
}
"""The ways in which the habits of each section are tried."""
WIDTH, SAMPLES, UPDATES, MICROBATCHES = 4, 8, 3, 2


@dataclass
class Script:
    """What a user writes.

    Attributes:
        blocks: the model.
        batches: pairs (inputs, targets).
        loss: a mean over samples, or (sum, weight).
        optimizer: from named parameters.
        lr_scheduler: from an optimizer.
        before_step: what plain torch does between backward and step, such as clipping.
        after_step: what plain torch does with the model after each update.
        options: what one passes to the pipeline for the same effect.
        around: a context for the forward, such as autocast: around forward and loss, or around the pipeline's loop.
        in_loop: what one does after every batch in the loop, with the number of the batch and the blocks.
        accumulates: plain torch goes through a batch by microbatches, too, and accumulates their gradients.
        result: of the pipeline, what is compared with the model's state in plain torch; None for the final weights.
    """

    blocks: dict[str, Any]
    batches: Iterable[Any]
    loss: Callable[[Any, Any], Any] = F.mse_loss
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9)
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    before_step: Callable[[nn.Module], Any] = lambda model: None
    after_step: Callable[[nn.Module], Any] = lambda model: None
    options: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    in_loop: Callable[[int, dict[str, Any]], Any] = lambda number, blocks: None
    accumulates: bool = False
    result: tuple[Callable[[nn.Module], Mapping[str, Tensor]], Callable[[Any], Mapping[str, Tensor]]] | None = None


@dataclass(frozen=True)
class Refused:
    """It is refused, with a message that says why and what to do.

    Attributes:
        words: what the message must contain.
        why: the reason on the page.
    """

    words: str
    why: str


@dataclass(frozen=True)
class Differs:
    """It trains, but not to the numbers of plain torch, for a reason that the docs give."""

    why: str


Answer = Refused | Differs | None
"""None: the same numbers as in plain torch."""


@dataclass(frozen=True)
class Habit:
    """A habit: its script, and the answer in every way."""

    name: str
    section: str
    says: str
    make: Callable[[], Script]
    answers: Mapping[str, Answer]

    def script(self) -> Script:
        """The script, with the same numbers each time."""
        torch.manual_seed(0)
        return self.make()


HABITS: dict[str, Habit] = {}


def habit(
    section: str, all_ways: Answer = None, **ways: Answer
) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """Enter a function into the table; the first line of its docstring is what the page says.

    Args:
        section: of the page.
        all_ways: the answer in every way.
        ways: the answer in single ways, with _ for -.
    """
    given = {name.replace("_", "-"): answer for name, answer in ways.items()}
    assert given.keys() <= set(SECTIONS[section])
    answers = {way: given.get(way, all_ways) for way in SECTIONS[section]}

    def enter(make: Callable[[], Script]) -> Callable[[], Script]:
        assert make.__name__ not in HABITS, make.__name__
        says = (make.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        HABITS[make.__name__] = Habit(make.__name__, section, says, make, answers)
        return make

    return enter


# --- parts of scripts -------------------------------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def around(make: Callable[[], Any]) -> dict[str, Any]:
    """Blocks of two stages, with what `make` makes in each of them."""
    return {"first": linear(), "second": make(), "third": make(), "head": linear()}


def bodies(*middle: Any) -> dict[str, Any]:
    """Blocks between two layers."""
    return {"first": linear(), **{f"middle{i}": block for i, block in enumerate(middle)}, "head": linear()}


def regression(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Batches of vectors, with vectors as targets."""
    generator = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        return torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(), draw()) for _ in range(UPDATES)]


def tokens(length: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of sequences of tokens, with the class of each as target."""
    generator = torch.Generator().manual_seed(2)

    def draw() -> Tensor:
        return torch.randint(0, WIDTH, (SAMPLES, length), generator=generator)

    return [(draw(), draw()) for _ in range(UPDATES)]


# --- both ways --------------------------------------------------------------------------------------------------------


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


def in_penstock(script: Script, way: str, group: dist.ProcessGroup | None = None) -> Trained:
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


# --- the page ---------------------------------------------------------------------------------------------------------

_PART = re.compile(r"(<!-- habits -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> str:
    """All sections, each with a table; then the reasons, numbered."""
    reasons: dict[str, int] = {}
    text = []
    for section, ways in SECTIONS.items():
        rows = [habit for habit in HABITS.values() if habit.section == section]
        text += [f"### {section}", "", f"| habit | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
        text += [f"| {row.says} | {' | '.join(_cell(row.answers[way], reasons) for way in ways)} |" for row in rows]
        text.append("")
    text += ["### Why", "", *(f"{number}. {why}" for why, number in reasons.items())]
    return "\n".join(text) + "\n"


def _cell(answer: Answer, reasons: dict[str, int]) -> str:
    if answer is None:
        return "same"
    number = reasons.setdefault(answer.why, len(reasons) + 1)
    return f"{'refused' if isinstance(answer, Refused) else 'differs'} ({number})"


def written(page: str) -> str:
    """The page with the tables of this table."""
    return _PART.sub(lambda part: part[1] + tables() + part[2], page)


if __name__ == "__main__":
    import support.habit_table

    assert support.habit_table
    from support import habits  # this file under its own name, where the table is

    PAGE.write_text(habits.written(PAGE.read_text()))
