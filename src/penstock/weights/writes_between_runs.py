"""Detect writes into the weights from outside, between two runs."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.store import VersionStore

_PART_ON_HOST, _PART_ON_DEVICE = 1 << 16, 1 << 20  # elements at a time: in the cache; few kernels. 16 bytes for each


class WrittenCheck:
    """Detects whether the newest weights of a stage have been written into.

    It keeps a checksum of them, which changes with every element and with the order of elements.

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
        """Add up what the device can without waiting for it, and read that once; integers wrap around."""
        flats = [_whole_numbers(flat) for flat in self._store.master.flats]
        if not flats:
            return 0
        device = flats[0].device
        size = _PART_ON_HOST if device.type == "cpu" else _PART_ON_DEVICE
        places = torch.arange(1, size + 1, device=device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for flat in flats:
            for part in torch.split(flat, size):
                total.mul_(31).add_((part * places[: part.numel()]).sum())
        return int(total)


def _whole_numbers(flat: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    return flat.detach().view(torch.int16 if flat.element_size() == 2 else torch.int32)
