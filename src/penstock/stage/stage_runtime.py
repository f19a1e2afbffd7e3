"""One stage of a rank: its passes and updates on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.comm.core.tensor_group import explain_lost_peer
from penstock.comm.message.trees import detached
from penstock.partition.sequence_slices import NOTHING, Carry, with_carry
from penstock.partition.tied import Tie
from penstock.schedule.ir.schedule import Copy, Stage
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.autograd.forward_graph import Graph
from penstock.stage.autograd.recompute import RecomputeInput
from penstock.stage.autograd.saved_bytes import storage_bytes
from penstock.stage.autograd_graphs import StageGraphs
from penstock.stage.blocks.loss import UnreadLoss
from penstock.stage.blocks.module import StageModule
from penstock.stage.blocks.precision_casts import cast
from penstock.stage.checks.forward_writes import explain_backward
from penstock.stage.checks.released_weight_placeholders import absent
from penstock.stage.in_flight_microbatch import InFlightMicrobatch, Microbatch
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.stage.weight_reads import WeightReads
from penstock.weights.decision import Decision
from penstock.weights.memory.buffers import Handle
from penstock.weights.sharded_store import allocated

NO_LEAVES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(repr=False)
class StageRuntime:
    """Runs the passes and updates of one stage.

    Attributes:
        module: its blocks.
        weights: their versions and gradients, and what updates them.
        reading: how its passes find their weights.
        graphs: of its forwards.
        ties: parameters that other stages share.
        place: of the stages that hold the same weights, in this pipeline and in parallel ones, the first (0), the
            second, and so on.
        flights: microbatches (or slices of them) between forward and backward, by their number in the span.
        carry: what the last slice of a microbatch hands on to the next one.
        carry_gradients: the gradients that come back for it.
        averaged: what evaluations read instead of the newest weights, while they do.
        evaluated: the version that they read instead.
        absent: what modules have while weights are not whole; None where they always are.
        frozen_sums: of its frozen parameters, when a snapshot was last taken (`penstock.stage.checks.tensor_sums`).
    """

    key: Stage
    module: StageModule
    weights: StageWeights
    reading: WeightReads
    graphs: StageGraphs
    ties: Sequence[Tie]
    place: int = 0
    flights: dict[Piece, InFlightMicrobatch] = field(default_factory=dict)
    carry: dict[int, Carry] = field(default_factory=dict)
    carry_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] | None = None
    evaluated: int | None = None
    absent: Mapping[str, Tensor] | None = None
    frozen_sums: Mapping[str, int] | None = None

    def __repr__(self) -> str:
        """Return where it is, and what it holds."""
        numbers = sum(parameter.numel() for parameter in self.module.trained.values())
        return f"<{self.module.where}: blocks {', '.join(self.module.blocks)}; {numbers} trained parameters>"

    @property
    def has_loss(self) -> bool:
        """Whether it computes a loss: the last stage, and others to which no gradient comes back."""
        return self.module.has_loss

    # --- passes -----------------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], version: int, copy: Copy | None = None
    ) -> tuple[Any, UnreadLoss | None]:
        """Run the blocks on a microbatch and keep what its backward needs.

        Args:
            microbatch: which.
            value: the input tree, cut off from other graphs.
            wants: which of its leaves want a gradient; none for the model's own input.
            version: the weights to read.
            copy: made of them, to be read instead.

        Returns:
            The output (still in its graph), or None and the loss on the last stage.
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
            return result.output, result.loss
        output, made = result.output
        carry = detached(made)
        flight.carries = len(carry[1])
        if microbatch.piece[0] + 1 < microbatch.piece[1]:
            self.carry[microbatch.k] = carry
        return output, result.loss

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch, value: Any) -> tuple[Any, UnreadLoss | None]:
        """Run the blocks in evaluation mode on the weights chosen for evaluation, and keep nothing."""
        if self.averaged is None:
            self._bind(self.weights.handle(self.evaluated))
        elif self.module.bound is not self.averaged:
            self.module.bind(self.averaged)
        with self.module.evaluating(), self.module.rng.preserved():
            return self.graphs.evaluate(microbatch, value)

    @torch.no_grad()
    def pass_on(self, microbatch: Microbatch, value: Any) -> tuple[Any, UnreadLoss | None]:
        """Run the blocks of a stage that is not trained, and keep nothing."""
        self._bind(None)
        with self.module.rng.preserved():
            return self.graphs.evaluate(microbatch, value)

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
                gradients = self._run(graph, [*([graph.seed] if gradients is None else gradients), *returned])
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

    # --- updates ----------------------------------------------------------------------------------------------------

    def try_step(self, batch: int, factor: float) -> None:
        """Create version batch + 1, but so that it can be made again."""
        self.graphs.accept_drafts()
        self.weights.try_step(batch, factor)

    def settle_step(self, batch: int, decision: Decision) -> None:
        """Settle a provisional update; if it is rejected, make it again and drop the forwards that have read it."""
        if decision.again:
            drafts = [key for key, flight in self.flights.items() if flight.version == batch + 1]
            self.graphs.discard_drafts(piece for key in drafts for piece in self.flights.pop(key).work)
        self.graphs.accept_drafts()
        self.weights.settle_step(decision)

    # --- weights as rows --------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Begin a span of training: where weights are rows, nothing else is left of them."""
        if not self.weights.keeps_rows:
            return
        if self.absent is None:
            self.absent = absent(self.weights.newest_tensors(), self.module.where)
        self.module.hide()
        self.module.bind(self.absent)
        self.weights.begin_run()

    def retain(self, alive: Iterable[int]) -> None:
        """Free all versions of trained weights but some; modules let go of one whose memory is given back."""
        assert isinstance(self.weights, TrainedWeights)
        store = self.weights.store
        bound = next((each for each in store.versions.values() if each.leaves is self.module.bound), None)
        store.retain(alive)
        if self.absent is not None and bound is not None and not allocated(bound):
            self.module.bind(self.absent)

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back, where weights are shards."""
        self.weights.release(version)
        if self.absent is not None:
            self.module.bind(self.absent)

    # --- between passes ---------------------------------------------------------------------------------------------

    def evaluated_leaves(self, averaged: bool) -> dict[str, Tensor] | None:
        """Return the weights that evaluations read: averaged or common to all pipelines; None for the newest."""
        model = self.weights.common_model(averaged)
        if model is None:
            return None
        low, full = self.module.precision, self.module.full
        return {name: cast(view, None if name in full else low) for name, view in model.views.items()}

    def adopt(self) -> None:
        """Take over parameters that were replaced on the modules, or given other memory, between two runs.

        Raises:
            ConfigError: modules have changed so that the optimizer could not follow.
        """
        self.module.adopt(self.weights.newest_tensors())

    def refresh(self) -> None:
        """Adopt what was written into the modules' parameters between two runs.

        Raises:
            ConfigError: modules have changed so that the optimizer could not follow.
        """
        self.adopt()
        self.weights.refresh()
        self.module.refresh()
        self.graphs.refresh()

    def restore(self) -> None:
        """Give the modules their own parameters back, over the newest weights."""
        self.module.restore(self.weights.newest_tensors())

    def _bind(self, handle: Handle | None) -> None:
        """Bind the weights of a handle to the modules."""
        leaves = NO_LEAVES if handle is None else handle.buffer.leaves
        if self.module.bound is not leaves:
            self.module.bind(leaves)
