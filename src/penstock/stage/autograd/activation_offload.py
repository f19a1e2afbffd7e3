"""Activations that are parked: what a graph keeps, moved away for a while (OFFLOAD) and back (FETCH).

They go to the memory of the rank's own host (on the CPU they are there already: they only change their name in the
account of memory), or to another rank, which has them between HOLD and RETURN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.stage.autograd.saved_bytes import SavedBytes


@dataclass
class _StorageSlot:
    """The storage of some tensors that a graph keeps."""

    storage: torch.UntypedStorage
    device: torch.device


@dataclass
class _Spot:
    """A tensor that a graph keeps: where it lies, and how."""

    place: _StorageSlot
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """It, wherever its storage is now."""
        storage = self.place.storage
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Parking(SavedBytes):
    """Records what a graph keeps while a forward runs, so that it can be moved.

    Args:
        known: addresses of memory that lives anyway, such as weights; it stays where it is.
    """

    def __init__(self, known: set[int]) -> None:
        self._places: dict[int, _StorageSlot] = {}
        self._stay: set[int] = set()
        super().__init__(known, self._spot, _found)

    def stay(self, tensors: Iterable[object]) -> None:
        """These are kept by others, too, and cannot be moved."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._stay.add(tensor.untyped_storage().data_ptr())

    def move(self, device: torch.device | None) -> int:
        """Move everything to a device, or back to where it was; returns how many bytes."""
        nbytes = 0
        for place in self._movable():
            place.storage = _copied(place.storage, device or place.device)
            nbytes += place.storage.nbytes()
        return nbytes

    def give(self) -> list[Tensor]:
        """Everything, as bytes, to be sent elsewhere; nothing of it is left here."""
        given = [_bytes(place.storage) for place in self._movable()]
        for place in self._movable():
            place.storage = torch.empty(0).untyped_storage()
        return given

    def take(self, given: Iterable[Tensor]) -> None:
        """Everything back, as `give` gave it."""
        for place, tensor in zip(self._movable(), given, strict=True):
            place.storage = tensor.clone().untyped_storage()

    def _movable(self) -> list[_StorageSlot]:
        return [place for address, place in self._places.items() if address not in self._stay]

    def _spot(self, tensor: Tensor) -> Tensor | _Spot:
        self.add([tensor])
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._known:
            return tensor.detach()
        place = self._places.setdefault(storage.data_ptr(), _StorageSlot(storage, tensor.device))
        return _Spot(place, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _found(kept: Tensor | _Spot) -> Tensor:
    return kept.tensor() if isinstance(kept, _Spot) else kept


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if storage.device == device:
        return storage
    return _bytes(storage).to(device).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
