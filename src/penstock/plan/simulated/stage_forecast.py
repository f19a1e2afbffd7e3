"""What the proofs of some methods will say of their stages, so that schedules are not proven in vain."""

from __future__ import annotations

from typing import NamedTuple

from penstock.plan.simulated.planned_methods import PlannedMethod
from penstock.schedule.proof.proof import StageFacts
from penstock.schedule.stage_state.stage_state import Delay


class StageForecast(NamedTuple):
    """What a stage needs.

    Attributes:
        rule: of the schedule.
        facts: of its versions and gradients.
        activations: microbatches in flight, at most; of a method with several stages on a rank, or whose backwards come
            in halves, at least.
    """

    rule: str
    facts: StageFacts
    activations: int


def least_microbatches(method: PlannedMethod, depth: int) -> int:
    """Return the fewest microbatches of a pipeline that the proof of a method accepts, the depth or more."""
    return max(depth, 2 * (depth - 1)) if method.name == "2bw-eager" else depth


def stage_forecast(method: PlannedMethod, depth: int, microbatches: int, stage: int) -> StageForecast:
    """Return what the proof of a method derives for a stage, if there are as many microbatches as ranks, or more.

    Args:
        method: which.
        depth, microbatches: d and m.
        stage: which.
    """
    doubled, behind = not method.flushes, depth - 1 - stage
    ahead = _ahead(method, behind, microbatches)
    flight = ahead + 1 if doubled else min(ahead + 1, microbatches)
    gradients = 2 if doubled and ahead < microbatches else 1
    facts = StageFacts(1 + doubled, 0, gradients, 2 + doubled, Delay(float(doubled), float(doubled)))
    return StageForecast(method.rule, facts, flight)


def _ahead(method: PlannedMethod, behind: int, microbatches: int) -> int:
    """Return how many forwards a stage with so many behind it runs before its first backward."""
    if method.row in ("gpipe", "breadth-first"):
        return microbatches - 1
    if method.chunks > 1:
        return 0
    return 2 * behind if method.row in ("eager", "2bw-eager", "zb-h2") else behind
