"""Shards of a stage's parameters: rows of each one, which one of several stages with the same weights owns.

The rows of a parameter are what its first dimension counts; of one without dimensions there is one. Holder i of w owns
rows i k to (i + 1) k of n, where k = ceil(n / w), as in torch's DTensor with `Shard(0)` and in FSDP2; the last holders
may have fewer, or none. Optimizers that look at a parameter as a whole need all rows of it at one holder: then
parameters are dealt out, the largest first, to whoever has the least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import VersionError
from penstock.weights.memory.buffers import Buffer, Layout


class Rows(NamedTuple):
    """A range of rows of a parameter.

    Attributes:
        first, end: the first row, and the one behind the last.
        all: the number of rows that the parameter has.
    """

    first: int
    end: int
    all: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor of the parameter's shape; they share its memory."""
        if tensor.dim() == 0:
            return tensor if self.end > self.first else tensor.view(1)[:0]
        return tensor[self.first : self.end]


class Steppable(Protocol):
    """Memory that an optimizer steps: a buffer, or rows of it."""

    @property
    def views(self) -> Mapping[str, Tensor]:
        """What it has of each parameter, by name."""
        ...

    def rewrite(self) -> None:
        """Begin a new epoch, which invalidates everything that depends on the old content."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply everything by `factor`."""
        ...


class OwnRows:
    """The rows of a buffer that this holder owns.

    Attributes:
        views: name -> its rows.
    """

    def __init__(self, buffer: Buffer, shards: RowShards) -> None:
        self._buffer = buffer
        self.views = shards.own(buffer.views)

    def rewrite(self) -> None:
        """Begin a new epoch of the buffer."""
        self._buffer.rewrite()

    def scale(self, factor: float) -> None:
        """Multiply the rows by `factor`."""
        with torch.no_grad():
            for view in self.views.values():
                view.mul_(factor)


class RowShards:
    """The division of the parameters of one stage among the holders of its weights.

    Args:
        layout: of the parameters.
        holders: w, how many there are.
        place: which of them this one is.
        whole: every parameter has one owner for all of its rows.

    Raises:
        VersionError: a row has no owner, or several.
    """

    def __init__(self, layout: Layout, holders: int, place: int, whole: bool = False) -> None:
        self.holders, self.place = holders, place
        self._owners = _dealt(layout, holders) if whole else {}
        self._count = {name: slot.shape[0] if slot.shape else 1 for name, slot in layout.slots.items()}
        self._check()

    def _check(self) -> None:
        """Make sure that every row has one owner: no number may be added, stepped or counted twice, or not at all."""
        for name, rows in self.table.items():
            ends = [0, *(end for _, end in rows)]
            if [first for first, _ in rows] != ends[:-1] or ends[-1] != self._count[name]:
                raise VersionError(f"the {self._count[name]} rows of {name} are not divided once among holders: {rows}")

    @property
    def table(self) -> dict[str, list[tuple[int, int]]]:
        """The first row, and the one behind the last, of each parameter at each holder."""
        return {name: [self.rows(name, holder)[:2] for holder in range(self.holders)] for name in self._count}

    def rows(self, name: str, holder: int | None = None) -> Rows:
        """Return the rows of a parameter that a holder owns, this one if None."""
        count, place = self._count[name], self.place if holder is None else holder
        if self._owners:
            owner = self._owners[name]
            return Rows(0 if place <= owner else count, 0 if place < owner else count, count)
        size = -(-count // self.holders)
        return Rows(min(place * size, count), min((place + 1) * size, count), count)

    def own(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the own rows of parameters, by name, where there are any; one without rows has an owner, too."""
        return {name: self.rows(name).of(view) for name, view in views.items() if self._owns(name)}

    def _owns(self, name: str) -> bool:
        first, end, count = self.rows(name)
        return end > first or (not count and self.place == self._owners.get(name, 0))

    def saved_as(self, kind: str, name: str) -> str:
        """Return the name in a saved state of the own rows of something of a parameter: "weights@8/NAME" from row 8 on.

        Without a number where they are all rows.
        """
        rows = self.rows(name)
        return f"{kind}/{name}" if rows.end - rows.first == rows.all else f"{kind}@{rows.first}/{name}"

    def flat(self, views: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Return, by holder, the rows of all parameters as flat tensors over the same memory."""
        return [
            [self.rows(name, holder).of(view).reshape(-1) for name, view in views.items()]
            for holder in range(self.holders)
        ]


def _dealt(layout: Layout, holders: int) -> dict[str, int]:
    """Deal out whole parameters, by name: the largest first, to the holder with the least."""
    held, owners = [0] * holders, dict[str, int]()
    for name, slot in sorted(layout.slots.items(), key=lambda item: -item[1].padded * item[1].dtype.itemsize):
        owners[name] = held.index(min(held))
        held[owners[name]] += slot.padded * slot.dtype.itemsize
    return owners
