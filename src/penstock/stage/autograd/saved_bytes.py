"""Walks over autograd graphs, and the exact number of bytes that one keeps alive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that count the storages that autograd saves while a forward runs, each once.

    Saved-tensor hooks switch off autograd's own check for tensors written after they were saved, and they cost time; so
    they are used only for the first forward of each input shape.

    Args:
        known: identities of storages that live anyway: weights, buffers.
        pack: turns a tensor into the object that the graph keeps; the tensor itself by default.
        unpack: turns that object back into the tensor.

    Attributes:
        gave_up: the forward ran without the hooks, because a block refuses them; what it saved is to be added.
    """

    def __init__(
        self,
        known: set[int],
        pack: Callable[[Tensor], Any] | None = None,
        unpack: Callable[[Any], Tensor] = lambda saved: saved,
    ) -> None:
        self._known = known
        self._seen: dict[int, int] = {}
        self._deferred: dict[int, int] = {}
        self._target = self._seen
        self.gave_up = False
        super().__init__(pack or self._pack, unpack)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        del self.pack_hook, self.unpack_hook  # a method of its own would keep this alive, and what it has seen

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add([tensor])
        return tensor.detach()  # an operation that keeps its own result would otherwise keep itself

    def give_up(self) -> None:
        """Forget what was counted, because the forward runs again without the hooks."""
        self.gave_up = True
        self._seen.clear()
        self._deferred.clear()

    def add(self, tensors: Iterable[object]) -> None:
        """Count the storages of these tensors, too."""
        for storage, nbytes in storage_sizes(tensors).items():
            if storage not in self._known:
                self._target[storage] = nbytes

    @contextmanager
    def counting_deferred(self) -> Iterator[None]:
        """Count as deferred whatever is saved in this context (`penstock.stage.autograd.split_backward`)."""
        self._target = self._deferred
        try:
            yield
        finally:
            self._target = self._seen

    @property
    def total(self) -> int:
        """All bytes counted so far."""
        return sum((self._seen | self._deferred).values())

    @property
    def deferred(self) -> int:
        """The bytes among them that stay alive until the second half of a split backward."""
        return sum(self._deferred.values())


class SavedWeights:
    """Lets backwards of custom Functions find in `saved_tensors` the weights, as they do without saved-tensor hooks.

    Torch unpacks what hooks have kept into new tensors: a gradient or an attribute that a backward assigns to such a
    one would be lost. (What torch's checkpoint keeps is lost in plain torch, too.)
    """

    def __init__(self) -> None:
        self._linked: dict[type, type] = {}

    def link(self, nodes: Iterable[Any]) -> bool:
        """Link what the Functions among the nodes of a graph have saved under hooks; return whether there are any."""
        found = [node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)]
        found = [node for node in found if any(map(_is_kept, node._raw_saved_tensors))]
        for node in found:
            kind = type(node)
            node.__class__ = self._linked.setdefault(kind, type(kind.__name__, (_LinkedNode, kind), {}))
        return bool(found)


def _is_kept(saved: Any) -> bool:
    hook = getattr(saved, "unpack_hook", None)
    return not getattr(hook, "__module__", "").startswith("torch.utils.checkpoint")


class _LinkedNode:
    """A node of a custom Function whose saved weights share gradients and attributes with the leaves of its graph."""

    __found: tuple[Any, ...] | None = None
    __given: Sequence[tuple[Tensor, Tensor, Tensor | None]] = ()

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What the forward has saved."""
        if self.__found is None:
            self.__given = []
            self.__found = tuple(map(self.__link, super().saved_tensors))  # type: ignore[misc]
        return self.__found

    def __link(self, saved: Any) -> Any:
        leaf = leaf_of(saved) if isinstance(saved, Tensor) and saved.requires_grad else None
        if leaf is None:
            return saved
        if saved.grad_fn is not None:  # a proxy, which is no leaf itself
            saved = saved.detach().requires_grad_()
        saved.__dict__, saved.grad = leaf.__dict__, leaf.grad
        self.__given = [*self.__given, (saved, leaf, leaf.grad)]
        return saved

    def apply(self, *gradients: Any) -> Any:
        """Run the backward, and give the leaves the gradients that it has assigned."""
        result = super().apply(*gradients)  # type: ignore[misc]
        for saved, leaf, before in self.__given:
            if saved.grad is not before:
                leaf.grad = saved.grad
        self.__found, self.__given = None, ()
        return result


def saved_of(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that nodes of a graph have saved, as torch shows them."""
    for node in nodes:
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                yield from (t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor))


def storage_bytes(tensors: Iterable[object], known: Collection[int]) -> int:
    """Sum the bytes of the storages of `tensors`, each once, without those that are known."""
    return sum(nbytes for storage, nbytes in storage_sizes(tensors).items() if storage not in known)


def storage_sizes(tensors: Iterable[object]) -> dict[int, int]:
    """Return the bytes of the storages of `tensors` by identity, which stays where memory is allocated again."""
    storages = [part.untyped_storage() for t in tensors if isinstance(t, Tensor) for part in _dense_parts(t)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of one storage: it is not sparse or nested, nor zero without memory."""
    return tensor.layout is torch.strided and not tensor._is_zerotensor()


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse or nested one consists of; a dense one itself."""
    if hasattr(tensor, "_local_tensor"):  # a DTensor
        return _dense_parts(tensor._local_tensor)
    layout = tensor.layout
    if layout is torch.strided:
        return (tensor,) if has_memory(tensor) else ()
    with torch.no_grad():
        if layout is torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if layout is torch.jagged:
            return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
        rows = layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (
            (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
        )
        return *indices, tensor.values()


def signature(value: object) -> tuple[object, ...]:
    """Shapes, dtypes and types of all leaves of an input, on which the bytes that a graph saves depend."""
    if type(value) is Tensor:
        return value.shape, value.dtype, value.requires_grad
    if value is None:
        return (type(None),)
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in pytree.tree_leaves(value)
    )


def edges_of(value: Any) -> list[GradientEdge | None]:
    """The edge at which a gradient enters the graph of each leaf of a tree; None for leaves without a graph."""
    if type(value) is Tensor:
        return [get_gradient_edge(value) if value.requires_grad else None]
    leaves = pytree.tree_leaves(value)
    return [get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]


def trained_leaves(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in whose `.grad` a backward from the leaves of `value` would accumulate."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    yield from (t for t in tensors if t.grad_fn is None)
    yield from (node.variable for node in graph_nodes(value) if type(node).__name__ == "AccumulateGrad")


def leaf_of(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor stands for in graphs: itself, or that of which it is another object."""
    node: Any = get_gradient_edge(tensor).node
    if type(node).__name__ == "AliasBackward0":
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def graph_nodes(value: Any) -> Iterator[Any]:
    """Yield every node of the graph behind the leaves of `value`."""
    rest: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        rest += [following for following, _ in node.next_functions]
