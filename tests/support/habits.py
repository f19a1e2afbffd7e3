"""What PyTorch users do by habit: the same script in plain torch and in Penstock, and what comes of it.

Each row of `HABITS` makes a script: blocks, batches, a loss, an optimizer. `tests/runtime/test_habits.py` trains it as
one does without pipelines, and with a pipeline of two stages, in each of the ways of `WAYS`. Here are habits that would
train wrong without a word if nobody cared for them, and those that a new user meets in the first hour.
`python tests/support/habits.py` writes the tables in docs/habits.md anew.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

import penstock

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
    "Hooks, gradients by hand, and state kept on modules": _GRAPHS,
    "Randomness and precision": _GRAPHS,
    "Between stages": _GRAPHS,
    "Optimizers, rates and updates": ("1f1b", "stash"),
    "Data": ("1f1b", "stash"),
    "In the loop": ("1f1b", "stash"),
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


def row(name: str, section: str, says: str, make: Callable[[], Script], every: Answer = None, **ways: Answer) -> None:
    """Enter a habit into the table.

    Args:
        name: of its tests.
        section: of the page.
        says: what stands on the page.
        make: makes the script.
        every: the answer in every way.
        ways: the answer in single ways, with _ for -.
    """
    given = {way.replace("_", "-"): answer for way, answer in ways.items()}
    assert name not in HABITS
    assert given.keys() <= set(SECTIONS[section])
    answers = {way: given.get(way, every) for way in SECTIONS[section]}
    HABITS[name] = Habit(name, section, says, make, answers)


# --- parts of scripts -------------------------------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def around(make: Callable[[], Any]) -> dict[str, Any]:
    """Blocks of two stages, with what `make` makes in each of them."""
    return {"first": linear(), "second": make(), "third": make(), "head": linear()}


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


# --- the rows: layers and shared parts --------------------------------------------------------------------------------

LAYERS, SHARING, BY_HAND, DRAWN, BETWEEN, UPDATING, DATA, LOOP, LOSSES = SECTIONS
F64 = torch.float64


class Block(nn.Module):
    """A layer, and a function of the block and its input.

    Args:
        function: (block, input) -> output.
        members: further modules, parameters, buffers (plain tensors) and attributes.
    """

    def __init__(self, function: Callable[[Any, Any], Any], **members: Any) -> None:
        super().__init__()
        self.layer, self.function = linear(), function
        for name, member in members.items():
            plain = isinstance(member, Tensor) and not isinstance(member, nn.Parameter)
            (self.register_buffer if plain else self.__setattr__)(name, member)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def of(make: Callable[[], Any], **more: Any) -> Script:
    """What `make` makes, in both stages."""
    return Script(around(make), regression(), **more)


def block(function: Callable[[Any, Any], Any], **members: Any) -> Script:
    """A block in each stage; gradients are accumulated in plain torch, too."""
    return of(lambda: Block(function, **{name: make() for name, make in members.items()}), accumulates=True)


def classified(table: nn.Module) -> Script:
    blocks = {"table": table, "first": linear(), "second": nn.Tanh(), "head": linear()}
    return Script(blocks, tokens(), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))


row(
    "batch_norm", LAYERS, "`BatchNorm1d`", lambda: of(lambda: nn.BatchNorm1d(WIDTH, dtype=F64)),
    Differs("statistics are those of a microbatch, as with accumulated gradients"),
)  # fmt: skip
row(
    "accumulated_batch_norm", LAYERS, "`BatchNorm1d`, where plain torch accumulates gradients, too",
    lambda: of(lambda: nn.BatchNorm1d(WIDTH, dtype=F64), accumulates=True),
)  # fmt: skip
row(
    "max_norm", LAYERS, "`Embedding(max_norm=...)`",
    lambda: classified(nn.Embedding(WIDTH, WIDTH, max_norm=0.5, dtype=F64)),
    Refused("max_norm", "the forward writes into the weights, which other microbatches are reading"),
)  # fmt: skip


def center(block: Any, x: Tensor) -> Tensor:
    block.count += 1
    block.mean.lerp_(x.detach().mean(0), 1 / float(block.count))
    found: Tensor = block.layer(x - block.mean)
    return found


row(
    "running_mean", LAYERS, "A count and a cumulative mean in buffers, written in place",
    lambda: block(center, count=lambda: torch.tensor(0), mean=lambda: torch.zeros(WIDTH, dtype=F64)),
)  # fmt: skip


def make_lately(block: Any, x: Tensor) -> Tensor:
    if not hasattr(block, "table"):
        block.table = nn.Parameter(torch.arange(WIDTH, dtype=F64).cos())
    found: Tensor = block.layer(x) * block.table
    return found


row(
    "lazy_parameter", LAYERS, "A parameter that the first forward makes", lambda: block(make_lately),
    Refused("belongs to no module of this stage", "no optimizer knows of it; make it in the constructor"),
)  # fmt: skip


def shift_by(assigns: bool) -> Callable[[Any, Tensor], Tensor]:
    """A shift that the first forward sets, as ActNorm does."""

    def shift(block: Any, x: Tensor) -> Tensor:
        if not block.done and assigns:
            block.shift.data = -x.detach().mean(0)
        elif not block.done:
            with torch.no_grad():
                block.shift.copy_(-x.mean(0))
        block.done = True
        found: Tensor = block.layer(x + block.shift)
        return found

    return shift


def shifting(assigns: bool) -> Script:
    return block(shift_by(assigns), shift=lambda: nn.Parameter(torch.zeros(WIDTH, dtype=F64)), done=lambda: False)


row(
    "set_by_the_first_forward", LAYERS, "A parameter that the first forward sets by `copy_` (ActNorm)",
    lambda: shifting(assigns=False),
)  # fmt: skip
row(
    "assigned_by_the_first_forward", LAYERS, "The same by `.data = ...`", lambda: shifting(assigns=True),
    Refused(
        "has assigned other memory to",
        "forwards have views of the memory of all weights; write into it (`copy_`), or use a step hook",
    ),
)  # fmt: skip


def follow(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for mine, other in zip(block.teacher.parameters(), block.layer.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)
    found: Tensor = block.layer(x) + block.teacher(x)
    return found


row(
    "following_teacher", LAYERS, "A frozen teacher that follows its student in the forward (mean teacher)",
    lambda: block(follow, teacher=lambda: linear().requires_grad_(False)),
    Refused("let the forward use a copy", "graphs of other microbatches need it; let the forward use a copy"),
    recompute=Refused("make it a buffer", "it would follow twice; make it a buffer"),
)  # fmt: skip


def tied() -> Script:
    script = classified(nn.Embedding(WIDTH, WIDTH, dtype=F64))
    script.blocks["head"].weight = script.blocks["table"].weight
    return script


def used_twice() -> Script:
    layer = linear()
    return Script({"first": layer, "act": nn.Tanh(), "again": layer, "head": linear()}, regression())


def tied_by_closure() -> Script:
    first = linear()
    return Script(
        {"first": first, "second": nn.Tanh(), "third": lambda x: x @ first.weight, "head": linear()}, regression()
    )


row("tied_weights", SHARING, "Weight tying between the first and the last stage (`head.weight = table.weight`)", tied)
row(
    "shared_over_stages", SHARING, "One module used in both stages", used_twice,
    Refused(
        "holds the same parameter",
        "a stage binds weights to its modules; make two modules that share their parameters",
    ),
)  # fmt: skip
row(
    "tied_by_closure", SHARING,
    "A function as a block that uses a weight of another stage (`lambda x: x @ first.weight`)", tied_by_closure,
    Refused(
        "belongs to no module",
        "only modules bring their parameters with them; pass the module, and tie by `head.weight = table.weight`",
    ),
)  # fmt: skip
row(
    "frozen_front", SHARING, "A frozen first stage",
    lambda: Script(around(nn.Tanh) | {"first": linear().requires_grad_(False)}, regression()),
)  # fmt: skip
UNUSED = Differs("a parameter that a batch does not use has a gradient of zero, so weight decay and momentum act on it")
row(
    "unused_decayed", SHARING, "A parameter that the forward does not use, with weight decay",
    lambda: of(
        lambda: Block(lambda block, x: block.layer(x), unused=linear()),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.1),
    ),
    UNUSED,
)  # fmt: skip


def branch(block: Any, x: Tensor) -> Tensor:
    """One layer in the first batch, another one later."""
    block.calls += 1
    found: Tensor = block.layer(x) if int(block.calls) <= 2 else block.other(x)
    return found


row(
    "data_dependent", SHARING, "A layer that the forward uses in some batches only, with momentum",
    lambda: block(branch, other=linear, calls=lambda: torch.tensor(0)), UNUSED,
)  # fmt: skip

# --- hooks, gradients by hand, state kept on modules ------------------------------------------------------------------


def hooked(hook: Callable[[Tensor], Tensor], **more: Any) -> Script:
    """Hooks on parameters of both stages."""
    script = of(linear, **more)
    for name in ("first", "third"):
        script.blocks[name].weight.register_hook(hook)
    return script


def clamped(**options: Any) -> Script:
    return hooked(lambda g: g.clamp(-0.02, 0.03), options=options, accumulates=True)


row(
    "masked_gradients", BY_HAND, "`register_hook` on a parameter that masks its gradient",
    lambda: hooked(lambda g: g * torch.eye(WIDTH, dtype=F64)),
)  # fmt: skip
row(
    "clamped_gradients", BY_HAND, "The same that clamps it", clamped,
    Differs("hooks see gradients of a sum over samples, divided by m; `Precision(divisor=samples)` makes it a mean"),
)  # fmt: skip
row(
    "clamped_gradients_in_scale", BY_HAND,
    "The same with `precision=Precision(divisor=samples)`; gradients accumulated in plain torch, too",
    lambda: clamped(precision=penstock.Precision(divisor=float(SAMPLES))),
)  # fmt: skip


class Product(torch.autograd.Function):
    """x times a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


