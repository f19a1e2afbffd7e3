"""What the proofs of some methods will say of their stages, so that schedules are not proven in vain."""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.methods.find_method import find_method
from penstock.schedule.proof.proof import StageFacts
from penstock.schedule.stage_state.stage_state import Delay


class StageForecast(NamedTuple):
    """What a stage needs.

    Attributes:
        rule: of the schedule.
        facts: of its versions and gradients.
        activations: microbatches in flight, at most.
    """

    rule: str
    facts: StageFacts
    activations: int


METHODS = ("1f1b", "eager", "gpipe", "2bw", "2bw-eager")
"""Methods with one stage on each rank whose backward is one pass, as profiles know it."""


def least_microbatches(method: str, depth: int) -> int:
    """Return the fewest microbatches of a pipeline that the proof of a method accepts, the depth or more."""
    return max(depth, 2 * (depth - 1)) if method == "2bw-eager" else depth


def stage_forecast(method: str, depth: int, microbatches: int, stage: int) -> StageForecast:
    """Return what the proof of a method derives for a stage, if there are as many microbatches as stages, or more.

    Args:
        method: one of `METHODS`.
        depth, microbatches: d and m.
        stage: which.
    """
    behind = depth - 1 - stage
    ahead = {"gpipe": microbatches - 1, "eager": 2 * behind, "2bw-eager": 2 * behind}.get(method, behind)
    doubled = method.startswith("2bw")
    flight = ahead + 1 if doubled else min(ahead + 1, microbatches)
    gradients = 2 if doubled and ahead < microbatches else 1
    facts = StageFacts(1 + doubled, 0, gradients, 2 + doubled, Delay(float(doubled), float(doubled)))
    return StageForecast(find_method(method).rule, facts, flight)
