"""Copies derived from the weights of a stage: predictions, blends, and an estimate of what forwards have read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.errors import VersionError
from penstock.schedule.ir.schedule import Copy
from penstock.weights.memory.buffers import Buffer, Handle, Layout


class DerivedCopies:
    """The buffers of the copies that are derived from the weights of one stage.

    Args:
        layout: of the versions that passes read.
        where: name of the stage for error messages.
        count: number of copies alive at once, as proven.

    Attributes:
        alive: the copies that passes may read.
    """

    def __init__(self, layout: Layout, where: str, count: int) -> None:
        self._layout, self._where = layout, where
        self.alive: dict[Copy, Buffer] = {}
        self._spare: list[Buffer] = []
        self._made: dict[Buffer, object] = {}  # copy -> the key of its content
        self._estimate: Buffer | None = None
        self._estimated: object = None  # the key of its content
        self.resize(count)

    @property
    def buffers(self) -> list[Buffer]:
        """All of them, alive or not."""
        return [*self._spare, *self.alive.values(), *([] if self._estimate is None else [self._estimate])]

    def read(self, copy: Copy, version: int) -> Handle:
        """Claim a copy that was made of a version.

        Raises:
            VersionError: it does not exist.
        """
        if copy not in self.alive:
            raise VersionError(f"{self._where}: copy {copy.label}{copy.first} of the weights does not exist")
        return Handle(self.alive[copy], self.alive[copy].epoch, version)

    def create(self, copy: Copy, made_of: object, write: Callable[[Buffer], None]) -> None:
        """Create a copy of the newest weights, or of two versions.

        Args:
            copy: its name.
            made_of: key of its content; a dropped copy with an equal key is reused without writing.
            write: fills a buffer.

        Raises:
            VersionError: no buffer is free.
        """
        if not self._spare:
            raise VersionError(f"{self._where}: no buffer is free for copy {copy.label}{copy.first} of the weights")
        same = [i for i, buffer in enumerate(self._spare) if self._made.get(buffer) == made_of]
        buffer = self.alive[copy] = self._spare.pop(same[0] if same else 0)
        if not same:
            write(buffer)
            self._made[buffer] = made_of

    def retain(self, alive: Iterable[Copy]) -> None:
        """Free the buffers of all copies except those in `alive`."""
        for copy in self.alive.keys() - set(alive):
            self._spare.append(self.alive.pop(copy))

    def forget(self) -> None:
        """Invalidate the content of dropped copies and estimates, because the weights were replaced."""
        self._made.clear()
        self._estimated = None

    def resize(self, count: int) -> None:
        """Drop all copies, whose content is lost, and hold buffers for so many."""
        self.retain(())
        self.forget()
        self._spare = self._spare[:count]
        while len(self._spare) < count:
            self._spare.append(Buffer(self._layout, f"copy {len(self._spare)} of {self._where}"))

    def hold_estimate(self, wanted: bool) -> None:
        """Allocate a buffer for estimates of the weights that forwards have read, or free it."""
        self._estimated = None
        if not wanted:
            self._estimate = None
        elif self._estimate is None:
            self._estimate = Buffer(self._layout, f"estimate of {self._where}")

    @property
    def holds_estimate(self) -> bool:
        """Whether there is a buffer for estimates."""
        return self._estimate is not None

    def estimate(self, version: int, gap: int, write: Callable[[Buffer], None]) -> Handle:
        """Claim an estimate of the weights `gap` updates before the newest version.

        Args:
            version: the newest version; estimates with the same version and gap are equal.
            gap: number of updates.
            write: fills the buffer.
        """
        buffer = self._estimate
        assert buffer is not None
        if self._estimated != (version, gap):
            write(buffer)
            self._estimated = version, gap
        return Handle(buffer, buffer.epoch, version)
