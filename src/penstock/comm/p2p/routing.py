"""Where stages meet: whom a stage has its inputs from, and who takes what it makes.

A stage has one input, or a tuple of those of several stages, in the order of their stages. Its output goes to every
stage that takes it; the gradients that come back are added in the order of the stages. Stages of one rank hand things
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
from penstock.schedule.ir.schedule import Op, Payload, Schedule, Stage, passes
from penstock.schedule.proof.in_flight import Piece

Gradients = list[Tensor | None]


class Ways(NamedTuple):
    """Of one stage; all stages are of its pipeline.

    Attributes:
        inputs: whose outputs are its input, in the order of their stages; none where data enters.
        returns: per input, whether a gradient goes back there.
        outputs: who takes its output.
        gradients: of those, who sends a gradient back.
        has_loss: nobody sends one back, so it has a loss of its own.
    """

    inputs: tuple[Stage, ...]
    returns: tuple[bool, ...]
    outputs: tuple[Stage, ...]
    gradients: tuple[Stage, ...]
    has_loss: bool


def ways_of(schedule: Schedule, stage: Stage) -> Ways:
    """Those of a stage."""
    incoming = sorted(schedule.predecessors[stage.index], key=lambda edge: edge.source)
    outgoing = sorted(schedule.successors[stage.index], key=lambda edge: edge.target)
    at, pipeline, frozen = schedule.stage_at, stage.direction, schedule.frozen
    gradients = tuple(at[e.target, pipeline] for e in outgoing if e.backward) if stage.index not in frozen else ()
    return Ways(
        tuple(at[e.source, pipeline] for e in incoming),
        tuple(e.backward and e.source not in frozen and stage.index not in frozen for e in incoming),
        tuple(at[e.target, pipeline] for e in outgoing),
        gradients,
        not gradients and (stage.index not in frozen or not outgoing),
    )


def entrances(schedule: Schedule) -> list[int]:
    """The stages where data enters."""
    return [index for index in range(schedule.num_stages) if not schedule.predecessors[index]]


def needs_decisions(schedule: Schedule) -> bool:
    """Whether the loss weight of a batch, or the wish to stop, does not reach every stage along the pipeline."""
    reached, border = {schedule.num_stages - 1}, [schedule.num_stages - 1]
    while border:
        index = border.pop()
        for edge in schedule.predecessors[index]:
            if edge.backward and edge.source not in reached:
                reached.add(edge.source)
                border.append(edge.source)
    trained = set(range(schedule.num_stages)) - schedule.frozen
    return schedule.directions > 1 or len(entrances(schedule)) > 1 or not trained <= reached


def reads_of(schedule: Schedule, ranks: Collection[int]) -> list[int]:
    """How often the stages of some ranks take each microbatch of a batch: where data enters, and where a loss is."""
    reads = [0] * schedule.microbatches
    taking = {stage for stage in schedule.stages if not (ways := ways_of(schedule, stage)).inputs or ways.has_loss}
    for rank in ranks:
        for action in schedule.programs[rank].period:
            for p in passes(action):
                if p.op is Op.F and p.stage in taking:
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
        self._ways = {stage: ways_of(schedule, stage) for stage in schedule.stages}
        before = {stage: schedule.segment_before(stage.index) for stage in schedule.stages}
        self._again = {  # from whom a stage has its input again, where it does not keep it
            stage: schedule.stage_at[index, stage.direction] for stage, index in before.items() if index is not None
        }
        self._again_to = {source: stage for stage, source in self._again.items()}
        self._sizes: dict[tuple[Stage, Piece], list[int]] = {}  # leaves of each of several inputs, for the gradients

    def enters(self, stage: Stage) -> bool:
        """Whether data enters at a stage."""
        return not self._ways[stage].inputs

    def own_input(self, stage: Stage, given: Any) -> Any:
        """What of a sample's input enters at a stage: all of it, or its part where data enters at several stages.

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
        return given[self._entrances.index(stage.index)]

    def inputs(self, stage: Stage, key: Piece) -> tuple[Header, Any, tuple[bool, ...]]:
        """What a forward works on, which of its leaves want a gradient, and what came with it."""
        ways = self._ways[stage]
        parcels = [self._newest(source, stage, key) for source in ways.inputs]
        wants = [
            parcel.wants_gradient if returns else (False,) * len(parcel.wants_gradient)
            for parcel, returns in zip(parcels, ways.returns, strict=True)
        ]
        if len(parcels) == 1:
            return parcels[0].header, parcels[0].tree, wants[0]
        self._compare(stage, [parcel.header for parcel in parcels])
        if self._trains and any(ways.returns):
            self._sizes[stage, key] = [len(here) for here in wants]
        return parcels[0].header, tuple(parcel.tree for parcel in parcels), tuple(w for here in wants for w in here)

    def _newest(self, source: Stage, stage: Stage, key: Piece) -> Parcel:
        """What a stage has made; where it has done so twice, because a version was rejected, the second."""
        parcel = self._mailbox.take(Payload.ACTIVATION, source, stage, key)
        return self._repair(source, stage, key) or parcel

    def _repair(self, source: Stage, stage: Stage, key: Piece) -> Parcel | None:
        if not self._mailbox.has(Payload.REPAIR, source, stage, key):
            return None
        return self._mailbox.take(Payload.REPAIR, source, stage, key)

    def repaired(self, stage: Stage, key: Piece, value: Any) -> Any:
        """What a forward has worked on, with what has been made again since."""
        sources = self._ways[stage].inputs
        repairs = [self._repair(source, stage, key) for source in sources]
        if len(sources) == 1:
            return value if repairs[0] is None else repairs[0].tree
        return (
            tuple(old if new is None else new.tree for old, new in zip(value, repairs, strict=True))
            if sources
            else value
        )

    def _compare(self, stage: Stage, headers: Sequence[Header]) -> None:
        """What comes from several entrances must come of the same sample.

        Raises:
            DataError: it does not.
        """
        first = headers[0]
        for header, source in zip(headers, self._ways[stage].inputs, strict=True):
            if (header.checksum, header.more) != (first.checksum, first.more):
                what = (
                    "is not the same sample" if header.checksum != first.checksum else "is the last on one of them only"
                )
                raise DataError(
                    f"microbatch {first.first} (batch {first.batch}), as it comes to stage {stage.name} from stages "
                    f"{self._ways[stage].inputs[0].name} and {source.name}, {what}; every rank must see the same "
                    "samples in the same order, and equally many"
                )

    def hand_on(self, stage: Stage, header: Header, output: Any, payload: Payload) -> None:
        """Lay ready what a forward has made, for the first time or (REPAIR) again."""
        tree, asks = detached(output)
        for target in self._ways[stage].outputs:
            self._mailbox.put(payload, stage, target, Parcel(header, tree, asks))

    def input_again(self, stage: Stage, key: Piece) -> Any:
        """What a forward is run again on, where the stage has not kept it."""
        source = self._again.get(stage)
        return None if source is None else self._mailbox.take(Payload.RECOMPUTE, source, stage, key).tree

    def hand_on_again(self, stage: Stage, header: Header, output: Any) -> None:
        """Lay ready what a forward has made again, for the next stage of its segment."""
        target = self._again_to.get(stage)
        if target is not None:
            self._mailbox.put(Payload.RECOMPUTE, stage, target, Parcel(header, *detached(output)))

    def gradients(self, stage: Stage, key: Piece) -> tuple[float, Gradients | None]:
        """The loss weight of the batch, as far as it came along, and the gradients of a forward's output.

        None where the loss is.
        """
        ways = self._ways[stage]
        if not ways.gradients:
            return math.nan, None
        parcels = [self._mailbox.take(Payload.GRADIENT, source, stage, key) for source in ways.gradients]
        total: Gradients = parcels[0].tree
        for parcel in parcels[1:]:
            total = [_sum(mine, other) for mine, other in zip(total, parcel.tree, strict=True)]
        return next((p.header.weight for p in parcels if not math.isnan(p.header.weight)), math.nan), total

    def hand_back(self, stage: Stage, header: Header, gradients: Gradients) -> None:
        """Lay ready the gradients of a forward's input."""
        ways, place = self._ways[stage], 0
        sizes = self._sizes.pop((stage, (header.first, header.piece)), [len(gradients)])
        for source, returns, size in zip(ways.inputs, ways.returns, sizes, strict=False):
            if returns:
                parcel = Parcel(header, gradients[place : place + size])
                self._mailbox.put(Payload.GRADIENT, stage, source, parcel)
            place += size


def _sum(mine: Tensor | None, other: Tensor | None) -> Tensor | None:
    if mine is None or other is None:
        return mine if other is None else other
    return mine + other
