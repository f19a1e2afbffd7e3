"""Where stages meet: whom a stage has its inputs from, and who takes what it makes.

A stage has one input, or a tuple of those of several stages, in the order of their cuts. Its output goes to every
stage that takes it; the gradients that come back are added in the order of the cuts. Stages of one rank hand things
over in its memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.message import Header, Parcel, detached
from penstock.errors import DataError
from penstock.schedule.ir.schedule import Node, Op, Payload, Schedule, passes
from penstock.schedule.proof.in_flight import Piece

Gradients = list[Tensor | None]


class Ways(NamedTuple):
    """Of one node; all nodes are of its replica.

    Attributes:
        inputs: whose outputs are its input, in the order of their cuts; none where data enters.
        returns: per input, whether a gradient goes back there.
        outputs: who takes its output.
        gradients: of those, who sends a gradient back.
        has_loss: nobody sends one back, so it has a loss of its own.
    """

    inputs: tuple[Node, ...]
    returns: tuple[bool, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node, ...]
    has_loss: bool


def ways_of(schedule: Schedule, node: Node) -> Ways:
    """Those of a node."""
    incoming = sorted(schedule.predecessors[node.cut], key=lambda edge: edge.source)
    outgoing = sorted(schedule.successors[node.cut], key=lambda edge: edge.target)
    at, replica, frozen = schedule.node_at, node.replica, schedule.frozen
    gradients = tuple(at[e.target, replica] for e in outgoing if e.backward) if node.cut not in frozen else ()
    return Ways(
        tuple(at[e.source, replica] for e in incoming),
        tuple(e.backward and e.source not in frozen and node.cut not in frozen for e in incoming),
        tuple(at[e.target, replica] for e in outgoing),
        gradients,
        not gradients and (node.cut not in frozen or not outgoing),
    )


def entrances(schedule: Schedule) -> list[int]:
    """The cuts where data enters."""
    return [cut for cut in range(schedule.cuts) if not schedule.predecessors[cut]]


def needs_decisions(schedule: Schedule) -> bool:
    """Whether the loss weight of a batch, or the wish to stop, does not reach every stage along the pipeline."""
    reached, border = {schedule.cuts - 1}, [schedule.cuts - 1]
    while border:
        cut = border.pop()
        for edge in schedule.predecessors[cut]:
            if edge.backward and edge.source not in reached:
                reached.add(edge.source)
                border.append(edge.source)
    trained = set(range(schedule.cuts)) - schedule.frozen
    return schedule.replicas > 1 or len(entrances(schedule)) > 1 or not trained <= reached


def reads_of(schedule: Schedule, ranks: Collection[int]) -> list[int]:
    """How often the stages of some ranks take each microbatch of a batch: where data enters, and where a loss is."""
    reads = [0] * schedule.microbatches
    taking = {node for node in schedule.nodes if not (ways := ways_of(schedule, node)).inputs or ways.has_loss}
    for rank in ranks:
        for action in schedule.programs[rank].period:
            for p in passes(action):
                if p.op is Op.F and p.node in taking:
                    for k in p.unit.microbatches:
                        reads[k % schedule.microbatches] += 1
    return reads


class Joints:
    """Of one rank, for one span.

    Args:
        schedule: says who is joined to whom.
        mailbox: of the rank.
    """

    def __init__(self, schedule: Schedule, mailbox: Mailbox) -> None:
        self._mailbox, self._entrances = mailbox, entrances(schedule)
        self._trains = any(
            p.op in (Op.B, Op.I) for program in schedule.programs for a in program.period for p in passes(a)
        )
        self._ways = {node: ways_of(schedule, node) for node in schedule.nodes}
        before = {node: schedule.segment_before(node.cut) for node in schedule.nodes}
        self._again = {  # from whom a stage has its input again, where it does not keep it
            node: schedule.node_at[cut, node.replica] for node, cut in before.items() if cut is not None
        }
        self._again_to = {source: node for node, source in self._again.items()}
        self._sizes: dict[tuple[Node, Piece], list[int]] = {}  # leaves of each of several inputs, for the gradients

    def enters(self, node: Node) -> bool:
        """Whether data enters at a node."""
        return not self._ways[node].inputs

    def own_input(self, node: Node, given: Any) -> Any:
        """What of a sample's input enters at a node: all of it, or its part where data enters at several cuts.

        Raises:
            DataError: there are not as many parts as entrances.
        """
        if len(self._entrances) == 1:
            return given
        if not isinstance(given, tuple | list) or len(given) != len(self._entrances):
            what = f"{len(given)} parts" if isinstance(given, tuple | list) else type(given).__name__
            raise DataError(
                f"data enters at stages {', '.join(map(str, self._entrances))}, so the input of a microbatch must be a "
                f"tuple with a part for each of them, got {what}"
            )
        return given[self._entrances.index(node.cut)]

    def inputs(self, node: Node, key: Piece) -> tuple[Header, Any, tuple[bool, ...]]:
        """What a forward works on, which of its leaves want a gradient, and what came with it."""
        ways = self._ways[node]
        parcels = [self._newest(source, node, key) for source in ways.inputs]
        wants = [
            parcel.wants_gradient if returns else (False,) * len(parcel.wants_gradient)
            for parcel, returns in zip(parcels, ways.returns, strict=True)
        ]
        if len(parcels) == 1:
            return parcels[0].header, parcels[0].tree, wants[0]
        self._compare(node, [parcel.header for parcel in parcels])
        if self._trains and any(ways.returns):
            self._sizes[node, key] = [len(here) for here in wants]
        return parcels[0].header, tuple(parcel.tree for parcel in parcels), tuple(w for here in wants for w in here)

    def _newest(self, source: Node, node: Node, key: Piece) -> Parcel:
        """What a stage has made; where it has done so twice, because a version was rejected, the second."""
        parcel = self._mailbox.take(Payload.ACTIVATION, source, node, key)
        return self._repair(source, node, key) or parcel

    def _repair(self, source: Node, node: Node, key: Piece) -> Parcel | None:
        if not self._mailbox.has(Payload.REPAIR, source, node, key):
            return None
        return self._mailbox.take(Payload.REPAIR, source, node, key)

    def repaired(self, node: Node, key: Piece, value: Any) -> Any:
        """What a forward has worked on, with what has been made again since."""
        sources = self._ways[node].inputs
        repairs = [self._repair(source, node, key) for source in sources]
        if len(sources) == 1:
            return value if repairs[0] is None else repairs[0].tree
        return (
            tuple(old if new is None else new.tree for old, new in zip(value, repairs, strict=True))
            if sources
            else value
        )

    def _compare(self, node: Node, headers: Sequence[Header]) -> None:
        """What comes from several entrances must come of the same sample.

        Raises:
            DataError: it does not.
        """
        first = headers[0]
        for header, source in zip(headers, self._ways[node].inputs, strict=True):
            if (header.checksum, header.more) != (first.checksum, first.more):
                what = (
                    "is not the same sample" if header.checksum != first.checksum else "is the last on one of them only"
                )
                raise DataError(
                    f"microbatch {first.first} (batch {first.batch}), as it comes to stage {node.name} from stages "
                    f"{self._ways[node].inputs[0].name} and {source.name}, {what}; every rank must see the same "
                    "samples in the same order, and equally many"
                )

    def hand_on(self, node: Node, header: Header, output: Any, payload: Payload) -> None:
        """Lay ready what a forward has made, for the first time or (REPAIR) again."""
        tree, asks = detached(output)
        for target in self._ways[node].outputs:
            self._mailbox.put(payload, node, target, Parcel(header, tree, asks))

    def input_again(self, node: Node, key: Piece) -> Any:
        """What a forward is run again on, where the stage has not kept it."""
        source = self._again.get(node)
        return None if source is None else self._mailbox.take(Payload.RECOMPUTE, source, node, key).tree

    def hand_on_again(self, node: Node, header: Header, output: Any) -> None:
        """Lay ready what a forward has made again, for the next stage of its segment."""
        target = self._again_to.get(node)
        if target is not None:
            self._mailbox.put(Payload.RECOMPUTE, node, target, Parcel(header, *detached(output)))

    def gradients(self, node: Node, key: Piece) -> tuple[float, Gradients | None]:
        """The loss weight of the batch, as far as it came along, and the gradients of a forward's output.

        None where the loss is.
        """
        ways = self._ways[node]
        if not ways.gradients:
            return math.nan, None
        parcels = [self._mailbox.take(Payload.GRADIENT, source, node, key) for source in ways.gradients]
        total: Gradients = parcels[0].tree
        for parcel in parcels[1:]:
            total = [_sum(mine, other) for mine, other in zip(total, parcel.tree, strict=True)]
        return next((p.header.weight for p in parcels if not math.isnan(p.header.weight)), math.nan), total

    def hand_back(self, node: Node, header: Header, gradients: Gradients) -> None:
        """Lay ready the gradients of a forward's input."""
        ways, place = self._ways[node], 0
        sizes = self._sizes.pop((node, (header.first, header.piece)), [len(gradients)])
        for source, returns, size in zip(ways.inputs, ways.returns, sizes, strict=False):
            if returns:
                parcel = Parcel(header, gradients[place : place + size])
                self._mailbox.put(Payload.GRADIENT, node, source, parcel)
            place += size


def _sum(mine: Tensor | None, other: Tensor | None) -> Tensor | None:
    if mine is None or other is None:
        return mine if other is None else other
    return mine + other
