"""Exchange with the CSV of `torch.distributed.pipelining`.

That form holds one flushed batch: a line per rank, cells such as `0F3`, `1I2`, `(0F1;1B0)OVERLAP_F_B` (stage,
operation, microbatch), empty cells for idle slots, no updates, no versions, no messages. What it cannot say is refused
by name in either direction.
"""

from __future__ import annotations

import csv
import io
import re

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.rules import RULES
from penstock.schedule.ir.schedule import Action, Kind, Op, Program, Schedule, Stage, Unit, chain, passes
from penstock.schedule.transforms.apply_rule import apply_rule

_CELL = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
_FUSED = re.compile(r"\((.*)\)OVERLAP_F_B")
_LETTERS = {"F": Op.F, "B": Op.B, "I": Op.I, "W": Op.W}


def to_torch_csv(schedule: Schedule) -> str:
    """The passes of one batch as torch's CSV.

    Raises:
        ScheduleError: the schedule holds something that the form cannot express.
    """
    if any(program.epilogue for program in schedule.programs):
        raise ScheduleError(f"{schedule.name}: torch's CSV holds one flushed batch; this schedule never drains")
    if any(stage.direction for stage in schedule.stages):
        raise ScheduleError(
            f"{schedule.name}: torch's CSV cannot hold a stage on several ranks (bidirectional pipelines)"
        )
    if schedule.edges != chain(schedule.num_stages) or schedule.frozen:
        raise ScheduleError(f"{schedule.name}: torch's CSV knows only a chain of stages that are all trained")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for program in schedule.programs:
        writer.writerow([_cell(action, schedule.name) for action in program.period if action.op is not Op.STEP])
    return out.getvalue()


def _cell(action: Action, name: str) -> str:
    if action.parts:
        if sorted(p.op for p in action.parts) != [Op.B, Op.F]:
            raise ScheduleError(f"{name}: torch fuses one F and one B; {action} is another combination")
        return "(" + ";".join(_cell(p, name) for p in action.parts) + ")OVERLAP_F_B"
    unit = action.unit
    if action.op.value not in _LETTERS:
        raise ScheduleError(f"{name}: torch's CSV has no {action.op} ({action})")
    if unit.count != 1 or unit.slice is not None or unit.kind is not Kind.TRAIN:
        raise ScheduleError(f"{name}: torch's CSV has only whole single training microbatches, not {action}")
    return f"{action.stage.index}{action.op.value}{unit.first}"


def from_torch_csv(text: str, name: str = "torch-csv") -> Schedule:
    """Read torch's CSV of compute actions as a schedule that flushes after each batch.

    Raises:
        ScheduleError: with the line and cell that cannot be read or has no meaning here.
    """
    rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text.strip("\r\n")))]
    if not any(rows):
        raise ScheduleError(f"{name}: the CSV is empty")
    where: dict[int, int] = {}
    programs = []
    for rank, row in enumerate(rows):
        actions = []
        if not row:
            raise ScheduleError(f"{name}: line {rank + 1} holds no action, so rank {rank} would have no stage")
        for cell in row:
            action = _action(cell, rank, f"{name}: line {rank + 1}")
            for p in passes(action):
                if where.setdefault(p.stage.index, rank) != rank:
                    raise ScheduleError(
                        f"{name}: line {rank + 1}, {cell}: stage {p.stage.index} is already on rank "
                        f"{where[p.stage.index]}"
                    )
            actions.append(action)
        programs.append(Program(tuple(actions)))
    stages = sorted(where)
    if stages != list(range(len(stages))):
        raise ScheduleError(f"{name}: stages must be numbered from 0 without gaps; found {stages}")
    microbatches = 1 + max(p.unit.first for program in programs for a in program.period for p in passes(a))
    placed = tuple(Stage(index, 0, where[index]) for index in stages)
    return apply_rule(Order(tuple(programs), placed, chain(len(stages))), RULES["flush"], microbatches, name)


def _action(cell: str, rank: int, where: str) -> Action:
    fused = _FUSED.fullmatch(cell)
    if fused:
        parts = tuple(_action(part.strip(), rank, where) for part in fused[1].split(";"))
        if sorted(p.op for p in parts) != [Op.B, Op.F]:
            raise ScheduleError(f"{where}: {cell!r}: an OVERLAP_F_B holds one F and one B")
        return Action(Op.FUSED, parts[0].stage, parts[0].unit, parts=parts)
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(f"{where}: cannot read {cell!r}; cells look like 0F3, 1I2 or (0F1;1B0)OVERLAP_F_B")
    stage, letters, microbatch = match.groups()
    if letters not in _LETTERS or not microbatch:
        raise ScheduleError(
            f"{where}: {letters} in {cell!r} is not a pass on a microbatch; only F, B, I and W are read"
        )
    return Action(_LETTERS[letters], Stage(int(stage), 0, rank), Unit(int(microbatch)))
