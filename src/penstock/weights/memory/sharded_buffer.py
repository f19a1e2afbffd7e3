"""Numbers of a stage of which each holder keeps its rows while a span trains, and which are whole between two spans."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.row_shards import RowShards


class DividedRows:
    """The own rows of some numbers, and all of them between two spans.

    The whole is a new buffer every time, never one whose memory comes and goes: users may keep tensors on it.

    Args:
        whole: all of them, as they are at first.
        layout: of the whole.
        shards: who owns which rows.

    Attributes:
        own: the own rows; between two spans the whole counts, into which users may have written.
        whole: all of them; None while a span trains.
    """

    def __init__(self, whole: Buffer, layout: Layout, shards: RowShards) -> None:
        self.whole: Buffer | None = whole
        self._layout, self._shards, self._name = layout, shards, whole.name
        views = shards.own(whole.views)
        self.own = Buffer(Layout(views), f"rows {shards.place} of {whole.name}")
        self.own.load(views)

    @property
    def nbytes(self) -> int:
        """Bytes of all memory."""
        return self.own.nbytes + self.whole_nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole, while it is there."""
        return 0 if self.whole is None else self.whole.nbytes

    @property
    def present(self) -> Mapping[str, Tensor]:
        """The present value of the own rows, by name."""
        return self.own.views if self.whole is None else self._shards.own(self.whole.views)

    def divide(self) -> None:
        """Take the own rows over from the whole, and forget that: a span begins."""
        self.own.load(self.present)
        self.whole = None

    def begin_whole(self) -> list[list[Tensor]]:
        """Allocate the whole with the own rows in it; returns its memory as flat tensors, by the owner of the rows."""
        self.whole = Buffer(self._layout, self._name)
        self.put(self._shards.own(self.whole.views))
        return self._shards.flat(self.whole.views)

    @torch.no_grad()
    def put(self, rows: Mapping[str, Tensor]) -> None:
        """Copy the own rows into other memory."""
        for name, view in self.own.views.items():
            rows[name].copy_(view)
