"""The plans of a job, made once: rank 0 builds and proves their schedules, and hands every rank its own program.

Another rank makes the same plan of its own blocks and options, with what it was told of the schedule, and all compare
what they have made. So nobody but rank 0 sees a schedule as a whole, and one that is wrong, or another one on some
rank, is found all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from penstock.comm.collective.control_plane import HandedOut, hand_out
from penstock.comm.core.rank_grid import RankGrid
from penstock.options.parallelism import rank_numbers
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.plan.received_schedule import KnownSchedule
from penstock.runtime.setup.same_weights import check_same_plans
from penstock.schedule.add_options import evaluation_of
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.lowering.report_places import reports_wait, with_report_places
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.rank_schedule import Json, common_part, part_of_rank, rank_proof, rank_schedule, schedule_facts

Known = Mapping[str, KnownSchedule]
"""What is known of schedules that another rank has built, by the names of their plans."""

_ONE = ""


def shared_plan(
    make: Callable[[KnownSchedule | None], UnprovenPlan], control: dist.ProcessGroup | None, tensor: int = 1
) -> PipelinePlan:
    """The proven plan of this rank; between processes all call this together.

    Args:
        make: makes it, but for its proof, of what is known of its schedule, which it builds if that is None.
        control: a process group on the CPU; None in a single process.
        tensor: how many of its processes, next to each other, share each stage.

    Raises:
        ConfigError: ranks have different plans; or whatever else `make` raises.
        ScheduleError: the schedule is wrong; where only m is too small, the message names the smallest legal m.
        TransportError: a peer is dead.
    """
    return shared_plans(lambda known: {_ONE: make(known.get(_ONE))}, control, tensor=tensor)[_ONE]


def shared_plans(
    make: Callable[[Known], Mapping[str, UnprovenPlan]],
    control: dist.ProcessGroup | None,
    prove: Callable[[str, UnprovenPlan], PipelinePlan] = lambda _, draft: draft.prove(),
    tensor: int = 1,
) -> dict[str, PipelinePlan]:
    """Several proven plans of this rank, by name.

    Args:
        make: makes all of them, but for their proofs.
        control, tensor: as of `shared_plan`.
        prove: proves one.

    Raises:
        ConfigError, ScheduleError, TransportError: as `shared_plan`.
    """

    def proven() -> dict[str, PipelinePlan]:
        return {name: prove(name, draft) for name, draft in make({}).items()}

    if control is None:
        return proven()
    made: dict[str, PipelinePlan] = {}

    def hand() -> HandedOut:
        made.update({name: _with_report_places(plan) for name, plan in proven().items()})
        return HandedOut(
            {name: _common(plan) for name, plan in made.items()},
            lambda other: {
                name: part_of_rank(plan.proof.lowered, _rank(plan, other // tensor)) for name, plan in made.items()
            },
        )

    common, own = hand_out(hand, "planning the pipeline", control)
    drafts: Mapping[str, UnprovenPlan] = made
    failure: Exception | None = None
    if not made:
        try:
            drafts = make({name: KnownSchedule(*part["schedules"]) for name, part in common.items()})
        except Exception as error:  # which rank 0 has not met; raised again when the others know of it
            failure = error
    check_same_plans(drafts, failure, control)
    number = dist.get_rank(control) // tensor
    return made or {
        name: draft.proven(rank_proof(draft.schedule, _rank(draft, number), common[name]["proof"], own[name]))
        for name, draft in drafts.items()
    }


def share_evaluation(schedule: Schedule, grid: RankGrid) -> Proof:
    """The proof of the schedule by which the model of another one is evaluated, made as in `shared_plan`.

    Args:
        schedule: of the training.
        grid: all ranks.

    Raises:
        TransportError: a peer is dead.
    """
    if grid.control is None:
        return check(evaluation_of(schedule))
    made = list[Proof]()

    def hand() -> HandedOut:
        made.append(check(evaluation_of(schedule)))
        common = {"schedule": schedule_facts(made[0].schedule), "proof": common_part(made[0])}
        return HandedOut(common, lambda other: part_of_rank(made[0].lowered, grid.numbers.place(other)[1]))

    common, own = hand_out(hand, "planning evaluations", grid.control)
    if made:
        return made[0]
    received = rank_schedule(common["schedule"], lambda: evaluation_of(schedule))
    return rank_proof(received, grid.local[0].rank, common["proof"], own)


def _common(plan: PipelinePlan) -> Json:
    known = KnownSchedule.of(plan.given, plan.schedule, [len(part) for part in plan.parts])
    return {"schedules": known, "proof": common_part(plan.proof)}


def _with_report_places(plan: PipelinePlan) -> PipelinePlan:
    """Let ranks hand out reports where none waits for one that has a report."""
    decided = reports_wait(plan.schedule, plan.options.data_parallel.width)
    return plan.proven(replace(plan.proof, lowered=with_report_places(plan.proof.lowered, decided=decided)))


def _rank(plan: PipelinePlan | UnprovenPlan, number: int) -> int:
    """The rank in its pipeline of a rank of the job."""
    return rank_numbers(plan.options.data_parallel, plan.schedule.ranks).place(number)[1]
