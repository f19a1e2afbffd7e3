"""One rank of a run without tensors: what it holds, action by action, as the runtime's ledger counts it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.op_table import ACCEPTING
from penstock.schedule.ir.schedule import Action, Kind, Op, Payload, Schedule, Stage
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.machine.deadlock import Blocked, blocked_at, deadlock
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, Message, Route
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.stage_state.stage_constants import stage_specs
from penstock.simulate.memory.fake_transport import Completion, InProcessLane, Rendezvous, wait
from penstock.simulate.memory.held import Blockwise, Held, HeldKind, Holdings, slice_number
from penstock.simulate.memory.meetings import FakeWaveExchange, SimulatedMeetings
from penstock.simulate.memory.moved_activations import MovedActivations
from penstock.simulate.memory.sharded_stage import PendingChanges, PlacesForGradients, ShardedStage, Tracked
from penstock.simulate.memory.snapshots import KeptSnapshots, SnapshotCopies, Snapshots
from penstock.simulate.memory.stage_run import StageRun, message_of


@dataclass
class SharedRun:
    """What all ranks have in common.

    Attributes:
        lowered: the schedule with its messages.
        width: parallel pipelines.
        blockwise: stages whose blocks are recomputed one by one, by index; all or none if a truth value.
        low_precision: passes compute in 16 bits.
        lanes: of messages, by pipeline.
        meet: collectives of ranks.
        snapshots: that are taken on the way; None for none.
        kept: snapshots of all ranks.
        combine: how pipelines agree.
        exchange: of what they have changed, where they do so in waves.
        on_device: activations that are moved to the host's memory are not counted.
    """

    lowered: Lowered
    width: int
    blockwise: Blockwise
    low_precision: bool
    lanes: dict[tuple[int, LaneKey], InProcessLane]
    meet: Rendezvous
    snapshots: Snapshots | None
    kept: KeptSnapshots
    combine: Combine
    exchange: FakeWaveExchange
    on_device: bool = False

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.lowered.schedule

    def lane(self, pipeline: int, lane: LaneKey) -> InProcessLane:
        """Return a lane of a pipeline."""
        return self.lanes.setdefault((pipeline, lane), InProcessLane())


class _HeldMessage(NamedTuple):
    """A message that counts until its receiver has posted the RECV."""

    received: Completion
    what: Held
    units: int
    instruction: Instruction
    t: int


@dataclass(slots=True)
class _Way:
    """What a rank knows of a route.

    Attributes:
        route: which.
        lane: of its messages.
        queue: of those that have been sent on this lane.
        parked: whether they are moved activations.
        what: each of them, if it is not.
    """

    route: Route
    lane: InProcessLane
    queue: deque[_HeldMessage]
    parked: bool
    what: Held


class RankRun:
    """One rank during a span."""

    def __init__(self, shared: SharedRun, pipeline: int, rank: int) -> None:
        self.shared, self.pipeline, self.rank = shared, pipeline, rank
        self.schedule, self.meet = shared.schedule, shared.meet
        self.width, self.blockwise, self.apart = shared.width, shared.blockwise, shared.combine.apart
        self._m, self._program = self.schedule.microbatches, shared.lowered.programs[rank]
        self._oldest = max((since(each.action.unit, self._m) for part in self._program for each in part), default=0)
        self.holdings = Holdings()
        self._pending = PendingChanges(self.holdings)
        plan, delay = shared.snapshots, RULES[self.schedule.rule].delay
        self.snapshots = None if plan is None else SnapshotCopies(plan, self.holdings, shared.kept, delay)
        self._shards = self._sharded_stages()
        self._stages = {stage: StageRun(self, stage, self._shards.get(stage)) for stage in self.schedule.on_rank(rank)}
        self._sent: dict[LaneKey, deque[_HeldMessage]] = {}
        self._posted: dict[tuple[int, int], Completion] = {}  # by route and microbatch, as `Message`
        self._ways: dict[int, _Way] = {}  # by route
        self.moved = MovedActivations(shared.lowered, self.blockwise, self.holdings, self._posted)
        self._updated, self._stepped = False, set[Stage]()
        self.meetings = SimulatedMeetings(
            shared.combine, self.width, pipeline, self.meet, shared.exchange, self.holdings, self.width * self.deciding
        )
        self.on_device = shared.on_device
        self._before, self._whole = 0, False  # batches of the span before, and whether weights are whole after it
        self._at = self._program.period[0], 0  # the instruction at which it stands, and the batch that it counts from
        self._wanted: tuple[int, int] | None = None  # the message for which it has waited last

    @property
    def deciding(self) -> int:
        """How many stages of a pipeline decide about its updates."""
        return len(self.schedule.deciding)

    def members(self, stage: Stage) -> int:
        """Return how many hold the weights of a stage."""
        width = 1 if self.apart else self.width
        return width * sum(other.index == stage.index for other in self.schedule.stages)

    def _sharded_stages(self) -> dict[Stage, ShardedStage]:
        """Return those of the rank of which something is whole for a while only."""
        tracked = Tracked.on(self.schedule, self.rank, self.shared.low_precision)
        if not tracked.gradients:
            return {}
        number = self.schedule.sharding.gradients
        places = PlacesForGradients(number) if tracked.apart and number is not None else None
        specs = stage_specs(self.schedule, 0, [self.rank])
        made = (ShardedStage(s, tracked, self._pending, places, self.meet, self.members(s.stage)) for s in specs)
        return {spec.stage: stage for spec, stage in zip(specs, made, strict=True)}

    def run(self, batches: int) -> Iterator[Completion]:
        """Run a span; yields what the rank waits for."""
        for shards in self._shards.values():
            shards.begin_span(self._before)
        self._before = batches
        for stage in self._stages.values():
            stage.begin_span()
        for t in range(-1, batches):
            yield from self._play(self._program.period, t, more=t + 1 < batches)
        for shards in self._shards.values():
            shards.drain(batches)
        yield from self._play(self._program.epilogue, batches, more=False)
        for stage in self._stages.values():
            yield from stage.whole()
        if self.schedule.sharding.level is not Level.NONE:
            self._between_runs(here=True)
        yield from self.meetings.drain([s for s, run in self._stages.items() if run.trained], batches)
        for sent in (sent for queue in self._sent.values() for sent in queue):
            self._at = sent.instruction, sent.t
            yield from wait(sent.received)
        for queue in self._sent.values():
            self._make_room(queue)

    def _between_runs(self, here: bool) -> None:
        """Hold what is whole of stages between two runs, or no longer."""
        if self._whole != here:
            self._whole = here
            for each in self._stages:
                self.holdings.change(Held(HeldKind.WHOLE, each.index), 1 if here else -1)

    def blocked(self) -> Blocked:
        """Say what the rank waits for."""
        instruction, t = self._at
        return blocked_at(self.shared.lowered, self.rank, instruction, t, lambda message: message != self._wanted)

    def _play(self, instructions: Sequence[Instruction], t: int, more: bool) -> Iterator[Completion]:
        early = t < self._oldest
        for instruction in instructions:
            action, route, needs, ahead, awaits, _ = instruction
            unit = self.meetings.placed(action.unit) if action.op is Op.AVERAGE else action.unit
            if (t < 0 and not ahead) or (ahead and not more) or (early and t < since(unit, self._m)):
                continue
            if action.op is Op.AVERAGE and not self.meetings.exists(unit.first + t):
                continue
            first = unit.first + (t if unit.kind is Kind.BATCH else t * self._m)
            self._at = instruction, t
            if route >= 0:
                way = self._way(route)
                if action.op is Op.RECV:
                    if way.parked:
                        yield from self.moved.make_room(route)
                    self._receive(way, route, first)
                    continue
                self._make_room(way.queue)
                if len(way.queue) >= self.shared.lowered.window:
                    yield from wait(way.queue[0].received)
                    self._make_room(way.queue)
                self._send(way, instruction, t)
                continue
            if action.op in ACCEPTING and action.peer is not None:
                self.moved.accept(action, needs[0].route, first, self._stages[action.stage].move_back)
                self._between_runs(here=False)
                continue
            for need in needs:
                self._wanted = need.route, need.first + t * self._m
                came = self._posted.pop(self._wanted, None)
                if came is None:  # there is no RECV for it
                    raise deadlock([self.blocked()])
                if not came.done:
                    yield came
            for each in awaits:
                yield from self.moved.wait(Message(each.route, each.first + t * self._m))
            yield from self._act(action, t, first)

    def _act(self, action: Action, t: int, first: int) -> Iterator[Completion]:
        """Do an action of a stage, and take account of it."""
        shards = self._shards.get(action.stage)
        if shards is not None:
            yield from shards.before(action, t)
        waits = self._stages[action.stage].act(action, first)
        if waits is not None:
            yield from waits
        if shards is not None:
            shards.after(action, t)
        if self.snapshots is not None:  # the ledger has them before it hears what an update has freed
            if action.op is Op.STEP:
                self._save(action.stage, first + 1)
            self.snapshots.record()
        self._between_runs(here=False)  # the ledger looks after the first action of a span
        if shards is not None:
            self._pending.report()
        if action.op is Op.STEP:
            self._count_update(action.stage)

    def _save(self, stage: Stage, version: int) -> None:
        """Take a snapshot after an update, or wait with it until the rest of the version has come."""
        assert self.snapshots is not None
        level, first = self.schedule.sharding.level, not (self.pipeline or stage.direction)
        if level in (Level.NONE, Level.FULL):
            self.snapshots.after_step(stage, version, first, level is not Level.NONE)
        else:
            self.snapshots.keep_older(stage, version, first)

    def completed(self, stage: Stage, version: int) -> None:
        """Take a snapshot of a version of which the rest has come."""
        if self.snapshots is not None:
            first = not (self.pipeline or stage.direction)
            self.snapshots.after_step(stage, version, first, divides=True)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _way(self, number: int) -> _Way:
        """Return what is known of a route."""
        found = self._ways.get(number)
        if found is None:
            there = self.shared.lowered.routes[number]
            key, parked = there.lane, there.payload is Payload.PARKED
            what = message_of(there.payload, there.source, there.target, slice_number(there.slice))
            queue = self._sent.setdefault(key, deque()) if key.source == self.rank else deque()
            found = self._ways[number] = _Way(there, self.shared.lane(self.pipeline, key), queue, parked, what)
        return found

    def _receive(self, way: _Way, number: int, first: int) -> None:
        """Post a RECV of a route, by its number."""
        came = self._posted[number, first] = way.lane.receive()
        if way.parked:
            self.moved.add(number, came)

    def _send(self, way: _Way, instruction: Instruction, t: int) -> None:
        """Post a SEND."""
        what, count = way.what, way.route.count
        if way.parked:
            what, count = self.moved.message(way.route, instruction.action.unit.first + t * self._m)
        self.holdings.change(what, count)
        way.queue.append(_HeldMessage(way.lane.send(), what, count, instruction, t))

    def _make_room(self, queue: deque[_HeldMessage]) -> None:
        """Forget SENDs that are complete."""
        while queue and queue[0].received.done:
            sent = queue.popleft()
            self.holdings.change(sent.what, -sent.units)

    def inside(self, payload: Payload, source: Stage, target: Stage, piece: int, count: int) -> None:
        """Lay a message ready for a stage of the same rank, or (negative) take it."""
        if source.rank == target.rank:
            self.holdings.change(message_of(payload, source, target, piece), count)

    # --- updates ----------------------------------------------------------------------------------------------------

    def _count_update(self, stage: Stage) -> None:
        """Count what the optimizer of a stage remembers from its first update on, and the scratches of all."""
        if not self._updated:
            self._updated = True
            for each in self._stages:
                self.holdings.change(Held(HeldKind.SCRATCH, each.index), 1)
        if stage not in self._stepped:
            self._stepped.add(stage)
            self.holdings.change(Held(HeldKind.OPTIMIZER, stage.index), 1)
        elif RULES[self.schedule.rule].provisional:
            self.holdings.change(Held(HeldKind.BEFORE, stage.index), 1)

    def averaged(self, stage: Stage, batch: int) -> Iterator[Completion]:
        """Meet the other pipelines after the update of a batch; optimizers may forget what they remember."""
        yield from self.meetings.average(stage, batch)
        if self.meetings.resets and stage in self._stepped:
            self._stepped.discard(stage)
            self.holdings.change(Held(HeldKind.OPTIMIZER, stage.index), -1)

    def settled(self, stage: Stage) -> None:
        """Forget what the optimizer remembered before an update that is settled now."""
        what = Held(HeldKind.BEFORE, stage.index)
        if self.holdings[what]:
            self.holdings.change(what, -1)
