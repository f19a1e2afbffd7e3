"""Parameter-sized blocks of memory, each with views, leaves and an epoch.

A `Buffer` holds all trained parameters of a stage in one flat tensor per dtype. Over time it holds a version of the
weights, the gradient of a batch, or nothing. Code that keeps something which depends on its content (a graph, a
recompute, an offloaded copy) keeps a `Handle` with the buffer's epoch; every rewrite begins a new epoch, after which
`Handle.check` raises. Autograd's version counter is bumped as well, as a second check: it detects a rewrite only where
no saved-tensor hooks are active.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from penstock.errors import VersionError
from penstock.weights.memory.user_parameter_hooks import ParameterHooks

ALIGNMENT = 64  # bytes; kernels may round differently on unaligned data
NOT_WHOLE = -1  # the epoch of a buffer that is not whole, which no handle has


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a buffer's flat tensor of its dtype."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    @property
    def padded(self) -> int:
        """Elements it occupies, including padding that aligns the next parameter."""
        step = max(ALIGNMENT // self.dtype.itemsize, 1)
        return -(-self.numel // step) * step


class Layout:
    """The memory layout of the parameters of a stage, the same in every buffer.

    Args:
        parameters: canonical name -> tensor; only shapes, dtypes and the device are used.

    Attributes:
        nbytes: bytes of one buffer, alignment included.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.slots: dict[str, Slot] = {}
        self.sizes: dict[torch.dtype, int] = {}
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        for name, p in parameters.items():
            start = self.sizes.get(p.dtype, 0)
            self.slots[name] = Slot(p.dtype, start, p.shape)
            self.sizes[p.dtype] = start + self.slots[name].padded
        self.nbytes = sum(size * dtype.itemsize for dtype, size in self.sizes.items())


class Readable(Protocol):
    """Weights that passes compute with: a buffer, or leaves of several (`weights.memory.emulated_delay_buffers`)."""

    @property
    def name(self) -> str:
        """Its name in error messages."""
        ...

    @property
    def epoch(self) -> int:
        """A counter that is raised at every rewrite; `NOT_WHOLE` while the buffer may not be read."""
        ...

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """The autograd leaves that enter graphs, by name."""
        ...

    @property
    def gradient(self) -> Buffer | None:
        """The buffer to which backwards of graphs on the leaves add."""
        ...

    def add_to(self, gradient: Buffer) -> None:
        """Make backwards of graphs on the leaves add to `gradient`."""
        ...

    def settle(self) -> None:
        """Remove hooks that are no longer needed, between two backwards."""
        ...

    def apply_hooks(self, hooks: ParameterHooks) -> None:
        """Let gradients of the leaves go through the hooks of parameters, and through no others."""
        ...

    def accumulate(self, key: str, found: Tensor) -> None:
        """Add to the gradient of a leaf a part that autograd did not compute."""
        ...


