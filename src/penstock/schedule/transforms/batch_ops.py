"""Add the actions on whole batches that follow the last backward of a batch on a stage.

`with_reductions`, `with_ties` and `with_decisions` add collectives to a schedule: sums over all copies of a stage, sums
over stages that share parameters, and decisions of all stages. They block no rank; each waits for those before it, and
the STEP for them all. `with_averages` adds the periodic synchronization of pipelines that do not sum their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Action, Kind, Op, Program, Schedule, Stage, Unit, passes

COLLECTIVES = (Op.REDUCE, Op.TIE, Op.DECIDE)
"""The actions that a STEP of the same stage and batch waits for, in their order after the last backward."""


def batch_unit(offset: int) -> Unit:
    """Return the unit of a STEP, REDUCE or DECIDE of batch t + offset."""
    return Unit(offset, kind=Kind.BATCH)


def is_backward(action: Action, stage: Stage) -> bool:
    """Return whether a pass is (a part of) a backward of a stage."""
    return action.op in (Op.B, Op.I, Op.W) and action.stage == stage


def is_trained(program: Program, stage: Stage) -> bool:
    """Return whether a program has backwards of a stage, so that there is something to update."""
    return any(is_backward(p, stage) for p in program.passes())


def after_backwards(program: Program, stage: Stage, op: Op, microbatches: int) -> Program:
    """Insert `op` directly after the last backward of each batch, behind the collectives that come before it.

    Args:
        program: the program of the stage's rank, with backwards of the stage.
        stage: the stage.
        op: an operation on batches.
        microbatches: m.
    """
    period, epilogue = list(program.period), list(program.epilogue)
    earlier = COLLECTIVES[: COLLECTIVES.index(op)] if op in COLLECTIVES else COLLECTIVES

    def last_of(actions: list[Action]) -> dict[int, int]:
        """Map each batch offset to the position of the last of its actions that come before `op`."""
        last = {}
        for position, action in enumerate(actions):
            for p in passes(action):
                if is_backward(p, stage):
                    last[p.unit.first // microbatches] = position
                elif p.op in earlier and p.stage == stage:
                    last[p.unit.first] = position
        return last

    last = last_of(period)
    offset = min(last)  # the oldest batch that this period works on is finished here
    period.insert(last[offset] + 1, Action(op, stage, batch_unit(offset)))
    for batch in range(offset, 0):
        place = last_of(epilogue).get(batch, -1) + 1
        epilogue.insert(place, Action(op, stage, batch_unit(batch)))
    return Program(tuple(period), tuple(epilogue))


def with_reductions(schedule: Schedule, everywhere: bool) -> Schedule:
    """Add a REDUCE on every trained stage whose weights are held elsewhere, too.

    Args:
        schedule: a schedule without REDUCEs.
        everywhere: True if parallel pipelines hold the same weights, so that every stage needs one; otherwise only
            stages with several copies in this pipeline do.
    """
    holders = [stage.index for stage in schedule.stages]
    made = _with(schedule, Op.REDUCE, lambda stage: everywhere or holders.count(stage.index) > 1)
    return made if _in_one_order(made) else _reduced_at_the_end(made)


def _in_one_order(schedule: Schedule) -> bool:
    """Return whether all ranks reduce any two stages in the same order; else they would deadlock."""
    pairs = set()
    for program in schedule.programs:
        stages = [a.stage.index for a in program.period if a.op is Op.REDUCE]
        pairs |= {pair for pair in combinations(stages, 2) if pair[0] != pair[1]}
    return not any((b, a) in pairs for a, b in pairs)


def _reduced_at_the_end(schedule: Schedule) -> Schedule:
    """Move the REDUCEs of every rank behind its last backward, in the order of the stages."""
    programs = []
    for period, epilogue in schedule.programs:
        late = sorted((a for a in period if a.op is Op.REDUCE), key=lambda a: a.stage)
        rest = [a for a in period if a.op is not Op.REDUCE]
        place = 1 + max((i for i, a in enumerate(rest) if any(is_backward(p, p.stage) for p in passes(a))), default=-1)
        programs.append(Program((*rest[:place], *late, *rest[place:]), epilogue))
    return replace(schedule, programs=tuple(programs))


def with_ties(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Add a TIE on each of these stages that is trained, because they share parameters.

    Raises:
        ConfigError: a stage is updated before another one on its rank has its gradient.
    """
    check_together(schedule, {}, stages)
    return _with(schedule, Op.TIE, lambda stage: stage.index in stages)


def with_decisions(schedule: Schedule) -> Schedule:
    """Add a DECIDE on every trained stage, so that updates wait for a decision of all stages.

    Raises:
        ConfigError: a stage is updated before another one on its rank has its gradient.
    """
    check_together(schedule, {"decides": "remove decides"})
    return _with(schedule, Op.DECIDE, lambda _: True)


