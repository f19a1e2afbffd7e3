"""torch's learning-rate schedulers on pipelines: the same rates at the same updates as in a plain loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler as schedulers

import penstock
from penstock import Pipeline, make_schedule
from penstock.errors import CapabilityError, CheckpointError, ConfigError, PenstockError
from penstock.options.run import Group
from penstock.weights.updates.lr_schedulers import ScheduledSettings
from support.cases import assert_equal_tensors
from support.pool import Pool
from support.snapshots import Kept

UPDATES, M, STAGES = 12, 2, 3
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=UPDATES + 2),
    "cosine": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=3),
    "steps": lambda o: schedulers.MultiStepLR(o, [2, 5, 6], gamma=0.3),
    "function": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (1 + n)),
    "warm-up": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.02, step_size_up=2),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda named: SGD([p for _, p in named], lr=0.02, momentum=0.9),
    "adamw": lambda named: AdamW([p for _, p in named], lr=0.01),
}


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(STAGES)]


def make_batches() -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [[tuple(torch.randn(2, 3, 4, generator=generator)) for _ in range(M)] for _ in range(UPDATES)]  # type: ignore[misc]


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), target.numel()


def train_plainly(optimizer: str, scheduler: str, delay: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """A loop in plain torch, whose gradients are those of the weights `delay` updates before."""
    model = nn.Sequential(*make_blocks())
    made = [OPTIMIZERS[optimizer](list(block.named_parameters())) for block in model]
    plans = [SCHEDULERS[scheduler](each) for each in made]
    settings, versions = [], [[p.detach().clone() for p in model.parameters()]]
    for batch in make_batches():
        newest = [p.detach().clone() for p in model.parameters()]
        for parameter, old in zip(model.parameters(), versions[max(len(versions) - 1 - delay, 0)], strict=True):
            parameter.data.copy_(old)
        model.zero_grad()
        weight = sum(target.numel() for _, target in batch)
        for x, target in batch:
            (loss(model(x), target)[0] / M).backward()
        for parameter, new in zip(model.parameters(), newest, strict=True):
            parameter.data.copy_(new)
            parameter.grad *= M / weight
        settings.append([{k: v for k, v in g.items() if k != "params"} for o in made for g in o.param_groups])
        for each, plan in zip(made, plans, strict=True):
            each.step()
            plan.step()
        versions.append([p.detach().clone() for p in model.parameters()])
    return versions[-1], settings


def make_pipeline(method: str, optimizer: str, scheduler: str | None, **options: Any) -> Pipeline:
    return Pipeline(
        make_blocks(),
        make_schedule(method, STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        lr_scheduler=None if scheduler is None else SCHEDULERS[scheduler],
        partition=[1] * STAGES,
        **options,
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("method", "delay", "optimizer"), [("1f1b", 0, "adamw"), ("2bw", 1, "sgd")])
def test_a_pipeline_follows_a_scheduler_as_a_plain_loop_does(
    scheduler: str, method: str, delay: int, optimizer: str
) -> None:
    wanted, settings = train_plainly(optimizer, scheduler, delay)
    pipeline = make_pipeline(method, optimizer, scheduler)
    list(pipeline.run(make_batches()))
    found = pipeline.state_dict()
    torch.testing.assert_close([found[name] for name in sorted(found, key=_place)], wanted, rtol=2e-6, atol=2e-7)
    last = [group for o in pipeline.optimizers().values() for group in o.param_groups]
    for group, known in zip(last, settings[-1], strict=True):
        assert {key: group[key] for key in ("lr", "momentum", "betas") if key in group} == {
            key: known[key] for key in ("lr", "momentum", "betas") if key in known
        }


def _place(name: str) -> tuple[str, str]:
    return name.split(".")[0], {"weight": "0", "bias": "1"}[name.rsplit(".", 1)[1]]


@pytest.mark.parametrize("scheduler", ["one cycle", "cosine"])
def test_a_resumed_run_has_the_scheduler_where_it_was(scheduler: str) -> None:
    whole = make_pipeline("2bw", "sgd", scheduler)
    list(whole.run(make_batches()))
    first, second = (make_pipeline("2bw", "sgd", scheduler) for _ in range(2))
    list(first.run(make_batches()[:5]))
    second.load(Kept(first.snapshots()))
    list(second.run(make_batches()[5:]))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_settings_may_be_asked_for_in_any_order() -> None:
    """Also after they were forgotten."""
    optimizer = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = ScheduledSettings(SCHEDULERS["cyclic"], optimizer)
        rates = [table.at(n)[0]["lr"] for n in range(3000)]
        assert [table.at(n)[0]["lr"] for n in (2999, 0, 1, 2500)] == [rates[n] for n in (2999, 0, 1, 2500)]
    assert len({round(rate, 9) for rate in rates}) == 3
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_a_momentum_that_comes_back_to_where_it_began_is_set() -> None:
    optimizer = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    table = ScheduledSettings(SCHEDULERS["cyclic"], optimizer)
    momenta = [table.at(n)[0].get("momentum", 0.9) for n in range(9)]
    wanted = []
    plain = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    scheduler = SCHEDULERS["cyclic"](plain)
    for _ in range(9):
        wanted.append(plain.param_groups[0]["momentum"])
        plain.step()
        scheduler.step()
    assert momenta == wanted


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_scheduler_stepped_in_the_loop_is_refused(method: str) -> None:
    pipeline = make_pipeline(method, "sgd", None)
    plans = [schedulers.ExponentialLR(o, 0.9) for o in pipeline.optimizers().values()]
    said = r"set from 0.02 to 0.018\d* during a run.*pass Pipeline\(lr_scheduler="
    with pytest.raises(ConfigError, match=said):  # noqa: PT012
        for _ in pipeline.run(make_batches()):
            for plan in plans:
                plan.step()


def test_rates_set_between_two_runs_are_kept() -> None:
    """As they are, and as what a correction multiplies."""
    for method in ("1f1b", penstock.method("pipemare", reschedule=10)):
        pipeline = Pipeline(
            make_blocks(), method=method, stages=STAGES, microbatches=1, loss=loss, optimizer=OPTIMIZERS["sgd"]
        )
        batches = [batch[:1] for batch in make_batches()]
        list(pipeline.run(batches[:1]))
        for optimizer in pipeline.optimizers().values():
            optimizer.param_groups[0]["lr"] = 0.5
        list(pipeline.run(batches[1:2]))
        found = [optimizer.param_groups[0]["lr"] for optimizer in pipeline.optimizers().values()]
        correctors = [stage.weights.corrector for stage in pipeline.stages.values()]  # type: ignore[attr-defined]
        assert found == [0.5 * (1.0 if corrector is None else corrector.rate(1)) for corrector in correctors]
        assert (found[0] == 0.5) == (method == "1f1b")


def test_between_two_runs_a_scheduler_may_be_stepped_by_hand() -> None:
    """Also one that needs a metric."""
    pipeline = make_pipeline("2bw", "sgd", None)
    plans = [schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0) for o in pipeline.optimizers().values()]
    for _ in range(3):
        list(pipeline.run(make_batches()[:2]))
        for plan in plans:
            plan.step(1.0)
    assert [o.param_groups[0]["lr"] for o in pipeline.optimizers().values()] == [0.005] * STAGES


def train_by_epochs(group: dist.ProcessGroup | None, method: str, stages: int, width: int) -> dict[str, Tensor]:
    """Three runs, between which a scheduler is stepped and momentum is set by hand."""
    pipeline = Pipeline(
        make_blocks()[:2],
        make_schedule(method, stages, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        data_parallel=width,
        group=Group(group, 20.0),
    )
    plans = [schedulers.StepLR(o, 1, gamma=0.5) for o in pipeline.optimizers().values()]
    batches = [a + b for a, b in pairwise(make_batches())] if width == 2 else make_batches()
    for epoch in range(3):
        list(pipeline.run(batches[2 * epoch : 2 * epoch + 2]))
        for plan in plans:
            plan.step()
        for optimizer in pipeline.optimizers().values():
            optimizer.param_groups[0]["momentum"] = 0.5 / (1 + epoch)
    every = [stage.weights.updater.optimizer for state in pipeline._ranks for stage in state.stages.values()]  # type: ignore[attr-defined]
    list(pipeline.run(batches[6:7]))
    assert {o.param_groups[0]["lr"] for o in every} == {0.0025}
    return pipeline.state_dict()


@pytest.mark.processes
def test_settings_by_hand_reach_parallel_pipelines(pool: Pool) -> None:
    """In one process, too, which shows the optimizers of the first one only."""
    alone = train_by_epochs(None, "2bw", 1, 2)
    for found in pool.submit(train_by_epochs, "2bw", 1, 2, ranks=2):
        assert_equal_tensors(found, alone, "weights")


def set_on_some(group: dist.ProcessGroup, stages: int, width: int, who: list[int]) -> tuple[list[str], list[Any]]:
    """What runs say, and the rates that they use: set on some ranks only, then on all, then nothing again."""
    pipeline = Pipeline(
        make_blocks()[: 2 * stages],
        make_schedule("1f1b", stages, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        data_parallel=width,
        group=Group(group, 20.0),
    )
    batches = [a + b for a, b in pairwise(make_batches())] if width == 2 else make_batches()
    said, rates = [], []
    log = logging.getLogger("penstock")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        for ranks in (who, who, [0, 1], []):
            if dist.get_rank(group) in ranks:
                for optimizer in pipeline.optimizers().values():
                    optimizer.param_groups[0]["lr"] = 0.0025
            try:
                list(pipeline.run(batches[:1]))
            except ConfigError as error:
                said.append(str(error))
            rates.append([o.param_groups[0]["lr"] for o in pipeline.optimizers().values()])
    finally:
        log.removeHandler(handler)
    return said, rates


@pytest.mark.processes
def test_other_settings_of_the_same_weights_are_refused(pool: Pool) -> None:
    """On all ranks, before anything is trained; and the pipelines go on once they are equal."""
    for said, rates in pool.submit(set_on_some, 1, 2, [1], ranks=2):
        reason = (
            "stage 0 is stepped with other settings on ranks 0 and 1, which hold the same weights: nothing and "
            "lr=0.0025 were set by hand; set the same on all ranks"
        )
        assert [text[: len(reason)] for text in said] == [reason] * 2
        assert rates[2:] == [[0.0025]] * 2


@pytest.mark.processes
def test_a_rate_that_is_set_on_some_stages_only_is_warned_of(pool: Pool) -> None:
    """Once; it may be meant."""
    for said, rates in pool.submit(set_on_some, 2, 1, [1], ranks=2):
        assert said == [
            "learning rates were set by hand on ranks 1, not on ranks 0; if that is not meant, set them on all ranks"
        ]
        assert rates[2:] == [[0.0025]] * 2


def overwritten_on_one(group: dist.ProcessGroup) -> list[str]:
    pipeline = Pipeline(
        make_blocks(),
        make_schedule("1f1b", STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        lr_scheduler=lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
        group=Group(group, 20.0),
    )
    if dist.get_rank(group) == 1:
        for optimizer in pipeline.optimizers().values():
            optimizer.param_groups[0]["lr"] = 0.5
    said = []
    for _ in range(2):
        with pytest.raises(PenstockError) as caught:
            list(pipeline.run(make_batches()[:2]))
        said.append(f"{caught.type.__name__}: {caught.value}")
    return said


@pytest.mark.processes
def test_a_rate_that_a_scheduler_would_overwrite_on_one_rank_is_refused_on_all(pool: Pool) -> None:
    one, two, *_ = pool.submit(overwritten_on_one, ranks=STAGES, timeout=20.0)
    assert all("ConfigError: the learning rate of SGD was set to 0.5 by hand, but lr_scheduler sets" in s for s in two)
    assert all(s.startswith("DataError: rank 1 could not begin (ConfigError: the learning rate of SGD") for s in one)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_has_the_settings_that_were_set_by_hand(optimizer: str, tmp_path: Path) -> None:
    """Also in other stages, and also if they were set after the last update; the user's schedulers are the user's."""

    def begin(stages: int = STAGES) -> tuple[Pipeline, penstock.Checkpoints]:
        pipeline = Pipeline(
            make_blocks(), method="2bw", stages=stages, microbatches=M, loss=loss, optimizer=OPTIMIZERS[optimizer]
        )
        return pipeline, penstock.Checkpoints(pipeline, tmp_path)

    whole, checkpoints = begin()
    plans = [schedulers.ExponentialLR(o, 0.1) for o in whole.optimizers().values()]
    list(whole.run(make_batches()[:3]))
    for plan, made in zip(plans, whole.optimizers().values(), strict=True):
        plan.step()
        made.param_groups[0] |= {"betas": (0.3, 0.4)} if optimizer == "adamw" else {"momentum": 0.3}
    checkpoints.save()
    list(whole.run(make_batches()[3:6]))
    for stages in (STAGES, 2):
        resumed, found = begin(stages)
        found.load()
        list(resumed.run(make_batches()[3:6]))
        assert_equal_tensors(resumed.state_dict(), whole.state_dict(), "weights")
        for made in resumed.optimizers().values():
            assert made.param_groups[0] | {"params": [], "param_names": []} == {
                **next(iter(whole.optimizers().values())).param_groups[0],
                "params": [],
                "param_names": [],
            }


def test_a_checkpoint_without_settings_by_hand_gives_those_of_the_factory() -> None:
    saved = make_pipeline("1f1b", "sgd", None)
    list(saved.run(make_batches()[:1]))
    other = make_pipeline("1f1b", "sgd", None)
    for made in other.optimizers().values():
        made.param_groups[0]["lr"] = 7.0
    other.load(Kept(saved.snapshots()))
    assert {made.param_groups[0]["lr"] for made in other.optimizers().values()} == {0.02}


def test_settings_of_two_groups_do_not_go_into_one() -> None:
    saved = make_pipeline("1f1b", "sgd", None)
    [*_, last] = saved.optimizers().values()
    last.param_groups[0]["lr"] = 7.0
    kept = Kept(saved.snapshots())
    other = Pipeline(make_blocks(), method="1f1b", stages=1, microbatches=M, loss=loss, optimizer=OPTIMIZERS["sgd"])
    with pytest.raises(CheckpointError, match=r"0.0.weight and 2.0.weight are in one parameter group, but .*'lr': 7.0"):
        other.load(kept)


def test_a_switch_keeps_what_was_set_by_hand() -> None:
    pipeline = make_pipeline("1f1b", "sgd", None)
    for made in pipeline.optimizers().values():
        made.param_groups[0]["lr"] = 0.5
    pipeline.switch("2bw")
    assert {made.param_groups[0]["lr"] for made in pipeline.optimizers().values()} == {0.5}


def test_a_rate_set_by_hand_that_a_scheduler_would_overwrite_is_refused() -> None:
    pipeline = make_pipeline("1f1b", "sgd", "steps")
    list(pipeline.run(make_batches()[:2]))
    next(iter(pipeline.optimizers().values())).param_groups[0]["lr"] = 0.5
    with pytest.raises(ConfigError, match="set to 0.5 by hand, but lr_scheduler sets it"):
        list(pipeline.run(make_batches()[2:4]))


def ending(
    group: dist.ProcessGroup | None, method: str, width: int = 1, blocks: list[nn.Module] | None = None
) -> Pipeline:
    """With a scheduler for five updates: OneCycleLR has a rate for after its last step, too."""
    return Pipeline(
        blocks or make_blocks(),
        make_schedule(method, STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        lr_scheduler=lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=4),
        data_parallel=width,
        group=Group(group, 20.0),
    )


def run_to_the_end(group: dist.ProcessGroup, method: str) -> tuple[list[int], str, int]:
    pipeline, reports, said = ending(group, method), [], ""
    try:
        for report in pipeline.run(make_batches()[:7]):
            reports.append(report.batch)
    except ConfigError as error:
        said = str(error)
    pipeline.full_state_dict()
    return reports, said[:37], pipeline.batches


@pytest.mark.processes
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_scheduler_that_ends_ends_the_run_on_all_ranks(method: str, pool: Pool) -> None:
    """The rank that reads furthest ahead says why; the others log it."""
    said = ["", "", "lr_scheduler has no rate for update 6"]
    assert pool.submit(run_to_the_end, method, ranks=STAGES) == [([0, 1, 2, 3, 4], one, 5) for one in said]


def end_with_a_frozen_front(group: dist.ProcessGroup, method: str, frozen: int) -> tuple[list[int], str, int, str]:
    """What is reported in two runs, and what the second one says, which needs more rates than there are; one more."""
    blocks = make_blocks()
    for block in blocks[:frozen]:
        block.requires_grad_(False)
    pipeline, reports, said = ending(group, method, blocks=blocks), [], []
    for batches in (make_batches()[:2], make_batches()[2:7], make_batches()[:1]):
        try:
            for report in pipeline.run(batches):
                reports.append(report.batch)
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    return reports, said[0][:65] if len(said) > 1 else "", pipeline.batches, said[-1]


@pytest.mark.processes
@pytest.mark.parametrize(("method", "frozen"), [("1f1b", 2), ("2bw", 1)])
def test_a_scheduler_that_ends_is_noticed_by_a_first_stage_that_is_frozen(pool: Pool, method: str, frozen: int) -> None:
    """It has no optimizer, so it asks a rank that has one how the scheduler goes."""
    *others, reader = pool.submit(end_with_a_frozen_front, method, frozen, ranks=STAGES, timeout=20.0)
    assert reader[:3] == ([0, 1, 2, 3, 4], "ConfigError: lr_scheduler has no rate for update 6: Tried to step"[:65], 5)
    for reports, said, batches, last in others:
        assert (reports, said, batches) == ([0, 1, 2, 3, 4], "", 5)
        assert "ConfigError: lr_scheduler has no rate for update 6" in last  # their own, or that of another rank


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_scheduler_that_ends_ends_the_run_before_the_next_batch(method: str, width: int) -> None:
    """All batches before have been trained on and reported, and the pipeline is as good as after any run."""
    batches = [a + b for a, b in pairwise(make_batches())] if width == 2 else make_batches()
    pipeline, wanted = (ending(None, method, width) for _ in range(2))
    reports = []
    with pytest.raises(ConfigError, match=r"lr_scheduler has no rate for update 6: .*as many steps as"):  # noqa: PT012
        for report in pipeline.run(batches[:7]):
            reports.append(report.batch)
    assert reports == [0, 1, 2, 3, 4]
    list(wanted.run(batches[:5]))
    assert_equal_tensors(pipeline.state_dict(), wanted.state_dict(), "weights")
    assert pipeline.batches == 5
    pipeline.snapshots()
    assert pipeline.evaluate(batches[:1]) is not None
    with pytest.raises(ConfigError, match="no rate for update 6"):
        list(pipeline.run(batches[:1]))
    assert list(pipeline.run([])) == []


def test_rates_beyond_the_end_of_a_scheduler_are_its_last_ones() -> None:
    """Predictions look further than training goes."""
    optimizer = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    table = ScheduledSettings(lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=4), optimizer)
    assert table.near(9) == table.near(4)
    assert table.at(2)[0]["lr"] > table.near(9)[0]["lr"]
    with pytest.raises(ValueError, match="Tried to step 5 times"):
        table.at(9)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (schedulers.ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (lambda _: "cosine", "lr_scheduler returned str, not a scheduler of torch"),
    ],
)
def test_what_is_no_function_of_updates_is_refused(factory: Any, said: str) -> None:
    with pytest.raises(CapabilityError, match=said):
        Pipeline(
            make_blocks(),
            make_schedule("1f1b", STAGES, M),
            loss=loss,
            optimizer=OPTIMIZERS["sgd"],
            lr_scheduler=factory,
        )


def test_a_scheduler_that_exists_already() -> None:
    plan = schedulers.StepLR(OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))]), 3)
    said = r"(?s)lr_scheduler is StepLR of an optimizer that exists already.*lambda optimizer: .*StepLR\(optimizer"
    with pytest.raises(ConfigError, match=said):
        Pipeline(
            make_blocks(), make_schedule("1f1b", STAGES, M), loss=loss, optimizer=OPTIMIZERS["sgd"], lr_scheduler=plan
        )
    with pytest.raises(ConfigError, match="lr_scheduler must be a function, optimizer -> scheduler.*got 0.1"):
        Pipeline(
            make_blocks(), make_schedule("1f1b", STAGES, M), loss=loss, optimizer=OPTIMIZERS["sgd"], lr_scheduler=0.1
        )


@pytest.mark.parametrize("factory", [schedulers.StepLR, lambda update: 1 / (1 + update)], ids=["class", "of updates"])
def test_a_factory_of_schedulers_that_fails_is_named(factory: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Pipeline(
            make_blocks(),
            make_schedule("1f1b", STAGES, M),
            loss=loss,
            optimizer=OPTIMIZERS["sgd"],
            lr_scheduler=factory,
        )
    assert "LambdaLR(optimizer, function)" in caught.value.__notes__[0]


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_scheduler_that_ends_too_early_says_so(method: str) -> None:
    pipeline = Pipeline(
        make_blocks(),
        make_schedule(method, STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        lr_scheduler=lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=4),
    )
    with pytest.raises(ConfigError, match="has no rate for update 6: Tried to step 5 times.*total_steps=epochs"):
        list(pipeline.run(make_batches()))
