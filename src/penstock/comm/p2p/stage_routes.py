"""Routing between stages: which stages feed a stage, and which consume its output.

The input of a stage is the output of one stage, or a tuple of the outputs of several, in the order of their indices.
The output of a stage goes to every stage that consumes it; the gradients that come back are added in the order of these
stages. Stages of the same rank pass data in memory, through the mailbox.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comm.p2p.codec import check_dense, dump_structure, structure_of
from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.comm.p2p.trees import detached
from penstock.errors import CapabilityError, DataError
from penstock.schedule.ir.schedule import Op, Payload, Schedule, Stage, passes
from penstock.schedule.stage_state.microbatch_state import Piece

Gradients = list[Tensor | None]


class Neighbors(NamedTuple):
    """The stages that one stage exchanges data with, all of its own direction.

    Attributes:
        inputs: stages whose outputs are its input, by index; none where data enters the pipeline.
        returns: per input, whether this stage sends a gradient back.
        outputs: stages that consume its output.
        gradients: those of the outputs that send a gradient back.
        has_loss: the stage computes a loss, as no stage sends it a gradient.
    """

    inputs: tuple[Stage, ...]
    returns: tuple[bool, ...]
    outputs: tuple[Stage, ...]
    gradients: tuple[Stage, ...]
    has_loss: bool


def neighbors_of(schedule: Schedule, stage: Stage) -> Neighbors:
    """Return the neighbors of a stage."""
    incoming = sorted(schedule.predecessors[stage.index], key=lambda edge: edge.source)
    outgoing = sorted(schedule.successors[stage.index], key=lambda edge: edge.target)
    at, direction, frozen = schedule.stage_at, stage.direction, schedule.frozen
    gradients = tuple(at[e.target, direction] for e in outgoing if e.backward) if stage.index not in frozen else ()
    return Neighbors(
        tuple(at[e.source, direction] for e in incoming),
        tuple(e.backward and e.source not in frozen and stage.index not in frozen for e in incoming),
        tuple(at[e.target, direction] for e in outgoing),
        gradients,
        not gradients and (stage.index not in frozen or not outgoing),
    )


def entrances(schedule: Schedule) -> list[int]:
    """Return the indices of the stages where data enters."""
    return [index for index in range(schedule.num_stages) if not schedule.predecessors[index]]


def needs_decisions(schedule: Schedule) -> bool:
    """Return whether a batch's loss weight, or a stop request, cannot reach every stage along the pipeline."""
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
    """Count, per microbatch of a batch, how often stages of the given ranks read it: for data, and for a loss."""
    reads = [0] * schedule.microbatches
    taking = {
        stage
        for stage in schedule.stages
        if not (neighbors := neighbors_of(schedule, stage)).inputs or neighbors.has_loss
    }
    for rank in ranks:
        for action in schedule.program(rank).period:
            for p in passes(action):
                if p.op is Op.F and p.stage in taking:
                    for k in p.unit.microbatches:
                        reads[k % schedule.microbatches] += 1
    return reads


