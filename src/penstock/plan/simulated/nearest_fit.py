"""Where no plan fits: the candidate that does with the least memory, how much that is, and what may help it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from penstock.byte_sizes import human_bytes, size_of
from penstock.errors import CapabilityError, ScheduleError
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.memory_kinds import ACTIVATIONS, MESSAGES, OPTIMIZER
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.stages.device_hierarchy import Devices

NEAREST = "all that was tried"
"""What the list of what was skipped calls it."""

_MOST_TRIED = 48


class NearestFit(NamedTuple):
    """The candidate that fits into the least memory.

    Attributes:
        of: the candidate.
        nbytes: bytes with which each device has room for its ranks.
        kind: of what its fullest device holds, that which takes the most.
        share: of that in what it holds.
    """

    of: Candidate
    nbytes: float
    kind: str
    share: float

    def in_words(self, devices: Devices) -> str:
        """Return what is missing, and what may help, by what takes the most; that is not tried."""
        limit = "" if devices.memory is None else f" of {human_bytes(devices.memory, 2)}"
        return (
            f"the closest is {self.of}: it fits with {_rounded_up(self.nbytes)} for each device instead{limit}; "
            f"{self.share:.0%} of what its fullest one holds are {self.kind}, so {self._help(devices)} may help"
        )

    def _help(self, devices: Devices) -> str:
        if self.kind in (ACTIVATIONS, MESSAGES) and self.of.sized.samples > 1:
            return "a profile of smaller microbatches (--microbatch-sizes)"
        if self.kind in (ACTIVATIONS, OPTIMIZER) and devices.host is None and devices.cores is None:
            return "moving them to the host (--host-bandwidth)"
        return "more devices (--devices)"


def _rounded_up(nbytes: float) -> str:
    """Return a number of bytes as `--memory` takes it, no less."""
    said = human_bytes(nbytes, 2)
    while size_of("--memory", said) < nbytes:
        nbytes *= 1.001
        said = human_bytes(nbytes, 2)
    return said


def nearest_fit(trials: Iterable[CandidateTrial], devices: Devices) -> NearestFit | None:
    """Return the candidate that fits into the least memory; None where devices differ, or none is known.

    Candidates whose devices hold the least on average come first, until no other one can hold less. Of ranks with
    several stages the cuts are those that were found step by step, so that they may fit into less.

    Args:
        trials: candidates that do not fit.
        devices: on which they do not.
    """
    if devices.kinds:
        return None
    best: NearestFit | None = None
    ordered = sorted(((trial.held_on_average(), trial) for trial in trials), key=itemgetter(0))
    for least, trial in ordered[:_MOST_TRIED]:
        if best is not None and least >= best.nbytes:
            break
        try:
            found = trial.least_memory()
        except (ScheduleError, CapabilityError):
            continue
        if found is None or (devices.memory is not None and found.nbytes <= devices.memory):
            continue  # more memory of devices is not what it lacks
        if best is None or found.nbytes < best.nbytes:
            kinds = found.kinds
            kind = max(kinds, key=lambda name: kinds[name])
            best = NearestFit(trial.of, found.nbytes, kind, kinds[kind] / found.nbytes)
    return best
