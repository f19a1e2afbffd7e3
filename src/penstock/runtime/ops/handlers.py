"""The table of operations that the runtime offers, and the binding of actions on whole batches and of moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from penstock.comm.core.ticket import Wait
from penstock.comm.p2p.mailbox import MessageBuffer
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.runtime.ops.bound import Bound, BoundAction, Turn
from penstock.runtime.ops.messages import Consumer, Receive, Send
from penstock.runtime.ops.passes import (
    Backward,
    Forward,
    HeldBackward,
    HeldForward,
    HeldRecomputeForward,
    HeldWeightBackward,
    Predict,
    RecomputeForward,
    Redo,
    Validate,
    WeightBackward,
    bind_forward,
)
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.ir.op_table import ACCEPTING
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.machine.instructions import Instruction, LoweredProgram
from penstock.schedule.stage_state.microbatch_state import Piece

# What leaves a stage and comes back: activations (OFFLOAD and FETCH; HOLD and RETURN on a rank that keeps them for
# a stage of another one) and optimizer states (SWAPOUT and SWAPIN).
#
# What comes from a peer is taken at the first look after it has come: HOLD and FETCH do not wait for it, but RETURN
# and the next action on the microbatch do.


class HostMove(Consumer):
    """Moves the activations of a microbatch to the host's memory (OFFLOAD), or back (FETCH)."""

    def work(self, turn: Turn) -> None:
        """Move them."""
        away, passes = self.op is Op.OFFLOAD, self._runtime.passes
        flight = passes.flights[turn.first, self._keys[0][1]]
        if not away:  # what comes back must not count twice meanwhile
            self._recorder.change(_OFFLOADED, -passes.graphs.movable_bytes(flight.work))
        nbytes = passes.graphs.offload(flight.work, away=away)
        if away:
            self._recorder.change(_OFFLOADED, nbytes)


class MoveToPeer(Consumer):
    """Gives activations to a peer that keeps them (OFFLOAD), or those of a peer back to it (RETURN)."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        own, peer = self.action.stage, self.action.peer
        assert peer is not None
        self._out: MessageBuffer = span.mailbox.buffer(Payload.PARKED, own, peer)
        self._held = span.held.setdefault(peer, {})

    def work(self, turn: Turn) -> None:
        """Lay them ready to be sent."""
        key: Piece = turn.first, self._keys[0][1]
        if self.op is Op.OFFLOAD:
            passes = self._runtime.passes
            tree = passes.graphs.take_bytes(passes.flights[key].work)
        else:
            message = self._held.pop(key)
            _begin_use(message)
            self._recorder.change(_ROLE, -message.nbytes)
            tree = message.tree
        self._out.put(TensorMessage(Header(turn.batch, turn.first, self._span.more, piece=key[1]), tree))


class MoveFromPeer(BoundAction):
    """Takes the activations of a peer in (HOLD), or the stage's own ones back (FETCH), once they have come."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        own, peer = self.action.stage, self.action.peer
        assert peer is not None
        self._in: MessageBuffer = span.mailbox.buffer(Payload.PARKED, peer, own)
        (message,) = instruction.needs
        self._inbox = span.mailbox.parked(message.route)
        self._held = span.held.setdefault(peer, {})
        self._use = self._hold if self.op is Op.HOLD else self._put_back

    def work(self, turn: Turn) -> float:
        """Take what has come, and see to it that the rest is taken when it comes."""
        self._inbox.settle()
        start, key = self._recorder.begin(), (turn.first, self._keys[0][1])
        what = f"{self.stage.name}, {self._name}{turn.first}"
        self._inbox.take(turn.first, turn.batch, what, partial(self._use, key))
        return start

    def _hold(self, key: Piece) -> None:
        message = self._held[key] = self._in.take(key)
        self._recorder.change(_ROLE, message.nbytes)

    def _put_back(self, key: Piece) -> None:
        message = self._in.take(key)
        _begin_use(message)
        passes = self._runtime.passes
        passes.graphs.put_bytes(passes.flights[key].work, message.tree)


