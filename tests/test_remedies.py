"""Remedies for a delay of one, in a plain loop, against the methods that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import stability
from benchmarks.remedies import (
    REMEDIES,
    SYNCHRONOUS,
    Kept,
    Model,
    Remedy,
    look_ahead,
    settings,
    table,
    trained,
    update,
    weights,
)

from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.contender_run import Key, train_contender
from penstock.compare.run import text_task
from penstock.train.prepare.prepare_run import Task

UPDATES = 9


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ComparisonConfig:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(2000)))
    small = ("model.layers=2", "model.width=16", "model.heads=2", "model.context=16", "microbatch_size=4")
    return settings(UPDATES, *small, f"data={text}", "evaluate.every=3", "evaluate.samples=8", "max_grad_norm=0.7")


@pytest.fixture(scope="module")
def task(config: ComparisonConfig) -> Task:
    return text_task(config, Path("nowhere"))


@pytest.mark.parametrize(
    ("remedy", "method"),
    [
        (SYNCHRONOUS, "1f1b"),
        ("none", "2bw"),
        ("repeat", "2bw-ahead"),
        ("motion", "2bw-ahead:motion=1"),
        ("motion-1.5", "2bw-ahead:motion=1:horizon=1.5"),
        ("mean", "2bw-ahead:a=1:b=0"),
        ("error-feedback", "error-feedback"),
    ],
)
def test_a_remedy_is_that_of_its_method(
    remedy: str, method: str, config: ComparisonConfig, task: Task, tmp_path: Path
) -> None:
    contenders = comparison_config([], {"methods": method}).contenders
    key, other = Key(next(iter(contenders)), 1, 3e-3), config.model_copy(update={"contenders": contenders})
    wanted = train_contender(other, task, tmp_path, key, lambda *_: None)
    found = list(trained(config, task, REMEDIES[remedy], key.seed, key.lr))
    assert [updates for updates, _ in found] == [3, 6, 9]
    for (_, loss), score in zip(found, wanted.scores, strict=True):
        assert loss == pytest.approx(score.loss, rel=2e-6)


@pytest.mark.parametrize(
    ("remedy", "of_quadratic"),
    [
        ("none", stability.plain),
        ("repeat", stability.repeat),
        ("motion", stability.motion(1.0)),
        ("motion-1.5", stability.motion(1.5)),
        ("repeat-error", stability.own_error),
        ("repeat-step-read", stability.from_prediction),
        ("error-feedback", stability.fed_back),
        ("spike", stability.nesterov),
    ],
)
def test_on_a_quadratic_a_remedy_is_the_one_whose_stability_is_known(remedy: str, of_quadratic: Any) -> None:
    """The second moment is so long that its root remains one; means have no bias after so many updates."""
    one, eta = torch.ones(1, dtype=torch.float64), 0.3
    kept = Kept.of(one, (0.9, 1.0 - 2.0**-50))
    kept.updates, kept.rate = 2**30, eta
    kept.v = (one - kept.betas[1] ** kept.updates) * (1.0 - 1e-8) ** 2
    wanted = stability.Kept(one, 0 * one, 0 * one, one, one)
    for _ in range(12):
        update(kept, REMEDIES[remedy], kept.read, eta, 0.0)
        look_ahead(kept, REMEDIES[remedy])
        wanted = of_quadratic(wanted, 0.9, eta)
        assert float(kept.w) == pytest.approx(float(wanted.w), abs=1e-6)


def test_spike_compensation_is_nadam_s_step_with_a_constant_momentum() -> None:
    """torch's grows to beta1; with an endless `momentum_decay` it is that from the beginning."""
    kept, parameter = Kept.of(torch.ones(3), (0.9, 0.95)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.NAdam([parameter], 0.1, kept.betas, momentum_decay=1e9)
    for number in range(4):
        parameter.grad = torch.tensor([1.0, -2.0, 0.5]) * (number + 1)
        optimizer.step()
        update(kept, REMEDIES["spike"], parameter.grad, 0.1, 0.0)
        torch.testing.assert_close(kept.w, parameter.detach())


def test_backwards_read_what_a_method_would_have_then() -> None:
    """The weights before the last update, and PipeMare's estimate of them, which is exact once the motion is steady."""
    for name in ("repeat-forward", "discrepancy"):
        kept, remedy = Kept.of(torch.ones(1), (0.9, 0.95)), REMEDIES[name]
        for _ in range(200):  # of equal gradients, whose direction is one
            update(kept, remedy, torch.full((1,), 0.5), 1e-3, 0.0)
            look_ahead(kept, remedy)
        assert float(kept.backward) == pytest.approx(float(kept.before), abs=1e-6)
        assert float(kept.w - kept.before) == pytest.approx(-1e-3, rel=1e-3)


def test_a_falling_horizon_begins_with_the_whole_step_and_ends_with_none() -> None:
    kept, falling = Kept.of(torch.ones(1), (0.9, 0.95)), REMEDIES["repeat-falling"]
    update(kept, falling, torch.full((1,), 0.5), 1e-3, 0.0)
    kept.rate = 1e-3
    assert torch.equal(falling.reads(kept), REMEDIES["repeat"].reads(kept))
    kept.progress = 1.0
    assert torch.equal(falling.reads(kept), kept.w)


def test_a_backward_reads_where_the_remedy_says(config: ComparisonConfig, task: Task) -> None:
    model = Model(task, config.run("1f1b", 0, 3e-3))
    here = model.flat.clone()
    there = here + 0.1 * torch.randn(here.shape, generator=torch.Generator().manual_seed(1))
    apart, alone, other = (model.gradient(a, b, 0, 4) for a, b in ((here, there), (here, here), (there, there)))
    last = list(model.parameters.values())[-1].numel()  # the gradient of the last parameter needs no weights
    assert torch.equal(apart[-last:], alone[-last:])
    for elsewhere in (alone, other):
        assert (apart - elsewhere)[:-last].norm() > 0.01 * apart.norm()


def test_a_run_whose_backwards_read_what_forwards_did_is_the_same(config: ComparisonConfig, task: Task) -> None:
    same = Remedy("", reads=weights, backward=lambda kept: kept.before)
    runs = [list(trained(config, task, remedy, 0, 3e-3)) for remedy in (same, REMEDIES["none"])]
    assert runs[0] == runs[1]


def test_every_remedy_trains_and_is_no_other(config: ComparisonConfig, task: Task) -> None:
    runs = {name: [loss for _, loss in trained(config, task, remedy, 0, 3e-3)] for name, remedy in REMEDIES.items()}
    assert all(losses[-1] < losses[0] for losses in runs.values())
    assert len({losses[-1] for losses in runs.values()}) == len(REMEDIES)


def test_the_table_has_differences_to_the_synchronous_run_with_the_same_seed_and_rate() -> None:
    losses = {(SYNCHRONOUS, 0): 2.0, (SYNCHRONOUS, 1): 4.0, ("none", 0): 2.2, ("none", 1): 4.2}
    rows = [{"remedy": n, "lr": 0.1, "seed": s, "losses": [[1, 9.0], [2, loss]]} for (n, s), loss in losses.items()]
    rows.append({"remedy": "repeat", "lr": 0.2, "seed": 0, "losses": [[2, 1.0]]})
    assert table(rows).splitlines()[2:] == [
        "| no delay (`1f1b`) | 3.000 |  |",
        "| no remedy (`2bw`) | +7.5 % (+10.0, +5.0) |  |",
    ]