class Buffer:
    """One block of parameter-sized memory.

    Attributes:
        views: name -> tensor of the parameter's shape, over the flat memory.
        leaves: the same memory as autograd leaves; these, never an optimizer's parameters, enter graphs.
        epoch: raised at every rewrite.
        gradient: the buffer to which backwards of graphs on these leaves add; None before the first.
        unwritten: while this is a gradient, the parameters that no backward has reached yet; their views hold old
            content.
        sources: while this is a gradient, the buffers whose leaves show it as theirs.
    """

    def __init__(self, layout: Layout, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.gradient: Buffer | None = None
        self.unwritten: set[str] = set()
        self.sources: list[Buffer] = []
        self._flats = {
            dtype: torch.zeros(size, dtype=dtype, device=layout.device) for dtype, size in layout.sizes.items()
        }
        self.views = {
            key: self._flats[slot.dtype][slot.offset : slot.offset + slot.numel].view(slot.shape)
            for key, slot in layout.slots.items()
        }
        self.leaves = {key: view.detach().requires_grad_() for key, view in self.views.items()}
        self._gathering: dict[
            str, RemovableHandle
        ] = {}  # hooks of leaves whose next gradient has to be moved to its place
        self._gathered: set[str] = set()  # leaves whose hook has done so
        self._awaiting: set[str] = set()  # leaves that show no gradient, until their next one
        self._lowers = False  # leaves are in lower precision than their gradients
        self._hooks: ParameterHooks | None = None  # of the user, and how leaves call them
        self._calling: list[RemovableHandle] = []

    @property
    def flats(self) -> list[Tensor]:
        """The flat tensors, one per dtype."""
        return list(self._flats.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all memory."""
        return sum(flat.nbytes for flat in self._flats.values())

    @property
    def storages(self) -> set[int]:
        """The identities of the flat tensors' storages, to tell weights from activations.

        Not their addresses, which change where memory is freed and allocated again (`ResizedBuffer`).
        """
        return {flat.untyped_storage()._cdata for flat in self._flats.values()}

    def rewrite(self) -> None:
        """Begin a new epoch, which invalidates everything that depends on the old content."""
        self.epoch += 1
        torch.autograd.graph.increment_version(self._flats.values())

    def begin_gradient(self) -> None:
        """Become an empty gradient; the old content stays until the first backward overwrites it."""
        self.rewrite()
        self.unwritten = set(self.views)

    def finish_gradient(self) -> None:
        """Zero the gradient of parameters that no backward has reached."""
        self.collect_sources()
        if self.unwritten:
            torch._foreach_zero_([self.views[key] for key in self.unwritten])
            self.unwritten = set()

    def add_to(self, gradient: Buffer) -> None:
        """Make backwards of graphs on the leaves add to `gradient`."""
        self.collect()
        self.gradient = gradient
        if self not in gradient.sources:
            gradient.sources.append(self)
        self._lowers = False
        self.settle()
        self._awaiting.clear()
        for key, leaf in self.leaves.items():
            view = gradient.views[key]
            lowers = view.dtype != leaf.dtype
            self._lowers |= lowers
            if not lowers and key not in gradient.unwritten:
                leaf.grad = view
                continue
            leaf.grad = None
            self._awaiting.add(key)
            if key not in self._gathering:
                hook = _gather(weakref.ref(self), key)
                self._gathering[key] = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Remove the hooks of leaves to whose gradients autograd now adds itself, since each hook takes time."""
        if self._lowers:
            self.collect()  # after each backward: sums are made in full precision
        for key in self._gathered:
            self._gathering.pop(key).remove()
        self._gathered.clear()

    def apply_hooks(self, hooks: ParameterHooks) -> None:
        """Let gradients of the leaves go through the hooks of parameters, and through no others."""
        if hooks is self._hooks:
            return
        for handle in self._calling:
            handle.remove()
        self._hooks = hooks
        before = [(key, partial(hooks.gradient, key)) for key in hooks.before if key in self.leaves]
        after = [(key, _accumulated(weakref.ref(self), key)) for key in hooks.after if key in self.leaves]
        self._calling = [self.leaves[key].register_hook(hook) for key, hook in before]  # type: ignore[no-untyped-call]
        self._calling += [
            self.leaves[key].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for key, hook in after
        ]

    def show_accumulated(self, key: str) -> None:
        """Call the user's hooks on the gradient of a leaf, which has been added to its place."""
        if self._hooks is not None and self.gradient is not None and key in self._hooks.after:
            self._hooks.accumulated(key, self.views[key], self.gradient.views[key])

    def placed(self, key: str, view: Tensor) -> None:
        """Take note that the gradient of a leaf is in its place, where autograd can add to it, unless in lower
        precision."""
        leaf = self.leaves[key]
        if view.dtype != leaf.dtype:
            leaf.grad = None
            return
        leaf.grad = view
        self._awaiting.discard(key)
        if key in self._gathering:
            self._gathered.add(key)

    def collect(self) -> None:
        """Move gradients to their places that a block's own backward has put into a tensor of its own.

        It may assign to the `grad` of a weight (w.grad = w.grad + d), as in plain torch. Until this is called, the
        next backwards go on from there.
        """
        gradient = self.gradient
        if gradient is None:
            return
        for key, leaf in self.leaves.items():
            if leaf.grad is not (None if key in self._awaiting else gradient.views[key]):
                self.take(key, leaf.grad)

    def collect_sources(self) -> None:
        """Let all buffers whose leaves show this gradient move to it what blocks have put elsewhere."""
        for source in self.sources:
            source.collect()

    def take(self, key: str, found: Tensor | None) -> None:
        """Move the gradient of a leaf to its place: what is there already is part of it, if the leaf has shown it."""
        gradient = self.gradient
        assert gradient is not None
        view, added = gradient.views[key], key in self._awaiting and key not in gradient.unwritten
        self.placed(key, view)
        if found is None:  # a block has dropped it
            view.zero_()
        elif added:  # to that of a backward on another version, or in full precision
            view.add_(found)
        else:
            view.copy_(found.to_dense() if found.is_sparse else found)
        gradient.unwritten.discard(key)

    def forget_gradient(self) -> None:
        """Drop the buffer to which backwards of graphs on the leaves have added."""
        self.gradient = None
        for leaf in self.leaves.values():
            leaf.grad = None

    def accumulate(self, key: str, found: Tensor) -> None:
        """Add to the gradient of a leaf a part that autograd did not compute, as autograd would."""
        gradient = self.gradient
        assert gradient is not None
        view = gradient.views[key]
        shown = self.leaves[key].grad
        if shown is not (None if key in self._awaiting else view):
            self.take(key, shown)
        if self._hooks is not None and key in self._hooks.before:
            found = self._hooks.gradient(key, found)
        if key not in gradient.unwritten:
            view.add_(found)
        else:
            view.copy_(found)
            gradient.unwritten.discard(key)
            self.placed(key, view)
        self.show_accumulated(key)

    def scale(self, factor: float) -> None:
        """Multiply everything by `factor`."""
        with torch.no_grad():
            for flat in self._flats.values():
                flat.mul_(factor)

    def approach(self, other: Buffer, share: float) -> None:
        """Move by a share of the distance to another buffer."""
        self.rewrite()
        with torch.no_grad():
            for dtype, flat in self._flats.items():
                flat.lerp_(other._flats[dtype], share)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Rewrite the buffer with the given parameters."""
        self.rewrite()
        with torch.no_grad():
            for key, view in self.views.items():
                view.copy_(tensors[key])


def _gather(buffer: weakref.ref[Buffer], key: str) -> Callable[[Tensor], None]:
    """Make a hook that moves the first gradient of a leaf (in low precision every one) to its place in the buffer.

    Zeroing the place beforehand and adding to it would read and write the memory once more.
    """

    def move(leaf: Tensor) -> None:
        weights, found = buffer(), leaf.grad
        gradient = weights.gradient if weights is not None else None
        if weights is not None and gradient is not None and found is not None and found is not gradient.views[key]:
            weights.take(key, found)

    return move


def _accumulated(buffer: weakref.ref[Buffer], key: str) -> Callable[[Tensor], None]:
    """Make a hook that calls those of the user, once the gradient of a leaf is in its place."""
    move = _gather(buffer, key)

    def show(leaf: Tensor) -> None:
        move(leaf)
        weights = buffer()
        if weights is not None:
            weights.show_accumulated(key)

    return show


@dataclass(frozen=True)
class Handle:
    """A claim on the current content of a buffer, or of several."""

    buffer: Readable
    epoch: int
    version: int

    @property
    def whole(self) -> Buffer:
        """The buffer, if all leaves are from one."""
        assert isinstance(self.buffer, Buffer), "chosen delays require rule flush and no correction"
        return self.buffer

    def check(self, who: str) -> None:
        """Raise an error if the buffer no longer has the claimed content.

        Raises:
            VersionError: the buffer has been rewritten, or its memory released.
        """
        if self.buffer.epoch == NOT_WHOLE:
            raise VersionError(
                f"{who} needs version {self.version} of the weights, which are not whole: buffer {self.buffer.name} "
                "was released, and no gather has completed it since"
            )
        if self.buffer.epoch != self.epoch:
            raise VersionError(
                f"{who} needs version {self.version} of the weights, but buffer {self.buffer.name} has been rewritten "
                f"since (epoch {self.epoch} then, {self.buffer.epoch} now)"
            )
