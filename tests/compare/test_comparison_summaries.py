"""What a comparison says of its runs: differences, verdicts and the best rate."""

from __future__ import annotations

import math
import statistics
from functools import cache
from typing import Any

import pytest

from penstock.compare.contender_run import Key, Score, TrialResult
from penstock.compare.prepared_contender import prepare_contender
from penstock.compare.results import Findings, MethodSummary
from support.comparisons import configured, task_of


@cache
def contenders() -> tuple[Any, ...]:
    config = configured("methods=2bw,1f1b")
    return config, [prepare_contender(config, name, task_of) for name in ("2bw", "1f1b")]


def summarised(ends: dict[tuple[str, int, float], float | None]) -> dict[str, MethodSummary]:
    """The summary of runs that end with these losses; None where they diverge."""
    config, methods = contenders()
    results = {}
    for place, end in ends.items():
        key, diverged = Key(*place), 3 if end is None else None
        scores = () if end is None else (Score(6, end),)
        results[key] = TrialResult(key, scores, (5.0,) * 3, (1.0,) * 3, diverged, 1.0)
    two_seeds = config.model_copy(update={"seeds": 2})
    return {summary.method: summary for summary in Findings(two_seeds, methods, results).summaries()}


def test_differences_are_those_of_the_same_seeds() -> None:
    """Seeds are far apart, and 2bw is 1 or 2 % worse on each of them."""
    found = summarised({("1f1b", 0, 0.1): 2.0, ("1f1b", 1, 0.1): 3.0, ("2bw", 0, 0.1): 2.02, ("2bw", 1, 0.1): 3.06})
    assert found["1f1b"].verdict == "baseline"
    assert (found["2bw"].loss, found["2bw"].spread) == pytest.approx((2.54, statistics.stdev([2.02, 3.06])))
    assert (found["2bw"].difference, found["2bw"].difference_spread) == pytest.approx((1.5, math.sqrt(0.5)))
    assert found["2bw"].verdict == "worse"


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (1.98, 2.96, "better"),
        (2.02, 2.98, "not resolved"),
        (2.0, 3.0, "equal"),
        (None, None, "diverged"),
        (2.2, None, "not resolved"),
    ],
)
def test_verdicts(first: float | None, second: float | None, verdict: str) -> None:
    base = {("1f1b", 0, 0.1): 2.0, ("1f1b", 1, 0.1): 3.0}
    assert summarised({**base, ("2bw", 0, 0.1): first, ("2bw", 1, 0.1): second})["2bw"].verdict == verdict


def test_one_seed_resolves_nothing_and_without_a_baseline_there_is_no_difference() -> None:
    assert summarised({("1f1b", 0, 0.1): 2.0, ("2bw", 0, 0.1): 4.0})["2bw"].verdict == "not resolved"
    alone = summarised({("2bw", 0, 0.1): 4.0, ("2bw", 1, 0.1): 4.0})["2bw"]
    assert (alone.verdict, alone.difference) == ("-", None)


def test_the_best_rate_diverges_least_then_ends_lowest() -> None:
    found = summarised(
        {
            ("1f1b", 0, 0.1): 3.0, ("1f1b", 1, 0.1): 3.0, ("1f1b", 0, 0.2): 2.5, ("1f1b", 1, 0.2): 3.4,
            ("2bw", 0, 0.1): 3.2, ("2bw", 1, 0.1): 3.2, ("2bw", 0, 0.2): 2.0, ("2bw", 1, 0.2): None,
            ("2bw", 0, 0.3): 1.0,  # not all seeds yet
        }
    )  # fmt: skip
    assert (found["1f1b"].lr, found["2bw"].lr) == (0.2, 0.1)
