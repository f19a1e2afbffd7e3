"""Activations that ranks keep for each other, without tensors: when they are taken from their lane, and whose they are.

It follows `penstock.comm.p2p.parked_activations_inbox`: HOLD and FETCH take what has come at the first look after it
has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Op, Schedule, Stage
from penstock.simulate.memory.message_completion import Completion, wait


class MovedActivationsLane:
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


def moves_to_peers(schedule: Schedule) -> frozenset[tuple[Stage, Stage]]:
    """Return the stages that have others keep activations for them, each with the other one.

    Raises:
        CapabilityError: two stages keep activations for each other, so their messages cannot be told apart.
    """
    actions = (action for program in schedule.programs for action in program.period)
    found = frozenset((a.stage, a.peer) for a in actions if a.op is Op.OFFLOAD and a.peer is not None)
    if any((peer, stage) in found for stage, peer in found):
        raise CapabilityError(
            f"{schedule.name}: memory is not predicted where two stages keep activations for each other"
        )
    return found
