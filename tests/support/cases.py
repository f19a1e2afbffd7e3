"""What the runtime's tests train: models, data, losses, optimizers; and how two runs are compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.comm.collective.all_reduce import Reduce
from penstock.models.gpt import gpt_blocks
from penstock.models.gpt_shape import GPTConfig
from penstock.options.passes import BoundaryGradients, PrecisionName, boundary_format, low_precision
from penstock.partition.blocks import LazyBlock
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.ir.schedule import Op, Schedule, passes
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.train.config.sections import OptimizerName, OptimizerSection
from penstock.train.setup.optimizers import optimizer_factory
from penstock.verify.derived_delays import order_of
from penstock.verify.reference import Reference, Scaling
from penstock.weights.corrections.base import Correction
from penstock.weights.decision import Decision, LossScale
from penstock.weights.updates.lr_scheduler_table import by_factor
from support.grouped import grouped
from support.own_methods import row_of, train_reference
from support.schedules import make_schedule

VOCABULARY, WIDTH, LENGTH = 13, 8, 4
SPIKE = VOCABULARY  # a target that no model can mean
FLUSH = ("sequential", "gpipe", "1f1b", "eager")
METHODS = (*FLUSH, "2bw", "stash")
ONE_OF_EACH = ("1f1b", "2bw", "stash")  # version rules
BALANCE = {1: (6,), 2: (3, 3), 3: (2, 1, 3), 4: (1, 2, 1, 2), 6: (1,) * 6, 8: (1,) * 8}  # per number of stages

Named = list[tuple[str, nn.Parameter]]


class Residual(nn.Module):
    """x + MLP(LayerNorm(x))."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class HalfGradient(torch.autograd.Function):
    """The identity, whose gradient travels in float16: large ones overflow."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.half().to(gradient.dtype)


class Matrix(nn.Module):
    """gelu(W x): all parameters are matrices."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.map = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.map(x))


def mixed() -> dict[str, Any]:
    return {
        "table": nn.Embedding(VOCABULARY, WIDTH),
        "first": Residual(),
        "tanh": torch.tanh,
        "norm": nn.LayerNorm(WIDTH),
        "second": Residual(),
        "head": nn.Linear(WIDTH, VOCABULARY),
    }


def matrices() -> dict[str, Any]:
    middle = {name: Matrix() for name in ("a", "b", "c", "d")}
    return {"table": nn.Embedding(VOCABULARY, WIDTH), **middle, "head": nn.Linear(WIDTH, VOCABULARY, bias=False)}


def gpt() -> dict[str, Any]:
    return dict(gpt_blocks(GPTConfig(layers=4, width=8, heads=2, context=LENGTH, vocabulary=VOCABULARY), seed=3))


def half() -> dict[str, Any]:
    """Six blocks, through whose middle gradients travel in float16."""
    return mixed() | {"tanh": lambda x: HalfGradient.apply(torch.tanh(x))}


class Faint(Residual):
    """Residual of which little can be seen: x + 0.02 f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.02 * (super().forward(x) - x)


def faint() -> dict[str, Any]:
    """Six blocks whose gradient is mostly that of the first and the last one."""
    return {
        "table": nn.Embedding(VOCABULARY, WIDTH),
        "first": Faint(),
        "tanh": torch.tanh,
        "norm": nn.LayerNorm(WIDTH, elementwise_affine=False),
        "second": Faint(),
        "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
    }


class Batched(nn.Module):
    """Batch statistics over samples and positions; they are kept as buffers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.flatten(0, -2)).view_as(x)
        return y


def restless() -> dict[str, Any]:
    """Six blocks that draw random numbers and change buffers."""
    return {
        "table": nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.2)),
        "first": nn.Sequential(Residual(), nn.Dropout(0.3)),
        "batched": Batched(),
        "noise": lambda x: x + 0.1 * torch.randn_like(x),
        "second": nn.Sequential(Residual(), Batched(), nn.Dropout(0.1)),
        "head": nn.Linear(WIDTH, VOCABULARY),
    }


def long() -> dict[str, Any]:
    """Eight blocks."""
    *begin, (last, head) = mixed().items()
    return dict(begin) | {"third": Residual(), "fourth": Residual(), last: head}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "mixed": mixed, "matrices": matrices, "gpt": gpt, "half": half, "restless": restless, "faint": faint, "long": long
}  # fmt: skip

TIED = {
    "mixed": {"head.weight": "table.weight"},
    "faint": {"head.weight": "table.weight"},
    "gpt": {"head.out.weight": "embedding.weight"},
}


