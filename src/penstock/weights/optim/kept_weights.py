"""Finds views of weights that an optimizer has kept, which are views of an older version once another is stepped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from penstock.errors import CapabilityError
from penstock.weights.optim.optimizer_adapters import ByParameter, name_of, optimizers_in

_DEPTH = 5  # of containers and optimizers within each other
_KEEP_NONE = ("torch.", "penstock.")  # packages whose optimizers keep no views of weights


class KeptWeights:
    """Notices that an optimizer has kept a view of weights, and steps them in other memory than that.

    In plain torch such a view always shows the newest weights. So it does here, as long as updates are in one place.

    Args:
        optimizer: whose attributes and state are looked at, unless its class is torch's or Penstock's own.
        weights: where they were when it was made.
    """

    def __init__(self, optimizer: Optimizer | None, weights: Iterable[Tensor]) -> None:
        parts = [] if optimizer is None else optimizers_in(optimizer)
        self._foreign = [
            part for part in parts if isinstance(part, ByParameter) or not type(part).__module__.startswith(_KEEP_NONE)
        ]
        self._seen: dict[int, StorageWeakRef] = {}  # references, so that no other storage gets the address of one
        if self._foreign:
            self._see(weights)

    def check(self, weights: Iterable[Tensor]) -> None:
        """Make sure that no view of other weights is kept than those that are to be stepped.

        Raises:
            CapabilityError: one is; it is named.
        """
        if not self._foreign:
            return
        others = self._seen.keys() - self._see(weights)
        if not others:
            return
        for part in self._foreign:
            for where, tensor in _tensors(part, part):
                if tensor.untyped_storage()._cdata in others:
                    raise CapabilityError(
                        f"{name_of(part)} keeps a view of the weights in {where}, but this method makes the next "
                        "version in other memory, so the view would show an older one; keep a copy, "
                        "p.detach().clone(), or read the parameter itself"
                    )

    def _see(self, weights: Iterable[Tensor]) -> set[int]:
        """Take note of the storages of weights; returns their identities."""
        self._seen = {address: ref for address, ref in self._seen.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        storages = (tensor.untyped_storage() for tensor in weights)
        now = {ref.cdata: ref for ref in map(StorageWeakRef, storages)}
        self._seen |= now
        return set(now)


def _tensors(value: Any, optimizer: Optimizer, where: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors within a value, each with its place, but for the parameters that the optimizer steps."""
    if isinstance(value, Tensor):
        yield where, value
    elif depth:
        for name, item in _items(value):
            if not any(item is p for group in optimizer.param_groups for p in group["params"]):
                yield from _tensors(item, optimizer, f"{where}{name}" if where else name.strip(".[]'"), depth - 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Optimizer):
        yield from ((f".{name}", item) for name, item in vars(value).items())
    elif isinstance(value, Mapping):
        yield from ((f"[{'...' if isinstance(key, Tensor) else repr(key)}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
