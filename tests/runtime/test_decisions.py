"""What all stages decide together equals the reference, bit for bit: clipping, skipped updates, loss scales."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.verify.reference import Scaling
from penstock.weights.decision import LossScale
from support.cases import (
    METHODS,
    Case,
    assert_same,
    expected,
    make_batches,
    make_pipeline,
    train,
    train_on_ranks,
)
from support.pool import Pool
from support.schedules import make_schedule
from support.smallest_batch import least

EVERY = (*METHODS, "2bw-eager")
CLIP = 0.6  # below the norm of most batches of these models
GRID = [("2bw", d, m) for d in (1, 2, 3, 4) for m in sorted({least("2bw", d), d, d + 2})]
GRID += [(method, d, m) for method in ("1f1b", "stash") for d, m in ((1, 3), (2, 2), (4, 6))]
GRID += [(method, 3, 5) for method in ("sequential", "gpipe", "eager", "2bw-eager")]
RESTLESS = Scaling(initial=2.0**24, growth=2.0, backoff=0.5, interval=2)


def clipped(method: str, depth: int, m: int) -> Case:
    return Case(method, depth, m, spans=(5, 3), skips=(2,), clip=CLIP, optimizer=("sgd", "adamw")[m % 2])


@pytest.mark.parametrize(("method", "depth", "m"), GRID)
def test_clipping_in_one_process(method: str, depth: int, m: int, device: str) -> None:
    case = replace(clipped(method, depth, m), device=device)
    wanted = expected(case)
    assert sum(norm > CLIP for _, _, norm, _, _ in wanted.decided) >= len(wanted.decided) / 2
    assert_same(train(None, case), wanted)


@pytest.mark.parametrize("method", EVERY)
def test_updates_that_are_not_finite_are_skipped(pool: Pool, method: str) -> None:
    """In batches that follow one another, too: the next version is a copy, and rate and optimizer stand still."""
    case = Case(method, 2, 3, loss="spiky", spans=(6, 4), spikes=(1, 2, 5, 6, 9), skips=(4,), clip=CLIP)
    wanted = expected(case)
    assert [skipped for *_, skipped in wanted.decided] == [t in {*case.spikes, 4} for t in range(10)]
    assert all(w.isfinite().all() for w in wanted.weights.values())
    assert_same(train(None, case), wanted)
    if method in ("1f1b", "2bw", "stash"):
        assert_same(train_on_ranks(pool, case), wanted)


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("method", EVERY)
def test_loss_scales(pool: Pool, method: str, clip: float | None) -> None:
    """A scale that begins too high, grows every other batch, and overflows again and again."""
    case = Case(method, 3, least(method, 3) + 1, model="half", spans=(9, 7), clip=clip, scaling=RESTLESS)
    wanted = expected(case)
    scales = [scale for *_, scale, _ in wanted.decided]
    assert max(scales) > scales[-1] < scales[0]
    assert any(a < b for a, b in pairwise(scales))
    assert 2 <= sum(skipped for *_, skipped in wanted.decided) < 14
    assert_same(train(None, case), wanted)
    if clip is None and method in ("1f1b", "2bw", "stash"):
        assert_same(train_on_ranks(pool, case), wanted)


def test_an_overflow_lowers_a_delayed_scale_once() -> None:
    """With double-buffered weights batch 1 begins before anybody knows that batch 0 overflowed."""
    case = Case("2bw", 2, 2, loss="spiky", spans=(5,), spikes=(0, 1), skips=(), scaling=Scaling(8.0, 2.0, 0.5, 100))
    assert [scale for *_, scale, _ in train(None, case).decided] == [8.0, 8.0, 4.0, 4.0, 4.0]


def test_a_scale_changes_nothing_but_what_overflows() -> None:
    """Powers of two cancel exactly."""
    plain = Case("2bw", 2, 3, clip=CLIP)
    scaled = Case("2bw", 2, 3, clip=CLIP, scaling=Scaling(256.0, 2.0, 0.5, 3))
    a, b = train(None, plain), train(None, scaled)
    a.decided = b.decided
    assert_same(b, a)


def test_decisions_lag_behind_reports_and_none_is_lost() -> None:
    case = Case("2bw", 2, 3, spans=(4,), skips=(), clip=CLIP)
    pipeline = make_pipeline(case)
    reported = [[d.batch for d in report.decided] for report in pipeline.run(make_batches(case))]
    assert reported == [[], [], [0], [1]]
    assert [d.batch for d in pipeline.decided()] == [2, 3]
    assert pipeline.decided() == ()


def test_where_nothing_is_decided_together_no_norm_is_known() -> None:
    case = Case("1f1b", 2, 2, spans=(2,), skips=())
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    decision = pipeline.decided()[-1]
    assert math.isnan(decision.norm)
    assert not decision.skipped


def test_a_schedule_that_decides_already_is_taken_as_it_is() -> None:
    case = clipped("2bw", 2, 3)
    schedule = make_schedule("2bw", 2, 3, decides=True)
    pipeline = make_pipeline(case, method=schedule)
    assert pipeline.schedule == schedule
    with_clip, without = make_pipeline(case), make_pipeline(case, max_grad_norm=None)
    assert with_clip.schedule == schedule != without.schedule


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_a_norm_that_makes_no_sense_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm must be a positive number"):
        make_pipeline(Case("1f1b", 2, 2), max_grad_norm=clip)


@pytest.mark.parametrize(
    "changes",
    [
        {"initial": 0.0}, {"initial": -1.0}, {"initial": math.nan}, {"initial": math.inf}, {"initial": "8"},
        {"initial": True}, {"initial": None}, {"initial": torch.tensor(8.0)}, {"growth": 0.5}, {"growth": math.inf},
        {"growth": True}, {"growth": "2"}, {"backoff": 2.0}, {"backoff": 0.0}, {"backoff": math.nan}, {"backoff": True},
        {"interval": 0}, {"interval": -3}, {"interval": True}, {"interval": 2.0}, {"interval": "3"},
    ],
)  # fmt: skip
def test_a_scale_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"loss scale.*{name}.*{re.escape(repr(value))}"):
        LossScale(**changes)


def test_a_scale_of_numpy_becomes_a_plain_number() -> None:
    """Snapshots hold it as JSON, which has no numbers of numpy."""
    found = LossScale(np.float32(8.0), np.int64(2), np.float64(0.5))  # type: ignore[arg-type]
    assert found == LossScale(8.0, 2.0, 0.5)
    assert [type(value) for value in (found.initial, found.growth, found.backoff)] == [float] * 3


def test_decisions_outlive_an_evaluation_and_a_loop_that_is_left() -> None:
    case = Case("2bw", 2, 3, spans=(9,), skips=(), clip=CLIP)
    pipeline, batches = make_pipeline(case), make_batches(case)
    seen = [d.batch for report in pipeline.run(batches[:3]) for d in report.decided]
    pipeline.evaluate(batches[:1])
    seen += [d.batch for d in pipeline.decided()]
    for report in pipeline.run(batches[3:]):
        seen += [d.batch for d in report.decided]
        if report.batch == 5:
            break
    seen += [d.batch for d in pipeline.decided()]
    assert seen == list(range(pipeline.batches))


def test_a_stop_before_a_run_is_forgotten() -> None:
    case = Case("2bw", 2, 2, spans=(5,), skips=(), clip=CLIP)
    pipeline = make_pipeline(case)
    pipeline.stop()
    assert len(list(pipeline.run(make_batches(case)))) == 5