def what_decides(
    clip: bool, loss_scale: bool, fp16: bool, width: int, apart: str | None, tensor: int = 1
) -> dict[str, str]:
    """Name the features that need a decision of all stages, each with the setting that turns it off.

    Args:
        clip: gradients are clipped.
        loss_scale: losses are scaled.
        fp16: losses are scaled because passes compute in float16.
        width: number of parallel pipelines.
        apart: how the pipelines are combined, if each has its own weights.
        tensor: number of processes that share each stage.
    """
    found = {"max_grad_norm": "set max_grad_norm to null (None)"} if clip else {}
    if loss_scale:
        scale = ("the loss scale of fp16", "set precision to bf16 or fp32") if fp16 else ("loss_scale", "remove it")
        found[scale[0]] = scale[1]
    if width > 1:
        found[f"data_parallel={width}" if apart is None else f"combine {apart!r}"] = (
            "set data_parallel (penstock train: width) to 1"
        )
    if tensor > 1:
        found[f"tensor_parallel={tensor}"] = "set tensor_parallel to 1"
    return found


def check_together(schedule: Schedule, decides: Mapping[str, str], tied: Collection[int] = ()) -> None:
    """Raise an error if updates cannot wait for information from other stages about the same batch.

    Args:
        schedule: a schedule with STEPs.
        decides: features that need a decision of all stages, with how to turn them off (`what_decides`).
        tied: stages that share parameters.

    Raises:
        ConfigError: a rank updates one of its stages before it runs the last backward of that batch on another one.
    """
    found = _updated_early(schedule) if decides or tied else None
    if found is None:
        return
    stage, late = found
    before = (
        f"{schedule.name}: rank {stage.rank} updates stage {stage.index} before stage {late.index} has its gradient "
        "of the same batch, so "
    )
    if decides:
        raise ConfigError(
            before + f"that update cannot wait for a decision of all stages, which {' and '.join(decides)} "
            f"need{'' if len(decides) > 1 else 's'}; {', '.join(decides.values())}, or use a method whose updates can "
            "wait, such as 2bw"
        )
    raise ConfigError(
        before + f"stages {', '.join(map(str, sorted(tied)))} cannot share parameters, whose gradients are summed "
        "before the update; untie them, or use a method whose updates can wait, such as 2bw"
    )


def _updated_early(schedule: Schedule) -> tuple[Stage, Stage] | None:
    """Find a stage that is updated before the last backward of the batch on another stage of its rank."""
    for program in schedule.programs:
        steps: dict[Stage, tuple[int, int]] = {}  # the period, relative to the batch, and the position in it
        backwards: dict[Stage, tuple[int, int]] = {}
        for place, action in enumerate(program.period):
            for p in passes(action):
                if p.op is Op.STEP:
                    steps[p.stage] = -p.unit.first, place
                elif is_backward(p, p.stage):
                    when = -(p.unit.first // schedule.microbatches), place
                    backwards[p.stage] = max(backwards.get(p.stage, when), when)
        for stage, step in steps.items():
            late = next((other for other, last in backwards.items() if last > step), None)
            if late is not None and stage in backwards and backwards[stage] < step:  # otherwise check rejects it
                return stage, late
    return None


def with_averages(schedule: Schedule, every: int, behind: int = 0) -> Schedule:
    """Add an AVERAGE directly after each STEP, which changes the new version before it is read.

    Args:
        schedule: a schedule without AVERAGEs.
        every: average only after batches b for which b + 1 is a multiple of it.
        behind: number of batches by which the sums added there are older, a multiple of `every`.
    """

    def insert(actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            yield action
            if action.op is Op.STEP:
                unit = action.unit._replace(first=action.unit.first - behind, every=every)
                yield Action(Op.AVERAGE, action.stage, unit)

    return replace(schedule, programs=tuple(Program(*(tuple(insert(part)) for part in p)) for p in schedule.programs))


def without_averages(schedule: Schedule) -> Schedule:
    """Remove the AVERAGEs from a schedule."""
    programs = (Program(*(tuple(a for a in part if a.op is not Op.AVERAGE) for part in p)) for p in schedule.programs)
    return replace(schedule, programs=tuple(programs))


def _with(schedule: Schedule, op: Op, wanted: Callable[[Stage], bool]) -> Schedule:
    programs = []
    for rank, program in enumerate(schedule.programs):
        for stage in schedule.stages:
            if stage.rank == rank and is_trained(program, stage) and wanted(stage):
                program = after_backwards(program, stage, op, schedule.microbatches)
        programs.append(program)
    return replace(schedule, programs=tuple(programs))
