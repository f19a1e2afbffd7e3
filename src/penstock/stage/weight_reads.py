"""How the passes of a stage find their weights, above all late ones: backwards, and forwards that are run again.

Version rules, corrections and delays by choice say what they read (`docs/asynchronous.md`, `docs/delays.md`). A late
pass reads what its forward has read (`OfForward`), the weights of its own moment, an estimate of what its forward has
read (both in `penstock.stage.weight_reads_newest`), or older weights by choice (`penstock.stage.weight_reads_delayed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from penstock.schedule.ir.schedule import Copy
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.in_flight import Flight
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.buffers import Handle
from penstock.weights.memory.older_versions import OlderVersions
from penstock.weights.optim.updater import Updater
from penstock.weights.store import VersionStore


class Reading:
    """On one stage; this one is for stages on which nothing is trained: there are no weights to find."""

    def forward(self, version: int, copy: Copy | None = None) -> Handle | None:
        """Claim what a forward reads.

        Args:
            version: that the schedule names; with delays by choice its number is that of the batch.
            copy: made of it, to be read instead.

        Raises:
            VersionError: it is not alive.
        """

    def recompute(self, flight: Flight, version: int) -> Handle | None:
        """Claim what a forward reads that is run again, for which the schedule names a version.

        Raises:
            VersionError: it is not alive, or not what the first forward has read where it has to be.
        """

    def backward(self, flight: Flight, batch: int, version: int, copy: Copy | None = None) -> Handle | None:
        """A backward (or a half of one) follows: let it find its weights, and the gradient that it is to add to.

        Args:
            flight: of its microbatch; where its graphs are still to be made, on `flight.handle`.
            batch: whose gradient.
            version: that the schedule names.
            copy: made of it, to be read instead.

        Returns:
            What the modules compute with meanwhile: blocks may run their forward again (torch's checkpoint).

        Raises:
            VersionError: what it needs is not there any more.
        """

    def within(self, flight: Flight) -> AbstractContextManager[object]:  # noqa: ARG002
        """The backward runs within it."""
        return nullcontext()

    def after(self, flight: Flight) -> None:
        """The backward is over."""

    def saved(self, known: set[int], weights: Handle) -> SavedBytes | None:
        """Hooks for a forward on `weights`, where graphs do not keep the weights themselves.

        Args:
            known: addresses of memory that lives anyway; the hooks count what else the graph keeps.
            weights: claimed.
        """

    def check(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that the backward of a graph can find its weights.

        Args:
            result: of the forward, in its graph.
            weights: its leaves.

        Raises:
            CapabilityError: it cannot.
        """


class OfForward(Reading):
    """Late passes read what their forward has read, and what is there still.

    Args:
        store, updater, corrector: of the stage.
        older: versions that passes read instead of the newest; None where none is delayed.
    """

    def __init__(
        self, store: VersionStore, updater: Updater, corrector: Corrector | None, older: OlderVersions | None = None
    ) -> None:
        self._store, self._updater, self._corrector, self._older = store, updater, corrector, older

    def forward(self, version: int, copy: Copy | None = None) -> Handle:
        """Claim it."""
        handle = claim(self._store, version, copy)
        return handle if self._older is None else self._older.read(handle)

    def recompute(self, flight: Flight, version: int) -> Handle:
        """Claim the same again."""
        if version == flight.weights.version:
            flight.weights.check(f"the recomputed forward of {self._name(flight)}")
        return self.forward(version)

    def backward(self, flight: Flight, batch: int, version: int, copy: Copy | None = None) -> Handle:  # noqa: ARG002
        """The graphs have it."""
        flight.weights.check(f"the backward of {self._name(flight)}")
        self._store.accumulate(flight.weights, batch)
        return flight.weights

    def after(self, flight: Flight) -> None:
        """Tell the corrector, while it is there."""
        if self._corrector is not None:
            self._corrector.backward_done(self._updater, flight.weights.whole, self._store.master)

    def _name(self, flight: Flight) -> str:
        return f"microbatch {flight.microbatch.k} on {self._store.where}"


def claim(store: VersionStore, version: int, copy: Copy | None) -> Handle:
    """Claim a version, or a copy made of it."""
    return store.read(version) if copy is None else store.read_copy(copy, version)
