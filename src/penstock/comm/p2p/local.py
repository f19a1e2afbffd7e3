"""All ranks in one process: messages are handed over in memory.

What is handed over is a copy, as it would be between processes: a stage that writes into its input does not touch what
the stage before it saved for its backward.
"""

from __future__ import annotations

from collections import defaultdict, deque

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.message import Structure, TensorMessage, copied, dump_structure, form_of, structure_of
from penstock.schedule.machine.instructions import LaneKey


class LocalTransport:
    """Lanes between ranks of one process; one object serves them all."""

    def __init__(self) -> None:
        self._sends: defaultdict[LaneKey, deque[tuple[Ticket, TensorMessage]]] = defaultdict(deque)
        self._receives: defaultdict[LaneKey, deque[Ticket]] = defaultdict(deque)
        self._structures: dict[LaneKey, Structure] = {}
        self._forms: dict[LaneKey, tuple[object, ...] | None] = {}

    def receive(self, lane: LaneKey) -> Ticket:
        """Post a RECV; it completes at once if the message is there."""
        ticket = Ticket(lane)
        self._receives[lane].append(ticket)
        self._match(lane)
        return ticket

    def send(self, lane: LaneKey, message: TensorMessage) -> Ticket:
        """Post a SEND; it completes when the RECV has been posted."""
        ticket, form = Ticket(lane), form_of(message)
        if form is None or form != self._forms.get(lane):
            self._check(lane, message)
            self._forms[lane] = form
        self._sends[lane].append((ticket, TensorMessage(message.header, _copied(message.tree), message.wants_gradient)))
        self._match(lane)
        return ticket

    def _check(self, lane: LaneKey, message: TensorMessage) -> None:
        """Refuse a message that could not travel between processes."""
        structure = structure_of(message, str(lane))
        if structure != self._structures.get(lane):
            dump_structure(structure, str(lane))
            self._structures[lane] = structure

    def close(self) -> None:
        """Forget what is under way."""
        self._sends.clear()
        self._receives.clear()

    def _match(self, lane: LaneKey) -> None:
        sends, receives = self._sends[lane], self._receives[lane]
        while sends and receives:
            sent, message = sends.popleft()
            sent.complete()
            receives.popleft().complete(message)


def _copied(tree: object) -> object:
    if isinstance(tree, Tensor):
        return copied(tree)
    if type(tree) is list and all(leaf is None or isinstance(leaf, Tensor) for leaf in tree):
        return [None if leaf is None else copied(leaf) for leaf in tree]
    return pytree.tree_map(lambda x: copied(x) if isinstance(x, Tensor) else x, tree)
