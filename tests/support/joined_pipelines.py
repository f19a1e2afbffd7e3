"""Outcomes of parallel pipelines joined into one."""

from __future__ import annotations

from dataclasses import replace

from support.cases import (
    Case,
    Outcome,
    assert_same,
    merged,
)


def together(outcomes: list[Outcome], case: Case) -> Outcome:
    """One pipeline's part of everything; the others must have the same."""
    pipelines = [outcomes[r * case.depth : (r + 1) * case.depth] for r in range(case.width)]
    results = []
    for ranks in pipelines:
        last = ranks[-1]  # which knows the losses
        result = Outcome(last.reports, merged([o.gradients for o in ranks]), decided=last.decided)
        for outcome in ranks:
            result.weights |= outcome.weights
            result.state |= outcome.state
            result.rates |= outcome.rates
            assert repr(outcome.decided) == repr(result.decided)
        results.append(result)
    for other in results[1:]:
        trained = {name: w for name, w in results[0].weights.items() if "running" not in name}
        assert_same(other, replace(results[0], weights=trained))
    return results[0]