class StageRoutes:
    """The buffers of one stage: where its inputs and gradients lie, and where it lays its outputs.

    Args:
        schedule: says which stages feed which.
        stage: of the rank.
        mailbox: of the rank.
        rounded: the type that float32 gradients are rounded to on their way; None where they stay as they are.

    Attributes:
        enters: data enters at this stage.
    """

    def __init__(self, schedule: Schedule, stage: Stage, mailbox: Mailbox, rounded: torch.dtype | None = None) -> None:
        self._rounded = rounded
        neighbors = self._neighbors = neighbors_of(schedule, stage)
        self._stage, self._entrances = stage, entrances(schedule)
        self.enters = not neighbors.inputs
        self._inputs = [mailbox.buffer(Payload.ACTIVATION, source, stage) for source in neighbors.inputs]
        self._repairs = [mailbox.buffer(Payload.REPAIR, source, stage) for source in neighbors.inputs]
        self._outputs = [mailbox.buffer(Payload.ACTIVATION, stage, target) for target in neighbors.outputs]
        self._repaired = [mailbox.buffer(Payload.REPAIR, stage, target) for target in neighbors.outputs]
        self._gradients = [mailbox.buffer(Payload.GRADIENT, source, stage) for source in neighbors.gradients]
        self._returned = [
            mailbox.buffer(Payload.GRADIENT, stage, source) if returns else None
            for source, returns in zip(neighbors.inputs, neighbors.returns, strict=True)
        ]
        self._only = self._inputs[0] if neighbors.returns == (True,) else None  # the usual case
        before = schedule.segment_before(stage.index)
        after = {schedule.segment_before(index): index for index in range(schedule.num_stages)}.get(stage.index)
        at, direction = schedule.stage_at, stage.direction
        self._again = None if before is None else mailbox.buffer(Payload.RECOMPUTE, at[before, direction], stage)
        self._again_to = None if after is None else mailbox.buffer(Payload.RECOMPUTE, stage, at[after, direction])
        trains = not schedule.operations.isdisjoint((Op.B, Op.I))
        self._counts = trains and any(neighbors.returns) and len(neighbors.inputs) > 1
        self._sizes: dict[Piece, list[int]] = {}  # leaves of each of several inputs, for the gradients

    def own_input(self, given: Any) -> Any:
        """Return what of a sample's input enters here: all of it, or its part where data enters at several stages.

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
        return given[self._entrances.index(self._stage.index)]

    def inputs(self, key: Piece) -> tuple[Header, Any, tuple[bool, ...]]:
        """Take the input of a forward: its header, its tree, and which of its leaves want a gradient."""
        if self._only is not None and key not in self._repairs[0]:
            message = self._only.take(key)
            return message.header, message.tree, message.wants_gradient
        messages = [self._newest(place, key) for place in range(len(self._inputs))]
        wants = [
            message.wants_gradient if returned is not None else (False,) * len(message.wants_gradient)
            for message, returned in zip(messages, self._returned, strict=True)
        ]
        if len(messages) == 1:
            return messages[0].header, messages[0].tree, wants[0]
        without = next((message for message in messages if message.header.stop), None)
        if without is not None:
            return without.header, without.tree, ()
        self._compare([message.header for message in messages])
        if self._counts:
            self._sizes[key] = [len(here) for here in wants]
        return messages[0].header, tuple(message.tree for message in messages), tuple(w for here in wants for w in here)

    def _newest(self, place: int, key: Piece) -> TensorMessage:
        """Take an input; where its stage has made it twice, because a version was rejected, the second one."""
        message = self._inputs[place].take(key)
        return self._repair(place, key) or message

    def _repair(self, place: int, key: Piece) -> TensorMessage | None:
        return self._repairs[place].take(key) if key in self._repairs[place] else None

    def repaired(self, key: Piece, value: Any) -> Any:
        """Replace in an input what its stages have made again since."""
        repairs = [self._repair(place, key) for place in range(len(self._inputs))]
        if len(repairs) == 1:
            return value if repairs[0] is None else repairs[0].tree
        if not repairs:
            return value
        return tuple(old if new is None else new.tree for old, new in zip(value, repairs, strict=True))

    def _compare(self, headers: Sequence[Header]) -> None:
        """Check that the inputs from several entrances belong to the same sample.

        Raises:
            DataError: they do not.
            CapabilityError: stages ahead have added auxiliary losses.
        """
        first = headers[0]
        for header, source in zip(headers, self._neighbors.inputs, strict=True):
            if (header.checksum, header.more) != (first.checksum, first.more):
                what = (
                    "is not the same sample" if header.checksum != first.checksum else "is the last on one of them only"
                )
                raise DataError(
                    f"a microbatch, as it comes to stage {self._stage.name} from stages "
                    f"{self._neighbors.inputs[0].name} and {source.name}, {what}; every rank must see the same samples "
                    "in the same order, and equally many"
                )
        if not all(math.isnan(header.auxiliary) for header in headers):
            raise CapabilityError(
                f"stage {self._stage.name} joins what several stages return, and stages ahead add auxiliary losses, "
                "which may be the same on several ways; let the loss of the pipeline add them"
            )

    def put_output(self, header: Header, output: Any, *, repair: bool = False) -> None:
        """Lay the output of a forward ready for the stages that take it, or (`repair`) of a forward run again."""
        tree, wants = detached(output)
        for buffer in self._repaired if repair else self._outputs:
            buffer.put(TensorMessage(header, tree, wants))

    def check_output(self, output: Any) -> None:
        """Refuse an output that cannot travel, before it is laid ready.

        Raises:
            CapabilityError: it cannot.
        """
        if all(target.rank == self._stage.rank for target in self._neighbors.outputs):
            return
        where = f"stage {self._stage.name}"
        if isinstance(output, Tensor):
            check_dense(output, where)
        else:
            dump_structure(structure_of(TensorMessage(Header(0, 0, False), *detached(output)), where), where)

    def recomputed_input(self, key: Piece) -> Any:
        """Take the input of a recompute, where the stage has not kept it; else None."""
        return None if self._again is None else self._again.take(key).tree

    def put_recomputed(self, header: Header, output: Any) -> None:
        """Lay the output of a recompute ready for the next stage of the segment."""
        if self._again_to is not None:
            self._again_to.put(TensorMessage(header, *detached(output)))

    def gradients(self, key: Piece) -> tuple[float, int, float, Gradients | None]:
        """Take the loss weight of the batch, as far as it came along, and the gradients of a forward's output.

        Between them, when the run is to end for the ranks behind this one (`Header.stop`), and the gradient of an
        auxiliary loss. There are none where the loss is.
        """
        if not self._gradients:
            return math.nan, 0, math.nan, None
        if len(self._gradients) == 1:
            message = self._gradients[0].take(key)
            header = message.header
            return header.weight, header.stop, header.auxiliary, self._restored(message.tree)
        messages = [buffer.take(key) for buffer in self._gradients]
        total = self._restored(messages[0].tree)
        for message in messages[1:]:
            total = [_sum(mine, other) for mine, other in zip(total, self._restored(message.tree), strict=True)]
        headers = [message.header for message in messages]
        weight = next((header.weight for header in headers if not math.isnan(header.weight)), math.nan)
        auxiliary = next((header.auxiliary for header in headers if not math.isnan(header.auxiliary)), math.nan)
        return weight, min((h.stop for h in headers if h.stop), default=0), auxiliary, total

    def put_input_gradients(self, header: Header, gradients: Gradients) -> None:
        """Lay the gradients of a forward's input ready for the stages that it came from."""
        if self._rounded is not None:
            gradients = [_cast(gradient, torch.float32, self._rounded) for gradient in gradients]
        place = 0
        sizes = self._sizes.pop((header.first, header.piece), None) or [len(gradients)]
        for buffer, size in zip(self._returned, sizes, strict=False):
            if buffer is not None:
                buffer.put(TensorMessage(header, gradients[place : place + size]))
            place += size

    def _restored(self, gradients: Gradients) -> Gradients:
        """Gradients as they were before they were rounded; autograd takes those of other activations back to theirs."""
        if self._rounded is None:
            return gradients
        return [_cast(gradient, self._rounded, torch.float32) for gradient in gradients]


def _cast(tensor: Tensor | None, source: torch.dtype, target: torch.dtype) -> Tensor | None:
    """Cast a tensor of one type to another; others stay as they are."""
    return tensor.to(target) if tensor is not None and tensor.dtype == source else tensor


def _sum(mine: Tensor | None, other: Tensor | None) -> Tensor | None:
    if mine is None or other is None:
        return mine if other is None else other
    return mine + other
