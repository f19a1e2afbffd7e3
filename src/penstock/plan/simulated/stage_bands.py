"""Times of all stages between all cuts, in bands, and the cuts of which the slowest stage is fastest.

Each stage has a block, so the first begin of a stage, and its first end, come a block after those of the stage before.
Its band is the part of a matrix from cut to cut that it can have: begins and ends count from 0 there, and the ends of a
stage are begins of the next one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import Floats
from penstock.plan.candidates.rank_memory import Cuts
from penstock.plan.stages.layer_row import between


def band_of(matrix: Floats, stage: int, stages: int) -> Floats:
    """Return the band of one of some stages."""
    size = len(matrix) - stages
    return matrix[stage : stage + size, stage + 1 : stage + 1 + size]


def bands_of(sums: Floats, stages: int) -> Floats:
    """Return sums between cuts, of each stage, where devices are as fast as the profile."""
    whole = between(sums)
    return np.array([band_of(whole, stage, stages) for stage in range(stages)])


def ends_later(blocks: int, stages: int) -> npt.NDArray[np.bool_]:
    """Return whether an end comes behind a begin, in a band."""
    return np.triu(np.ones((blocks - stages + 1,) * 2, dtype=bool))


def slowest_of(times: Floats) -> float:
    """Return the time of the slowest stage, with the cuts with which it is least, from times of stages in bands."""
    reached = np.where(np.arange(times.shape[1]) > 0, np.inf, 0.0)
    for stage in times:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def evenest_cuts(times: Floats) -> Cuts | None:
    """Return the cuts of which the slowest stage is fastest, from times of stages in bands; None if no cuts fit."""
    reached = np.where(np.arange(times.shape[1]) > 0, np.inf, 0.0)
    trail = []
    for stage in times:
        through = np.maximum(reached[:, None], stage)
        trail.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    if not math.isfinite(reached[-1]):
        return None
    places = [len(reached) - 1]
    for from_ in reversed(trail):
        places.append(int(from_[places[-1]]))
    return tuple(stage + place for stage, place in enumerate(reversed(places)))
