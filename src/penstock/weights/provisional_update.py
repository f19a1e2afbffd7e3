"""Provisional updates: made before the global decision, and repeated if that rejects them.

With `apart`, the new version is written to a buffer of its own, and the optimizer state is copied, so that a repeated
update starts from identical bits. In place, nothing is copied: the first attempt is undone by arithmetic
(`penstock.weights.optim.undo`), which rounds. The gradient is kept until the decision either way.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import CapabilityError
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater


class Provisional:
    """The provisional update of one batch on one stage.

    Args:
        store, updater: of the stage.
        batch: the batch, whose gradient is complete.
        apart: keep copies; otherwise the update is in place.
    """

    def __init__(self, store: VersionStore, updater: Updater, batch: int, apart: bool) -> None:
        self._store, self._updater, self._batch, self._apart = store, updater, batch, apart
        self._gradient = store.gradient(batch)
        self._old, self._new = store.succeed(batch, apart)
        self._before: tuple[int, dict[tuple[str, str], Any]] = updater.updates, _state(updater) if apart else {}
        self._tried = 0.0  # the factor on the gradient in an update in place

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of optimizer state."""
        return sum(getattr(value, "nbytes", 0) for value in self._before[1].values())

    def make(self, factor: float) -> None:
        """Make the first attempt; a factor of zero, if it is sure to be rejected, leaves the weights unchanged."""
        self._attempt(factor)

    def again(self, factor: float) -> None:
        """Make the second attempt, with the factor that all stages decided on."""
        if self._apart:
            self._updater.go_back(*self._before)
        elif self._tried:
            self._updater.undo(self._new, self._gradient)
        self._attempt(factor)

    def settle(self) -> None:
        """End the update after the decision, which frees the gradient."""
        self._store.release_gradient(self._batch)

    def _attempt(self, factor: float) -> None:
        torch.clear_autocast_cache()  # it holds casts of leaves whose memory changes now
        if not self._apart:
            if factor:
                self._updater.in_place(self._new, self._gradient, factor / (self._tried or 1.0))
                self._tried = factor
        elif factor:
            self._updater.rotate(self._old, self._new, factor, self._gradient)
        else:
            self._new.load(self._old.views)
        self._store.publish(self._batch + 1)


def _state(updater: Updater) -> dict[tuple[str, str], Any]:
    try:
        return updater.state()
    except CapabilityError as error:
        raise CapabilityError(
            f"an update of {updater.name} cannot be undone, which post-validation may require: the optimizer must hold "
            f"all its state by parameter; use the method without post-validation. ({error})"
        ) from None