row(
    "custom_function", BY_HAND, "A custom `autograd.Function` of a weight",
    lambda: block(
        lambda block, x: Product.apply(block.layer(x), block.weight),
        weight=lambda: nn.Parameter(torch.ones(WIDTH, dtype=F64)),
    ),
)  # fmt: skip


def by_input(block: Any, x: Tensor) -> Tensor:
    """The gradient of an energy by its input, as in models of forces and scores."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(block.layer(x)).square().sum(), x, create_graph=True)
    return force + x


row(
    "input_gradient", BY_HAND, "`autograd.grad(create_graph=True)` by the input of a block", lambda: block(by_input),
    zb_h1=Refused(
        "1f1b",
        "the gradients of weights are not in the graph of the first half; use a method without halves, such as 1f1b",
    ),
)  # fmt: skip
row(
    "without_gradients", BY_HAND, "`torch.no_grad()` around the loop", lambda: of(nn.Tanh, around=torch.no_grad),
    Refused("under torch.no_grad()", "nothing would be learnt; leave the context"),
)  # fmt: skip


def keep(block: Any, x: Tensor) -> Tensor:
    block.kept = block.layer(x)
    return torch.tanh(block.kept)


def skipping(detaches: bool) -> Script:
    """A skip connection over an attribute, from the first stage to the last one."""
    keeping = Block(keep)

    def use(block: Any, x: Tensor) -> Tensor:
        found: Tensor = block.layer(x) + (keeping.kept.detach() if detaches else keeping.kept)
        return found

    blocks = {"first": keeping, "second": nn.Tanh(), "third": nn.Tanh(), "head": Block(use)}
    return Script(blocks, regression(), accumulates=True)


def kept_for_the_loss() -> Script:
    blocks = {"first": Block(keep), "second": nn.Tanh(), "third": Block(keep), "head": linear()}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        kept = blocks["first"].kept.square().mean() + blocks["third"].kept.square().mean()  # type: ignore[union-attr,operator]
        return F.mse_loss(output, target) + 0.1 * kept

    return Script(blocks, regression(), loss, accumulates=True)


PASSED = "what was kept belongs to another microbatch by then; let the blocks hand it on, as in `(x, kept)`"
KEPT = Refused("kept on a module or by a hook", PASSED)
row(
    "kept_for_another_stage", BY_HAND,
    "A skip connection over an attribute (`self.kept = x`, read by a block of another stage)",
    lambda: skipping(detaches=False), KEPT,
)  # fmt: skip
row("detached_for_another_stage", BY_HAND, "The same, detached", lambda: skipping(detaches=True), Differs(PASSED))
row(
    "auxiliary_losses", BY_HAND, "Auxiliary losses that blocks keep for the loss (`block.aux_loss`)",
    kept_for_the_loss, KEPT,
)  # fmt: skip

# --- randomness and precision -----------------------------------------------------------------------------------------


def stochastic_depth() -> Script:
    random.seed(0)
    return block(lambda block, x: block.layer(x) if random.random() < 0.5 else x)


def in_single(script: Script) -> Script:
    """The script in float32."""
    for part in script.blocks.values():
        part.float()
    script.batches = [(x.float(), y.float()) for x, y in script.batches]
    return script


def low_precision() -> Script:
    script = in_single(of(nn.Tanh, options={"precision": "bf16"}))
    script.loss = lambda output, target: (output.float() - target).square().mean()
    return script


row(
    "dropout", DRAWN, "`Dropout`", lambda: of(lambda: nn.Dropout(0.5)),
    Differs(
        "random numbers are those of a block and microbatch, from `seed`, so that recomputed forwards and processes "
        "draw the same"
    ),
)  # fmt: skip
row(
    "stochastic_depth", DRAWN, "`random.random()` in a block (stochastic depth)", stochastic_depth,
    Differs(
        "numbers come in the order of passes, which go through stages at the same time; seed them by what a sample has"
    ),
)  # fmt: skip
row(
    "autocast_around", DRAWN, "`torch.autocast` around the loop; gradients accumulated in plain torch, too",
    lambda: in_single(of(nn.Tanh, accumulates=True, around=lambda: torch.autocast("cpu", torch.bfloat16))),
    newest=Refused(
        "precision='bf16'", 'backwards would read casts of the weights of the forward; use `precision="bf16"`'
    ),
)  # fmt: skip
row(
    "low_precision", DRAWN, '`precision="bf16"` in place of autocast', low_precision,
    Differs('`precision="bf16"` casts weights and activations everywhere; autocast chooses by operation'),
)  # fmt: skip

# --- between stages ---------------------------------------------------------------------------------------------------


@dataclass
class Opened:
    """A dataclass, whose tensors torch finds."""

    x: Tensor
    others: Any


class Opaque:
    """An object that torch knows nothing of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def across(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Script:
    """What one block packs travels to the next stage, whose first block unpacks it."""
    packing, unpacking = Block(lambda block, x: pack(block.layer(x))), Block(lambda block, x: block.layer(unpack(x)))
    return Script({"first": linear(), "pack": packing, "unpack": unpacking, "head": linear()}, regression())


row(
    "trees", BETWEEN, "Tuples, lists, dicts and dataclasses, with numbers, strings and None in them",
    lambda: across(
        lambda x: (x, [x + 1, {"a": x * 2}], Opened(x * 3, (2, "text", None))),
        lambda tree: tree[0] + tree[1][0] + tree[1][1]["a"] + tree[2].x * tree[2].others[0],
    ),
)  # fmt: skip
row(
    "kinds_of_tensors", BETWEEN, "Transposed, expanded and complex tensors, masks, scalars, tensors without elements",
    lambda: across(
        lambda x: (x.t(), x[:, :1].expand(-1, WIDTH), torch.fft.fft(x), x > 0, x.mean(), x[:0]),
        lambda t: t[0].t() + t[1] + t[2].abs() * t[3] + 0 * t[4] + t[5].sum(),
    ),
)  # fmt: skip
row(
    "own_objects", BETWEEN, "Objects of one's own class", lambda: across(Opaque, lambda found: found.x),
    Refused(
        "Opaque", "torch does not know what is inside; use a dataclass, or register the class in `torch.utils._pytree`"
    ),
)  # fmt: skip
row(
    "sparse", BETWEEN, "Sparse tensors", lambda: across(lambda x: x.to_sparse(), lambda x: x.to_dense()),
    Refused("to_dense", "messages hold dense tensors; send values and indices, or `to_dense()`"),
)  # fmt: skip

# --- optimizers, rates, updates ---------------------------------------------------------------------------------------


def stepped_by(make: Callable[[Any], torch.optim.Optimizer], **more: Any) -> Script:
    return of(nn.Tanh, optimizer=make, **more)


def groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    head = [p for name, p in named if name.startswith("head")]
    biases = [p for name, p in named if name.endswith("bias") and not name.startswith("head")]
    rest = [p for name, p in named if not name.endswith("bias") and not name.startswith("head")]
    some = [{"params": head, "lr": 0.003}, {"params": biases, "weight_decay": 0.0}, {"params": rest}]
    return torch.optim.AdamW([group for group in some if group["params"]], lr=0.01, weight_decay=0.1)


def of_the_whole_model() -> Script:
    script = of(nn.Tanh)
    everything = [p for part in script.blocks.values() for p in part.parameters()]
    script.optimizer = lambda _: torch.optim.SGD(everything, lr=0.1)
    return script


def projecting(named: Any) -> torch.optim.Optimizer:
    """Clips gradients before and weights after every update."""
    optimizer = torch.optim.SGD(named, lr=0.1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 0.01))
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.3, 0.3) for p in parameters] and None)
    return optimizer


