"""Offloading of activations: the saved tensors of a graph are moved away for a while (OFFLOAD) and back (FETCH).

They go to the memory of the rank's own host (on the CPU they are there already; only their role in the memory account
changes), or to another rank, which keeps them between HOLD and RETURN. An accelerator moves them beside its work: a
FETCH is issued some actions before the backward, and that alone waits for it, on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.comm.core.devices import Done, SideStream
from penstock.stage.autograd.saved_bytes import SavedBytes, has_memory, storage_sizes

_HOST = torch.device("cpu")


@dataclass
class _StorageSlot:
    """A storage that saved tensors of a graph share; its content may be elsewhere at the moment."""

    storage: torch.UntypedStorage
    device: torch.device


@dataclass
class _SavedView:
    """A saved tensor as a view of its storage."""

    place: _StorageSlot
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Make the tensor, on whatever device its storage is now."""
        storage = self.place.storage
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class ActivationOffload(SavedBytes):
    """Saved-tensor hooks that record what a graph saves while a forward runs, so that it can be moved.

    Args:
        known: identities of storages that live anyway, such as weights; they are never moved.
        side: copies beside the work of the device; None where the host computes.
    """

    def __init__(self, known: set[int], side: SideStream | None = None) -> None:
        self._side = side
        self._arriving: Done | None = None  # when what comes back is there
        self._places: dict[int, _StorageSlot] = {}
        self._pinned: set[int] = set()
        super().__init__(known, self._record, _unpack)

    def pin(self, tensors: Iterable[object]) -> None:
        """Exclude tensors from being moved, because others keep them alive, too."""
        for tensor in tensors:
            self._pinned.update(storage_sizes([tensor]))

    def move(self, *, away: bool) -> int:
        """Move all recorded storages to the memory of the host, or back, and return their bytes."""
        side, nbytes = self._side, 0
        if side is not None:
            side.after_work()  # which makes what is moved away
        for place in self._movable():
            if side is None or place.device != side.device:
                place.storage = _copied(place.storage, _HOST if away else place.device)
            else:
                copied = side.to_host if away else side.to_device
                place.storage = copied(_bytes(place.storage)).untyped_storage()
            nbytes += place.storage.nbytes()
        if side is not None:
            self._arriving = side.mark()
        return nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all recorded storages that can be moved, wherever they are."""
        return sum(place.storage.nbytes() for place in self._movable())

    @property
    def arrives(self) -> bool:
        """Whether something may still be on its way back."""
        return self._arriving is not None

    def settle(self) -> None:
        """Have the work that follows on the device wait for what comes back; called before a backward reads it."""
        if self._arriving is not None and self._side is not None:
            self._side.before_work(self._arriving)
            self._arriving = None

    def take_bytes(self) -> list[Tensor]:
        """Take all recorded storages out, as tensors of bytes to be sent to another rank, and free them here."""
        self.settle()
        given = [_bytes(place.storage) for place in self._movable()]
        for place in self._movable():
            place.storage = torch.empty(0).untyped_storage()
        return given

    def put_bytes(self, given: Iterable[Tensor]) -> None:
        """Put back what `take_bytes` took out."""
        for place, tensor in zip(self._movable(), given, strict=True):
            place.storage = tensor.clone().untyped_storage()

    def _movable(self) -> list[_StorageSlot]:
        return [place for storage, place in self._places.items() if storage not in self._pinned]

    def _record(self, tensor: Tensor) -> Tensor | _SavedView:
        self.add([tensor])
        if not has_memory(tensor):
            return tensor.detach()  # sparse ones stay where they are
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return tensor.detach()
        place = self._places.setdefault(storage._cdata, _StorageSlot(storage, tensor.device))
        return _SavedView(place, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _unpack(kept: Tensor | _SavedView) -> Tensor:
    return kept.tensor() if isinstance(kept, _SavedView) else kept


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if storage.device == device:
        return storage
    return _bytes(storage).to(device).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
