"""Weights and gradients of a stage that are whole for a while only, without tensors: gathered, summed, given back.

It follows the stores of `penstock.weights` and the ledger of a rank. Passes and updates change what is there, and so do
sums that end beside them, on whatever rank joins last; the ledger of a rank says so after its next action.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Update
from penstock.schedule.machine.gradient_room import ADDING
from penstock.schedule.proof.unsharded_peaks import sums_wait
from penstock.schedule.stage_state.stage_constants import StageSpec
from penstock.schedule.stage_state.stage_state import StageState
from penstock.simulate.memory.fake_transport import Completion, Rendezvous, wait
from penstock.simulate.memory.held import Held, HeldKind, Holdings

_READING = (*ADDING, Op.F, Op.R)


class Tracked(NamedTuple):
    """What of the stages of a rank comes and goes.

    Attributes:
        weights: gathered versions.
        gradients: full-size gradients.
        apart: rows of sums lie elsewhere than in the gradients, whose memory is given back when sums end.
        versions: versions before the newest one, or their rows, and the rows of sums.
    """

    weights: bool
    gradients: bool
    apart: bool
    versions: bool

    @classmethod
    def on(cls, schedule: Schedule, rank: int, low_precision: bool) -> Tracked:
        """Return it for a rank."""
        full, rotates = schedule.sharding.level is Level.FULL, RULES[schedule.rule].update is Update.ROTATE
        waits = schedule.sharding.level is not Level.NONE and sums_wait(schedule, rank, low_precision)
        apart = (full and rotates) or waits
        return cls(full, full or apart, apart, apart and rotates)


class PlacesForGradients:
    """The places of one rank for full-size gradients, as `GradientPlaces` has them.

    Args:
        places: how many.
    """

    def __init__(self, places: int) -> None:
        self._begun: set[tuple[int, int]] = set()  # stage and batch
        self._freed: deque[Completion | None] = deque([None] * places)
        self._parts: dict[int, tuple[int, Completion]] = {}  # the last sum of each stage, and its batch

    def take(self, stage: int, batch: int) -> Iterator[Completion]:
        """Begin a gradient, unless it has begun, once there is room."""
        if (stage, batch) in self._begun:
            return
        of, part = self._parts.get(stage, (-1, None))
        if part is not None and of == batch:
            yield from wait(part)  # the next part takes the same memory
        before = self._freed.popleft()
        if before is not None:
            yield from wait(before)
        self._begun.add((stage, batch))

    def reduce(self, stage: int, batch: int, settled: Completion) -> None:
        """Take note of what frees the place of a gradient."""
        self._begun.discard((stage, batch))
        self._freed.append(settled)
        self._parts[stage] = batch, settled


class PendingChanges:
    """What the ledger of a rank has not said yet of what its stages hold.

    Args:
        holdings: of the rank.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings, self._changes = holdings, Counter[Held]()

    def change(self, what: Held, count: int) -> None:
        """Take note that there is more or, negative, less of something."""
        self._changes[what] += count

    def report(self) -> None:
        """Say it, what there is less of first."""
        for what, count in sorted(self._changes.items(), key=lambda change: change[1]):
            if count:
                self._holdings.change(what, count)
        self._changes.clear()


