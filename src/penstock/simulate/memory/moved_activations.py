"""Activations that ranks keep for each other, without tensors: when they are taken from their lane, and whose they are.

It follows `penstock.comm.p2p.mailbox`: HOLD and FETCH take what has come at the first look after it
has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.errors import CapabilityError
from penstock.schedule.add_options import halved_units
from penstock.schedule.ir.schedule import Action, Op, Payload, Schedule, Stage
from penstock.schedule.machine.instructions import LaneKey, Lowered, Message, Route
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.simulate.memory.fake_transport import Completion, wait
from penstock.simulate.memory.held import Blockwise, Held, HeldKind, Holdings, is_blockwise, slice_number


class _Lane:
    """The RECVs of one lane of moved activations that are posted and not taken.

    Args:
        window: how many there may be.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._open: dict[Completion, Callable[[], None] | None] = {}  # in the order in which they come

    def add(self, came: Completion) -> None:
        """Note a RECV that has been posted."""
        self._open[came] = None

    def take(self, came: Completion, use: Callable[[], None]) -> None:
        """Take what a RECV was posted for, now or at the first look after it has come."""
        self._open[came] = use
        self.settle()

    def settle(self) -> None:
        """Take what has come."""
        for came, use in [*self._open.items()]:
            if use is not None and came.done:
                del self._open[came]
                use()

    def make_room(self) -> Iterator[Completion]:
        """Wait until another RECV may be posted."""
        self.settle()
        while len(self._open) >= self._window:
            yield from wait(next(came for came, use in self._open.items() if use is not None))
            self.settle()


class MovedActivations:
    """What one rank keeps of the activations of others, and others of its own.

    Args:
        lowered: the schedule with its messages.
        blockwise: stages whose blocks are recomputed one by one, which keep nothing that can be moved.
        holdings: of the rank.
        posted: its RECVs whose messages have not been taken.
    """

    def __init__(
        self, lowered: Lowered, blockwise: Blockwise, holdings: Holdings, posted: dict[tuple[int, int], Completion]
    ) -> None:
        self._lowered, self._blockwise, self._holdings, self._posted = lowered, blockwise, holdings, posted
        self._lanes: dict[LaneKey, _Lane] = {}
        self._keeping = _moves_to_peers(lowered.schedule)
        self._halved: dict[Stage, frozenset[Piece]] = {}

    def make_room(self, route: int) -> Iterator[Completion]:
        """Wait until another RECV of a route may be posted."""
        lane = self._lane(route)
        if lane is not None:
            yield from lane.make_room()

    def add(self, route: int, came: Completion) -> None:
        """Note a RECV that has been posted."""
        lane = self._lane(route)
        if lane is not None:
            lane.add(came)

    def message(self, route: Route, first: int) -> tuple[Held, int]:
        """Return what a message of moved activations of a microbatch holds, and how many of that."""
        owner = route.source if (route.source, route.target) in self._keeping else route.target
        return self._held(owner, (first, slice_number(route.slice))), int(self._moves(owner))

    def accept(self, action: Action, route: int, first: int, move_back: Callable[[Piece], None]) -> None:
        """Take activations of a peer in (HOLD), or those of a stage back (FETCH), once they have come."""
        lane, message, peer = self._lane(route), Message(route, first), action.peer
        piece = first, slice_number(action.unit.slice)
        assert lane is not None
        assert peer is not None

        def use() -> None:
            del self._posted[message]
            if action.op is Op.FETCH:
                move_back(piece)
            elif self._moves(peer):
                self._holdings.change(self._held(peer, piece), 1)

        lane.take(self._posted[message], use)

    def wait(self, message: Message) -> Iterator[Completion]:
        """Wait until moved activations have come, unless they have been taken."""
        lane = self._lane(message.route)
        if lane is not None and message in self._posted:
            yield from wait(self._posted[message])
            lane.settle()

    def give_back(self, peer: Stage, k: Piece) -> None:
        """Give the activations of a peer back to it (RETURN)."""
        if self._moves(peer):
            self._holdings.change(self._held(peer, k), -1)

    def _held(self, owner: Stage, k: Piece) -> Held:
        """Return what has been moved of a graph of a stage."""
        halved = self._halved.get(owner)
        if halved is None:
            halved = self._halved[owner] = halved_pieces(self._lowered.schedule, owner)
        late = (k[0] % self._lowered.schedule.microbatches, k[1]) in halved
        return Held(HeldKind.MOVED_HALVED if late else HeldKind.MOVED, owner.index, slice=k[1])

    def _lane(self, route: int) -> _Lane | None:
        """Return the lane of a route of moved activations; None of others."""
        there = self._lowered.routes[route]
        if there.payload is not Payload.PARKED:
            return None
        return self._lanes.setdefault(there.lane, _Lane(self._lowered.window))

    def _moves(self, stage: Stage) -> bool:
        """Return whether a stage keeps graphs from forward to backward, of which something can be moved."""
        return not (is_blockwise(self._blockwise, stage.index) or stage.index in self._lowered.schedule.recomputed)


def gradients_to(schedule: Schedule, stage: Stage) -> list[Stage]:
    """Return the stages to which a stage sends gradients."""
    return [
        schedule.stage_at[edge.source, stage.direction]
        for edge in schedule.predecessors[stage.index]
        if edge.backward and not {edge.source, stage.index} & schedule.frozen
    ]


def halved_pieces(schedule: Schedule, stage: Stage) -> frozenset[Piece]:
    """Return the microbatches of a batch (and slices) of which the backward of a stage comes in two halves."""
    return halved_units(schedule, stage, bool(gradients_to(schedule, stage)))


def _moves_to_peers(schedule: Schedule) -> frozenset[tuple[Stage, Stage]]:
    """Return the stages that have others keep activations for them, each with the other one.

    Raises:
        CapabilityError: two stages keep activations for each other, so their messages cannot be told apart.
    """
    if Op.OFFLOAD not in schedule.operations:  # which is known, and asked for each rank
        return frozenset()
    actions = (action for program in schedule.programs for action in program.period)
    found = frozenset((a.stage, a.peer) for a in actions if a.op is Op.OFFLOAD and a.peer is not None)
    if any((peer, stage) in found for stage, peer in found):
        raise CapabilityError(
            f"{schedule.name}: memory is not predicted where two stages keep activations for each other"
        )
    return found
