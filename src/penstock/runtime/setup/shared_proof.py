"""Proves the schedules of a job once: rank 0 does, and every rank gets what it needs of the proof."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from penstock.comm.collective.hand_out import HandedOut, hand_out
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.setup.same_plan import check_same_plan
from penstock.schedule.build import evaluation_of
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.proof.check import Proof, check
from penstock.schedule.rank_proof import common_part, own_part, rank_proof


def prove_plan(plan: UnprovenPlan, control: dist.ProcessGroup | None) -> PipelinePlan:
    """The plan with its proof; between processes, all call this together, and it is of their rank alone.

    Args:
        plan: the same on every rank; if it has been proven, nothing is proven again.
        control: a process group on the CPU; None in a single process.

    Raises:
        ConfigError: ranks have different plans.
        ScheduleError: the schedule is wrong; where only m is too small, the message names the smallest legal m.
        TransportError: a peer is dead.
    """
    if control is not None:
        check_same_plan(plan, control)
    if isinstance(plan, PipelinePlan):
        return plan
    if control is None:
        return plan.prove()
    proof = _prove_once(plan.schedule, lambda: plan.prove().proof, control)
    return plan.proven(proof)


def prove_evaluation_once(schedule: Schedule, control: dist.ProcessGroup | None) -> Proof:
    """The proof of the schedule by which the model of another one is evaluated, made as in `prove_plan`.

    Args:
        schedule: of the training.
        control: as of `prove_plan`.

    Raises:
        TransportError: a peer is dead.
    """
    made = evaluation_of(schedule)
    return check(made) if control is None else _prove_once(made, lambda: check(made), control)


def _prove_once(schedule: Schedule, prove: Callable[[], Proof], control: dist.ProcessGroup) -> Proof:
    """Prove a schedule, which all ranks have, on rank 0; parallel pipelines have one after the other's ranks."""
    depth, made = schedule.ranks, list[Proof]()

    def make() -> HandedOut:
        made.append(prove())
        return HandedOut(common_part(made[0]), lambda other: own_part(made[0], other % depth))

    common, own = hand_out(make, "proving the schedule", control)
    return made[0] if made else rank_proof(schedule, dist.get_rank(control) % depth, common, own)
