"""Configurations whose order is searched for the times of their blocks (zb-auto), on as many ranks as another plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.candidate_times import CandidateTimes
from penstock.plan.candidates.planned_methods import SEARCHED, ActivationMemory
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.stages.device_hierarchy import Devices
from penstock.simulate.option_choice.order_options_from_costs import with_search_options

_MOST_SEARCHED = 1 << 9  # forwards of a batch for which an order is searched, which takes about a second


def searched_for(base: Candidate, chain: BlockChain, devices: Devices, known: KnownSchedules) -> Iterator[Candidate]:
    """Yield the same configuration with orders searched for its times: ZB-2p, and with a limit of memory down to ZB-1p.

    With a limit the microbatches in flight become fewer by a quarter of the ranks at a time. A search knows one time
    for each kind of pass, the mean over ranks, of blocks that are not recomputed; messages are those of even cuts.

    Args:
        base: with the depth, width and microbatch size to take.
        chain: its blocks.
        devices: to plan for.
        known: schedules of other candidates.

    Raises:
        NoPlanError: the halves of backwards are not known, or it has too many passes.
    """
    of = replace(base, method=SEARCHED, sharding="none", away=False, offloads=False)
    if chain.halved is None:
        raise NoPlanError(of, "the profile does not tell the halves of backwards of every layer apart")
    if of.passes > _MOST_SEARCHED:
        raise NoPlanError(of, f"{of.passes:,} passes are too many to search an order for them here ({_MOST_SEARCHED})")
    cuts = np.linspace(0, chain.blocks, of.depth + 1).astype(int)
    costs = CandidateTimes(of, chain, devices, known).costs(cuts, [ActivationMemory.KEPT] * of.depth)
    costs = replace(costs, latency=tuple(each + costs.transfer for each in costs.latencies(of.depth)), transfer=0.0)
    times = with_search_options(SEARCHED.row, None, {}, costs, of.depth)
    sharding = "none" if base.sharding == "none" else "gradients"  # as others with one stage on each rank
    most, step = 2 * of.depth, -(-of.depth // 4)
    for limit in (most,) if devices.memory is None else (*range(most, of.depth, -step), of.depth):
        method = SEARCHED._replace(searched=tuple({**times, "limit": limit}.items()))
        yield replace(of, method=method, sharding=sharding)
