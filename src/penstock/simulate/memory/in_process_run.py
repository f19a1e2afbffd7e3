"""A run of all ranks in one process without tensors: what each rank holds, as the runtime's ledger counts it.

It follows the runtime action by action: who goes on when (`runtime.execute.drive_ranks`), when a SEND counts as
taken, and what passes and updates begin and cease to hold. Activations that are moved to the host's memory count like
others, as all kinds are counted together. What takes the same room from beginning to end is not
counted here (`penstock.simulate.memory.predicted`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import CapabilityError
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.schedule import Action, Kind, Op, Payload, Schedule, Stage
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.machine.deadlock import Blocked, blocked_at, deadlock
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, Message
from penstock.schedule.split_backward_microbatches import halved_units
from penstock.simulate.memory.held import Blockwise, Combination, Held, HeldKind, Holdings, is_blockwise
from penstock.simulate.memory.message_completion import Completion, InProcessLane, Part, Rendezvous, take_turns

_NOT_PREDICTED = (Op.HOLD, Op.RETURN, Op.AVERAGE, Op.TIE, Op.RELEASE)


@dataclass
class _Shared:
    """What all ranks have in common.

    Attributes:
        lowered: the schedule with its messages.
        width: parallel pipelines.
        blockwise: stages whose blocks are recomputed one by one, by index; all or none if a truth value.
        lanes: of messages, by pipeline.
        meet: collectives of ranks.
    """

    lowered: Lowered
    width: int
    blockwise: Blockwise
    lanes: dict[tuple[int, LaneKey], InProcessLane]
    meet: Rendezvous

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.lowered.schedule

    def lane(self, pipeline: int, lane: LaneKey) -> InProcessLane:
        """Return a lane of a pipeline."""
        return self.lanes.setdefault((pipeline, lane), InProcessLane())

    def members(self, stage: Stage) -> int:
        """Return how many hold the weights of a stage."""
        return self.width * sum(other.index == stage.index for other in self.schedule.stages)


def most_held(
    lowered: Lowered, batches: int, width: int = 1, blockwise: Blockwise = False
) -> dict[Part, tuple[Combination, ...]]:
    """Return what every rank holds in a span, at the moments at which it may be the most.

    Args:
        lowered: the schedule with its messages, and with all actions that its run has.
        batches: length of the span.
        width: parallel pipelines.
        blockwise: stages whose blocks are recomputed one by one before their backwards, by index; all or none if a
            truth value.

    Raises:
        CapabilityError: the schedule does something that is not predicted.
        DeadlockError: some ranks wait for ever; the message names their actions, and the messages that do not come.
    """
    schedule = lowered.schedule
    ops = {i.action.op for program in lowered.programs for part in program for i in part}
    unknown = sorted(op.value for op in ops.intersection(_NOT_PREDICTED))
    if unknown or schedule.slices > 1 or schedule.sharding.level is Level.FULL:
        what = ", ".join(unknown) or ("slices of sequences" if schedule.slices > 1 else "sharding=full")
        raise CapabilityError(f"{schedule.name}: memory is not predicted for schedules with {what}")
    shared = _Shared(lowered, width, blockwise, {}, Rendezvous())
    parts = [(pipeline, rank) for pipeline in range(width) for rank in range(schedule.ranks)]
    ranks = {part: _RankRun(shared, *part) for part in parts}
    stuck = take_turns({part: rank.run(batches) for part, rank in ranks.items()})
    if stuck:
        raise deadlock(ranks[part].blocked() for part in stuck)
    return {part: rank.holdings.largest() for part, rank in ranks.items()}


class _HeldMessage(NamedTuple):
    """A message that counts until its receiver has posted the RECV."""

    received: Completion
    what: Held
    units: int
    instruction: Instruction
    t: int


class _RankRun:
    """One rank during a span."""

    def __init__(self, shared: _Shared, pipeline: int, rank: int) -> None:
        self.shared, self.pipeline, self.rank = shared, pipeline, rank
        schedule = self._schedule = shared.schedule
        self._m, self._program = schedule.microbatches, shared.lowered.programs[rank]
        self.holdings = Holdings()
        self._stages = {stage: _StageRun(self, stage) for stage in schedule.on_rank(rank)}
        self._sent: dict[LaneKey, deque[_HeldMessage]] = {}
        self._posted: dict[Message, Completion] = {}
        self._lanes: dict[int, InProcessLane] = {}  # by route
        self._stepped: set[Stage] = set()
        self._at = self._program.period[0], 0  # the instruction at which it stands, and the batch that it counts from
        self._wanted: Message | None = None  # for which it has waited last

    def run(self, batches: int) -> Iterator[Completion]:
        """Run the span; yields what the rank waits for."""
        for t in range(-1, batches):
            yield from self._play(self._program.period, t, more=t + 1 < batches)
        yield from self._play(self._program.epilogue, batches, more=False)
        for stage in self._stages.values():
            yield from stage.whole()
        for each in self._stages if self._schedule.sharding.level is not Level.NONE else ():
            self.holdings.change(Held(HeldKind.WHOLE, each.index), 1)
        for sent in (sent for queue in self._sent.values() for sent in queue):
            self._at = sent.instruction, sent.t
            yield from _wait(sent.received)

    def blocked(self) -> Blocked:
        """Say what the rank waits for."""
        instruction, t = self._at
        return blocked_at(self.shared.lowered, self.rank, instruction, t, lambda message: message != self._wanted)

    def _play(self, instructions: Sequence[Instruction], t: int, more: bool) -> Iterator[Completion]:
        for instruction in instructions:
            action, route, needs, ahead, _ = instruction
            unit = action.unit
            if (t < 0 and not ahead) or (ahead and not more) or t < since(unit, self._m):
                continue
            if unit.every > 1 and (unit.first + t + 1) % unit.every:
                continue
            first = unit.first + (t if unit.kind is Kind.BATCH else t * self._m)
            self._at = instruction, t
            if route >= 0:
                if action.op is Op.RECV:
                    self._posted[Message(route, first)] = self._lane(route).receive()
                else:
                    yield from self._send(instruction, t)
                continue
            for need in needs:
                self._wanted = Message(need.route, need.first + t * self._m)
                came = self._posted.pop(self._wanted, None)
                if came is None:  # there is no RECV for it
                    raise deadlock([self.blocked()])
                if not came.done:
                    yield came
            waits = self._stages[action.stage].act(action, first)
            if waits is not None:
                yield from waits

    # --- messages ---------------------------------------------------------------------------------------------------

    def _lane(self, route: int) -> InProcessLane:
        """Return the lane of a route."""
        found = self._lanes.get(route)
        if found is None:
            found = self._lanes[route] = self.shared.lane(self.pipeline, self.shared.lowered.routes[route].lane)
        return found

    def _send(self, instruction: Instruction, t: int) -> Iterator[Completion]:
        """Post a SEND, as soon as there is room."""
        there, lane = self.shared.lowered.routes[instruction.route], self._lane(instruction.route)
        queue = self._sent.setdefault(there.lane, deque())
        self._make_room(there.lane)
        if len(queue) >= self.shared.lowered.window:
            yield from _wait(queue[0].received)
            self._make_room(there.lane)
        what = message_of(there.payload, there.source.index, there.target.index)
        self.holdings.change(what, there.count)
        queue.append(_HeldMessage(lane.send(), what, there.count, instruction, t))

    def _make_room(self, lane: LaneKey) -> None:
        """Forget SENDs that are complete."""
        queue = self._sent[lane]
        while queue and queue[0].received.done:
            sent = queue.popleft()
            self.holdings.change(sent.what, -sent.units)

    def inside(self, payload: Payload, source: Stage, target: Stage, count: int) -> None:
        """Lay a message ready for a stage of the same rank, or (negative) take it."""
        if source.rank == target.rank:
            self.holdings.change(message_of(payload, source.index, target.index), count)

    # --- updates ----------------------------------------------------------------------------------------------------

    def stepped(self, stage: Stage) -> None:
        """Count what the optimizer of a stage remembers from its first update on, and the scratches of all."""
        if not self._stepped:
            for each in self._stages:
                self.holdings.change(Held(HeldKind.SCRATCH, each.index), 1)
        if stage not in self._stepped:
            self._stepped.add(stage)
            self.holdings.change(Held(HeldKind.OPTIMIZER, stage.index), 1)
        elif RULES[self._schedule.rule].provisional:
            self.holdings.change(Held(HeldKind.BEFORE, stage.index), 1)

    def settled(self, stage: Stage) -> None:
        """Forget what the optimizer remembered before an update that is settled now."""
        what = Held(HeldKind.BEFORE, stage.index)
        if self.holdings.counts.get(what):
            self.holdings.change(what, -1)


class _StageRun:
    """One stage of a rank during a span."""

    def __init__(self, rank: _RankRun, stage: Stage) -> None:
        self._rank, self._stage, self._shared = rank, stage, rank.shared
        schedule = rank.shared.schedule
        at, direction = schedule.stage_at, stage.direction
        self._inputs = [at[edge.source, direction] for edge in schedule.predecessors[stage.index]]
        self._outputs = [at[edge.target, direction] for edge in schedule.successors[stage.index]]
        self._gradients = [
            at[edge.target, direction]
            for edge in schedule.successors[stage.index]
            if edge.backward and stage.index not in schedule.frozen
        ]
        self._returns = [
            at[edge.source, direction]
            for edge in schedule.predecessors[stage.index]
            if edge.backward and not {edge.source, stage.index} & schedule.frozen
        ]
        self._m, self._halved = schedule.microbatches, halved_units(schedule, stage, bool(self._returns))
        self._again = stage.index in schedule.recomputed
        self._blockwise = is_blockwise(rank.shared.blockwise, stage.index)
        self._before, after = schedule.segment_before(stage.index), dict[int | None, int]()
        for index in range(schedule.num_stages):
            after[schedule.segment_before(index)] = index
        self._behind = after.get(stage.index)
        self._trained = any(p.op in (Op.B, Op.I) and p.stage == stage for p in schedule.program(stage.rank).period)
        self._kinds = {kind: Held(kind, stage.index) for kind in HeldKind}
        self._sums: dict[int, list[Completion]] = {}
        self._votes: dict[int, Completion] = {}
        self._gathering: Completion | None = None
        self._begun = -1
        self._deciding = len(schedule.deciding) * rank.shared.width
        self._provisional = RULES[schedule.rule].provisional

    def act(self, action: Action, first: int) -> Iterator[Completion] | None:
        """Do an action; returns what it waits for first, where it may have to."""
        op, numbers = action.op, range(first, first + action.unit.count)
        if op is Op.F:
            if first // self._m > self._begun:
                return self._begin(first // self._m, numbers)
            for k in numbers:
                self._forward(k)
        elif op in (Op.B, Op.I):
            for k in numbers:
                self._backward(k, whole=op is Op.B)
        elif op is Op.W:
            for k in numbers:
                if self._is_halved(k):
                    self._change(HeldKind.LATE, -1)
        elif op is Op.R:
            for k in numbers:
                self._recompute(k)
        elif op in (Op.REDUCE, Op.DECIDE, Op.GATHER):
            self._join(op, first)
        elif op is Op.STEP:
            return self._step(first)
        elif op is Op.VALIDATE:
            return self._validate(first)
        return None

    def whole(self) -> Iterator[Completion]:
        """Wait until the newest version is whole."""
        if self._gathering is not None:
            yield from _wait(self._gathering)
            self._gathering = None

    # --- passes -----------------------------------------------------------------------------------------------------

    def _begin(self, batch: int, numbers: range) -> Iterator[Completion]:
        """Run the first forwards of a batch."""
        self._begun = batch
        yield from self.whole()
        for k in numbers:
            self._forward(k)

    def _change(self, kind: HeldKind, count: int) -> None:
        self._rank.holdings.change(self._kinds[kind], count)

    def _is_halved(self, k: int) -> bool:
        return (k % self._m, 0) in self._halved

    def _graph(self, k: int) -> HeldKind:
        return HeldKind.HALVED if self._is_halved(k) else HeldKind.GRAPH

    def _forward(self, k: int) -> None:
        for source in self._inputs:
            self._rank.inside(Payload.ACTIVATION, source, self._stage, -1)
        if self._trained:
            graph = self._graph(k)
            if self._again:
                self._replace(graph, HeldKind.INPUT)
            elif self._blockwise:
                halved = graph is HeldKind.HALVED
                self._replace(HeldKind.FORWARD_HALVED if halved else HeldKind.FORWARD, HeldKind.SAVED)
            else:
                self._change(graph, 1)
        for target in self._outputs:
            self._rank.inside(Payload.ACTIVATION, self._stage, target, 1)

    def _replace(self, early: HeldKind, later: HeldKind) -> None:
        """Hold something for a while, and then something smaller."""
        self._change(early, 1)
        self._change(early, -1)
        self._change(later, 1)

    def _recompute(self, k: int) -> None:
        at, direction = self._shared.schedule.stage_at, self._stage.direction
        if self._before is not None:
            self._rank.inside(Payload.RECOMPUTE, at[self._before, direction], self._stage, -1)
        self._change(self._graph(k), 1)
        self._change(HeldKind.INPUT, -1)
        if self._behind is not None:
            self._rank.inside(Payload.RECOMPUTE, self._stage, at[self._behind, direction], 1)

    def _backward(self, k: int, whole: bool) -> None:
        for source in self._gradients:
            self._rank.inside(Payload.GRADIENT, source, self._stage, -1)
        halved = self._is_halved(k)
        if self._blockwise and not self._again:
            self._change(HeldKind.SAVED, -1)
            while_ = HeldKind.BACKWARD_HALVED if halved else HeldKind.BACKWARD
            self._change(while_, 1)
            self._change(while_, -1)
        else:
            self._change(self._graph(k), -1)
        if halved and not whole:
            self._change(HeldKind.LATE, 1)
        for target in self._returns:
            self._rank.inside(Payload.GRADIENT, self._stage, target, 1)

    # --- updates ----------------------------------------------------------------------------------------------------

    def _join(self, op: Op, batch: int) -> None:
        """Join a collective; stages decide once their gradients have been added."""
        index, meet = self._stage.index, self._shared.meet
        if op is Op.GATHER:
            self._gathering = meet.join((op, index, batch), self._shared.members(self._stage))
        elif op is Op.REDUCE:
            self._sums[batch] = [meet.join((op, index, batch), self._shared.members(self._stage))]
        else:
            vote = self._votes[batch] = Completion()
            before = self._sums.get(batch, [])
            if before:
                before[0].then(lambda: _ignore(meet.join((op, batch), self._deciding, vote)))
            else:
                meet.join((op, batch), self._deciding, vote)

    def _validate(self, batch: int) -> Iterator[Completion]:
        yield from _wait(self._votes.pop(batch))
        self._rank.settled(self._stage)

    def _step(self, batch: int) -> Iterator[Completion]:
        yield from self.whole()
        for each in self._sums.pop(batch, []):
            yield from _wait(each)
        if batch in self._votes and not self._provisional:
            yield from _wait(self._votes.pop(batch))
        self._rank.stepped(self._stage)


def _wait(what: Completion) -> Iterator[Completion]:
    if not what.done:
        yield what


def _ignore(_: Completion) -> None:
    """Take no notice of a result."""


def message_of(payload: Payload, source: int, target: int) -> Held:
    """Return a message between two stages; recomputed and repaired outputs are outputs."""
    return Held(HeldKind.GRADIENT if payload is Payload.GRADIENT else HeldKind.OUTPUT, source, target)
