"""What crosses the border of a unit otherwise than as its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import CapabilityError
from penstock.partition.replay.specs import leaves_in
from penstock.partition.replay.stage_forward import HiddenWriteError


class UnitBorders(TorchDispatchMode):
    """Watches, in every operation of a forward, which tensors cross the border of a unit other than as arguments and
    results.

    Args:
        units: by path.
        depends: whether one stage alone computes a tensor that is made between units.
    """

    def __init__(self, units: Mapping[str, nn.Module], depends: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depends = depends
        self._owners: dict[int, set[str]] = {}  # of parameters and buffers, by storage
        for path, unit in units.items():
            for tensor in (*unit.parameters(), *unit.buffers()):
                if (storage := _storage(tensor)) is not None:
                    self._owners.setdefault(storage, set()).add(path)
        self._made: dict[int, tuple[StorageWeakRef, int, str]] = {}  # storage -> the call of a unit; 0 between units
        self._path, self._call, self._count = "", 0, 0
        self._arguments: set[int | None] = set()

    def begin(self, path: str, arguments: Iterable[Tensor]) -> None:
        """Note that a unit is called."""
        self._count += 1
        self._path, self._call = path, self._count
        self._arguments = set(map(_storage, arguments))

    def end(self, results: Iterable[Tensor]) -> None:
        """Note that it has returned."""
        for tensor in results:
            storage = _storage(tensor)
            if storage in self._made:
                self._made[storage] = self._made[storage][0], 0, ""
        self._path, self._call = "", 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check what an operation takes, and note what it makes."""
        kwargs = kwargs or {}
        for tensor in leaves_in((*args, *kwargs.values())):
            self._check(tensor)
        result = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in leaves_in((*args, *kwargs.values()))}  # of which results are views
        for tensor in leaves_in((result,)):
            storage = _storage(tensor)
            if storage is not None and storage not in given and self._origin(storage) is None:
                weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._made[storage] = weak, self._call, self._path
        return result

    def _origin(self, storage: int) -> tuple[int, str] | None:
        """Return the call of the unit that made some memory, and its path; None for what was there before."""
        known = self._made.get(storage)
        if known is None or known[0].expired():  # type: ignore[no-untyped-call]
            return None
        return known[1], known[2]

    def _check(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage is None or (storage in self._arguments and self._call):
            return
        owners = self._owners.get(storage)
        if owners is not None and self._call and self._path not in owners:
            raise CapabilityError(
                f"{self._path} reads a parameter or buffer of {min(owners)}, which may be on another stage; pass it as "
                "an argument, or let both be within one layer"
            )
        origin = self._origin(storage)
        if origin is None:
            return
        call, path = origin
        if call not in (0, self._call):
            by = f"{self._path} takes" if self._call else "code between layers takes"
            raise HiddenWriteError(
                f"{by} a value that {path} has left somewhere instead of returning it (an attribute, a list, what a "
                "hook keeps), which other stages cannot see; let it be returned", path,
            )  # fmt: skip
        if self._call and call == 0 and self._depends(tensor):
            raise CapabilityError(
                f"{self._path} takes a value of other layers that is none of its arguments, which other stages cannot "
                "see; pass it as an argument"
            )


def _storage(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's memory; None for one that has none, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
