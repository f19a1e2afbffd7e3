"""What ranks of a plan wait for: by how much a batch would be shorter if that took no time.

So what one cause adds is the same for all ranks. Where several would each delay a batch alone, as a link that is as
busy as the sums beside it, the last one in the order of `waiting_times` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.plan.candidates.candidate import NoPlanError
from penstock.plan.candidates.candidate_times import CandidateTimes
from penstock.plan.candidates.planned_methods import ActivationMemory
from penstock.plan.candidates.rank_memory import Cuts
from penstock.plan.stages.planned import COPIES, CORES, LINKS, SUMS
from penstock.simulate.costs import Costs


def waiting_times(times: CandidateTimes, cuts: Cuts, activations: Sequence[ActivationMemory]) -> dict[str, float]:
    """Return the seconds of a batch that ranks spend for each cause beside their own work; 0 where it is not known.

    One after the other takes no time: messages, sums and gathers of parallel pipelines, copies to the host, and the
    work of other ranks on the same cores.

    Args:
        times: of the configuration.
        cuts: where stages begin, and where the last one ends.
        activations: what each rank does with them.
    """
    steps = list(_freed(times, cuts, activations))
    names, costs = [name for name, _ in steps[1:]], [each for _, each in steps]
    try:
        batches = times.batch_times_at(costs, [times.schedule(activations)] * len(costs))
    except NoPlanError:  # rounds of microbatches that are not played differ
        return dict.fromkeys(names, 0.0)
    least = np.minimum.accumulate(batches)
    return dict(zip(names, (least[:-1] - least[1:]).tolist(), strict=True))


def _freed(times: CandidateTimes, cuts: Cuts, activations: Sequence[ActivationMemory]) -> Iterator[tuple[str, Costs]]:
    """Yield the costs as they are, and then without what each cause takes, one cause after the other."""
    of, where = times.of, np.array(cuts)
    now = times.costs(where, activations)
    yield "", now
    if of.depth > 1:
        now = replace(times.without_message_work().costs(where, activations), transfer=0.0, latency=0.0, decision=None)
        yield LINKS, now
    if of.width > 1:
        now = replace(now, collective=0.0, network=None)
        yield SUMS, now
    if of.offloads:
        now = replace(now, stages=tuple(replace(stage, copy=0.0) for stage in now.stages))
        yield COPIES, now
    if now.cores is not None:
        yield CORES, replace(now, cores=None)
