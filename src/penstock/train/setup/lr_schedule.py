"""Learning rates over the number of updates."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.train.config.sections import RateSection


def rate_schedule(section: RateSection, updates: int) -> Callable[[int], float]:
    """Return a function: number of the update (0, 1, ...) -> factor on the peak rate.

    Args:
        section: shape of the schedule.
        updates: how many updates the run makes; the decay ends there.
    """
    warm_up = min(section.warm_up, updates)

    def factor(update: int) -> float:
        if update < warm_up:
            return (update + 1) / warm_up
        if section.decay == "none" or updates <= warm_up:
            return 1.0
        progress = min((update - warm_up) / max(updates - warm_up - 1, 1), 1.0)
        fall = (1 + math.cos(math.pi * progress)) / 2 if section.decay == "cosine" else 1 - progress
        return section.floor + (1 - section.floor) * fall

    return factor