def by_shape(named: Named) -> tuple[Named, Named]:
    """Matrices, and the other parameters."""
    return [(n, p) for n, p in named if p.dim() > 1], [(n, p) for n, p in named if p.dim() <= 1]


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "nadam": lambda named: torch.optim.NAdam(named, lr=0.01),
    "adafactor": lambda named: torch.optim.Adafactor(named, lr=0.01),
    "muon": lambda named: torch.optim.Muon(named, lr=0.02),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01),
    "two rates": lambda named: torch.optim.SGD(
        [{"params": part, "lr": lr} for part, lr in zip(by_shape(named), (0.1, 0.02), strict=True)], momentum=0.9
    ),
    "undecayed": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
}
BY_NAME: tuple[OptimizerName, ...] = ("muon", "adan", "soap", "basis-rotation")
"""As `penstock train` makes them; cases call them "configured muon" and so on."""


def configured(name: OptimizerName, named: Named) -> torch.optim.Optimizer:
    often = {"refresh": 3} if name in ("soap", "basis-rotation") else {}
    return optimizer_factory(OptimizerSection(name=name, lr=0.02, **often))(named)


OPTIMIZERS |= {f"configured {name}": partial(configured, name) for name in BY_NAME}


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Sum over the tokens that count, and their number."""
    total = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum", ignore_index=-100)
    return total, float((targets != -100).sum())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A scalar, which counts as a mean over samples, or over the share of their tokens that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


def spiky_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """The sum over the tokens, with an infinite gradient where the first target says so."""
    total, weight = token_loss(logits, targets.clamp(max=VOCABULARY - 1))
    return total * (math.inf if targets[0, 0] == SPIKE else 1.0), weight


def even_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The mean, and every microbatch counts the same; so nothing is scaled."""
    return mean_loss(logits, targets), 1


LOSSES = {"tokens": token_loss, "mean": mean_loss, "even": even_loss, "spiky": spiky_loss}


