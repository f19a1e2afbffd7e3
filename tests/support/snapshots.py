"""Snapshots of all stages as what a pipeline loads, without a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.runtime.rank.snapshot import Snapshot


class Kept:
    """Snapshots of all stages in memory, as a checkpoint would give them."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.facts: dict[str, Any] = {"values": {}}
        for snapshot in snapshots:
            assert not self.tensors.keys() & snapshot.tensors.keys()
            self.tensors |= snapshot.tensors
            self.facts["values"] |= snapshot.values
            self.facts |= snapshot.facts

    @property
    def names(self) -> set[str]:
        return set(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]
