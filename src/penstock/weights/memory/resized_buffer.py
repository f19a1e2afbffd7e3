"""Buffers whose memory is freed for a while and allocated again in place, so that graphs on them stay valid.

A graph keeps the storages of the leaves it was built on, not their addresses. So a storage that is resized to nothing
after a forward, and filled with the same values again before the backward, serves that backward as if it had never been
away (FSDP2 does the same). Between the two nobody may read it: it has no memory, and while a gather fills it some of
its rows are those of another version. The epoch says so (`NOT_WHOLE`), to everybody who claims the buffer or has.
"""

from __future__ import annotations

from torch import Tensor

from penstock.weights.memory.buffers import NOT_WHOLE, Buffer, Layout


class ResizedBuffer(Buffer):
    """A buffer that can give its memory back for a while.

    Attributes:
        rows: name -> the same memory as `views`, for whoever fills it with what was there before: writing here does not
            count as a change for autograd.
    """

    def __init__(self, layout: Layout, name: str) -> None:
        super().__init__(layout, name)
        self._sizes = [flat.untyped_storage().nbytes() for flat in self.flats]
        self._content = self.epoch  # that of what is or was in it, while `epoch` says that it is not whole
        self.allocated = True
        self.rows: dict[str, Tensor] = {key: view.data for key, view in self.views.items()}

    @property
    def whole(self) -> bool:
        """Whether it may be read."""
        return self.epoch != NOT_WHOLE

    def free(self) -> None:
        """Give the memory back; its content is to be filled in again, or to be replaced (`rewrite`)."""
        if self.whole:
            self._content, self.epoch = self.epoch, NOT_WHOLE
        self.allocated = False
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Take memory again; it holds anything until `complete` says that the content is there."""
        for flat, size in zip(self.flats, self._sizes, strict=True):
            flat.untyped_storage().resize_(size)
        self.allocated = True

    def complete(self) -> None:
        """Let it be read again: its rows have been filled in."""
        if not self.whole:
            self.epoch = self._content

    def rewrite(self) -> None:
        """Begin a new epoch, which invalidates everything that depends on the old content."""
        whole = self.whole
        super().rewrite()
        if not whole:
            self._content, self.epoch = self._content + 1, NOT_WHOLE
