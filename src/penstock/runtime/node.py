"""A stage with its weights: what F, R, B and STEP do to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.graphs import Graphs, Loss, Microbatch
from penstock.runtime.late import Late
from penstock.runtime.parcel import detached
from penstock.runtime.parking import Parking
from penstock.runtime.precision import cast
from penstock.runtime.rebinding import Rebinding
from penstock.runtime.recompute import BufferPlace, Kept
from penstock.runtime.rereading import Rereading
from penstock.runtime.saved import storage_bytes
from penstock.runtime.slicing import NOTHING, Carry, with_carry
from penstock.runtime.stage import Graph, Stage, run_backward
from penstock.runtime.ties import Tie
from penstock.schedule.flights import Piece
from penstock.schedule.ir import Copy, Node
from penstock.weights.agreement import Agreement
from penstock.weights.buffers import Buffer, Handle
from penstock.weights.corrections import Corrector
from penstock.weights.decision import Decision
from penstock.weights.older import OlderVersions
from penstock.weights.provisional import Provisional
from penstock.weights.store import VersionStore
from penstock.weights.update import Updater
from penstock.weights.waves import Waves

NO_LEAVES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass
class Flight:
    """A microbatch between its forward and its backward on one stage.

    Attributes:
        microbatch: which.
        version: that its forward read.
        handle: its weights; None where nothing is trained.
        work: what its backward goes through, first things first: a graph, or what graphs are made of again.
        late: what the second half of its backward goes through, once the first is done.
        late_nbytes: that it keeps alive.
        carried: leaves of its input that a slice before has made, the last ones.
        carries: leaves of its output that go on to the next slice, the last ones.
    """

    microbatch: Microbatch
    version: int | None
    handle: Handle | None
    work: Sequence[Graph | Kept]
    carried: int = 0
    carries: int = 0
    late: list[Late] = field(default_factory=list)
    late_nbytes: int = 0


@dataclass
class NodeRuntime:
    """One stage at work.

    Attributes:
        store, updater: None where the stage has no trained parameters.
        graphs: of its forwards.
        ties: parameters that other stages share.
        average: exponential moving average of the weights; None where none is kept.
        place: of the nodes that hold the same weights, in this pipeline and in parallel ones, the first (0), the
            second, and so on.
        decay: of it: A(t+1) = decay A(t) + (1 - decay) W(t+1) at every update that is made; A(0) = W(0).
        flights: microbatches (or slices of them) between forward and backward, by their number in the span.
        carry: what the last slice of a microbatch hands on to the next one.
        carry_gradients: the gradients that come back for it.
        averaged: what evaluations read instead of the newest weights, while they do.
        evaluated: the version that they read instead.
        apart: where updates are provisional, copies are kept to undo them.
        provisional: the update that is not decided on yet.
        buffers: those of the modules as they were before the first forward that reads its version.
        older: versions that training passes read instead of the newest; None where none is delayed.
        rebinding: which weights backwards read, where the rule does not say those of their forwards.
        corrector: what is done about staleness.
        mean: c / N by the last batch that the stage has been updated with and that had a loss weight.
        agreement: what becomes of the weights when parallel pipelines meet; None where they hold the same.
    """

    node: Node
    stage: Stage
    store: VersionStore | None
    updater: Updater | None
    graphs: Graphs
    ties: Sequence[Tie]
    average: Buffer | None
    decay: float
    place: int = 0
    flights: dict[Piece, Flight] = field(default_factory=dict)
    carry: dict[int, Carry] = field(default_factory=dict)
    carry_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] | None = None
    evaluated: int | None = None
    apart: bool = False
    provisional: Provisional | None = None
    buffers: Mapping[BufferPlace, Tensor] | None = None
    older: OlderVersions | None = None
    rebinding: Rebinding | None = None
    corrector: Corrector | None = None
    mean: float = 1.0
    agreement: Agreement | Waves | None = None

    @property
    def has_loss(self) -> bool:
        """Whether it has a loss: the last stage, and others to which no gradient comes back."""
        return self.stage.has_loss

    # --- passes -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: Microbatch,
        value: Any,
        wants: tuple[bool, ...],
        version: int | None,
        copy: Copy | None = None,
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
        handle, carried = self._claim(version, copy), NOTHING
        if microbatch.piece:
            carried = self.carry.pop(microbatch.k, NOTHING)
            value, wants = with_carry(value, wants, carried)
        with self.stage.randomness.apart():
            work, result = self.graphs.make(microbatch, value, wants, handle)
        flight = self.flights[microbatch.key] = Flight(microbatch, version, handle, work, len(carried[1]))
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
        """Run the blocks in evaluation mode on what evaluations read now, and keep nothing."""
        if self.averaged is not None:
            self.stage.bind(self.averaged)
        else:
            newest = self.store.newest if self.store is not None and self.evaluated is None else self.evaluated
            self._claim(newest, delayed=False)
        with self.stage.evaluating(), self.stage.randomness.apart():
            return self.graphs.evaluate(microbatch, value)

    @torch.no_grad()
    def pass_on(self, microbatch: Microbatch, value: Any) -> tuple[Any, Loss | None]:
        """Run blocks that are not trained, and keep nothing."""
        self._claim(None)
        with self.stage.randomness.apart():
            return self.graphs.evaluate(microbatch, value)

    def recompute(self, key: Piece, version: int, value: Any = None) -> Any:
        """Make the graph of a microbatch again, on the weights that the schedule names (or an estimate of older ones).

        Args:
            key: the microbatch, and its slice.
            version: the weights to read.
            value: the input, where it was not kept.

        Returns:
            The output (still in its graph).
        """
        flight = self.flights[key]
        (kept,) = flight.work
        assert isinstance(kept, Kept)
        if self.rebinding is None and flight.handle is not None and version == flight.handle.version:
            flight.handle.check(f"the recomputed forward of microbatch {key[0]} on {self.stage.where}")
        handle = self._claim_estimate(flight, version) or self._claim(version)
        with self.stage.randomness.apart():
            result = self.graphs.remake(kept, flight.microbatch, handle, value)
        flight.handle, flight.work = handle, [result.graph]
        return result.output

    def park(self, key: Piece, away: bool) -> int:
        """Move what a microbatch's graphs keep to the host's memory, or back; returns how many bytes."""
        host, nbytes = torch.device("cpu"), 0
        for parking in self._parked(key):
            nbytes += parking.move(host if away else None)
        self.graphs.hold(-nbytes if away else nbytes)
        return nbytes

    def give(self, key: Piece) -> list[list[Tensor]]:
        """What a microbatch's graphs keep, as bytes, to be sent to another rank."""
        given = [parking.give() for parking in self._parked(key)]
        self.graphs.hold(-sum(tensor.nbytes for tensors in given for tensor in tensors))
        return given

    def take(self, key: Piece, given: list[list[Tensor]]) -> None:
        """The same back."""
        for parking, tensors in zip(self._parked(key), given, strict=True):
            parking.take(tensors)
        self.graphs.hold(sum(tensor.nbytes for tensors in given for tensor in tensors))

    def _parked(self, key: Piece) -> list[Parking]:
        work = self.flights[key].work
        return [piece.parking for piece in work if isinstance(piece, Graph) and piece.parking is not None]

    def backward(
        self, key: Piece, batch: int, version: int, gradients: list[Tensor | None] | None, copy: Copy | None = None
    ) -> list[Tensor | None]:
        """Backward of a microbatch; weight gradients are added to the gradient of `batch`.

        Args:
            key: the microbatch, counted through the span, and its slice.
            batch: its batch, counted from the start of training.
            version: of the weights to read.
            gradients: of the output's leaves; None on the last stage.
            copy: made of the version, to be read instead.

        Returns:
            The gradients of the input's leaves, None where none is wanted.
        """
        found = self.backward_for_inputs(key, batch, version, gradients, copy)
        self.backward_for_weights(key, batch, version, copy)
        return found

    def backward_for_inputs(
        self, key: Piece, batch: int, version: int, gradients: list[Tensor | None] | None, copy: Copy | None = None
    ) -> list[Tensor | None]:
        """The first half of `backward`; where graphs are not made for two, all of it."""
        flight = self._claim_for_backward(key, batch, version, copy)
        returned = self.carry_gradients.pop(key[0], [None] * flight.carries)
        work = list(flight.work)
        flight.work = ()
        while work:
            piece = work.pop()
            graph = piece
            if isinstance(piece, Kept):
                with self.stage.randomness.apart():
                    graph = self.graphs.remake(piece, flight.microbatch, flight.handle).graph
            assert isinstance(graph, Graph)
            with self._no_forward(flight):
                gradients = run_backward(graph, [*([graph.seed] if gradients is None else gradients), *returned])
            returned = []
            if graph.late is not None:
                flight.late.append(graph.late)
                flight.late_nbytes += graph.late_nbytes
            self.graphs.hold(-graph.nbytes)
        assert gradients is not None
        if flight.late:
            flight.late_nbytes += storage_bytes([g for late in flight.late for g in late.gradients], ())
            self.graphs.hold(flight.late_nbytes)
        if key[1]:
            self.carry_gradients[key[0]] = gradients[len(gradients) - flight.carried :]
        return gradients[: len(gradients) - flight.carried]

    def _no_forward(self, flight: Flight) -> AbstractContextManager[object]:
        """Within it a backward runs, which may not run a forward where that would read other weights than it."""
        if not isinstance(self.rebinding, Rereading) or flight.handle is None:
            return nullcontext()
        assert self.older is not None
        leaves = flight.handle.buffer.leaves
        return self.rebinding.no_forward(leaves[name] for name in self.older.apart & leaves.keys())

    def backward_for_weights(self, key: Piece, batch: int, version: int, copy: Copy | None = None) -> None:
        """The second half, which needs nothing of others."""
        flight = self._claim_for_backward(key, batch, version, copy)
        for late in flight.late:
            assert flight.handle is not None
            late.run(flight.handle.buffer.leaves, flight.handle.buffer.accumulate)
        self.graphs.hold(-flight.late_nbytes)
        del self.flights[key]
        if self.corrector is not None and self.rebinding is None and flight.handle is not None:
            assert self.store is not None
            assert self.updater is not None
            self.corrector.backward_done(self.updater, flight.handle.whole, self.store.master)

    def _claim_for_backward(self, key: Piece, batch: int, version: int, copy: Copy | None) -> Flight:
        flight = self.flights[key]
        if flight.handle is not None and self.store is not None:
            again = flight.handle
            if self.rebinding is None or isinstance(self.rebinding, Rereading):
                flight.handle.check(f"the backward of microbatch {key[0]} on {self.stage.where}")
            if isinstance(self.rebinding, Rereading):
                assert self.older is not None
                self.rebinding.turn_to_leaves(self.older.read_backward(self.store.read(version)))
            elif self.rebinding is not None:
                again = self._turn(self.rebinding, flight, batch, version, copy)
            self.store.accumulate(flight.handle, batch)
            self.stage.bind(again.buffer.leaves)  # blocks may run their forward again (torch's checkpoint)
        return flight

    def _turn(self, rebinding: Rebinding, flight: Flight, batch: int, version: int, copy: Copy | None) -> Handle:
        """Let a backward read the weights of this moment, or an estimate of those that its forward read.

        Returns:
            What a forward within the backward computes with: that of the first one, or, where it is gone, this.
        """
        assert self.store is not None
        assert flight.handle is not None
        assert flight.version is not None
        estimate = self._claim_estimate(flight, version)
        if estimate is not None:
            rebinding.turn_to(estimate.whole)
            if any(isinstance(piece, Kept) for piece in flight.work):
                flight.handle = estimate  # its graphs are made now, of the same
            return flight.handle
        now = self.store.read(version) if copy is None else self.store.read_copy(copy, version)
        motion = None if self.corrector is None else self.corrector.motion
        rebinding.turn_to(now.whole, motion, version - flight.version)
        if not rebinding.again_on_newest:
            return flight.handle
        if all(isinstance(piece, Kept) for piece in flight.work):
            flight.handle = now  # its graphs will be made on it
        else:
            self.store.accumulate(now, batch)
        return now

    def _claim_estimate(self, flight: Flight, version: int) -> Handle | None:
        """What a late pass reads instead of the newest version, where that is made beforehand; None where it is not."""
        if self.store is None or not self.store.estimates or flight.version in (None, version):
            return None
        assert self.corrector is not None
        assert flight.version is not None
        torch.clear_autocast_cache()
        gap = version - flight.version
        handle = self.store.estimate(version, gap, partial(self.corrector.estimate, self.store.master, gap))
        self.stage.bind(handle.buffer.leaves)
        return handle

    def predict(self, copy: Copy, versions: tuple[int, ...], batch: int, scale: float) -> None:
        """Make a derived copy of the newest version, or of the one that a forward read and the newest.

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
        self.store.bear(copy, (versions, copy.label, depends), write)

    # --- updates ----------------------------------------------------------------------------------------------------

    def gradient(self, batch: int) -> list[Tensor]:
        """What the backwards of a batch have accumulated, all of them done, as flat tensors."""
        return [] if self.store is None else self.store.gradient(batch).flats

    def gradients_of(self, batch: int, names: Sequence[str]) -> list[Tensor]:
        """The same of some parameters."""
        assert self.store is not None
        views = self.store.gradient(batch).views
        return [views[name] for name in names]

    def gradient_squares(self, batch: int) -> tuple[float, float]:
        """The sum of the squares of the same, but for parameters that count with another stage, and its rounding."""
        if self.store is None:
            return 0.0, 0.0
        elsewhere = {n for tie in self.ties for n in tie.names_at(self.node.cut) if tie.cuts[0] != self.node.cut}
        return self.store.gradient(batch).squares(without=elsewhere)

    def all_squares(self, batch: int) -> float:
        """The sum of the squares of all of its gradient."""
        return 0.0 if self.store is None else self.store.gradient(batch).squares()[0]

    def step(self, batch: int, factor: float, keeps_old: bool) -> None:
        """Bear version batch + 1.

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
            self.corrector.before_step(self.store.gradient(batch))
        self.store.update(batch, self.updater, factor, keeps_old, stepped)
        if self.average is not None and factor:
            self.average.approach(self.store.master, 1.0 - self.decay)

    def try_step(self, batch: int, factor: float) -> None:
        """Bear version batch + 1 as `step` does, but so that it can be done again."""
        self.buffers = None
        if self.store is None or self.updater is None:
            return
        torch.clear_autocast_cache()
        self.provisional = Provisional(self.store, self.updater, batch, self.apart)
        self.provisional.make(factor)

    def draft(self) -> None:
        """Before a forward that reads a version not decided on yet: keep what else it changes."""
        if self.buffers is None:
            self.buffers = {place: tensor.clone() for place, tensor in self.graphs.buffers.items()}

    def settle_step(self, batch: int, decision: Decision) -> None:
        """The update of a batch is decided on; if it is rejected, it is made again, and what has read it is dropped."""
        if decision.again:
            self._drop_drafts(batch + 1)
        self.buffers = None
        if self.store is None or self.provisional is None:
            return
        if decision.again:
            torch.clear_autocast_cache()
            self.provisional.again(decision.factor)
        self.provisional.settle()
        self.provisional = None
        if self.average is not None and decision.factor:
            self.average.approach(self.store.master, 1.0 - self.decay)

    def _drop_drafts(self, version: int) -> None:
        """Forget the forwards that have read a version, and what they have changed in buffers."""
        for key in [key for key, flight in self.flights.items() if flight.version == version]:
            self.graphs.drop(self.flights.pop(key).work)
        present = self.graphs.buffers
        with torch.no_grad():
            for place, tensor in (self.buffers or {}).items():
                present[place].copy_(tensor)

    def average_leaves(self) -> dict[str, Tensor] | None:
        """The averaged weights as passes read them; None where none are kept."""
        if self.average is None:
            return None
        return {name: cast(view, self.stage.precision) for name, view in self.average.views.items()}

    def common_leaves(self) -> dict[str, Tensor] | None:
        """The model that pipelines have in common, as passes read it; None where that is the newest weights."""
        if self.agreement is None or self.agreement.model is None:
            return None
        return {name: cast(view, self.stage.precision) for name, view in self.agreement.model.views.items()}

    def bytes_by_role(self) -> dict[str, int]:
        """Bytes of everything parameter-sized but the optimizer."""
        roles = {} if self.store is None else self.store.bytes_by_role()
        if self.average is not None:
            roles["averaged weights"] = self.average.nbytes
        if self.older is not None:
            roles["delayed weights"] = self.older.nbytes
        if self.corrector is not None:
            roles["correction"] = self.corrector.nbytes
        if self.agreement is not None:
            roles |= self.agreement.bytes_by_role()
        if self.apart:
            roles["optimizer before"] = 0 if self.provisional is None else self.provisional.nbytes
        return roles

    def refresh(self) -> None:
        """Take over what has been written into the modules' parameters between two runs."""
        if self.store is not None:
            self.store.refresh()
            self.store.forget_copies()
            if self.agreement is not None:
                self.agreement.take_over()
        self.stage.refresh()

    def is_finite(self) -> bool:
        """Whether the newest weights, and what the optimizer remembers of them, are numbers."""
        if self.store is None or self.updater is None:
            return True
        remembered = [value for value in self.updater.tensors if value.is_floating_point()]
        return all(bool(tensor.isfinite().all()) for tensor in (*self.store.master.views.values(), *remembered))

    def restore(self) -> None:
        """Give the modules their own parameters back, over the newest weights."""
        self.stage.restore({} if self.store is None else self.store.newest_tensors())

    def _claim(self, version: int | None, copy: Copy | None = None, delayed: bool = True) -> Handle | None:
        """Claim a version (a copy made of it; with delays what its batch reads) and let the modules compute with it."""
        if self.store is None or version is None:
            self.stage.bind(NO_LEAVES)
            return None
        handle = self.store.read(version) if copy is None else self.store.read_copy(copy, version)
        if delayed and self.older is not None:
            handle = self.older.read(handle)
        self.stage.bind(handle.buffer.leaves)
        return handle
