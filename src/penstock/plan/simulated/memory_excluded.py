"""What a limit of memory excludes: a candidate that would be faster than the best plan that fits.

Of the candidates whose first bound, which counts no memory, is below the time of that plan, those with the least bounds
are tried without a limit, until one is faster. So a plan that only recomputes for lack of room is found out, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter

from penstock.errors import CapabilityError, ScheduleError
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import LEAST_GAIN, Excluded

_MOST_TRIED = 4


def memory_excluded(
    met: Iterable[tuple[float, Candidate]],
    seconds: float,
    chains: Mapping[int, BlockChain],
    devices: Devices,
    known: KnownSchedules,
) -> Excluded | None:
    """Return a candidate that a limit excludes and that is faster than the best plan; None if none is known.

    Args:
        met: candidates that divide and move nothing, with the seconds per sample that each takes at least.
        seconds: of the best plan, per sample.
        chains: of blocks, by samples of a microbatch.
        devices: with their limits.
        known: schedules of candidates.
    """
    kinds = tuple(replace(kind, memory=None) for kind in devices.kinds)
    free = replace(devices, memory=None, kinds=kinds)
    most = seconds / LEAST_GAIN
    faster = sorted((each for each in met if each[0] < most), key=itemgetter(0))
    for _, of in faster[:_MOST_TRIED]:
        of = replace(of, on=tuple(replace(each, memory=None) for each in of.on))
        trial = CandidateTrial(of, chains[of.sized.samples], free, known)
        try:
            if max(trial.bounds()) < most:
                found = trial.fastest((most, 0))
                return Excluded(str(of), found.seconds, seconds / found.seconds)
        except (NoPlanError, ScheduleError, CapabilityError):
            continue
    return None