class ShardedStage:
    """One stage during a span.

    Args:
        spec: the constants of the stage.
        tracked: what comes and goes.
        pending: of the rank.
        places: of the rank, where it has fewer than gradients.
        meet: collectives of ranks.
        members: how many hold the weights of the stage.
    """

    def __init__(
        self,
        spec: StageSpec,
        tracked: Tracked,
        pending: PendingChanges,
        places: PlacesForGradients | None,
        meet: Rendezvous,
        members: int,
    ) -> None:
        self._spec, self._tracked, self._places, self._pending = spec, tracked, places, pending
        self._meet, self._members, self._stage = meet, members, spec.stage
        self._state = StageState(spec) if tracked.versions else None
        self._gathering: dict[int, Completion] = {}  # by version
        self._uses: Counter[int] = Counter()  # GATHERs of a version that no RELEASE has followed
        self._whole: set[int] = set()  # batches whose gradient has its memory
        self._sums: set[int] = set()  # batches for whose sum there are rows
        self._older: set[int] = set()

    @property
    def gathers(self) -> bool:
        """Whether passes wait for weights that are gathered for them."""
        return self._tracked.weights

    def begin_span(self, before: int) -> None:
        """Begin a span, whose batches and versions are counted from 0 on.

        Args:
            before: batches of the span before; 0 if there was none.
        """
        if self._state is None:
            return
        self._spec = replace(self._spec, older=-1 if before else 0)
        self._state = StageState(self._spec)
        self._older = {version - before for version in self._older}

    def before(self, action: Action, t: int) -> Iterator[Completion]:
        """Wait for the weights that a pass reads and, if it adds to a gradient, for room."""
        if action.op not in _READING or not self._spec.share:
            return
        if action.reads is not None and self._tracked.weights:
            gathering = self._gathering.pop(self._version(action, t), None)
            if gathering is not None:
                yield from wait(gathering)
        if self._places is not None and action.op in ADDING:
            yield from self._places.take(self._stage.index, self._batch(action, t))

    def reduce(self, batch: int, added: Completion) -> Completion:
        """Take note that the gradient of a batch is being added up; returns what is complete when it is settled."""
        if not self._tracked.apart:
            return added
        settled = Completion()

        def settle() -> None:
            if batch in self._whole:
                self._whole.discard(batch)
                self._change(HeldKind.FULL_GRADIENT, -1)
            settled.complete()

        added.then(settle)
        if self._places is not None:
            self._places.reduce(self._stage.index, batch, settled)
        return settled

    def after(self, action: Action, t: int) -> None:
        """Take account of an action that was done."""
        op = action.op
        if op in (Op.GATHER, Op.RELEASE) and self._tracked.weights:
            self._gather(self._version(action, t), op is Op.GATHER)
        elif op in ADDING and self._spec.share:
            self._add(self._batch(action, t))
        elif op is Op.STEP:
            self._step(self._batch(action, t))
        if self._state is not None:
            admitted = {} if action.reads is None else {self._first(action, t): self._version(action, t)}
            self._state.apply(action, t, admitted)
            self._drop(self._state.versions.alive)

    def drain(self, batches: int) -> None:
        """Begin the epilogue of a span of so many batches."""
        if self._state is not None:
            self._state.drain(batches)

    def _gather(self, version: int, begins: bool) -> None:
        """Make a version whole, or give it back, unless another GATHER has named it."""
        self._uses[version] += 1 if begins else -1
        if self._uses[version] == begins:
            self._change(HeldKind.GATHERED, 1 if begins else -1)
        if begins and self._uses[version] == 1:
            joined = (Op.GATHER, self._stage.index, version)
            self._gathering[version] = self._meet.join(joined, self._members)

    def _add(self, batch: int) -> None:
        """Begin the gradient of a batch, or a further part of it."""
        if batch not in self._whole:
            self._whole.add(batch)
            self._change(HeldKind.FULL_GRADIENT, 1)
        if self._tracked.versions and batch not in self._sums:
            self._sums.add(batch)
            self._change(HeldKind.SUM, 1)

    def _step(self, batch: int) -> None:
        """Make the next version."""
        if batch in self._whole:
            self._whole.discard(batch)
            self._change(HeldKind.FULL_GRADIENT, -1)
        if self._tracked.versions:
            self._sums.discard(batch)
            self._change(HeldKind.SUM, -1)
            self._older.add(batch)
            self._change(HeldKind.OLDER, 1)

    def _drop(self, alive: set[int]) -> None:
        """Drop the versions that nothing reads any more."""
        for version in [version for version in self._older if version not in alive and not self._uses[version]]:
            self._older.discard(version)
            self._change(HeldKind.OLDER, -1)

    def _change(self, kind: HeldKind, count: int) -> None:
        self._pending.change(Held(kind, self._stage.index), count)

    def _version(self, action: Action, t: int) -> int:
        assert action.reads is not None
        return max(action.reads.versions[0] + t, self._spec.older)

    def _batch(self, action: Action, t: int) -> int:
        unit = action.unit
        return t + (unit.first if unit.kind is Kind.BATCH else unit.first // self._spec.microbatches)

    def _first(self, action: Action, t: int) -> int:
        return action.unit.first + t * self._spec.microbatches
