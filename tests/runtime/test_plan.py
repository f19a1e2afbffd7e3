"""A plan: every check once, cheap ones first, and no module or process is needed for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock import make_schedule as proven
from penstock.errors import CapabilityError, ConfigError, PenstockError, ScheduleError
from penstock.options.all_options import PipelineOptions
from penstock.options.parallelism import DataParallel, Partition
from penstock.options.passes import Precision, Recompute
from penstock.options.run import Group
from penstock.options.updates import Divergence
from penstock.partition.blocks import LazyBlock
from penstock.runtime.from_checked_plan import continue_under, pipeline_of
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan import plan as plan_module
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.plan.schedule_from_arguments import request_of
from penstock.schedule import add_options, build
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.methods.choice import method
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.table import METHODS
from penstock.weights.corrections.pipemare import PipeMare
from support.cases import Case, make_pipeline
from support.offered_methods import OFFERED
from support.own_methods import correction_of
from support.schedules import make_schedule

CHECKS = (
    "check_enough", "cut_blocks", "find_ties", "check_slices", "resolve_both", "with_all_actions",
    "check_recomputed_blocks", "check_correction", "prove_with_all_actions",
)  # fmt: skip


def never() -> nn.Module:
    raise AssertionError("a block was made")


def unmade(count: int) -> dict[str, LazyBlock]:
    """Blocks that say what they cost, and must not be made."""
    return {f"block{i}": LazyBlock(never, seed=i, cost=1.0) for i in range(count)}


def linear(count: int) -> dict[str, LazyBlock]:
    return {f"block{i}": LazyBlock(lambda: nn.Linear(2, 2), seed=i, cost=1.0) for i in range(count)}


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def total(output: torch.Tensor, target: object) -> tuple[torch.Tensor, float]:
    return output.sum(), 1.0


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever proves a schedule fails the test."""

    def check(*_: object) -> None:
        raise AssertionError("a schedule was proven")

    for module in (build, add_options):
        monkeypatch.setattr(module, "check", check)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each step of a plan was taken."""
    found: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return real(*arguments, **options)

        return counted

    for name in CHECKS:
        monkeypatch.setattr(plan_module, name, counting(name, getattr(plan_module, name)))
    return found


def test_a_plan_needs_no_module() -> None:
    options = PipelineOptions().changed(max_grad_norm=1.0, balance=[2, 2, 1])
    plan = PipelinePlan.make(unmade(5), ScheduleRequest("2bw", 3, 4), options)
    assert plan.parts == [["block0", "block1"], ["block2", "block3"], ["block4"]]
    assert any(action.op.value == "DECIDE" for action in plan.schedule.programs[0].period)
    assert plan.schedule is plan.proof.schedule
    assert plan.plain == make_schedule("2bw", 3, 4)


def test_every_check_is_made_once(counted: Counter[str]) -> None:
    plan = PipelinePlan.make(linear(4), ScheduleRequest("1f1b", 2, 2), PipelineOptions())
    pipeline = pipeline_of(plan, linear(4), total, sgd)
    assert counted == dict.fromkeys(CHECKS, 1)
    assert pipeline.schedule is plan.schedule


def test_a_plan_is_followed_by_another_one_that_is_not_checked_again(counted: Counter[str]) -> None:
    plan = PipelinePlan.make(linear(4), ScheduleRequest("2bw", 2, 2), PipelineOptions().changed(max_grad_norm=1.0))
    pipeline = pipeline_of(plan, linear(4), total, sgd)
    following = plan.followed_by(ScheduleRequest("1f1b", 2, 2), None).prove()
    before = counted.copy()
    continue_under(pipeline, following)
    assert counted == before
    assert pipeline.schedule is following.schedule
    assert len(list(pipeline.run([[(torch.ones(2), None)] * 2] * 3))) == 3


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("method", "stages", "options", "kind", "message"),
    [
        ("2bw", 100, {}, ConfigError, "the model has 6 blocks, which cannot be cut into 100 stages"),
        ("interleaved", 4, {}, ConfigError, "the model has 6 blocks, which cannot be cut into 8 stages"),
        ("2bw", 6, {"balance": [6]}, ConfigError, "must hold 6 positive numbers that add up to the model's 6 blocks"),
        ("2bw", 6, {"delays": 1}, ConfigError, "delays need version rule 'flush'"),
        ("2bw", 6, {"combine": Combine("average")}, ConfigError, "needs parallel pipelines"),
        ("pipemare", 6, {}, ConfigError, "pass staleness=correction_of"),
        (
            "2bw",
            6,
            {"correction": correction_of("pipemare", reschedule=5)},
            ConfigError,
            "goes with version rule newest",
        ),
        ("seq1f1b", 2, {"recompute": "block"}, ConfigError, "does not go with slices of sequences"),
        ("2bw", 6, {"recompute": "stage", "segments": 7}, ConfigError, "from 1 to 6 here"),
        (
            "i-timeprest",
            4,
            {"recompute": "stage", "correction": correction_of("i-timeprest")},
            ScheduleError,
            "needs an order that places its own recomputes",
        ),
        (
            "spectrain",
            4,
            {"recompute": "block", "correction": correction_of("spectrain")},
            CapabilityError,
            "recompute is not supported",
        ),
    ],
)
def test_what_is_wrong_is_found_before_a_proof(
    method: str, stages: int, options: dict[str, Any], kind: type[PenstockError], message: str
) -> None:
    """With 2 microbatches, of which 2bw has too few for 6 stages; that is looked for last."""
    with pytest.raises(kind, match=message):
        UnprovenPlan.of(unmade(6), ScheduleRequest(method, stages, 2), PipelineOptions().changed(**options))


def test_too_few_microbatches_are_found_last() -> None:
    draft = UnprovenPlan.of(unmade(6), ScheduleRequest("2bw", 6, 2), PipelineOptions())
    with pytest.raises(ScheduleError, match="needs at least 5 microbatches per batch, got 2"):
        draft.prove()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "data_parallel: width must be a whole number of at least 1, got 0"),
        ({"reduce": "quick"}, "reduce must be one of ordered, fast"),
        ({"combine": "average"}, "combine must be a Combine"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16"),
        ({"recompute": "all"}, "recompute must be one of none, block, stage"),
        ({"segments": 2}, "segments=2 is for recompute='stage'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a positive number"),
        ({"divisor": 0.0}, "divisor must be positive"),
        ({"ema_decay": 1.0}, "ema_decay must be between 0 and 1"),
        ({"ema_decay": 0.9, "combine": Combine("average")}, "ema_decay=0.9 and combine=average do not go together"),
    ],
)
def test_options_are_checked_when_they_are_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineOptions().changed(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"staleness": "pipemare"},
            r"staleness must be .*correction_of\('pipemare', reschedule=500\).*; got 'pipemare'",
        ),
        ({"partition": 2}, r"partition must be the number of blocks of each stage, such as \[3, 2, 3\], .*; got 2"),
        ({"partition": "22"}, r"partition must be .*; got '22'"),
        ({"partition": [2.0, 2]}, r"partition must be .*; got \[2.0, 2\]"),
        ({"partition": lambda: Partition(tied=[("a", "b")])}, "tied must be a dict, such as .*; got"),  # type: ignore[arg-type]
        ({"partition": lambda: Partition(slicing=2)}, "slicing must be a Slicing"),  # type: ignore[arg-type]
        ({"max_grad_norm": "1"}, "max_grad_norm must be a number, such as 1.0, or None; got '1'"),
        ({"max_grad_norm": True}, "max_grad_norm must be a number, such as 1.0, or None; got True"),
        ({"ema_decay": "0.9"}, "ema_decay must be a number, such as 0.999, or None; got '0.9'"),
        ({"divergence": 3}, r"divergence must be penstock.Divergence\(spike=2.0\) or the like, or None; got 3"),
        ({"divergence": Divergence(spike="2")}, "divergence: spike must be a number, .*; got '2'"),  # type: ignore[arg-type]
        ({"group": lambda: Group(timeout="x")}, "timeout must be a number of seconds above 0; got 'x'"),
        ({"group": lambda: Group(timeout=0)}, "timeout must be a number of seconds above 0; got 0"),
        ({"seed": None}, "seed must be a whole number; got None"),
        ({"data_parallel": "2"}, "data_parallel: width must be a whole number of at least 1, got '2'"),
        ({"precision": lambda: Precision("fp16", loss_scale=8.0)}, "loss_scale must be a LossScale"),  # type: ignore[arg-type]
        ({"precision": lambda: Precision(divisor="8")}, "divisor must be a number, .*; got '8'"),  # type: ignore[arg-type]
        ({"recompute": True}, "recompute must be one of none, block, stage, or a list .*; got True"),
        ({"recompute": lambda: Recompute("stage", segments="2")}, "segments must be .*; got '2'"),  # type: ignore[arg-type]
        ({"divergence": Divergence()}, r"set max_grad_norm=, .*precision=.* or data_parallel= \(penstock train: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_values_of_wrong_types_are_refused_with_what_to_write(options: dict[str, Any], message: str) -> None:
    def make() -> Pipeline:
        given = {name: value() if callable(value) else value for name, value in options.items()}
        return Pipeline([nn.Linear(2, 2)], method="1f1b", stages=1, microbatches=2, loss=total, optimizer=sgd, **given)

    with pytest.raises(ConfigError, match=message):
        make()


def test_every_option_has_a_name_of_its_own_and_keywords_are_options() -> None:
    default = PipelineOptions()
    names = [option.name for group in fields(default) for option in fields(getattr(default, group.name))]
    assert len(names) == len(set(names)) == len(PipelineOptions.names())
    arguments = Pipeline.__init__.__annotations__.keys()
    what = {"blocks", "method", "stages", "loss", "optimizer", "group", "example", "return"}
    assert {*names, *(group.name for group in fields(default))} >= arguments - what


def test_options_change_by_name() -> None:
    changed = PipelineOptions().changed(width=3, seed=5)
    assert (changed.data_parallel.width, changed.run.seed) == (3, 5)
    assert changed.changed(width=1, seed=0) == PipelineOptions()
    with pytest.raises(TypeError, match="no option 'wdith'"):
        PipelineOptions().changed(wdith=3)


@pytest.mark.parametrize("method", OFFERED)
def test_a_request_gives_the_plan_of_its_proof(method: str) -> None:
    """Also where the proof finds that more messages must be outstanding than the order asks for."""
    given = {"reschedule": 5} if "reschedule" in METHODS[method].spec.options else {}
    correction = correction_of(method, **given)
    options = PipelineOptions().changed(correction=correction, max_grad_norm=1.0, width=2)
    request = ScheduleRequest(method, 4, 8)
    blocks = unmade(request.schedule.num_stages)
    draft = UnprovenPlan.of(blocks, request, options)
    plan = draft.prove()
    assert plan.proof == PipelinePlan.make(blocks, prove(method, 4, 8), options).proof
    assert replace(draft.schedule, window=plan.schedule.window) == plan.schedule


def test_a_pipeline_runs_the_plan_of_its_keywords() -> None:
    """What a keyword of `Pipeline` says is what its plan says."""
    pipeline = make_pipeline(Case("1f1b", 2, 2, clip=0.5, width=2, precision="bf16", tied=True), ema_decay=0.9, seed=7)
    options = pipeline._plan.options
    assert (options.update.max_grad_norm, options.update.ema_decay, options.run.seed) == (0.5, 0.9, 7)
    assert (options.data_parallel.width, options.precision.precision) == (2, "bf16")
    assert options.partition.tied == {"head.weight": "table.weight"}
    assert (options.partition.balance, options.run.timeout) == ((3, 3), 20.0)


def test_options_may_follow_the_name_of_a_method_as_on_the_command_line() -> None:
    schedules = [proven(chosen, 2, 4) for chosen in ("interleaved:chunks=3", method("interleaved", chunks=3))]
    assert str(schedules[0]) == str(schedules[1])
    request, correction = request_of("pipemare:reschedule=7", 2, 4)
    assert (request.method, correction) == ("pipemare", PipeMare(reschedule=7))
    with pytest.raises(ConfigError, match="method 1f1b has no option 'chunks'"):
        request_of("1f1b:chunks=2", 2, 4)


@pytest.mark.parametrize(
    ("asked", "level"),
    [("gradients", "gradients:gradients=2"), ("none", "none"), (None, "full:weights=2:gradients=2")],
)
def test_the_sharding_of_a_method_gives_way_to_the_one_that_is_asked_for(asked: str | None, level: str) -> None:
    options = PipelineOptions(data_parallel=DataParallel(2, sharding=asked))
    request = ScheduleRequest("layered", 2, 4)
    plan = UnprovenPlan.of(linear(4), request, options)
    assert str(plan.schedule.sharding) == level
    assert str(plan.followed_by(request, None).schedule.sharding) == level