row(
    "groups", UPDATING, "`AdamW` with parameter groups: no decay for biases, another rate for the head",
    lambda: stepped_by(groups),
)  # fmt: skip
row(
    "lbfgs", UPDATING, "`LBFGS`", lambda: stepped_by(lambda named: torch.optim.LBFGS([p for _, p in named])),
    Refused("closure", "its `step` evaluates the model again, which a stage alone cannot do"),
)  # fmt: skip
row(
    "left_out_of_the_optimizer", UPDATING, "Parameters that are left out of the optimizer",
    lambda: stepped_by(lambda named: torch.optim.SGD([p for n, p in named if "bias" not in n], lr=0.1)),
    Refused("left out", "a stage trains all its parameters; freeze with `requires_grad_(False)`"),
)  # fmt: skip
row(
    "of_the_whole_model", UPDATING,
    "An optimizer of all parameters of the model (`SGD(model.parameters())`), for every stage", of_the_whole_model,
    Refused("left out", "one optimizer is made for each stage, of the parameters that the function gets"),
)  # fmt: skip
row(
    "one_cycle", UPDATING, "`OneCycleLR`, with momentum",
    lambda: of(nn.Tanh, lr_scheduler=lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=4)),
)  # fmt: skip
row(
    "plateau", UPDATING, "`ReduceLROnPlateau` as `lr_scheduler`",
    lambda: of(nn.Tanh, lr_scheduler=schedulers.ReduceLROnPlateau),
    Refused("ReduceLROnPlateau", "it needs a metric, which no update has: step it between two runs"),
)  # fmt: skip
row(
    "clipped", UPDATING, "`clip_grad_norm_`, as `max_grad_norm`",
    lambda: of(
        nn.Tanh,
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        options={"max_grad_norm": 0.1},
    ),
)  # fmt: skip
row(
    "projected", UPDATING, "`clip_grad_value_` and limits of weights, as step hooks of the optimizer",
    lambda: stepped_by(projecting),
)  # fmt: skip

