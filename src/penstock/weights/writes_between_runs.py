"""Detect writes into the weights from outside, between two runs."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.store import VersionStore

_PART = 1 << 16  # elements at a time; each takes up to 24 bytes meanwhile


class WrittenCheck:
    """Detects whether the newest weights of a stage have been written into.

    It keeps a checksum of them, which changes with every element and with the order of elements.

    Args:
        store: the store of the stage.

    Attributes:
        seen: the checksum at the last `look`.
        taken_over: weights that were written have been adopted since the last run.
    """

    def __init__(self, store: VersionStore) -> None:
        self._store, self.seen, self.taken_over = store, 0, False

    def look(self) -> None:
        """Store the checksum of the weights as they are."""
        self.seen = self._sum()

    @property
    def written(self) -> bool:
        """Return whether the weights differ from those at the last `look`."""
        return self._sum() != self.seen

    def _sum(self) -> int:
        total = 0
        for flat in self._store.master.flats:
            for part in torch.split(_whole_numbers(flat), _PART):
                places = torch.arange(1, part.numel() + 1, device=part.device)
                total = (31 * total + int((part.long() * places).sum())) % (1 << 61)
        return total


def _whole_numbers(flat: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    return flat.detach().view(torch.int16 if flat.element_size() == 2 else torch.int32)