class SwapAction(BoundAction):
    """Brings the optimizer state of a stage from the host's memory (SWAPIN), or moves it back (SWAPOUT)."""

    def work(self, turn: Turn) -> None:  # noqa: ARG002
        """Begin; only the update waits."""
        self._runtime.weights.swap(away=self.op is Op.SWAPOUT)


def _begin_use(message: TensorMessage) -> None:
    if message.on_use is not None:
        message.on_use()


def bind_move(instruction: Instruction, span: RankSpan) -> BoundAction:
    """The move that an instruction stands for: to the host's memory and back, or to a peer, or from there."""
    if instruction.action.peer is None:
        return HostMove(instruction, span)
    return (MoveFromPeer if instruction.action.op in ACCEPTING else MoveToPeer)(instruction, span)


_ROLE = "parked activations"  # of another rank
_OFFLOADED = "offloaded activations"


class ReduceAction(BoundAction):
    """Begins to add the gradient of a batch over all that hold the same weights."""

    def work(self, turn: Turn) -> None:
        """Begin."""
        self._span.updates.reduce(self._runtime, turn.batch)


class TieAction(BoundAction):
    """Begins to add the gradients of parameters that several stages share."""

    def work(self, turn: Turn) -> None:
        """Begin."""
        self._span.updates.tie(self._runtime, turn.batch)


class DecideAction(BoundAction):
    """Contributes what a stage knows of a batch to the decision of all stages."""

    def work(self, turn: Turn) -> None:
        """Contribute."""
        span = self._span
        loss = span.losses.share(turn.batch) if self.stage.is_last else None
        span.updates.contribute(self._runtime, turn.batch, loss)
        span.meetings.contribute(self.action.stage, turn.batch, loss is not None)


class StepAction(BoundAction):
    """The optimizer update, once everything that it needs of others is there."""

    def run(self, t: int) -> Iterator[Wait]:
        """Wait for sums and decisions, then update."""
        turn, updates = self.turn(t), self._span.updates
        yield from self._span.complete(self.stage, str(turn))  # what this update begins from
        yield from updates.wait(self.action.stage, turn.batch, self.op, f"{self.op}{turn.first}")
        self._span.capture.before_update(self._runtime)
        self.act(turn)

    def work(self, turn: Turn) -> float | None:
        """Update, and take a snapshot if it is time."""
        span, batch, start = self._span, turn.batch, None
        settle = self._runtime.weights.settle_swap()
        if settle is not None:
            start = self._recorder.wait_on_device(settle, f"copy {turn.label}", *self._place, batch)
        weight = span.losses.weight_for_update(batch)
        decision = span.updates.step(self._runtime, batch, weight, self.stage.books.last.rotated)
        span.reports.decided(decision)
        gathers = span.updates.gathers
        final = (gathers is None or gathers.full) and not span.meetings.meets(batch)
        (span.capture.after_step if final else span.capture.keep_older)(self._runtime, batch + 1)
        return start


class ProvisionalStep(StepAction):
    """The optimizer update before the decision of all stages; VALIDATE settles it."""

    def work(self, turn: Turn) -> None:
        """Update by the factor that the decision would give if nothing were clipped and everything were finite."""
        self._span.updates.try_step(self._runtime, turn.batch, self._span.losses.weight_for_update(turn.batch))


class GatherAction(BoundAction):
    """Begins to make a version whole of which a shard is here; the first pass on it waits."""

    def work(self, turn: Turn) -> None:
        """Begin."""
        gathers = self._span.updates.gathers
        assert gathers is not None, "only sharded schedules have GATHERs"
        gathers.begin(self._runtime, turn.version)


class ReleaseAction(BoundAction):
    """Gives the memory of a gathered version back."""

    def work(self, turn: Turn) -> None:
        """Give it back."""
        self._runtime.release(turn.version)


