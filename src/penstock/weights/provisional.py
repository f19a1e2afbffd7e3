"""An update that is made before it is decided on, and made again if it was wrong.

Apart, the new version is written beside the one it starts from, and what the optimizer remembers is copied, so that the
second attempt starts from the very same bits. In place, nothing is copied: the first attempt is undone by arithmetic
(`penstock.weights.optim.undo`), which rounds. The gradient stays until the decision either way.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import CapabilityError
from penstock.weights.optim.updater import Updater
from penstock.weights.store import VersionStore


class Provisional:
    """The update of one batch on one stage.

    Args:
        store, updater: of the stage.
        batch: whose gradient is complete.
        apart: keep copies; else the update is in place.
    """

    def __init__(self, store: VersionStore, updater: Updater, batch: int, apart: bool) -> None:
        self._store, self._updater, self._batch, self._apart = store, updater, batch, apart
        self._gradient = store.gradient(batch)
        self._old, self._new = store.succeed(batch, apart)
        self._before: tuple[int, dict[tuple[str, str], Any]] = updater.updates, _state(updater) if apart else {}
        self._tried = 0.0  # what the gradient in place has been multiplied by

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of what the optimizer remembers."""
        return sum(getattr(value, "nbytes", 0) for value in self._before[1].values())

    def make(self, factor: float) -> None:
        """The first attempt; with a factor of zero, which leaves the weights as they are, where it is sure to fail."""
        self._attempt(factor)

    def again(self, factor: float) -> None:
        """The second attempt, with what all have decided."""
        if self._apart:
            self._updater.go_back(*self._before)
        elif self._tried:
            self._updater.undo(self._new, self._gradient)
        self._attempt(factor)

    def settle(self) -> None:
        """It is decided on: the gradient is free."""
        self._store.release_gradient(self._batch)

    def _attempt(self, factor: float) -> None:
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
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
            f"an update of {updater.name} cannot be taken back, as post-validation may have to: what it remembers must "
            f"be in its state, by parameter; take the method without post-validation. ({error})"
        ) from None
