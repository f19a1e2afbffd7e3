"""What the proofs of some methods will say of their stages, so that schedules are not proven in vain."""

from __future__ import annotations

from typing import NamedTuple


class StageForecast(NamedTuple):
    """What a stage needs.

    Attributes:
        buffers: parameter-sized, for weights and gradients.
        activations: microbatches in flight, at most.
        scratch: updates are written over gradients.
    """

    buffers: int
    activations: int
    scratch: bool


METHODS = ("1f1b", "eager", "gpipe", "2bw", "2bw-eager")
"""Methods with one stage on each rank whose backward is one pass, as profiles know it."""


def least_microbatches(method: str, depth: int) -> int:
    """Return the fewest microbatches of a pipeline that the proof of a method accepts, the depth or more."""
    return max(depth, 2 * (depth - 1)) if method == "2bw-eager" else depth


def forecast(method: str, depth: int, microbatches: int, stage: int) -> StageForecast:
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
    return StageForecast(3 if doubled else 2, flight, doubled)
