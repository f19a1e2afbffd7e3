"""Version rules: which weights a pass reads, and when a version is born.

Version v of a node is its weights after v decided batches; STEP of batch t bears version t+1. A rule says from which
`Source` forwards, backwards and recomputes read, and where in the order the updates stand. `apply_rule` writes both
into an order; `penstock.schedule.check` proves them again, independently, by playing the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.errors import ScheduleError
from penstock.schedule.batchwise import after_backwards, batch_unit, is_trained, with_reductions
from penstock.schedule.blends import divided, with_blends
from penstock.schedule.collection import no_collection
from penstock.schedule.ir import Action, Node, Op, Program, Schedule, WeightRef, passes
from penstock.schedule.ops import PASSES
from penstock.schedule.order import Order
from penstock.schedule.predictions import with_predictions
from penstock.schedule.rejection import with_validations


class Source(StrEnum):
    """Where the weights of a pass come from."""

    BATCH = "batch"  # version t for batch t: every earlier update is in
    PREVIOUS = "previous"  # version t-1 for batch t
    NEWEST = "newest"  # whatever the node has when the pass runs
    ADMISSION = "admission"  # what the first cut had when the microbatch entered the pipeline
    FORWARD = "forward"  # what the forward of the same unit read
    COPY = "copy"  # a derived copy, born by a PREDICT on the same node


class Placing(StrEnum):
    """Where a STEP stands in the order."""

    END = "end"  # at the end of the batch's period, when nothing is in flight
    LATE = "late"  # directly before the first forward of batch t+2
    EARLY = "early"  # directly after the batch's last backward


class Update(StrEnum):
    """Where an update writes the version it bears."""

    IN_PLACE = "in place"  # over the version it starts from
    COPY_ON_WRITE = "copy on write"  # in place, unless something still reads the version it starts from
    ROTATE = "rotate"  # into the buffer of its gradient; the version it starts from stays
    APART = "apart"  # into a third buffer; version and gradient stay until the update is valid, to do it again if not


@dataclass(frozen=True)
class VersionRule:
    """One row of the table of rules.

    Attributes:
        forward, backward, recompute: where each kind of pass reads its weights.
        step: where updates stand.
        update: where an update writes.
        bases: how many versions a span hands to the next one (2: the newest and the one before).
        buffers: parameter-sized buffers (versions and gradients together) per node, or None: as many as it takes.
        provisional: a version may be read by forwards before VALIDATE has decided it.
        keeps_forward: backwards read a copy, but making it takes the version that the forward read.
        shares: the first microbatch of a batch makes the copies, and all of the batch read them.
    """

    name: str
    summary: str
    forward: Source
    backward: Source
    step: Placing
    update: Update
    recompute: Source = Source.FORWARD
    bases: int = 1
    buffers: int | None = None
    provisional: bool = False
    keeps_forward: bool = False
    shares: bool = False

    @property
    def pins(self) -> bool:
        """Whether a microbatch in flight keeps the version alive that its forward read."""
        return (self.backward is Source.FORWARD and not self.copies_forward) or self.keeps_forward

    @property
    def copies_forward(self) -> bool:
        """Whether forwards read copies."""
        return self.forward is Source.COPY

    @property
    def copies_backward(self) -> bool:
        """Whether backwards read copies of their own."""
        return self.backward is Source.COPY

    @property
    def keeps_copy(self) -> bool:
        """Whether backwards read the copy that their forward read."""
        return self.copies_forward and self.backward is Source.FORWARD

    @property
    def rebinds(self) -> bool:
        """Whether backwards read other weights than their forwards."""
        return self.backward is not Source.FORWARD


_RULES = (
    VersionRule(
        "flush",
        "one version; the pipeline is empty at every update",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "double-buffer",
        "batch t reads version max(t-1, 0) everywhere (PipeDream-2BW, arXiv 2006.09503, sec. 3.1)",
        forward=Source.PREVIOUS,
        backward=Source.FORWARD,
        step=Placing.LATE,
        update=Update.ROTATE,
        bases=2,
        buffers=3,
    ),
    VersionRule(
        "stash",
        "forwards read the newest version of their stage and backwards the same one (PipeDream, arXiv 1806.03377)",
        forward=Source.NEWEST,
        backward=Source.FORWARD,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
    ),
    VersionRule(
        "vertical-sync",
        "every stage reads the version that the first stage had at admission (PipeDream, arXiv 1806.03377)",
        forward=Source.ADMISSION,
        backward=Source.FORWARD,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
    ),
    VersionRule(
        "newest",
        "every pass reads the newest version of its stage; no stash (PipeMare, arXiv 1910.05124)",
        forward=Source.NEWEST,
        backward=Source.NEWEST,
        recompute=Source.NEWEST,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "predicted",
        "forwards and backwards read copies that a PREDICT on their node made of the newest version",
        forward=Source.COPY,
        backward=Source.COPY,
        recompute=Source.COPY,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "predicted-shared",
        "as predicted, but all microbatches of a batch read the copies that the first one made (XPipe, 1911.04610)",
        forward=Source.COPY,
        backward=Source.COPY,
        recompute=Source.COPY,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
        shares=True,
    ),
    VersionRule(
        "predicted-forward",
        "forwards read a copy that was predicted, backwards the newest version (PipeOptim, arXiv 2312.00839)",
        forward=Source.COPY,
        backward=Source.NEWEST,
        recompute=Source.COPY,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "predicted-stash",
        "forwards read a copy that was predicted, backwards the same one (second form in SpecTrain's code)",
        forward=Source.COPY,
        backward=Source.FORWARD,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "blended",
        "backwards read a blend of their forward's version and the newest one (I-TiMePReSt, arXiv 2509.23241)",
        forward=Source.NEWEST,
        backward=Source.COPY,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
        keeps_forward=True,
    ),
    VersionRule(
        "admitted-newest",
        "forwards read what the first stage had at admission, backwards the newest version (TiMePReSt, 2410.14312)",
        forward=Source.ADMISSION,
        backward=Source.NEWEST,
        recompute=Source.NEWEST,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
    ),
    VersionRule(
        "provisional",
        "as flush, but forwards may read a version before its VALIDATE (zero bubble's post-validation, 2401.10241)",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.APART,
        buffers=3,
        provisional=True,
    ),
    VersionRule(
        "provisional-in-place",
        "as provisional, but a rejected update is undone by arithmetic, without copies (2401.10241, app. on rollback)",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.IN_PLACE,
        buffers=2,
        provisional=True,
    ),
    VersionRule(
        "frozen",
        "nothing is updated: evaluation",
        forward=Source.NEWEST,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.IN_PLACE,
        buffers=1,
    ),
)

RULES: Mapping[str, VersionRule] = MappingProxyType({rule.name: rule for rule in _RULES})
"""Every version rule by its name."""


@no_collection
def apply_rule(order: Order, rule: VersionRule, microbatches: int, name: str) -> Schedule:
    """Insert the updates that `rule` asks for and annotate every pass with the version it reads.

    A backward of several microbatches is divided where their forwards read different versions that it has to read.
    """
    with_steps = tuple(
        _insert_steps(program, [n for n in order.nodes if n.rank == rank], rule, microbatches, name)
        for rank, program in enumerate(order.programs)
    )
    if rule.copies_forward:
        with_steps = tuple(with_predictions(program, rule, microbatches) for program in with_steps)
    forward_reads = _forward_offsets(with_steps, rule, microbatches)
    if rule.pins:
        with_steps = tuple(divided(program, forward_reads, microbatches) for program in with_steps)
    if rule.keeps_forward:
        with_steps = tuple(with_blends(program, forward_reads, microbatches) for program in with_steps)
    programs = tuple(_annotate(program, rule, forward_reads, microbatches) for program in with_steps)
    made = Schedule(
        name, microbatches, order.nodes, order.edges, programs, rule.name, order.frozen, order.segments, order.window
    )
    return with_reductions(made, everywhere=False)


# --- where the updates stand ----------------------------------------------------------------------------------------


def _insert_steps(program: Program, nodes: list[Node], rule: VersionRule, m: int, name: str) -> Program:
    for node in nodes:
        if not is_trained(program, node):
            continue  # forward-only: nothing to update
        period, epilogue = program
        steps = [Action(Op.STEP, node, batch_unit(offset)) for offset in (0, -1, -2)]
        if rule.step is Placing.END:
            program = Program((*period, steps[0]), epilogue)
        elif rule.step is Placing.LATE:
            forwards = [i for i, a in enumerate(period) if any(p.op is Op.F and p.node == node for p in passes(a))]
            if not forwards:
                raise ScheduleError(f"{name}: node {node.name} on rank {node.rank} has backwards but no forwards")
            first = forwards[0]
            program = Program((*period[:first], steps[2], *period[first:]), (steps[2], *epilogue, steps[1]))
        else:
            program = after_backwards(program, node, Op.STEP, m)
    trained = [node for node in nodes if is_trained(program, node)]
    return with_validations(program, trained) if rule.provisional and trained else program


# --- which version each pass reads ----------------------------------------------------------------------------------


def _forward_offsets(programs: tuple[Program, ...], rule: VersionRule, m: int) -> dict[tuple[Node, int], int]:
    """The version, relative to its batch, that the forward of each (node, microbatch of its batch) reads."""
    reads: dict[tuple[Node, int], int] = {}
    admission: dict[int, int] = {}
    first = min((a.node.cut for program in programs for a in program.period if a.op is Op.STEP), default=0)
    for program in programs:
        newest = _newest_before_period(program)
        for action in program.period:
            if action.op is Op.STEP:
                newest[action.node] = action.unit.first + 1
            for p in passes(action):
                if p.op is Op.F:
                    for batch, k in (divmod(number, m) for number in p.unit.microbatches):
                        here = {Source.BATCH: 0, Source.PREVIOUS: -1}.get(rule.forward, newest.get(p.node, 0) - batch)
                        reads[p.node, k] = here
                        if p.node.cut == first:
                            admission[k] = here
    if rule.forward is Source.ADMISSION:
        missing = sorted({k for _, k in reads} - admission.keys())
        if missing:
            raise ScheduleError(f"cut {first} runs no forward of microbatches {missing}, which other cuts run")
        return {(node, k): admission[k] for node, k in reads}
    return reads


def _newest_before_period(program: Program) -> dict[Node, int]:
    """The newest version of each node, relative to t, when the period of batch t begins."""
    return {a.node: a.unit.first for a in program.period if a.op is Op.STEP}


def _annotate(program: Program, rule: VersionRule, forward_reads: dict[tuple[Node, int], int], m: int) -> Program:
    trained = {a.node for a in program.period if a.op is Op.STEP}

    def annotate(action: Action, newest: dict[Node, int]) -> Action:
        if action.parts:
            return action._replace(parts=tuple(annotate(p, newest) for p in action.parts))
        if action.op is Op.STEP:
            newest[action.node] = action.unit.first + 1
        if action.op not in PASSES or action.reads is not None or action.node not in trained:
            return action
        source = {Op.F: rule.forward, Op.R: rule.recompute}.get(action.op, rule.backward)
        if source is Source.NEWEST:
            return _reading(action, newest.get(action.node, 0))
        batch, k = divmod(action.unit.first, m)
        if (action.node, k) not in forward_reads:
            raise ScheduleError(f"{action}: rank {action.node.rank} runs no forward of microbatch {k} of a batch")
        return _reading(action, forward_reads[action.node, k] + batch)

    def annotate_all(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        newest = _newest_before_period(program)
        return tuple(annotate(action, newest) for action in actions)

    return Program(annotate_all(program.period), annotate_all(program.epilogue))


def _reading(action: Action, version: int) -> Action:
    return Action(action.op, action.node, action.unit, WeightRef((version,)))
