"""The order in which the ranks of a plan are numbered, which says whose messages and sums stay on a server.

Either the ranks of a pipeline follow each other or the replicas of a stage do. Both are tried where some links are
faster with the one and others with the other.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.plan.simulated.candidate import Candidate
from penstock.plan.simulated.candidate_trial import CandidateTrial, TimedCuts
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan
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


def with_rank_order(plan: Plan, trial: CandidateTrial, found: TimedCuts, devices: Devices) -> Plan:
    """Return a plan that says the order of its ranks, if it matters, and what the same stages take with the other one.

    Args:
        plan: of what was found, without it.
        trial: of the plan.
        found: its cuts.
        devices: of the plan.
    """
    of = trial.of
    if not _several(of, devices) or (of.rank_order == _PIPELINES and all(_no_slower(of, devices))):
        return plan
    other = trial.twin(rank_order=_PIPELINES if of.rank_order == _REPLICAS else _REPLICAS)
    (batch,) = other.batch_times([(found.cuts, found.again)])
    return in_order(plan, of.rank_order, batch)


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
