"""The plan of the cuts that were chosen for a candidate, with the order in which its ranks are numbered.

That order says whose messages and sums stay on a server: either the ranks of a pipeline follow each other or the
replicas of a stage do. Both are tried where some links are faster with the one and others with the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import ActivationMemory
from penstock.plan.candidates.rank_memory import Cuts
from penstock.plan.planners.two_bw import single_device_ways
from penstock.plan.simulated.candidate_trial import NAME, CandidateTrial
from penstock.plan.simulated.fitting_cuts import TimedCuts
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, PlannedStage, Rating
from penstock.schedule.ir.rank_numbers import RANK_ORDERS, RankOrder

_PIPELINES, _REPLICAS = RANK_ORDERS
_SAID = "rank_order "  # a note on it begins like this


def rank_orders(candidate: Candidate, devices: Devices) -> tuple[RankOrder, ...]:
    """Return the orders of a candidate that are worth trying: not where no link is faster than in the other one.

    Where all links are alike the ranks of a pipeline follow each other. On devices of several kinds the replicas of a
    stage do, which are of one kind where that can be: so the ranks on each kind follow each other, as launchers want.
    """
    if not _several(candidate, devices):
        return (_PIPELINES,)
    first, second = _no_slower(candidate, devices)
    if first and second:
        return (_REPLICAS if len(set(candidate.placement)) > 1 else _PIPELINES,)
    return tuple(order for order, beaten in ((_PIPELINES, second), (_REPLICAS, first)) if not beaten)


def chosen_plan(trial: CandidateTrial, found: TimedCuts, devices: Devices) -> Plan:
    """Return the plan with cuts; where the order of its ranks matters, with that and what the other one would take.

    Args:
        trial: of its candidate.
        found: the cuts.
        devices: of the plan.
    """
    of, ratings, stages = trial.of, trial.ratings(found), []
    for rank, (first, last) in zip(of.method.ranks(of.depth), pairwise(found.cuts), strict=True):
        does, layers, on = found.activations[rank], tuple(range(first, last)), of.on[rank] if of.on else None
        ways = single_device_ways(of.sized.graph, does is ActivationMemory.RECOMPUTED)
        named, away = tuple(ways[n].name for n in layers) if ways else (), does is ActivationMemory.OFFLOADED
        stages.append(PlannedStage(layers, of.width, 1, named, sharded=of.shards > 1, on=on, offloaded=away))
    notes = (f"{of}: one more batch of a long run takes {found.batch:.4g} s",)
    rating = Rating(NAME, found.batch / of.sized.microbatches, tuple(ratings))
    run = train_settings(of, found.cuts, found.activations)
    plan = Plan(of.method.name, tuple(stages), rating, notes, of.sized.samples, run, of.method.chunks)
    if not _several(of, devices) or (of.rank_order == _PIPELINES and all(_no_slower(of, devices))):
        return plan
    other = trial.twin(rank_order=_PIPELINES if of.rank_order == _REPLICAS else _REPLICAS)
    (batch,) = other.times.batch_times([(found.cuts, found.activations)])
    return in_order(plan, of.rank_order, batch)


def train_settings(of: Candidate, cuts: Cuts, activations: Sequence[ActivationMemory]) -> dict[str, Any]:
    """Return the keys of `penstock train` that run a candidate.

    Args:
        of: the candidate.
        cuts: where stages begin, and where the last one ends.
        activations: what each rank does with them.
    """
    does = [activations[rank] for rank in of.method.ranks(of.depth)]
    found: dict[str, Any] = {"method": of.method.row, "stages": of.depth, "width": of.width}
    if of.method.options:
        found["options"] = of.method.options
    if of.shards > 1:
        found["sharding"] = of.sharding
    if of.away:
        found["offload_optimizer"] = "pieces"
    found |= {
        "microbatches": of.microbatches,
        "microbatch_size": of.sized.samples,
        "recompute": _one_or_all(["block" if each is ActivationMemory.RECOMPUTED else "none" for each in does]),
    }
    if ActivationMemory.OFFLOADED in does:
        each_away = ["activations" if each is ActivationMemory.OFFLOADED else "none" for each in does]
        found["offload"] = _one_or_all(each_away)
    found["balance"] = [last - first for first, last in pairwise(cuts)]
    if of.on:
        found["placement"] = list(of.placement)
    return found


def _one_or_all(words: list[str]) -> str | list[str]:
    """Return the word that stages have in common, or that of each."""
    return words[0] if len(set(words)) == 1 else words


def _several(candidate: Candidate, devices: Devices) -> bool:
    """Return whether ranks lie on other devices, or use other links, in one order than in the other."""
    return candidate.width > 1 and candidate.depth > 1 and (len(devices.levels) > 1 or bool(candidate.on))


def _no_slower(candidate: Candidate, devices: Devices) -> tuple[bool, bool]:
    """Return, for each order, whether no link is slower with it than with the other one."""
    if len(devices.levels) == 1:
        return True, True
    first, second = (replace(candidate, rank_order=order).links(devices) for order in RANK_ORDERS)
    return first.as_fast_as(second, candidate.wraps), second.as_fast_as(first, candidate.wraps)


def in_order(plan: Plan, order: RankOrder, otherwise: float) -> Plan:
    """Return a plan with an order of its ranks.

    Args:
        plan: with or without one.
        order: which.
        otherwise: seconds of one more batch with the other order.
    """
    rows, other = "the ranks of a pipeline", _REPLICAS
    if order == _REPLICAS:
        rows, other = "the replicas of a stage", _PIPELINES
    note = (
        f"{_SAID}{order}: {rows} follow each other, on one server where they fit; with {other} one more batch of these "
        f"stages takes {otherwise:.4g} s"
    )
    notes = [each for each in plan.notes if not each.startswith(_SAID)]
    return replace(plan, settings={**plan.settings, "rank_order": order}, notes=(*notes, note))
