"""One stage of a rank: its passes and updates on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.comm.p2p.message import detached
from penstock.partition.sequence_slices import NOTHING, Carry, with_carry
from penstock.partition.tied import Tie
from penstock.schedule.ir.schedule import Copy, Stage
from penstock.schedule.proof.in_flight import Piece
from penstock.stage.autograd.recompute import RecomputeInput
from penstock.stage.autograd.saved_bytes import storage_bytes
from penstock.stage.graphs import Loss, StageGraphs
from penstock.stage.in_flight import InFlightMicrobatch, Microbatch
from penstock.stage.module import StageModule, run_backward
from penstock.stage.precision import cast
from penstock.stage.weight_reads import WeightReads
from penstock.weights.averaging import Agreement
from penstock.weights.corrections.base import Corrector
from penstock.weights.decision import Decision
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.memory.older_versions import OlderVersions
from penstock.weights.optim.updater import Updater
from penstock.weights.provisional import Provisional
from penstock.weights.store import VersionStore
from penstock.weights.waves import WaveWeights

NO_LEAVES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass
class StageRuntime:
    """Runs the passes and updates of one stage.

    Attributes:
        store, updater: None where the stage has no trained parameters.
        reading: how its passes find their weights.
        graphs: of its forwards.
        ties: parameters that other stages share.
        place: of the stages that hold the same weights, in this pipeline and in parallel ones, the first (0), the
            second, and so on.
        average: exponential moving average of the weights; None where none is kept.
        decay: of it: A(t+1) = decay A(t) + (1 - decay) W(t+1) at every update that is made; A(0) = W(0).
        flights: microbatches (or slices of them) between forward and backward, by their number in the span.
        carry: what the last slice of a microbatch hands on to the next one.
        carry_gradients: the gradients that come back for it.
        averaged: what evaluations read instead of the newest weights, while they do.
        evaluated: the version that they read instead.
        apart: where updates are provisional, copies are kept to undo them.
        provisional: the update that is not decided on yet.
        older: versions that training passes read instead of the newest; None where none is delayed.
        corrector: what is done about staleness.
        mean: c / N by the last batch that the stage has been updated with and that had a loss weight.
        agreement: what becomes of the weights when parallel pipelines meet; None where they hold the same.
    """

    key: Stage
    module: StageModule
    store: VersionStore | None
    updater: Updater | None
    reading: WeightReads
    graphs: StageGraphs
    ties: Sequence[Tie]
    average: Buffer | None
    decay: float
    place: int = 0
    flights: dict[Piece, InFlightMicrobatch] = field(default_factory=dict)
    carry: dict[int, Carry] = field(default_factory=dict)
    carry_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] | None = None
    evaluated: int | None = None
    apart: bool = False
    provisional: Provisional | None = None
    older: OlderVersions | None = None
    corrector: Corrector | None = None
    mean: float = 1.0
    agreement: Agreement | WaveWeights | None = None

    @property
    def has_loss(self) -> bool:
        """Whether it computes a loss: the last stage, and others to which no gradient comes back."""
        return self.module.has_loss

    # --- passes -----------------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], version: int, copy: Copy | None = None
    ) -> tuple[Any, Loss | None]:
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
    def evaluate(self, microbatch: Microbatch, value: Any) -> tuple[Any, Loss | None]:
        """Run the blocks in evaluation mode on the weights chosen for evaluation, and keep nothing."""
        if self.averaged is not None:
            self.module.bind(self.averaged)
        elif self.store is None:
            self._bind(None)
        else:
            self._bind(self.store.read(self.store.newest if self.evaluated is None else self.evaluated))
        with self.module.evaluating(), self.module.rng.preserved():
            return self.graphs.evaluate(microbatch, value)

    @torch.no_grad()
    def pass_on(self, microbatch: Microbatch, value: Any) -> tuple[Any, Loss | None]:
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
        self._bind(self.reading.backward(flight, batch, version, copy))
        found = self._inputs_backward(flight, key, gradients)
        self._weights_backward(flight, key)
        return found

    def backward_for_inputs(
        self, key: Piece, batch: int, version: int, gradients: list[Tensor | None] | None, copy: Copy | None = None
    ) -> list[Tensor | None]:
        """Run the backward for the inputs; all of it where graphs are not made for two halves."""
        flight = self.flights[key]
        self._bind(self.reading.backward(flight, batch, version, copy))
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
            with self.reading.backward_context(flight):
                gradients = run_backward(graph, [*([graph.seed] if gradients is None else gradients), *returned])
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

    def _weights_backward(self, flight: InFlightMicrobatch, key: Piece) -> None:
        for late in flight.deferred:
            late.run(flight.weights.buffer.leaves, flight.weights.buffer.accumulate)
        self.graphs.hold(-flight.deferred_nbytes)
        del self.flights[key]
        self.reading.after_backward(flight)

    def predict(self, copy: Copy, versions: tuple[int, ...], batch: int, scale: float) -> None:
        """Create a derived copy of the newest version, or of it and the one that a forward read.

        Args:
            copy: its name.
            versions: what it is made of, the newest last.
            batch: of the microbatch that it is for.
            scale: S of the batch whose gradient the next update is made of: all batches before are decided.
        """
        if self.store is None or self.updater is None:
            return
        assert self.corrector is not None
        *older, newest = versions
        depends = self.corrector.look_ahead(batch - newest, self.store.gradients.get(newest), self.mean / scale)
        if older:
            first, last = (self.store.read(version).whole for version in versions)
            write = partial(self.corrector.blend, first, last, newest - older[0])
        else:
            write = partial(self.corrector.predict, self.updater, self.store.master, copy.label)
        self.store.create_copy(copy, (versions, copy.label, depends), write)

    # --- updates ----------------------------------------------------------------------------------------------------

    def gradient(self, batch: int) -> list[Tensor]:
        """Return the accumulated gradient of a batch as flat tensors."""
        return [] if self.store is None else self.store.gradient(batch).flats

    def gradients_of(self, batch: int, names: Sequence[str]) -> list[Tensor]:
        """Return the accumulated gradients of some parameters."""
        assert self.store is not None
        views = self.store.gradient(batch).views
        return [views[name] for name in names]

    def gradient_squares(self, batch: int) -> tuple[float, float]:
        """Return the squared gradient norm, without parameters that count with another stage, and its rounding."""
        if self.store is None:
            return 0.0, 0.0
        elsewhere = {n for tie in self.ties for n in tie.names_at(self.key.index) if tie.stages[0] != self.key.index}
        return self.store.gradient(batch).squares(without=elsewhere)

    def all_squares(self, batch: int) -> float:
        """Return the squared norm of the whole gradient."""
        return 0.0 if self.store is None else self.store.gradient(batch).squares()[0]

    def step(self, batch: int, factor: float, keeps_old: bool) -> None:
        """Create version batch + 1: the optimizer update.

        Args:
            batch: counted from the start of training.
            factor: what the accumulated gradient is multiplied by first; zero skips the update.
            keeps_old: version `batch` stays readable, so the new one is written over the gradient.
        """
        if self.store is None or self.updater is None:
            return
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
        if self.older is not None:
            self.older.keep(batch, self.store.versions[batch].views)
        stepped = self.corrector.stepped if self.corrector is not None and self.corrector.watches else None
        if self.corrector is not None and factor:
            self.corrector.before_step(self.store.gradient(batch), self.store.master, factor)
        self.store.update(batch, self.updater, factor, keeps_old, stepped)
        if self.average is not None and factor:
            self.average.approach(self.store.master, 1.0 - self.decay)

    def try_step(self, batch: int, factor: float) -> None:
        """Create version batch + 1 as `step` does, but so that it can be made again."""
        self.graphs.accept_drafts()
        if self.store is not None and self.updater is not None:
            self.provisional = Provisional(self.store, self.updater, batch, self.apart)
            self.provisional.make(factor)

    def settle_step(self, batch: int, decision: Decision) -> None:
        """Settle a provisional update; if it is rejected, make it again and drop the forwards that have read it."""
        if decision.again:
            drafts = [key for key, flight in self.flights.items() if flight.version == batch + 1]
            self.graphs.discard_drafts(piece for key in drafts for piece in self.flights.pop(key).work)
        self.graphs.accept_drafts()
        if self.store is None or self.provisional is None:
            return
        if decision.again:
            self.provisional.again(decision.factor)
        self.provisional.settle()
        self.provisional = None
        if self.average is not None and decision.factor:
            self.average.approach(self.store.master, 1.0 - self.decay)

    def evaluated_leaves(self, averaged: bool) -> dict[str, Tensor] | None:
        """Return the weights that evaluations read: averaged or common to all pipelines; None for the newest."""
        common = None if self.agreement is None else self.agreement.model
        model = self.average if averaged else common
        return None if model is None else {k: cast(view, self.module.precision) for k, view in model.views.items()}

    @property
    def in_use(self) -> tuple[int, int]:
        """The number of versions and of gradients: a pass may begin a gradient or end a version, and nothing else."""
        return (0, 0) if self.store is None else (len(self.store.versions), len(self.store.gradients))

    def bytes_by_role(self) -> dict[str, int]:
        """Return the parameter-sized bytes by role, without the optimizer's."""
        roles = {} if self.store is None else self.store.bytes_by_role()
        parts = {"averaged weights": self.average, "delayed weights": self.older, "correction": self.corrector}
        roles |= {role: part.nbytes for role, part in parts.items() if part is not None}
        if self.agreement is not None:
            roles |= self.agreement.bytes_by_role()
        if self.apart:
            roles["optimizer before"] = 0 if self.provisional is None else self.provisional.nbytes
        return roles

    def refresh(self) -> None:
        """Adopt what was written into the modules' parameters between two runs."""
        if self.store is not None:
            self.store.refresh()
            self.store.forget_copies()
            if self.agreement is not None:
                self.agreement.take_over()
        self.module.refresh()

    def is_finite(self) -> bool:
        """Return whether the newest weights and the optimizer state are finite."""
        if self.store is None or self.updater is None:
            return True
        remembered = [value for value in self.updater.tensors if value.is_floating_point()]
        return all(bool(tensor.isfinite().all()) for tensor in (*self.store.master.views.values(), *remembered))

    def restore(self) -> None:
        """Give the modules their own parameters back, over the newest weights."""
        self.module.restore({} if self.store is None else self.store.newest_tensors())

    def _bind(self, handle: Handle | None) -> None:
        """Bind the weights of a handle to the modules."""
        self.module.bind(NO_LEAVES if handle is None else handle.buffer.leaves)
