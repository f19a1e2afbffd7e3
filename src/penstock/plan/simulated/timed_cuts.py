"""Cuts with what they take, and their place among others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.plan.simulated.planned_methods import ActivationMemory
from penstock.plan.simulated.rank_memory import Cuts


class TimedCuts(NamedTuple):
    """Cuts that fit.

    Attributes:
        cuts: where stages begin, and where the last one ends.
        activations: what each rank does with them.
        batch: seconds of one more batch of a long run.
        seconds: of it per sample.
    """

    cuts: Cuts
    activations: tuple[ActivationMemory, ...]
    batch: float
    seconds: float


def place_of(seconds: float, activations: Sequence[ActivationMemory], away: bool = False) -> tuple[float, int]:
    """Return what plans are ordered by: their time but for rounding, then how many ranks recompute or move something.

    Args:
        seconds: of the plan.
        activations: what each rank does with them.
        away: all ranks have optimizer states in the memory of the host.
    """
    more = len(activations) * away + sum(each is not ActivationMemory.KEPT for each in activations)
    return float(f"{seconds:.9g}"), more
