"""The passes of one stage on tensors, under the schedule that it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.comm.core.tensor_group import explain_lost_peer
from penstock.comm.p2p.tensor_message import Header
from penstock.comm.p2p.trees import detached
from penstock.errors import CapabilityError
from penstock.partition.sequence_slices import NOTHING, Carry, with_carry
from penstock.schedule.ir.schedule import Copy
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.autograd.forward_graph import Graph
from penstock.stage.autograd.recompute import RecomputeInput
from penstock.stage.autograd.saved_bytes import storage_bytes
from penstock.stage.autograd_graphs import StageGraphs
from penstock.stage.blocks.loss import AUXILIARY, UnreadLoss
from penstock.stage.blocks.module import StageModule
from penstock.stage.checks.forward_writes import explain_backward
from penstock.stage.in_flight_microbatch import InFlightMicrobatch, Microbatch
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.stage.weight_reads import WeightReads
from penstock.weights.memory.buffers import Handle

Passed = tuple[Any, UnreadLoss | None, float | None]
"""The output of a forward, its loss, and the value of the auxiliary losses of the stage; None where there are none."""
_NO_LEAVES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(repr=False)
class StagePasses:
    """Runs the passes of one stage, and keeps its microbatches from their forwards to their backwards.

    Attributes:
        module: its blocks.
        weights: their versions and gradients.
        reading: how its passes find their weights.
        graphs: of its forwards.
        flights: microbatches (or slices of them) between forward and backward, by their number in the span.
        carry: what the last slice of a microbatch hands on to the next one.
        carry_gradients: the gradients that come back for it.
        averaged: what evaluations read instead of the newest weights, while they do.
        evaluated: the version that they read instead.
        predicted: what they return on the last stage, by batch, while that is kept and no loss is computed; else None.
    """

    module: StageModule
    weights: StageWeights
    reading: WeightReads
    graphs: StageGraphs
    flights: dict[Piece, InFlightMicrobatch] = field(default_factory=dict)
    carry: dict[int, Carry] = field(default_factory=dict)
    carry_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] | None = None
    evaluated: int | None = None
    predicted: dict[int, list[Any]] | None = None

    def forward(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], version: int, copy: Copy | None = None
    ) -> Passed:
        """Run the blocks on a microbatch and keep what its backward needs.

        Args:
            microbatch: which.
            value: the input tree, cut off from other graphs.
            wants: which of its leaves want a gradient; none for the model's own input.
            version: the weights to read.
            copy: made of them, to be read instead.

        Returns:
            The output (still in its graph), or None and the loss on the last stage; and auxiliary losses.
        """
        handle, carried = self.reading.forward(version, copy), NOTHING
        self._bind(handle)
        if microbatch.piece:
            carried = self.carry.pop(microbatch.k, NOTHING)
            value, wants = with_carry(value, wants, carried)
        with self.module.rng.preserved():
            work, result = self.graphs.forward(microbatch, value, wants, handle)
        flight = self.flights[microbatch.key] = InFlightMicrobatch(microbatch, version, handle, work, len(carried[1]))
        if not microbatch.piece:
            return result.output, result.loss, result.auxiliary
        output, made = result.output
        carry = detached(made)
        flight.carries = len(carry[1])
        if microbatch.piece[0] + 1 < microbatch.piece[1]:
            self.carry[microbatch.k] = carry
        return output, result.loss, result.auxiliary

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, value: Any) -> Passed:
        """Run the blocks in evaluation mode on the weights chosen for evaluation, and keep nothing."""
        if self.averaged is None:
            self._bind(self.weights.handle(self.evaluated))
        elif self.module.tensors.bound is not self.averaged:
            self.module.tensors.bind(self.averaged)
        with self.module.evaluating(), self.module.rng.preserved():
            if self.predicted is None or not self.module.has_loss:
                return self.graphs.evaluate(microbatch, value)
            return self.module.run([*self.module.blocks], value, microbatch.rng_key), None, None

    @torch.no_grad()
    def pass_on(self, microbatch: Microbatch, value: Any) -> Passed:
        """Run the blocks of a stage that is not trained, and keep nothing."""
        self._bind(None)
        with self.module.rng.preserved():
            return self.graphs.evaluate(microbatch, value)

    def beside_loss(
        self, key: Piece, header: Header, loss: UnreadLoss | None, added: float | None
    ) -> tuple[Header, UnreadLoss | None]:
        """Add the auxiliary losses of a forward to those of earlier stages, and set them beside the loss.

        Args:
            key: of its microbatch.
            header: that came with its input.
            loss: of the microbatch, on a stage that has one; their gradients are weighted as it is.
            added: by this stage.
        """
        if added is not None:
            header = header._replace(auxiliary=added + (0.0 if math.isnan(header.auxiliary) else header.auxiliary))
        if loss is None or math.isnan(header.auxiliary):
            return header, loss
        flight = self.flights.get(key)
        if flight is not None:
            flight.auxiliary = flight.microbatch.scale * float(loss.weight) / self.graphs.divisor
        return header, loss._replace(numbers={**loss.numbers, AUXILIARY: header.auxiliary * loss.weight})

    def recompute(self, key: Piece, version: int, value: Any = None) -> Any:
        """Recompute the graph of a microbatch.

        Args:
            key: the microbatch, and its slice.
            version: that the schedule names.
            value: the input, where it was not kept.

        Returns:
            The output (still in its graph).
        """
        flight = self.flights[key]
        (kept,) = flight.work
        assert isinstance(kept, RecomputeInput)
        handle = self.reading.recompute(flight, version)
        self._bind(handle)
        with self.module.rng.preserved():
            result = self.graphs.recompute(kept, flight.microbatch, handle, value)
        flight.handle, flight.work = handle, [result.graph]
        return result.output

    def backward(
        self, key: Piece, batch: int, version: int, gradients: list[Tensor | None] | None, copy: Copy | None = None
    ) -> list[Tensor | None]:
        """Run the backward of a microbatch; weight gradients are added to the gradient of `batch`.

        Args:
            key: the microbatch, counted through the span, and its slice.
            batch: its batch, counted from the start of training.
            version: of the weights to read.
            gradients: of the output's leaves; None on the last stage.
            copy: made of the version, to be read instead.

        Returns:
            The gradients of the input's leaves, None where none is wanted.
        """
        flight = self.flights[key]
        handle = self.reading.backward(flight, batch, version, copy)
        self._bind(handle)
        self.graphs.backward_reads(handle)
        found = self._inputs_backward(flight, key, gradients)
        self._weights_backward(flight, key)
        return found

    def backward_for_inputs(
        self, key: Piece, batch: int, version: int, gradients: list[Tensor | None] | None, copy: Copy | None = None
    ) -> list[Tensor | None]:
        """Run the backward for the inputs; all of it where graphs are not made for two halves."""
        flight = self.flights[key]
        handle = self.reading.backward(flight, batch, version, copy)
        self._bind(handle)
        self.graphs.backward_reads(handle)
        return self._inputs_backward(flight, key, gradients)

    def backward_for_weights(self, key: Piece, batch: int, version: int, copy: Copy | None = None) -> None:
        """Run the backward for the weights, which needs nothing from other stages."""
        flight = self.flights[key]
        self._bind(self.reading.backward(flight, batch, version, copy))
        self._weights_backward(flight, key)

    def discard_forwards(self, version: int) -> None:
        """Drop the forwards that have read a version, which was rejected."""
        drafts = [key for key, flight in self.flights.items() if flight.version == version]
        self.graphs.discard_drafts(piece for key in drafts for piece in self.flights.pop(key).work)

    def _inputs_backward(
        self, flight: InFlightMicrobatch, key: Piece, gradients: list[Tensor | None] | None
    ) -> list[Tensor | None]:
        returned = self.carry_gradients.pop(key[0], [None] * flight.carries)
        work, flight.work = list(flight.work), ()
        while work:
            graph = work.pop()
            if isinstance(graph, RecomputeInput):
                with self.module.rng.preserved():
                    graph = self.graphs.recompute(graph, flight.microbatch, flight.handle).graph
            if graph.offload is not None:
                graph.offload.settle()
            with self.reading.backward_context(flight):
                given = [*([graph.seed] if gradients is None else gradients), *returned]
                gradients = self._run(graph, [*given, *self._of_auxiliary(graph, flight)] if graph.auxiliary else given)
            returned = []
            if graph.deferred is not None:
                flight.deferred.append(graph.deferred)
                flight.deferred_nbytes += graph.deferred_nbytes
            self.graphs.hold(-graph.nbytes)
        assert gradients is not None
        if flight.deferred:
            flight.deferred_nbytes += storage_bytes([g for late in flight.deferred for g in late.gradients], ())
            self.graphs.hold(flight.deferred_nbytes)
        if key[1]:
            self.carry_gradients[key[0]] = gradients[len(gradients) - flight.carried :]
        return gradients[: len(gradients) - flight.carried]

    def _of_auxiliary(self, graph: Graph, flight: InFlightMicrobatch) -> list[Tensor | None]:
        """Return the gradients of the auxiliary losses in a graph."""
        if math.isnan(flight.auxiliary):
            raise CapabilityError(
                f"{self.module.where}: a block calls auxiliary(), but how much its microbatch weighs in the loss is "
                "unknown, as no gradient comes here from the stage of the loss"
            )
        return [torch.full_like(like, factor * flight.auxiliary) for like, factor in graph.auxiliary]

    def _run(self, graph: Graph, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        try:
            return graph.backward(gradients)
        except RuntimeError as error:
            if self.module.division.splits:
                explain_lost_peer(error, self.module.where)
            explain_backward(error, self.module.where)
            raise

    def _weights_backward(self, flight: InFlightMicrobatch, key: Piece) -> None:
        try:
            for late in flight.deferred:
                late.run(flight.weights.buffer.leaves, flight.weights.buffer.accumulate)
        except RuntimeError as error:
            explain_backward(error, self.module.where)
            raise
        self.graphs.hold(-flight.deferred_nbytes)
        del self.flights[key]
        self.reading.after_backward(flight)

    def _bind(self, handle: Handle | None) -> None:
        """Bind the weights of a handle to the modules."""
        leaves, tensors = _NO_LEAVES if handle is None else handle.buffer.leaves, self.module.tensors
        if tensors.bound is not leaves:
            tensors.bind(leaves)
