"""Parameter-sized blocks of memory, each with views, leaves and an epoch.

A `Buffer` holds all trained parameters of a stage in one flat tensor per dtype. It plays different roles over time:
a version of the weights, the gradient of a batch, or nothing. Whoever keeps something that depends on its content (a
graph, a recompute, an offloaded copy) keeps a `Handle` with the buffer's epoch; every rewrite begins a new epoch, and
`Handle.check` then raises. This is the proof of consistency that Penstock itself owns. Autograd's version counter is
bumped as well, as a second net: it notices a rewrite only where no saved-tensor hooks act.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import VersionError

ALIGNMENT = 64  # bytes; kernels may round differently on unaligned data


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a buffer's flat tensor of its dtype."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    @property
    def padded(self) -> int:
        """Elements it takes up: the next parameter is aligned, too."""
        step = max(ALIGNMENT // self.dtype.itemsize, 1)
        return -(-self.numel // step) * step


class Layout:
    """How the parameters of a stage lie in memory, the same in every buffer.

    Args:
        parameters: canonical name -> tensor; only shapes, dtypes and the device are used.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.slots: dict[str, Slot] = {}
        self.sizes: dict[torch.dtype, int] = {}
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        for name, p in parameters.items():
            start = self.sizes.get(p.dtype, 0)
            self.slots[name] = Slot(p.dtype, start, p.shape)
            self.sizes[p.dtype] = start + self.slots[name].padded

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer, alignment included."""
        return sum(size * dtype.itemsize for dtype, size in self.sizes.items())


class Buffer:
    """One block of parameter-sized memory.

    Attributes:
        views: name -> tensor of the parameter's shape, over the flat memory.
        leaves: the same memory as autograd leaves; these, never an optimizer's parameters, enter graphs.
        epoch: raised at every rewrite.
    """

    def __init__(self, layout: Layout, name: str) -> None:
        self.name = name
        self.epoch = 0
        self._flats = {
            dtype: torch.zeros(size, dtype=dtype, device=layout.device) for dtype, size in layout.sizes.items()
        }
        self.views = {
            key: self._flats[slot.dtype][slot.offset : slot.offset + slot.numel].view(slot.shape)
            for key, slot in layout.slots.items()
        }
        self.leaves = {key: view.detach().requires_grad_() for key, view in self.views.items()}

    @property
    def storages(self) -> set[int]:
        """Addresses of the flat tensors, to tell weights from activations."""
        return {flat.untyped_storage().data_ptr() for flat in self._flats.values()}

    def rewrite(self) -> None:
        """Begin a new epoch: whatever depends on the old content is void."""
        self.epoch += 1
        torch.autograd.graph.increment_version(self._flats.values())

    def zero(self) -> None:
        """Rewrite with zeros."""
        self.rewrite()
        with torch.no_grad():
            for flat in self._flats.values():
                flat.zero_()

    def scale(self, factor: float) -> None:
        """Multiply everything by `factor`."""
        with torch.no_grad():
            for flat in self._flats.values():
                flat.mul_(factor)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Rewrite with the given parameters."""
        self.rewrite()
        with torch.no_grad():
            for key, view in self.views.items():
                view.copy_(tensors[key])


@dataclass(frozen=True)
class Handle:
    """A claim on the present content of a buffer."""

    buffer: Buffer
    epoch: int
    version: int

    def check(self, who: str) -> None:
        """Make sure that the content is still the one claimed.

        Raises:
            VersionError: the buffer has been rewritten.
        """
        if self.buffer.epoch != self.epoch:
            raise VersionError(
                f"{who} needs version {self.version} of the weights, but buffer {self.buffer.name} has been rewritten "
                f"since (epoch {self.epoch} then, {self.buffer.epoch} now)"
            )
