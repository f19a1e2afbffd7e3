"""Runs whose predicted and recorded peaks are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock import check
from penstock.measure.stage_bytes import measure_stages
from penstock.measure.stage_trial import Training
from penstock.models.gpt_shape import GPTConfig
from penstock.models.vocabulary_parallel_gpt import summed_cross_entropy, vocabulary_parallel_gpt, with_targets
from penstock.options.all_options import PipelineOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.pipeline_stats import TOTAL_ON_DEVICE
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule
from penstock.schedule.methods.choice import method as method_choice
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.schedule.methods.find_method import find_method
from penstock.simulate.memory.predicted import MemoryOptions, peak_bytes
from penstock.simulate.memory.snapshots import Snapshots
from penstock.stage.blocks.loss import LossFunction
from penstock.train.config.sections import OptimizerSection
from penstock.train.setup.optimizers import optimizer_factory
from support.grouped import grouped
from support.own_methods import correction_of
from support.schedules import make_schedule

WIDTH, SAMPLES, TOKENS = 24, 3, 7
BATCHES = 4
BATCH_OPS = (Op.STEP, Op.REDUCE)
OWN = {
    "parked slices": """
schedule parked-slices
rule flush
microbatches 2
nodes 0@0 1@1
rank 0: F0:0/2^t F0:1/2^t F1:0/2^t F1:1/2^t OFFLOAD1:1/2@0>1/parked B0:1/2^t B0:0/2^t FETCH1:1/2@0<1/parked B1:1/2^t B1:0/2^t STEP[t]
rank 1: F0:0/2^t F0:1/2^t HOLD1:1/2@1<0/parked B0:1/2^t B0:0/2^t F1:0/2^t F1:1/2^t RETURN1:1/2@1>0/parked B1:1/2^t B1:0/2^t STEP[t]
"""  # noqa: E501  # an order has a line for each rank
}


@dataclass(frozen=True)
class Run:
    """A method and how it is run."""

    method: str
    depth: int
    m: int
    recompute: str | tuple[str, ...] = "none"
    precision: str = "fp32"
    width: int = 1
    sharding: str | None = None
    clip: float | None = None
    offload: str | tuple[str, ...] = "none"
    motion: bool = False  # of 2bw-ahead
    muon: bool = False
    chunks: int | None = None  # of the order, if it has another number by itself
    tied: bool = False  # the first stage shares a parameter with the last one
    slices: int | None = None  # of the order, if it has another number by itself
    offload_optimizer: str = "none"
    snapshots: Snapshots | None = None
    halved: bool = False  # whole backwards of the order are made to come in two halves
    combine: Combine = REDUCE
    ema: float | None = None
    own: str = ""  # one of `OWN` instead of the schedule of the method


def in_halves(schedule: Schedule) -> Schedule:
    """Make every whole backward two halves, the second one behind the next action, but before updates."""

    def halve(actions: Sequence[Action]) -> Iterator[Action]:
        late: list[Action] = []
        for action in actions:
            if action.op in BATCH_OPS:
                yield from late
                late = []
            yield action._replace(op=Op.I) if action.op is Op.B else action
            yield from late
            late = [action._replace(op=Op.W)] if action.op is Op.B else []
        yield from late

    programs = tuple(Program(*(tuple(halve(part)) for part in program)) for program in schedule.programs)
    return replace(schedule, programs=programs)


class Widening(nn.Module):
    """A layer with a bias, a norm, and another width inside: its stages are not alike."""

    tokenwise = True

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, inside), nn.Linear(inside, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Summing(nn.Module):
    """Adds what was before in the sequence: slices hand on their sums, and all tokens so far."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_slice(x, None)[0]

    def forward_slice(self, x: torch.Tensor, carry: Any) -> tuple[torch.Tensor, Any]:
        before = [] if carry is None else carry
        tokens = torch.cat([*before, x], 1)
        return x + tokens.square().cumsum(1)[:, -x.shape[1] :], [tokens]


class Sine(nn.Module):
    tokenwise = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


def blocks_for(stages: int, tied: bool = False, slices: bool = False) -> dict[str, Any]:
    """Two blocks for each stage, some of them functions unless sequences are sliced."""
    torch.manual_seed(1)
    blocks: dict[str, Any] = {}
    for n in range(stages):
        blocks[f"layer{n}"] = Widening(16 + 8 * (n % 3))
        blocks[f"sin{n}"] = (Summing() if n % 2 else Sine()) if slices else torch.sin
    if tied:
        blocks[f"layer{stages - 1}"].norm.weight = blocks["layer0"].norm.weight
    return blocks


_GPT = GPTConfig(layers=4, width=16, heads=2, context=TOKENS, vocabulary=29)


@dataclass(frozen=True)
class _Model:
    """What is trained: its blocks, made anew for each use, how they are divided, its loss, and a microbatch."""

    blocks: Callable[[], Mapping[str, Any]]
    balance: list[int]
    loss: LossFunction
    microbatch: Callable[[], tuple[Any, Any]]


