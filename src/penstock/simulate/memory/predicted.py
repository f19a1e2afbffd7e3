"""The bytes that every rank of a run holds at most, equal to what the runtime's ledger says in one process.

What takes the same room from beginning to end is counted at once: every buffer of weights and gradients that the proof
asks for exists all the time, in use or idle, and so do master weights, copies, and the buffers of a correction. What
comes and goes is played (`penstock.simulate.memory.memory_simulation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Update
from penstock.schedule.methods.corrections import CorrectionSpec, find_correction
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.schedule.proof.proof import Proof, StageFacts
from penstock.schedule.proof.unsharded_peaks import sums_wait
from penstock.simulate.memory.fake_transport import Part
from penstock.simulate.memory.held import Blockwise, Combination, Held, HeldKind, is_blockwise, most_bytes
from penstock.simulate.memory.memory_simulation import most_held
from penstock.simulate.memory.snapshots import Snapshots
from penstock.simulate.memory.stage_sizes import SnapshotBytes, StageBytes


@dataclass(frozen=True)
class MemoryOptions:
    """How a schedule is run, as far as memory depends on it.

    Attributes:
        width: parallel pipelines.
        low_precision: passes compute in 16 bits, so there are master weights.
        blockwise: stages whose blocks are recomputed one by one, by index; all or none if a truth value.
        correction: of stale weights, by name or by its row.
        batches: of the run; the last new peak comes soon after `Proof.steady_from`.
        snapshots: that are taken on the way; None for none.
        combine: how pipelines agree.
        averages: an exponential moving average of the weights is kept.
        on_device: activations that are moved to the host's memory do not count.
    """

    width: int = 1
    low_precision: bool = False
    blockwise: Blockwise = False
    correction: str | CorrectionSpec = "none"
    batches: int = 4
    snapshots: Snapshots | None = None
    combine: Combine = REDUCE
    averages: bool = False
    on_device: bool = False

    @property
    def spec(self) -> CorrectionSpec:
        """The row of the correction."""
        return find_correction(self.correction)


class AlwaysThere(NamedTuple):
    """How many parameter-sized buffers of a stage are there all the time, from the beginning to the end of a run.

    Attributes:
        versions: as passes read the weights, of `StageBytes.version` bytes.
        whole: gradients and weights that are updated, of `StageBytes.whole` bytes.
        rows: weights that are updated, of `StageBytes.rows` bytes: the rest is there between two runs only.
        masters: how many of `whole` and `rows` are weights that are updated beside the versions, never anything else.
    """

    versions: int
    whole: int
    rows: int = 0
    masters: int = 0


def peak_bytes(proof: Proof, sizes: Mapping[int, StageBytes], options: MemoryOptions) -> dict[Part, int]:
    """Return the most bytes that every rank holds, of all kinds together, or of those on its device.

    Args:
        proof: of the schedule with all actions that its run has.
        sizes: of every stage, by index.
        options: how it is run.

    Raises:
        CapabilityError: the schedule does something that is not predicted.
    """
    saving = options.snapshots and options.snapshots._replace(drains=proof.border_fault is not None)
    held = most_held(
        proof.lowered,
        options.batches,
        options.width,
        options.blockwise,
        options.low_precision,
        saving,
        options.combine,
        options.on_device,
    )
    return {part: peak_of(proof, part, held[part], sizes, options) for part in held}


def peak_of(
    proof: Proof,
    part: Part,
    combinations: Sequence[Combination],
    sizes: Mapping[int, StageBytes],
    options: MemoryOptions,
) -> int:
    """Return the most bytes of one rank, given what it holds besides what is always there."""
    stages = proof.schedule.on_rank(part[1])
    places = {stage.index: _place(proof.schedule, stage, part[0]) for stage in stages}
    there = {stage.index: _always_there(proof, stage, options) for stage in stages}
    of_each: dict[Held, int] = {}
    for what in {what for each in combinations for what, _ in each}:
        of_each[what] = _bytes_of(what, sizes, proof, places.get(what.stage, 0), options)
        if what.kind is HeldKind.WHOLE:
            of_each[what] = _between_runs(proof.schedule, part[1], there[what.stage], sizes[what.stage], options)
    always = sum(fixed_bytes(each, sizes[index], places[index]) for index, each in there.items())
    return always + most_bytes(combinations, of_each)


def _place(schedule: Schedule, stage: Stage, pipeline: int) -> int:
    """Return the place of a stage among all that divide its state; 0 where nobody does."""
    level = schedule.sharding.level
    if level is Level.NONE:
        return 0
    return pipeline if level is Level.FULL else pipeline * schedule.directions + stage.direction


def _always_there(proof: Proof, stage: Stage, options: MemoryOptions) -> AlwaysThere:
    schedule, facts = proof.schedule, proof.stages[stage]
    again = is_blockwise(options.blockwise, stage.index) or stage.index in schedule.recomputed
    level, rotates_ = schedule.sharding.level, RULES[schedule.rule].update is Update.ROTATE
    there = always_there(schedule.rule, facts, options, again, level is not Level.NONE)
    rows = options.averages and _keeps_rows(schedule, options)
    kept = options.averages - rows + options.combine.spec.buffers
    there = there._replace(whole=there.whole + kept, rows=there.rows + rows)
    if level is Level.FULL and rotates_:  # in low precision those of sums and older versions come and go
        return AlwaysThere(0, 0, (1 if options.low_precision else facts.buffers) + options.averages)
    apart = _sums_wait(schedule, stage.rank, options)
    if level is Level.FULL:
        return AlwaysThere(0, 0, 1 + apart + options.averages)
    if apart:  # of the versions and gradients only the newest version is there always
        return AlwaysThere(1, kept, there.rows + 1)
    return there


def _keeps_rows(schedule: Schedule, options: MemoryOptions) -> bool:
    """Return whether the newest weights, and their average, are rows while a span trains."""
    level, ahead = schedule.sharding.level, options.spec.reads_ahead
    return level is Level.FULL or (level is not Level.NONE and (options.low_precision or ahead))


def _sums_wait(schedule: Schedule, rank: int, options: MemoryOptions) -> bool:
    """Return whether rows of sums have a place of their own."""
    return schedule.sharding.level is not Level.NONE and sums_wait(schedule, rank, options.low_precision)


def _between_runs(schedule: Schedule, rank: int, there: AlwaysThere, stage: StageBytes, options: MemoryOptions) -> int:
    """Return what is whole of a stage between two runs, and rows in them."""
    if schedule.sharding.level is Level.FULL:
        return (1 + options.averages) * stage.whole + (stage.version if options.low_precision else 0)
    return (there.rows - _sums_wait(schedule, rank, options)) * stage.whole


def fixed_bytes(there: AlwaysThere, stage: StageBytes, place: int = 0) -> int:
    """Return the bytes of a stage that are there all the time, at a place among all that divide its state."""
    rows = there.rows and stage.rows[place]
    return stage.frozen + there.versions * stage.version + there.whole * stage.whole + there.rows * rows


def always_there(
    rule: str, facts: StageFacts, options: MemoryOptions, again: bool, divided: bool = False
) -> AlwaysThere:
    """Return the parameter-sized buffers of a stage that are there all the time.

    Args:
        rule: of the schedule.
        facts: that its proof derives about the stage.
        options: how it is run.
        again: forwards are recomputed.
        divided: pipelines divide updates.
    """
    spec, delayed = options.spec, facts.delay.forward > 0
    estimates = spec.estimates and delayed and (options.low_precision or again)
    copies = facts.copies + estimates
    if spec.reads_ahead:  # its buffer is that of the newest weights, which low precision has anyway
        delayed = not options.low_precision
    corrected = spec.buffers if delayed or spec.without_delay else 0
    if not options.low_precision:
        rows = corrected if divided else 0  # no other correction goes with it
        newest = corrected if spec.reads_ahead else 0
        return AlwaysThere(copies + facts.buffers, corrected - rows, rows, newest)
    masters = 2 if RULES[rule].update is Update.APART else 1
    rows = masters if divided else 0
    return AlwaysThere(copies + facts.versions, corrected + facts.gradients + masters - rows, rows, masters)


def rotates(rule: str, facts: StageFacts, options: MemoryOptions) -> bool:
    """Return whether updates of a stage take a scratch; arguments as of `always_there`."""
    apart, spec = RULES[rule].update is Update.APART, options.spec
    if spec.reads_ahead:
        return True  # where it asks for previous values, as measured
    watches = spec.watches and (spec.without_delay or facts.delay.forward > 0)
    return apart or watches or (not options.low_precision and facts.versions > 1)


def _bytes_of(what: Held, sizes: Mapping[int, StageBytes], proof: Proof, place: int, options: MemoryOptions) -> int:
    """Return the bytes of one of something."""
    stage, kind = sizes[what.stage], what.kind
    if kind is HeldKind.OUTPUT:
        return stage.of(what.slice).output
    if kind is HeldKind.GRADIENT:
        return stage.of(what.slice).gradients.get(what.peer, 0)
    if kind is HeldKind.OPTIMIZER:
        return stage.optimizer[place]
    if kind in (HeldKind.BUFFERS, HeldKind.FROZEN):
        return stage.snapshot.buffers if kind is HeldKind.BUFFERS else stage.snapshot.frozen
    if kind in (HeldKind.SNAPSHOT, HeldKind.SHARE, HeldKind.OLDER_COPY):
        return _copied_bytes(kind, stage.snapshot, proof.schedule, place, options)
    if kind is HeldKind.BEFORE:
        return stage.optimizer[place] if RULES[proof.schedule.rule].update is Update.APART else 0
    if kind is HeldKind.PASSING:
        return options.combine.spec.passing * stage.whole
    if kind is HeldKind.WAVE:
        return options.width * stage.whole
    if kind is HeldKind.SCRATCH:
        facts = next(facts for key, facts in proof.stages.items() if key.index == what.stage)
        return stage.scratch[place] if rotates(proof.schedule.rule, facts, options) else 0
    if kind in (HeldKind.GATHERED, HeldKind.FULL_GRADIENT):
        return stage.version if kind is HeldKind.GATHERED else stage.whole
    if kind in (HeldKind.SUM, HeldKind.OLDER):
        return _waiting_bytes(what, stage, proof.schedule, place, options)
    return stage.of(what.slice).passes.get(kind, 0)


def _copied_bytes(kind: HeldKind, copies: SnapshotBytes, schedule: Schedule, place: int, options: MemoryOptions) -> int:
    """Return the bytes of what is copied for a snapshot; rules for which the pipeline is not drained have it so."""
    spec, older, level = options.spec, RULES[schedule.rule].delay, schedule.sharding.level
    if level is Level.NONE:
        if kind is HeldKind.OLDER_COPY:
            return copies.version
        older = min(older, 1)
        versions, whole = (older + 1, 1) if spec.reads_ahead else (older, 1 + spec.buffers)
        whole += options.averages
        return versions * copies.version + whole * copies.weights + copies.optimizer
    optimizer, rows, version_rows = copies.shares[place]
    kept = 1 + options.averages
    if level is Level.FULL:
        return optimizer + kept * rows + older * version_rows
    if kind is HeldKind.OLDER_COPY:
        return older * copies.version
    divided = _keeps_rows(schedule, options)
    if kind is HeldKind.SHARE:
        return optimizer + (kept * rows if divided else 0)
    return optimizer + kept * (rows if divided else copies.weights) + spec.reads_ahead * copies.version


def _waiting_bytes(what: Held, stage: StageBytes, schedule: Schedule, place: int, options: MemoryOptions) -> int:
    """Return the bytes of the rows of a sum, or of an older version, where these come and go."""
    if schedule.sharding.level is not Level.FULL:
        return 0 if what.kind is HeldKind.SUM else stage.version
    if not options.low_precision:
        return 0  # updates are written over sums, so there are always as many rows
    return (stage.rows if what.kind is HeldKind.SUM else stage.low_rows)[place]