def warm_up(ordinal: int) -> float:
    return min((ordinal + 1) / 3, 1.0) * 0.9**ordinal


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        spans: the number of batches of each call of `run`.
        skips: batches in which no token counts.
        clip: the largest norm of a gradient.
        scaling: of the loss.
        spikes: batches whose gradient is not finite in one microbatch.
        recompute: which forwards are run again.
        seed: of the random numbers of blocks.
        precision: what passes compute in.
        boundary_gradients: what gradients are rounded to between stages.
        tied: the output embedding is the input embedding.
        width: parallel pipelines.
        device: on which models and data are.
        reduce: how they add their gradients.
        options: of the order, as pairs of name and value.
        rule: another one than the method's.
        correction: of staleness.
    """

    method: str
    depth: int
    m: int
    model: str = "mixed"
    optimizer: str = "adamw"
    loss: str = "tokens"
    spans: tuple[int, ...] = (6,)
    skips: tuple[int, ...] = (3,)
    rate: bool = True
    clip: float | None = None
    scaling: Scaling | None = None
    spikes: tuple[int, ...] = ()
    recompute: RecomputeMode = "none"
    seed: int = 0
    precision: PrecisionName = "fp32"
    boundary_gradients: BoundaryGradients = "same"
    tied: bool = False
    width: int = 1
    device: str = "cpu"
    reduce: Reduce = "ordered"
    options: tuple[tuple[str, int], ...] = ()
    rule: str | None = None
    correction: Correction | None = None

    @cached_property  # it is proven, which takes longer than many a run
    def schedule(self) -> Schedule:
        return make_schedule(self.method, self.depth, self.m, options=dict(self.options), rule=self.rule)

    @property
    def divisor(self) -> float | None:
        return None if self.loss in ("mean", "even") else 7.0

    @property
    def decides(self) -> bool:
        return self.clip is not None or self.scaling is not None or self.width > 1 or self.schedule.directions > 1


@dataclass
class Outcome:
    """What can be compared of a run.

    Attributes:
        reports: (batch, loss, weight) of each.
        gradients: what the optimizer was handed, per update that was made.
        state: of the optimizers, by parameter.
        rates: the last learning rate of each parameter.
        decided: (batch, loss, norm, scale, skipped) of each update, where the pipeline decides about it.
    """

    reports: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    decided: list[tuple[int, float, float, float, bool]] = field(default_factory=list)


class Recording:
    """An optimizer factory that takes down what the optimizers are handed.

    A hook, not a subclass, because torch's own classes may be stepped with a few parameters at a time.
    """

    def __init__(self, factory: Callable[[Named], torch.optim.Optimizer]) -> None:
        self._factory = factory
        self._updates: dict[torch.optim.Optimizer, list[dict[str, Tensor]]] = {}

    def __call__(self, named: Named) -> torch.optim.Optimizer:
        optimizer = self._factory(named)
        updates = self._updates[optimizer] = []

        def take_down(*_: object) -> None:
            here = {name: p.grad.clone() for name, p in named if p.grad is not None}
            if not updates or updates[-1].keys() & here.keys():
                updates.append({})
            updates[-1].update(here)

        optimizer.register_step_pre_hook(take_down)
        return optimizer

    @property
    def gradients(self) -> list[dict[str, Tensor]]:
        return merged(list(self._updates.values()))

    def undone(self, optimizer: torch.optim.Optimizer) -> None:
        """Its last update was taken back, and will be made again."""
        self._updates[optimizer].pop()


def merged(parts: Iterable[Sequence[Mapping[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """The n-th updates of all optimizers together; those that train nothing have none."""
    filled, result = [part for part in parts if part], []
    for updates in zip(*filled, strict=True):
        result.append(dict(updates[0]))
        for part in updates[1:]:
            for name, g in part.items():  # all copies of a stage are handed the same
                assert torch.equal(result[-1].setdefault(name, g), g), name
    return result


def make_blocks(model: str, seed: int = 5, device: str = "cpu") -> dict[str, Any]:
    torch.manual_seed(seed)
    blocks = MODELS[model]()
    if device == "cpu":
        return blocks
    made = {name: block.make() if isinstance(block, LazyBlock) else block for name, block in blocks.items()}
    return {name: block.to(device) if isinstance(block, nn.Module) else block for name, block in made.items()}


def make_batches(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """Tokens, of which another number counts in every microbatch."""
    g = torch.Generator().manual_seed(11)
    batches = []
    for t in range(sum(case.spans)):
        batch = []
        for _ in range(case.width * case.m):
            tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=g)
            targets = tokens[:, 1:].clone()
            ignored = torch.rand(targets.shape, generator=g) < 0.4
            targets[ignored if t not in case.skips else ...] = -100
            if t in case.spikes and not batch:
                targets[0, 0] = SPIKE
            batch.append((tokens[:, :-1].to(case.device), targets.to(case.device)))
        batches.append(batch)
    return batches


def make_pipeline(case: Case, group: dist.ProcessGroup | None = None, **changes: Any) -> Pipeline:
    arguments: dict[str, Any] = {
        "blocks": None if "blocks" in changes else make_blocks(case.model, device=case.device),
        "method": case.schedule,
        "loss": LOSSES[case.loss],
        "optimizer": OPTIMIZERS[case.optimizer],
        "lr_scheduler": by_factor(warm_up) if case.rate else None,
        "divisor": case.divisor,
        "max_grad_norm": case.clip,
        "loss_scale": LossScale(*case.scaling) if case.scaling is not None else None,
        "recompute": case.recompute,
        "seed": case.seed,
        "width": case.width,
        "reduce": case.reduce,
        "precision": case.precision,
        "boundary_gradients": case.boundary_gradients,
        "tied": TIED[case.model] if case.tied else None,
        "balance": BALANCE[case.schedule.num_stages],
        "correction": case.correction,
        "group": group,
        "timeout": 20.0,
    }
    return Pipeline(**grouped(arguments | changes))


def train(group: dist.ProcessGroup | None, case: Case, **changes: Any) -> Outcome:
    """Run a case with the pipeline, in this process or as one rank of a group."""
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline = make_pipeline(case, group, optimizer=recording, **changes)
    return finish(run_spans(pipeline, case), pipeline, recording)


def run_spans(pipeline: Pipeline, case: Case) -> Outcome:
    """Run the batches of a case; what reports and decisions say."""
    outcome = Outcome()
    batches = make_batches(case)
    for first, end in pairwise((0, *accumulate(case.spans))):
        for r in pipeline.run(batches[first:end]):
            outcome.reports.append((r.batch, r.loss, r.weight))
            add_decisions(outcome, case, r.decided)
    add_decisions(outcome, case, pipeline.decided())
    return outcome


def add_decisions(outcome: Outcome, case: Case, decided: Iterable[Decision]) -> None:
    """Take down what was decided together."""
    if case.decides:
        outcome.decided += [(d.batch, d.loss, d.norm, d.scale, d.skipped) for d in decided]


def finish(outcome: Outcome, pipeline: Pipeline, recording: Recording) -> Outcome:
    """Add what is known at the end."""
    outcome.gradients = recording.gradients
    outcome.weights = {name: w.clone() for name, w in pipeline.state_dict().items()}
    for optimizer in pipeline.optimizers().values():
        add_state(outcome, optimizer.state_dict())
    return outcome


def add_state(outcome: Outcome, state: dict[str, Any]) -> None:
    for group in state.get("param_groups", ()):
        for name, number in zip(group["param_names"], group["params"], strict=True):
            outcome.state[name] = state["state"].get(number, {})
            outcome.rates[name] = group["lr"]


def train_on_ranks(pool: Any, case: Case) -> Outcome:
    """Run a case on gloo and put together what the ranks know."""
    return together(pool.submit(train, case, ranks=case.width * case.depth))


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of all ranks; those of the last stage report losses, the others only which batches there were."""
    told = next((o.reports for o in outcomes if o.reports and o.reports[0][2] is not None), [])
    for other in outcomes:
        assert other.reports in (told, [(batch, None, None) for batch, _, _ in told])
    result = Outcome(reports=told, gradients=merged([o.gradients for o in outcomes]))
    result.decided = outcomes[0].decided
    assert all(repr(o.decided) == repr(result.decided) for o in outcomes)  # repr, because NaN differs from itself
    for outcome in outcomes:
        result.weights |= outcome.weights
        result.state |= outcome.state
        result.rates |= outcome.rates
    return result


