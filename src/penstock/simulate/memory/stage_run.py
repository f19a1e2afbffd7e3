"""One stage during a run without tensors: what its passes and updates begin and cease to hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from penstock.schedule.ir.schedule import Action, Op, Payload, Schedule, Stage
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.simulate.memory.fake_transport import Completion, Rendezvous, wait
from penstock.simulate.memory.held import Blockwise, Held, HeldKind, Holdings, is_blockwise, slice_number
from penstock.simulate.memory.meetings import SimulatedMeetings
from penstock.simulate.memory.moved_activations import MovedActivations, gradients_to, halved_pieces
from penstock.simulate.memory.sharded_stage import ShardedStage
from penstock.simulate.memory.snapshots import SnapshotCopies


class RankOfStage(Protocol):
    """The rank of a stage.

    Attributes:
        holdings: what it holds.
        schedule: that it runs.
        meet: collectives of ranks.
        blockwise: stages whose blocks are recomputed one by one.
        width: parallel pipelines.
        pipeline: which of these.
        snapshots: that are taken of its stages; None for none.
        moved: activations that it keeps for others, or others for it.
        meetings: with other pipelines.
        deciding: how many stages of a pipeline decide about its updates.
        apart: pipelines have weights of their own.
        on_device: activations that are moved to the host's memory are not counted.
    """

    holdings: Holdings
    schedule: Schedule
    meet: Rendezvous
    blockwise: Blockwise
    width: int
    pipeline: int
    snapshots: SnapshotCopies | None
    moved: MovedActivations
    meetings: SimulatedMeetings
    apart: bool
    on_device: bool

    @property
    def deciding(self) -> int:
        """How many stages of a pipeline decide about its updates."""
        ...

    def members(self, stage: Stage) -> int:
        """Return how many hold the weights of a stage."""
        ...

    def inside(self, payload: Payload, source: Stage, target: Stage, piece: int, count: int) -> None:
        """Lay a message ready for a stage of the same rank, or (negative) take it."""
        ...

    def averaged(self, stage: Stage, batch: int) -> Iterator[Completion]:
        """Meet the other pipelines after the update of a batch."""
        ...

    def completed(self, stage: Stage, version: int) -> None:
        """Take a snapshot of a version of which the rest has come."""
        ...

    def settled(self, stage: Stage) -> None:
        """Forget what the optimizer remembered before an update that is settled now."""
        ...


class StageRun:
    """One stage of a rank during a span.

    Args:
        rank: whose.
        stage: which.
        shards: its weights and gradients, where some of them are whole for a while only.

    Attributes:
        trained: it has backwards.
    """

    def __init__(self, rank: RankOfStage, stage: Stage, shards: ShardedStage | None) -> None:
        self._rank, self._stage, self._shards = rank, stage, shards
        schedule = self._schedule = rank.schedule
        at, direction = schedule.stage_at, stage.direction
        self._inputs = [at[edge.source, direction] for edge in schedule.predecessors[stage.index]]
        self._outputs = [at[edge.target, direction] for edge in schedule.successors[stage.index]]
        self._gradients = [
            at[edge.target, direction]
            for edge in schedule.successors[stage.index]
            if edge.backward and stage.index not in schedule.frozen
        ]
        self._returns = gradients_to(schedule, stage)
        self._m, self._halved = schedule.microbatches, halved_pieces(schedule, stage)
        self._again = stage.index in schedule.recomputed
        self._blockwise = is_blockwise(rank.blockwise, stage.index)
        self._before, after = schedule.segment_before(stage.index), dict[int | None, int]()
        for index in range(schedule.num_stages):
            after[schedule.segment_before(index)] = index
        self._behind = after.get(stage.index)
        self.trained = any(p.op in (Op.B, Op.I) and p.stage == stage for p in schedule.program(stage.rank).period)
        slices = range(schedule.slices)
        self._kinds = {(kind, j): Held(kind, stage.index, slice=j) for kind in HeldKind for j in slices}
        self._sums: dict[int, list[Completion]] = {}
        self._votes: dict[int, Completion] = {}
        self._gathering: tuple[int, Completion] | None = None  # and the version that it completes
        self._begun = -1
        self._group = rank.pipeline if rank.apart else 0  # of pipelines that update the same weights
        self._deciding = rank.deciding * (1 if rank.apart else rank.width)
        self._tied = sum(s.direction == stage.direction for s in tied_stages(schedule))
        self._provisional = RULES[schedule.rule].provisional
        self._gathers = shards is not None and shards.gathers

    def begin_span(self) -> None:
        """Begin a span, whose batches are counted from 0 on."""
        self._begun = -1

    def act(self, action: Action, first: int) -> Iterator[Completion] | None:
        """Do an action; returns what it waits for first, where it may have to."""
        op, piece = action.op, slice_number(action.unit.slice)
        numbers = [(k, piece) for k in range(first, first + action.unit.count)]
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
                    self._change(HeldKind.LATE, k, -1)
        elif op is Op.R:
            for k in numbers:
                self._recompute(k)
        elif op in (Op.REDUCE, Op.TIE, Op.DECIDE) or (op is Op.GATHER and not self._gathers):
            self._join(op, first)
        elif op in (Op.OFFLOAD, Op.FETCH) and (action.peer is not None or self._rank.on_device):
            for k in numbers:
                self._move(k, away=op is Op.OFFLOAD)
        elif op is Op.RETURN and action.peer is not None:
            self._rank.moved.give_back(action.peer, (first, piece))
        elif op is Op.STEP:
            return self._step(first)
        elif op is Op.VALIDATE:
            return self._validate(first)
        elif op is Op.AVERAGE:
            return self._rank.averaged(self._stage, first)
        return None

    def whole(self) -> Iterator[Completion]:
        """Wait until the newest version is whole."""
        if self._gathering is not None:
            version, gathered = self._gathering
            yield from wait(gathered)
            self._gathering = None
            self._rank.completed(self._stage, version)

    # --- passes -----------------------------------------------------------------------------------------------------

    def _begin(self, batch: int, numbers: Sequence[Piece]) -> Iterator[Completion]:
        """Run the first forwards of a batch."""
        self._begun = batch
        yield from self.whole()
        if self._rank.snapshots is not None:
            first = not (self._rank.pipeline or self._stage.direction)
            self._rank.snapshots.before_forward(self._stage, batch, first)
        for k in numbers:
            self._forward(k)

    def _change(self, kind: HeldKind, k: Piece, count: int) -> None:
        self._rank.holdings.change(self._kinds[kind, k[1]], count)

    def _is_halved(self, k: Piece) -> bool:
        return (k[0] % self._m, k[1]) in self._halved

    def _graph(self, k: Piece) -> HeldKind:
        return HeldKind.HALVED if self._is_halved(k) else HeldKind.GRAPH

    def _forward(self, k: Piece) -> None:
        for source in self._inputs:
            self._rank.inside(Payload.ACTIVATION, source, self._stage, k[1], -1)
        if self.trained:
            graph = self._graph(k)
            if self._again:
                self._replace(k, graph, HeldKind.INPUT)
            elif self._blockwise:
                halved = graph is HeldKind.HALVED
                self._replace(k, HeldKind.FORWARD_HALVED if halved else HeldKind.FORWARD, HeldKind.SAVED)
            else:
                self._change(graph, k, 1)
        for target in self._outputs:
            self._rank.inside(Payload.ACTIVATION, self._stage, target, k[1], 1)

    def _replace(self, k: Piece, early: HeldKind, later: HeldKind) -> None:
        """Hold something for a while, and then something smaller."""
        self._change(early, k, 1)
        self._change(early, k, -1)
        self._change(later, k, 1)

    def _recompute(self, k: Piece) -> None:
        at, direction = self._schedule.stage_at, self._stage.direction
        if self._before is not None:
            self._rank.inside(Payload.RECOMPUTE, at[self._before, direction], self._stage, k[1], -1)
        self._change(self._graph(k), k, 1)
        self._change(HeldKind.INPUT, k, -1)
        if self._behind is not None:
            self._rank.inside(Payload.RECOMPUTE, self._stage, at[self._behind, direction], k[1], 1)

    def _backward(self, k: Piece, whole: bool) -> None:
        for source in self._gradients:
            self._rank.inside(Payload.GRADIENT, source, self._stage, k[1], -1)
        halved = self._is_halved(k)
        if self._blockwise and not self._again:
            self._change(HeldKind.SAVED, k, -1)
            while_ = HeldKind.BACKWARD_HALVED if halved else HeldKind.BACKWARD
            self._change(while_, k, 1)
            self._change(while_, k, -1)
        else:
            self._change(self._graph(k), k, -1)
        if halved and not whole:
            self._change(HeldKind.LATE, k, 1)
        for target in self._returns:
            self._rank.inside(Payload.GRADIENT, self._stage, target, k[1], 1)

    def move_back(self, k: Piece) -> None:
        """Have the activations of a graph back that another rank has kept."""
        self._move(k, away=False)

    def _move(self, k: Piece, away: bool) -> None:
        """Hold a graph without what is kept elsewhere of it, or with it; of what is recomputed nothing is."""
        if self._again or self._blockwise:
            return
        left = HeldKind.LEFT_HALVED if self._is_halved(k) else HeldKind.LEFT
        self._change(self._graph(k) if away else left, k, -1)
        self._change(left if away else self._graph(k), k, 1)

    # --- updates ----------------------------------------------------------------------------------------------------

    def _join(self, op: Op, batch: int) -> None:
        """Join a collective; stages decide once their gradients have been added."""
        index, meet = self._stage.index, self._rank.meet
        if op is Op.GATHER:
            self._gathering = batch + 1, meet.join((op, index, batch), self._rank.members(self._stage))
        elif op is Op.REDUCE:
            added = meet.join((op, self._group, index, batch), self._rank.members(self._stage))
            settled = added if self._shards is None else self._shards.reduce(batch, added)
            self._sums.setdefault(batch, []).append(settled)
        else:
            before, mine = self._sums.get(batch, []), Completion()
            joined: Hashable = (op, self._group, batch)
            members = self._deciding
            if op is Op.TIE:
                joined, members = (op, self._rank.pipeline, self._stage.direction, batch), self._tied
                self._sums[batch] = [*before, mine]
            else:
                self._votes[batch] = mine
                self._rank.meetings.vote(self._stage, batch)
            if before:  # they end one after the other
                before[-1].then(lambda: _ignore(meet.join(joined, members, mine)))
            else:
                meet.join(joined, members, mine)

    def _validate(self, batch: int) -> Iterator[Completion]:
        yield from wait(self._votes.pop(batch))
        self._rank.settled(self._stage)

    def _step(self, batch: int) -> Iterator[Completion]:
        yield from self.whole()
        for each in self._sums.pop(batch, []):
            yield from wait(each)
        if batch in self._votes and not self._provisional:
            yield from wait(self._votes.pop(batch))


def tied_stages(schedule: Schedule) -> set[Stage]:
    """Return the stages that share parameters with others."""
    if Op.TIE not in schedule.operations:  # which is known, and asked for each stage
        return set()
    return {action.stage for program in schedule.programs for action in program.period if action.op is Op.TIE}


def _ignore(_: Completion) -> None:
    """Take no notice of a result."""


def message_of(payload: Payload, source: Stage, target: Stage, piece: int) -> Held:
    """Return a message between two stages; recomputed and repaired outputs are outputs."""
    kind = HeldKind.GRADIENT if payload is Payload.GRADIENT else HeldKind.OUTPUT
    return Held(kind, source.index, target.index, piece)
