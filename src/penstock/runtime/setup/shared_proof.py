"""Proves the schedules of a job once: rank 0 does, and every rank gets what it needs of the proof."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from penstock import errors
from penstock.comm.collective.hand_out import hand_out
from penstock.errors import PenstockError, ScheduleError, TransportError
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.setup.same_plan import check_same_plan
from penstock.schedule.build import evaluation_of
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.proof.check import Proof, check
from penstock.schedule.rank_proof import common_part, own_part, rank_proof

_WHAT = "proving the schedule"


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
    rank, depth = dist.get_rank(control), schedule.ranks
    if rank:
        common, own = hand_out(None, None, _WHAT, control)
        if "failed" in common:
            raise _failure(*common["failed"])
        return rank_proof(schedule, rank % depth, common, own)
    try:
        proof = prove()
    except Exception as error:
        hand_out({"failed": [type(error).__name__, str(error)]}, None, _WHAT, control)
        raise
    hand_out(common_part(proof), lambda other: own_part(proof, other % depth), _WHAT, control)
    return proof


def _failure(kind: str, said: str) -> PenstockError:
    """What rank 0 has raised, to be raised on this rank as well."""
    made = getattr(errors, kind, None)
    if isinstance(made, type) and issubclass(made, ScheduleError):
        return made(said)
    return TransportError(f"rank 0, {_WHAT}, failed: {kind}: {said}")