# --- data -------------------------------------------------------------------------------------------------------------


def loaded(**options: Any) -> Script:
    """Batches of a DataLoader."""
    inputs, targets = (torch.cat(parts) for parts in zip(*regression(), strict=True))
    return Script(around(nn.Tanh), DataLoader(TensorDataset(inputs, targets), **{"batch_size": SAMPLES, **options}))


def batches_of(make: Callable[[Tensor, Tensor], Any], *first: Any, loss: Any = F.mse_loss) -> Script:
    """Batches that are made of inputs and targets."""
    blocks = around(nn.Tanh)
    if first:
        (blocks["first"],) = first
    return Script(blocks, [make(x, y) for x, y in regression()], loss)


class Refilling:
    """Yields the same tensors again and again, with other values."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = torch.empty(SAMPLES, WIDTH, dtype=F64), torch.empty(SAMPLES, WIDTH, dtype=F64)
        for inputs, targets in regression():
            yield x.copy_(inputs), y.copy_(targets)


row(
    "loader", DATA, "A `DataLoader`, shuffled by a generator, with a short last batch",
    lambda: loaded(batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(3)),
)  # fmt: skip
row(
    "dict_inputs", DATA, "Inputs that are a dict of tensors, and targets that are a tuple, with texts",
    lambda: batches_of(
        lambda x, y: ({"x": x, "scale": x[:, :1]}, (y, [str(i) for i in range(len(y))])),
        Block(lambda block, batch: block.layer(batch["x"]) * batch["scale"]),
        loss=lambda y, t: (torch.tensor([float(name) for name in t[1]], dtype=F64)[:, None] * (y - t[0])).abs().mean(),
    ),
)  # fmt: skip
row(
    "enumerated", DATA, "`enumerate(loader)`",
    lambda: Script(around(nn.Tanh), list(enumerate(regression()))),
    Refused("leave enumerate out", "reports have numbers; leave `enumerate` out"),
)  # fmt: skip
row(
    "dict_batches", DATA, "Batches that are one dict, whose targets are not named `labels`",
    lambda: batches_of(lambda x, y: {"x": x, "targets": y}),
    Refused("a batch is a pair", "targets of a dict are its `labels`; name them so in the `collate_fn`"),
)  # fmt: skip
row(
    "too_short", DATA, "A last batch of one sample, with two microbatches",
    lambda: loaded(batch_size=SAMPLES * UPDATES - 1),
    Refused("too few", "a batch has fewer samples than microbatches; use `drop_last=True`"),
)  # fmt: skip
row(
    "refilled_batches", DATA, "A generator that refills one tensor",
    lambda: Script(around(linear), Refilling()),  # type: ignore[arg-type]
    **{
        "1f1b": Refused(
            "was written into by the loader",
            "batches are read ahead, as by a `DataLoader` with workers; yield new tensors, such as `x.clone()`",
        )
    },
)  # fmt: skip

# --- in the loop ------------------------------------------------------------------------------------------------------


def looping(change: Callable[[int, Any], Any], make: Callable[[], Any] = nn.Tanh, **more: Any) -> Script:
    return of(make, in_loop=change, **more)


@torch.no_grad()
def clamp(number: int, blocks: dict[str, Any]) -> None:
    for p in blocks["first"].parameters():
        p.clamp_(-0.1, 0.1)


def zero(number: int, blocks: dict[str, Any]) -> None:
    for part in blocks.values():
        part.zero_grad()


def rate_by_hand() -> Script:
    made: list[torch.optim.Optimizer] = []

    def make(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(named, lr=0.1, momentum=0.9))
        return made[-1]

    def decay(number: int, blocks: dict[str, Any]) -> None:
        for group in (group for optimizer in made for group in optimizer.param_groups):
            group["lr"] = 0.1 / (number + 2)

    return looping(decay, optimizer=make)


class Growing:
    """Batches that become harder."""

    scale = 1.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in regression():
            yield inputs * self.scale, targets


def curriculum() -> Script:
    batches = Growing()
    return Script(around(nn.Tanh), batches, in_loop=lambda number, _: setattr(batches, "scale", number + 2.0))


def best_weights() -> Script:
    seen: dict[str, Tensor] = {}

    def note(number: int, blocks: dict[str, Any]) -> None:
        seen[f"seen {number}"] = blocks["first"].weight.detach().clone()

    return looping(note, result=(lambda model: dict(seen), lambda pipeline: dict(seen)))


row(
    "left_in_eval", LOOP,
    "`model.eval()` for a validation, and `model.train()` is forgotten; gradients accumulated in plain torch, too",
    lambda: looping(
        lambda number, blocks: [part.eval() for part in blocks.values()],
        lambda: nn.BatchNorm1d(WIDTH, dtype=F64),
        accumulates=True,
    ),
)  # fmt: skip
WRITTEN = "microbatches under way have read the weights and add to the gradients; write between two runs, or in hooks"
for name, says, change in (
    ("zeroed_later", "`model.zero_grad()` after the batch", zero),
    ("clamped_later", "Weights are clamped, loaded or stepped", clamp),
    ("frozen_later", "A layer is frozen", lambda number, blocks: blocks["first"].requires_grad_(False)),
):
    row(
        name, LOOP, says, lambda change=change: looping(change),  # type: ignore[misc]
        Refused("was changed in the loop over reports", WRITTEN),
    )  # fmt: skip
row(
    "rate_by_hand", LOOP, "The learning rate is set, or a scheduler is stepped (`group[\"lr\"] = ...`)", rate_by_hand,
    Refused("was set from 0.1 to", "updates lag behind reports; pass `lr_scheduler`, or set the rate between two runs"),
)  # fmt: skip
row(
    "curriculum", LOOP, "The dataset is changed for the next batch (a curriculum)", curriculum,
    Differs("batches are fetched ahead, as by a `DataLoader` with workers; let the data count batches by themselves"),
    stash=None,
)  # fmt: skip
row(
    "best_weights", LOOP, "The best weights are kept, or the model is validated by itself", best_weights,
    Differs("updates lag behind reports, so these are weights of before; use `Evaluating`, `Checkpoints`, `on_update`"),
)  # fmt: skip

# --- losses -----------------------------------------------------------------------------------------------------------


def judged_by(loss: Callable[[Any, Any], Any]) -> Script:
    return Script(around(nn.Tanh), regression(), loss)


def ignoring() -> Script:
    batches = [(x, torch.where(torch.arange(SAMPLES) % 3 == 1, -100, y.argmax(1))) for x, y in regression()]
    return Script(around(nn.Tanh), batches, nn.CrossEntropyLoss())


def penalty_of_weights() -> Script:
    script = judged_by(F.mse_loss)
    weights = [p for part in script.blocks.values() for p in part.parameters()]
    script.loss = lambda y, t: F.mse_loss(y, t) + 0.1 * sum(p.square().sum() for p in weights)
    return script


def scaled_by_hand() -> Script:
    scaler = torch.amp.GradScaler("cpu")
    return judged_by(lambda output, target: scaler.scale(F.mse_loss(output, target)))


def backward_in_loss(output: Tensor, target: Tensor) -> Tensor:
    mean = F.mse_loss(output, target)
    mean.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return mean


row(
    "masked", LOSSES, "A sum under a mask and the number of its elements, as (sum, weight)",
    lambda: judged_by(lambda y, t: (((y - t).square() * (t > 0)).sum(), (t > 0).sum())),
)  # fmt: skip
row("ignored_targets", LOSSES, "`CrossEntropyLoss` with ignored targets (-100)", ignoring)
row(
    "summed", LOSSES, '`MSELoss(reduction="sum")`, or `"none"`', lambda: judged_by(nn.MSELoss(reduction="sum")),
    Refused("sum", "a sum is not a mean over samples; return (sum, weight)"),
)  # fmt: skip
row(
    "contrastive", LOSSES, "A contrastive loss over the samples of a batch",
    lambda: judged_by(lambda output, target: F.cross_entropy(output @ target.T, torch.arange(len(target)))),
    Refused(
        "how much that counts",
        "the loss compares the samples of a microbatch; return (sum, weight), as with accumulated gradients",
    ),
)  # fmt: skip
row(
    "penalty_of_weights", LOSSES,
    "A penalty of all weights in the loss (`sum(p.square().sum() for p in model.parameters())`)", penalty_of_weights,
    Refused(
        "belongs to no module",
        "the loss has the weights of its own stage only; use the `weight_decay` of the optimizer, or a step hook",
    ),
)  # fmt: skip
row(
    "scaled_by_hand", LOSSES, "`GradScaler.scale` in the loss", scaled_by_hand,
    Refused("GradScaler", "nobody would divide by the scale; `precision='fp16'` brings a loss scale"),
)  # fmt: skip
row(
    "backward_in_loss", LOSSES, "`loss.backward(retain_graph=True)` in the loss", lambda: judged_by(backward_in_loss),
    Refused(
        "has called backward()", "it would add to gradients of the last stage alone; the pipeline makes the backward"
    ),
)  # fmt: skip
row(
    "detached_loss", LOSSES, "A loss that detaches the output, or computes under `no_grad`",
    lambda: judged_by(lambda output, target: F.mse_loss(output.detach(), target)),
    Refused("the loss has no graph", "nothing would be learnt; let the loss be in the graph of the output"),
)  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