def cut(blocks: Mapping[str, Any], balance: Sequence[int]) -> list[dict[str, Any]]:
    """Stages for the reference."""
    made = {name: b.make() if isinstance(b, LazyBlock) else b for name, b in blocks.items()}
    ends = list(accumulate(balance))
    return [dict(list(made.items())[end - size : end]) for size, end in zip(balance, ends, strict=True)]


def expected(case: Case, batches: int | None = None, options: Mapping[str, Any] | None = None) -> Outcome:
    """The outcome that the reference says, of the first so many batches, with options of the method."""
    return outcome_of(case, reference_run(case, batches, options))


def reference_run(case: Case, batches: int | None = None, options: Mapping[str, Any] | None = None) -> Reference:
    """All that the reference says, of the first so many batches."""
    return train_reference(
        cut(make_blocks(case.model, device=case.device), BALANCE[case.schedule.num_stages]),
        LOSSES[case.loss],
        make_batches(case)[:batches],
        method=case.method,
        parts=parts_of(case),
        optimizer=OPTIMIZERS[case.optimizer],
        divisor=case.divisor if case.precision == "fp32" else 8.0,  # the nearest power of two
        drains=list(accumulate(case.spans)),
        clip=case.clip,
        scaling=case.scaling,
        seed=case.seed,
        precision=low_precision(case.precision),
        boundary=boundary_format(case.boundary_gradients),
        tied=TIED[case.model] if case.tied and case.schedule.num_stages > 1 else {},
        options=options or {},
        order=order_of(row_of(case.method), case.schedule, case.recompute),
        **({"rate": warm_up} if case.rate else {}),
    )


def outcome_of(case: Case, result: Reference) -> Outcome:
    """What of a reference is compared with a case's run."""
    outcome = as_outcome(result)
    if case.decides:
        skipped = [not gradients for gradients in result.gradients]
        figures = (range(len(skipped)), result.losses, result.norms, result.scales, skipped)
        outcome.decided = list(zip(*figures, strict=True))
    return outcome


def parts_of(case: Case) -> list[list[int]]:
    """The microbatches whose gradients are summed apart before they are added: of each pipeline and direction."""
    parts: dict[int, list[int]] = {}
    for program in case.schedule.programs:
        for action in program.period:
            for p in passes(action):
                if p.op is Op.F and p.stage.index == 0:
                    parts.setdefault(p.stage.direction, []).append(p.unit.first)
    return [[w * case.m + k for k in sorted(set(parts[r]))] for w in range(case.width) for r in sorted(parts)]


def reference_of(case: Case, make: Callable[[], dict[str, Any]], balance: tuple[int, ...]) -> Reference:
    """What the reference says of other blocks, made right after seeding, in one span."""
    torch.manual_seed(5)
    return train_reference(
        cut(make(), balance),
        token_loss,
        make_batches(case),
        method=case.method,
        optimizer=OPTIMIZERS[case.optimizer],
        rate=warm_up,
        divisor=case.divisor,
        seed=case.seed,
    )


def as_outcome(result: Reference) -> Outcome:
    outcome = Outcome(gradients=[g for g in result.gradients if g], weights=result.versions[-1] | result.buffers)
    for t, (loss, weight) in enumerate(zip(result.losses, result.weights, strict=True)):
        outcome.reports.append((t, loss if weight else None, weight))
    for state in result.optimizers:
        add_state(outcome, state)
    return outcome


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Every number is the same, bit for bit; buffers and frozen parameters may come on top."""
    assert found.reports == wanted.reports
    assert len(found.gradients) == len(wanted.gradients)
    for update, (a, b) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        assert_equal_tensors(a, b, f"gradient of update {update}")
    assert_equal_tensors({name: found.weights[name] for name in wanted.weights}, wanted.weights, "final weights")
    assert found.rates == wanted.rates
    assert repr(found.decided) == repr(wanted.decided)
    assert found.state.keys() == wanted.state.keys()
    for name, state in wanted.state.items():
        assert_equal_tensors(found.state[name], state, f"optimizer state of {name}")


def assert_equal_tensors(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), f"{what}, {name}: off by {(found[name] - value).abs().max()}"
        else:
            assert found[name] == value, f"{what}, {name}"
