"""Detect writes into the weights from outside, between two runs."""

from __future__ import annotations

from penstock.weights.memory.tensor_sums import tensor_sums
from penstock.weights.store import VersionStore


class WrittenCheck:
    """Detects whether the newest weights of a stage have been written into.

    Args:
        store: the store of the stage.

    Attributes:
        seen: the checksum at the last `look`.
        now: that of the weights when it was last asked whether they were written.
        taken_over: weights that were written have been adopted since the last run.
    """

    def __init__(self, store: VersionStore) -> None:
        self._store, self.seen, self.now, self.taken_over = store, 0, 0, False

    def look(self) -> None:
        """Store the checksum of the weights as they are."""
        self.seen = self._sum()

    @property
    def written(self) -> bool:
        """Return whether the weights differ from those at the last `look`."""
        self.now = self._sum()
        return self.now != self.seen

    def _sum(self) -> int:
        """Return one number, the same in every process."""
        flats = {str(place): flat for place, flat in enumerate(self._store.master.flats)}
        return hash(tuple(tensor_sums(flats).values()))
