"""Read and write the CSV of `torch.distributed.pipelining`.

That form holds one flushed batch: a line per rank, cells such as `0F3`, `1I2`, `(0F1;1B0)OVERLAP_F_B` (stage,
operation, microbatch), empty cells for idle slots, no updates and no versions. torch writes it with passes alone
(`_dump_csv(f, "compute_only")`, and all that its schedules of one stage per rank have) or, by default, with
communication (`"compute_comms"`): `0SEND_F3`, `1RECV_F3`, `0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`. Both are read; passes
alone are written. What the form cannot say is refused by name in either direction.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.schedule import Action, Kind, Op, Program, Schedule, Stage, Unit, chain, passes
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.transforms.apply_version_rule import apply_rule

_CELL = re.compile(r"([0-9]{1,6})([A-Z_]+?)([0-9]{0,6})")
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
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
    """Read torch's CSV as a schedule that flushes after each batch.

    Penstock sends messages of its own, so those of the file are compared with what its passes need and then left out.
    UNSHARD, RESHARD and REDUCE_GRAD are left out, too: they shard and add up what parallel copies of the pipeline hold,
    which a schedule of one of them does not say (`Pipeline(data_parallel=...)` adds gradients up by itself).

    Args:
        text: the content of the file.
        name: of the schedule, also for messages.

    Returns:
        A schedule whose window is open: `check` takes the least that costs no time.

    Raises:
        ScheduleError: with the line and cell that cannot be read or has no meaning here, or with the message that is
            missing, in the wrong place or needed by nobody.
    """
    try:
        lines = list(csv.reader(io.StringIO(text.strip("\r\n"))))
    except csv.Error as error:
        raise ScheduleError(f"{name}: this is no CSV: {error}") from None
    rows = [[cell.strip() for cell in row if cell.strip()] for row in lines]
    if not any(rows):
        raise ScheduleError(f"{name}: the CSV is empty")
    where: dict[int, int] = {}
    programs: list[Program] = []
    messages: list[_Message] = []
    for rank, row in enumerate(rows):
        actions: list[Action] = []
        line = f"{name}: line {rank + 1}"
        for cell in row:
            message = _message(cell, line, rank, len(actions))
            if message is not None:
                messages.append(message)
            elif not _is_sharding(cell):
                actions.append(_action(cell, rank, line))
        if not actions:
            raise ScheduleError(f"{line} holds no pass, so rank {rank} would have no stage")
        for p in (p for action in actions for p in passes(action)):
            if where.setdefault(p.stage.index, rank) != rank:
                raise ScheduleError(
                    f"{line}, {p.stage.index}{p.op}{p.unit.first}: stage {p.stage.index} is already on rank "
                    f"{where[p.stage.index]}"
                )
        programs.append(Program(tuple(actions)))
    stages = sorted(where)
    if stages != list(range(len(stages))):
        raise ScheduleError(f"{name}: stages must be numbered from 0 without gaps; found {stages}")
    if messages:
        _check_messages(messages, programs, where, name)
    microbatches = 1 + max(p.unit.first for program in programs for a in program.period for p in passes(a))
    held = sum(len(passes(a)) for program in programs for a in program.period)
    if microbatches > held:
        raise ScheduleError(
            f"{name}: microbatch {microbatches - 1} means {microbatches} of them in a batch, but there are only {held} "
            "passes"
        )
    placed = tuple(Stage(index, 0, where[index]) for index in stages)
    return apply_rule(Order(tuple(programs), placed, chain(len(stages))), RULES["flush"], microbatches, name)


class _Message(NamedTuple):
    """A SEND or RECV of the file."""

    rank: int
    stage: int
    what: str
    microbatch: int
    place: int  # passes of its rank that stand before it

    @property
    def cell(self) -> str:
        """As the file says it."""
        return f"{self.stage}{self.what}{self.microbatch}"


def _message(cell: str, where: str, rank: int, place: int) -> _Message | None:
    """The message that a cell sends or receives; None for any other cell.

    Raises:
        ScheduleError: it does not say of which microbatch.
    """
    match = _CELL.fullmatch(cell)
    if match is None or match[2] not in _MESSAGES:
        return None
    if not match[3]:
        raise ScheduleError(f"{where}: {cell!r:.80} does not say of which microbatch")
    return _Message(rank, int(match[1]), match[2], int(match[3]), place)


def _is_sharding(cell: str) -> bool:
    """Whether a cell gathers, drops or adds up what parallel copies hold; it names a stage and no microbatch."""
    match = _CELL.fullmatch(cell)
    return match is not None and match[2] in _SHARDING and not match[3]


def _check_messages(
    messages: Sequence[_Message], programs: Sequence[Program], where: Mapping[int, int], name: str
) -> None:
    """Compare the messages of a file with those that its passes need.

    Raises:
        ScheduleError: one is missing, in the wrong place, there twice, or needed by nobody.
    """
    wanted = {
        (rank, stage, what, microbatch): place
        for rank, program in enumerate(programs)
        for stage, what, microbatch, place in _needed(program, where)
    }
    found: set[tuple[int, int, str, int]] = set()
    for message in messages:
        line, key = f"{name}: line {message.rank + 1}, {message.cell}", message[:4]
        if key not in wanted:
            raise ScheduleError(
                f"{line}: no pass of this rank gives or needs such a message to or from another rank; leave it out"
            )
        if key in found:
            raise ScheduleError(f"{line}: this message is there twice")
        found.add(key)
        place = wanted[key]
        if message.what.startswith("SEND") and message.place <= place:
            raise ScheduleError(f"{line} stands before the pass that makes what it sends; put it behind that")
        if message.what.startswith("RECV") and message.place > place:
            raise ScheduleError(f"{line} stands behind the pass that needs what it receives; put it before that")
    missing = sorted(wanted.keys() - found)
    if missing:
        rank, stage, what, microbatch = missing[0]
        raise ScheduleError(
            f"{name}: line {rank + 1} has no {stage}{what}{microbatch}, which its passes need (messages missing: "
            f"{len(missing)}); give all messages, or passes alone"
        )


def _needed(program: Program, where: Mapping[int, int]) -> Iterator[tuple[int, str, int, int]]:
    """(stage, what, microbatch, place of the pass) of each message that the passes of a rank send or receive."""
    for place, action in enumerate(program.period):
        for p in passes(action):
            if p.op is Op.W:
                continue
            stage, letter = p.stage.index, "F" if p.op is Op.F else "B"
            step = 1 if letter == "F" else -1
            for what, other in (("RECV", stage - step), ("SEND", stage + step)):
                if where.get(other, p.stage.rank) != p.stage.rank:
                    yield stage, f"{what}_{letter}", p.unit.first, place


def _action(cell: str, rank: int, where: str) -> Action:
    fused = _FUSED.fullmatch(cell)
    if fused:
        parts = tuple(_action(part.strip(), rank, where) for part in fused[1].split(";"))
        if sorted(p.op for p in parts) != [Op.B, Op.F]:
            raise ScheduleError(f"{where}: {cell!r:.80}: an OVERLAP_F_B holds one F and one B")
        return Action(Op.FUSED, parts[0].stage, parts[0].unit, parts=parts)
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(f"{where}: cannot read {cell!r:.80}; cells look like 0F3, 1I2 or (0F1;1B0)OVERLAP_F_B")
    stage, letters, microbatch = match.groups()
    if letters not in _LETTERS or not microbatch:
        raise ScheduleError(
            f"{where}: {letters} in {cell!r:.80} is neither a pass on a microbatch (F, B, I, W) nor communication "
            f"({', '.join([*_MESSAGES, *_SHARDING])})"
        )
    return Action(_LETTERS[letters], Stage(int(stage), 0, rank), Unit(int(microbatch)))