def model_for(run: Run, schedule: Schedule) -> _Model:
    """Layers that are not alike; a GPT whose output layer is divided where the method divides one."""
    if find_method(run.method).divides_head:
        made = partial(vocabulary_parallel_gpt, _GPT, schedule.ranks, 0)
        return _Model(lambda: made().blocks, made().partition, summed_cross_entropy, _tokens)
    sliced = schedule.slices > 1
    shape = (2, SAMPLES, TOKENS, WIDTH) if sliced else (2, SAMPLES, WIDTH)
    blocks = partial(blocks_for, schedule.num_stages, run.tied, sliced)
    loss = squares if sliced else squared
    return _Model(blocks, [2] * schedule.num_stages, loss, lambda: tuple(torch.randn(*shape)))


def _tokens() -> tuple[Any, torch.Tensor]:
    tokens, targets = torch.randint(_GPT.vocabulary, (2, SAMPLES, TOKENS))
    return with_targets(tokens, targets)


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def squares(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for slices: a sum, and its weight."""
    return (output - target).square().sum(), torch.tensor(float(output.shape[0] * output.shape[1]))


def optimizer_for(method: str) -> Any:
    """An optimizer that goes with the method."""
    name = find_method(method).settings.get("optimizer.name")
    if name == "sgd":
        return lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9)
    if name == "nadam":
        return lambda named: torch.optim.NAdam(named, lr=0.01)
    return lambda named: torch.optim.AdamW(named, lr=0.01)


def muon(named: Any) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest."""
    return optimizer_factory(OptimizerSection(name="muon", lr=0.01))(named)


def _options(correction: str) -> dict[str, Any]:
    """Options that have no default outside of `penstock train`."""
    return {"reschedule": 4} if "reschedule" in CORRECTIONS[correction].options else {}


def saving(snapshots: Snapshots) -> Saving:
    """Whoever takes snapshots keeps them until the next ones come, or not at all."""
    kept: list[Snapshot] = []

    def make_room(batch: int) -> bool:
        for each in [each for each in kept if each.batch < batch]:
            each.tensors.clear()
            kept.remove(each)
        return True

    return Saving(snapshots.every, kept.append if snapshots.kept else lambda _: None, make_room, shares=True)


def peaks_of_a_run(run: Run, on_device: bool = False) -> tuple[dict[int, int], dict[int, int]]:
    """The predicted peaks of all ranks, and those that the ledger has recorded; of their devices if asked for."""
    row = find_method(run.method)
    m = int(row.settings.get("microbatches", run.m))
    options = {"precision": run.precision, "recompute": run.recompute, "width": run.width, "offload": run.offload}
    options |= {"sharding": run.sharding, "offload_optimizer": run.offload_optimizer}
    options |= {"combine": run.combine, "ema_decay": run.ema}
    given = {"motion": 1} if run.motion else _options(row.correction)
    correction = None if row.correction == "none" else correction_of(row.correction, **given)
    order = {key: n for key, n in (("chunks", run.chunks), ("slices", run.slices)) if n is not None}
    schedule = make_schedule(run.method, run.depth, m, options=order)
    method: Any = method_choice(run.method, **order, **given)
    if run.halved or run.own:
        schedule = check(OWN[run.own]).schedule if run.own else schedule
        method = schedule = in_halves(schedule) if run.halved else schedule
    model, optimizer = model_for(run, schedule), muon if run.muon else optimizer_for(run.method)
    arguments = {
        "blocks": model.blocks(),
        "method": method,
        "loss": model.loss,
        "optimizer": optimizer,
        "max_grad_norm": run.clip,
        "balance": model.balance,
    }
    arguments |= {} if method is schedule else {"stages": run.depth, "microbatches": m}
    pipeline = Pipeline(**grouped(arguments | options))
    data = [[model.microbatch() for _ in range(m * run.width)] for _ in range(BATCHES)]
    list(pipeline.run(data, save=None if run.snapshots is None else saving(run.snapshots)))
    total = TOTAL_ON_DEVICE if on_device else "total"
    found = {rank: kinds.get(total, kinds["total"]) for rank, kinds in pipeline.peak_bytes().items()}
    options |= {"sharding": str(pipeline.schedule.sharding.level)}
    training = Training(model.loss, optimizer, PipelineOptions().changed(**options), correction)
    again = run.recompute != "none"
    sizes = measure_stages(model.blocks(), pipeline.parts, data[0][0], training, again, pipeline.schedule)
    each = run.recompute if isinstance(run.recompute, tuple) else (run.recompute,) * schedule.num_stages
    blockwise = frozenset(index for index, mode in enumerate(each) if mode == "block")
    asked = MemoryOptions(
        run.width,
        run.precision != "fp32",
        blockwise,
        row.correction,
        BATCHES,
        run.snapshots,
        run.combine,
        run.ema is not None,
        on_device,
    )
    predicted = peak_bytes(pipeline.proof, sizes, asked)
    depth = schedule.ranks
    return {pipeline_ * depth + rank: peak for (pipeline_, rank), peak in predicted.items()}, found
