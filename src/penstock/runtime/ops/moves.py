"""Activations that leave a stage and come back: OFFLOAD and FETCH, and HOLD and RETURN on the rank that keeps them."""

from __future__ import annotations

from penstock.comm.p2p.mailbox import Desk
from penstock.comm.p2p.message import Header, TensorMessage
from penstock.runtime.ops.bound import BoundAction, Turn
from penstock.runtime.ops.messages import Consumer
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.machine.instructions import Instruction
from penstock.schedule.proof.in_flight import Piece

_ROLE = "parked activations"


class HostMove(BoundAction):
    """Moves the activations of a microbatch to the host's memory (OFFLOAD), or back (FETCH)."""

    def work(self, turn: Turn) -> None:
        """Move them."""
        away, flight = self.op is Op.OFFLOAD, self._runtime.flights[turn.first, self._keys[0][1]]
        nbytes = self._runtime.graphs.offload(flight.work, away=away)
        self._recorder.change(_ROLE, nbytes if away else -nbytes)


class PeerMove(Consumer):
    """Moves activations between a stage and the peer that keeps them for it (BPipe)."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        own, peer = self.action.stage, self.action.peer
        assert peer is not None
        self._out: Desk = span.mailbox.desk(Payload.PARKED, own, peer)
        self._in: Desk = span.mailbox.desk(Payload.PARKED, peer, own)
        self._held = span.held.setdefault(peer, {})

    def work(self, turn: Turn) -> None:
        """Give activations away and take them back, or keep those of the peer and return them."""
        key: Piece = turn.first, self._keys[0][1]
        header, runtime = Header(turn.batch, turn.first, self._span.more, piece=key[1]), self._runtime
        match self.op:
            case Op.OFFLOAD:
                self._out.put(TensorMessage(header, runtime.graphs.take_bytes(runtime.flights[key].work)))
            case Op.FETCH:
                runtime.graphs.put_bytes(runtime.flights[key].work, self._in.take(key).tree)
            case Op.HOLD:
                message = self._held[key] = self._in.take(key)
                self._recorder.change(_ROLE, message.nbytes)
            case Op.RETURN:
                message = self._held.pop(key)
                self._recorder.change(_ROLE, -message.nbytes)
                self._out.put(TensorMessage(header, message.tree))


def bind_move(instruction: Instruction, span: RankSpan) -> BoundAction:
    """The move that an instruction stands for: to the host's memory, or with a peer."""
    return (HostMove if instruction.action.peer is None else PeerMove)(instruction, span)
