"""The rest of a run after a snapshot."""

from __future__ import annotations

from dataclasses import replace

from support.cases import (
    Outcome,
)


def rest_of(outcome: Outcome, batch: int) -> Outcome:
    """What of a whole run comes from `batch` on."""
    decided = [t for t, *_, skipped in outcome.decided if not skipped]
    made = decided if outcome.decided else [t for t, _, weight in outcome.reports if weight]
    first = sum(t < batch for t in made)
    return replace(
        outcome,
        reports=[r for r in outcome.reports if r[0] >= batch],
        gradients=outcome.gradients[first:],
        decided=[d for d in outcome.decided if d[0] >= batch],
    )
