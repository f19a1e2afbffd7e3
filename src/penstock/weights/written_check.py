"""Whether somebody has written into weights from outside, between two runs."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.store import VersionStore

_PART = 1 << 20  # elements at a time


class WrittenCheck:
    """Of the newest weights of a stage.

    What is kept of them is a number, which changes with every single element and with their places.

    Args:
        store: of the stage.

    Attributes:
        seen: that number, when they were last looked at.
        taken_over: what was written has been taken over since the last run.
    """

    def __init__(self, store: VersionStore) -> None:
        self._store, self.seen, self.taken_over = store, 0, False

    def look(self) -> None:
        """Take the weights as they are for those that the pipeline has made."""
        self.seen = self._sum()

    @property
    def written(self) -> bool:
        """Whether they are others than when they were looked at."""
        return self._sum() != self.seen

    def _sum(self) -> int:
        total = 0
        for flat in self._store.master.flats:
            for part in torch.split(_whole_numbers(flat), _PART):
                places = torch.arange(1, part.numel() + 1, device=part.device)
                total = (31 * total + int((part.long() * places).sum())) % (1 << 61)
        return total


def _whole_numbers(flat: Tensor) -> Tensor:
    """The bits of a tensor."""
    return flat.detach().view(torch.int16 if flat.element_size() == 2 else torch.int32)
