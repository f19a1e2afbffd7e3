"""What leaves a stage and comes back: activations (OFFLOAD and FETCH; HOLD and RETURN on a rank that keeps them for
a stage of another one) and optimizer states (SWAPOUT and SWAPIN).

What comes from a peer is taken at the first look after it has come: HOLD and FETCH do not wait for it, but RETURN
and the next action on the microbatch do.
"""

from __future__ import annotations

from functools import partial

from penstock.comm.p2p.mailbox import MessageBuffer
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.runtime.ops.bound import BoundAction, Turn
from penstock.runtime.ops.messages import Consumer
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.ir.op_table import ACCEPTING
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.machine.instructions import Instruction
from penstock.schedule.stage_state.microbatch_state import Piece

_ROLE = "parked activations"  # of another rank
_OFFLOADED = "offloaded activations"


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
