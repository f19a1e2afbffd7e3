"""Activations that a rank keeps for another one until their backward (BPipe)."""

from __future__ import annotations

from penstock.comm.core.recorder import Recorder
from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.message import Header, Parcel
from penstock.schedule.ir.schedule import Op, Payload, Stage
from penstock.schedule.proof.in_flight import Piece
from penstock.stage.stage_runtime import StageRuntime


class Lending:
    """What a rank gives away and takes back, and what it keeps for others.

    Args:
        mailbox: of the rank.
        recorder: told how many bytes of others are here.
    """

    def __init__(self, mailbox: Mailbox, recorder: Recorder) -> None:
        self._mailbox, self._recorder = mailbox, recorder
        self._kept: dict[tuple[Stage, Piece], Parcel] = {}  # by whose they are

    def move(self, stage: StageRuntime, op: Op, peer: Stage, header: Header) -> None:
        """Activations of this rank to another one and back (OFFLOAD, FETCH), or those of another one (HOLD, RETURN)."""
        key = header.first, header.piece
        match op:
            case Op.OFFLOAD:
                given = Parcel(header, stage.graphs.give(stage.flights[key].work))
                self._mailbox.put(Payload.PARKED, stage.key, peer, given)
            case Op.FETCH:
                back = self._mailbox.take(Payload.PARKED, peer, stage.key, key).tree
                stage.graphs.take(stage.flights[key].work, back)
            case Op.HOLD:
                parcel = self._kept[peer, key] = self._mailbox.take(Payload.PARKED, peer, stage.key, key)
                self._recorder.change("parked activations", parcel.nbytes)
            case Op.RETURN:
                parcel = self._kept.pop((peer, key))
                self._recorder.change("parked activations", -parcel.nbytes)
                self._mailbox.put(Payload.PARKED, stage.key, peer, Parcel(header, parcel.tree))
            case _:
                raise AssertionError(f"{op} moves no activations")
