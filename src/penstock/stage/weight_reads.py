"""Strategies that decide which weights the passes of a stage read, above all backwards and recomputed forwards.

Between a forward and its backward (or its recomputation) the weights may have been updated. Version rules, corrections
and chosen delays say which ones the later pass reads then (`docs/asynchronous.md`, `docs/delays.md`):

- those that the forward read (`ForwardWeightReads`);
- the newest ones, or an estimate of those that the forward read (`penstock.stage.weight_reads_newest`);
- older ones by choice (`penstock.stage.chosen_backward_delays`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from penstock.schedule.ir.schedule import Copy
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.in_flight_microbatch import InFlightMicrobatch
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.buffers import Handle
from penstock.weights.memory.emulated_delay_buffers import OlderVersions
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater

_NOTHING: AbstractContextManager[object] = nullcontext()


class WeightReads:
    """Decides which weights the passes of one stage read; this base class is for stages without trained weights.

    Attributes:
        looks_up: graphs keep positions instead of weights, and look these up when their backward runs
            (`saved_tensor_hooks`).
    """

    looks_up = False

    def forward(self, version: int, copy: Copy | None = None) -> Handle | None:
        """Claim the weights that a forward reads.

        Args:
            version: named by the schedule; with chosen delays the number of the batch.
            copy: a derived copy of that version, to be read instead.

        Raises:
            VersionError: they are not alive.
        """

    def recompute(self, flight: InFlightMicrobatch, version: int) -> Handle | None:
        """Claim the weights that a recomputed forward reads, given the version that the schedule names for it.

        Raises:
            VersionError: they are not alive, or not those that the first forward read where they have to be.
        """

    def backward(self, flight: InFlightMicrobatch, batch: int, version: int, copy: Copy | None = None) -> Handle | None:
        """Prepare for a backward (or one half of it): find its weights and the gradient that it adds to.

        Args:
            flight: the microbatch; if its graphs are still to be made, they will be on `flight.handle`.
            batch: the batch whose gradient is added to.
            version: named by the schedule.
            copy: a derived copy of that version, to be read instead.

        Returns:
            The weights to bind to the modules meanwhile: blocks may recompute their own forward (torch's checkpoint).

        Raises:
            VersionError: the weights have been rewritten.
        """

    def backward_context(self, flight: InFlightMicrobatch) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context in which the backward runs."""
        return _NOTHING

    def after_backward(self, flight: InFlightMicrobatch) -> None:
        """Called when the backward is over."""

    def saved_tensor_hooks(self, known: set[int], weights: Handle) -> SavedBytes | None:
        """Return the hooks under which a forward on `weights` runs; None where graphs keep the weights themselves.

        Args:
            known: identities of storages that live anyway; the hooks count what else the graph keeps.
            weights: claimed.
        """

    def check_graph(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that the backward of a graph can find its weights.

        Args:
            result: the output of the forward, in its graph.
            weights: the leaves of the weights.

        Raises:
            CapabilityError: it cannot.
        """


class ForwardWeightReads(WeightReads):
    """Backwards and recomputed forwards read the weights that the forward read, which are kept alive until then.

    Args:
        store, updater, corrector: of the stage.
        older: versions that passes read instead of the newest; None where none is delayed.
    """

    def __init__(
        self, store: VersionStore, updater: Updater, corrector: Corrector | None, older: OlderVersions | None = None
    ) -> None:
        self._store, self._updater, self._corrector, self._older = store, updater, corrector, older
        self._claimed: Handle | None = None  # by the last forward

    def forward(self, version: int, copy: Copy | None = None) -> Handle:
        """Claim the version (or its copy); most forwards read the same as the one before."""
        last = self._claimed
        if copy is None and last is not None and last.version == version:
            buffer = self._store.versions.get(version)
            if buffer is last.buffer and buffer.epoch == last.epoch:
                return last
        handle = claim(self._store, version, copy)
        if self._older is not None:
            return self._older.read(handle)
        if copy is None:
            self._claimed = handle
        return handle

    def recompute(self, flight: InFlightMicrobatch, version: int) -> Handle:
        """Claim the same weights again."""
        if version == flight.weights.version:
            flight.weights.check(f"the recomputed forward of {self._name(flight)}")
        return self.forward(version)

    def backward(
        self,
        flight: InFlightMicrobatch,
        batch: int,
        version: int,  # noqa: ARG002
        copy: Copy | None = None,  # noqa: ARG002
    ) -> Handle:
        """Make sure that the weights in the graphs are still those of the forward."""
        handle = flight.weights
        if handle.epoch != handle.buffer.epoch:
            handle.check(f"the backward of {self._name(flight)}")
        self._store.accumulate(handle, batch)
        return handle

    def after_backward(self, flight: InFlightMicrobatch) -> None:
        """Notify the corrector, while the weights of the forward are still alive."""
        if self._corrector is not None and self._corrector.compares:
            self._corrector.backward_done(self._updater, flight.weights.whole, self._store.master)

    def _name(self, flight: InFlightMicrobatch) -> str:
        return f"microbatch {flight.microbatch.k} on {self._store.where}"


def claim(store: VersionStore, version: int, copy: Copy | None) -> Handle:
    """Claim a version, or a copy derived from it.

    Raises:
        VersionError: it is not alive.
    """
    return store.read(version) if copy is None else store.derived.read(copy, version)