class AverageAction(BoundAction):
    """The meeting of parallel pipelines that have weights of their own."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction._replace(action=span.meetings.placed(instruction.action)), span)
        self.settled = math.inf  # it depends on the batch

    def exists(self, t: int) -> bool:
        """Return whether pipelines meet in this period."""
        return super().exists(t) and self._span.meetings.meets(self._span.start + t + self._offset)

    def run(self, t: int) -> Iterator[Wait]:
        """Wait for the other pipelines, then go on with what they have agreed on."""
        turn = self.turn(t)
        yield from self._span.meetings.meet(self._runtime, turn.batch, f"{self.op}{turn.first}", self._span.hold_bytes)
        self.act(turn)

    def work(self, turn: Turn) -> None:
        """Change the newest version, and take a snapshot if it is time."""
        if self._span.meetings.end(self._runtime, turn.batch):
            self._span.stop.agree()
        self._span.capture.after_step(self._runtime, turn.batch + 1)


def bind_step(instruction: Instruction, span: RankSpan) -> StepAction:
    """The update that an instruction stands for."""
    return (ProvisionalStep if span.provisional else StepAction)(instruction, span)


HANDLERS: Mapping[Op, Callable[[Instruction, RankSpan], Bound]] = MappingProxyType(
    {
        Op.SEND: Send,
        Op.RECV: Receive,
        Op.F: bind_forward,
        Op.B: Backward,
        Op.I: Backward,
        Op.W: WeightBackward,
        Op.R: RecomputeForward,
        Op.REDO: Redo,
        Op.PREDICT: Predict,
        Op.REDUCE: ReduceAction,
        Op.TIE: TieAction,
        Op.DECIDE: DecideAction,
        Op.STEP: bind_step,
        Op.GATHER: GatherAction,
        Op.RELEASE: ReleaseAction,
        Op.VALIDATE: Validate,
        Op.AVERAGE: AverageAction,
        Op.OFFLOAD: bind_move,
        Op.FETCH: bind_move,
        Op.HOLD: bind_move,
        Op.RETURN: bind_move,
        Op.SWAPIN: SwapAction,
        Op.SWAPOUT: SwapAction,
    }
)


_HELD: Mapping[Op, Callable[[Instruction, RankSpan], Bound]] = MappingProxyType(
    {
        Op.F: HeldForward,
        Op.B: HeldBackward,
        Op.I: HeldBackward,
        Op.W: HeldWeightBackward,
        Op.R: HeldRecomputeForward,
    }
)
"""Passes of trained stages where weights are shards, or gradients wait for room."""


def bind(program: LoweredProgram, span: RankSpan) -> list[list[Bound]]:
    """Bind the instructions of a rank: of its period, its epilogue, and the period with a rejected version."""
    found = [[_handler(instruction, span)(instruction, span) for instruction in part] for part in program]
    for part, bounds in zip(program, found, strict=True):
        if program.places_reports:
            for instruction, bound in zip(part, bounds, strict=True):
                bound.report_lag = instruction.report_lag
        else:
            _answer_first(bounds)
    return found


def _answer_first(bounds: Sequence[Bound]) -> None:
    """Let no report go before the backward that follows the loss: the stages before wait for its gradient."""
    for before, after in pairwise(bound for bound in bounds if bound.op not in (Op.SEND, Op.RECV)):
        if isinstance(before, Forward) and isinstance(after, Backward) and before.begins_backward(after):
            after.report_lag = None  # and it waits for nothing


def _handler(instruction: Instruction, span: RankSpan) -> Callable[[Instruction, RankSpan], Bound]:
    action, gathers = instruction.action, span.updates.gathers
    if gathers is not None and gathers.holds_up_passes and action.op in _HELD and span.stages[action.stage].trained:
        return _HELD[action.op]
    return HANDLERS[action.op]
