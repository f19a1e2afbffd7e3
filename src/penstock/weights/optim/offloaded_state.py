"""Offloading of optimizer states: they are in the memory of the host between two updates (SWAPIN, SWAPOUT).

An update is made by the accelerator, from the same numbers in the same memory as without, so it has the same bits; the
processor would round otherwise (ZeRO-Offload steps there). Copies are made beside the work of the accelerator, which
waits for those that it needs, and the host for none. Where the host computes, nothing is copied; the account of memory
says where it would be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from penstock.comm.core.devices import Done, SideStream

OffloadedOptimizer = Literal["none", "stages", "pieces"]
_Group = TypeVar("_Group", bound=Collection[str])


class OffloadedState:
    """The state of the optimizer of a stage; counters (tensors without dimensions) stay where they are.

    Args:
        optimizer: whose state; it may be there already.
        parameters: that it steps, by name.
        in_pieces: a few parameters at a time are here, those of the next step on their way; otherwise all.
        side: copies beside the work of the device; None where the host computes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        in_pieces: bool,
        side: SideStream | None,
    ) -> None:
        self._optimizer, self._parameters, self.in_pieces, self._side = optimizer, parameters, in_pieces, side
        self._here = set(parameters)  # names of what is on the device, or on its way there
        self._arriving: dict[str, Done] = {}
        self._last: Done | None = None  # when all copies so far have been made
        self.store()

    def fetch(self, names: Iterable[str]) -> None:
        """Begin to bring the state of some parameters to the device."""
        wanted = [name for name in names if name not in self._here]
        self._here.update(wanted)
        if self._side is None or not wanted:
            return
        for name in wanted:
            self._move(name, self._side.to_device)
        self._last = self._side.mark()
        self._arriving |= dict.fromkeys(wanted, self._last)

    def settle(self, names: Iterable[str] | None = None) -> None:
        """Have the work that follows on the device wait for what has been fetched; for all of it if None."""
        wanted = list(self._arriving) if names is None else [name for name in names if name in self._arriving]
        arriving = [self._arriving.pop(name) for name in wanted]
        if self._side is not None and arriving:
            self._side.before_work(arriving[-1])  # copies are made in order

    def store(self, names: Iterable[str] | None = None) -> None:
        """Begin to move the state of some parameters to the host, once the work so far is done; all that is here if
        None."""
        leaving = sorted(self._here if names is None else self._here.intersection(names))
        self._here.difference_update(leaving)
        for name in leaving:
            self._arriving.pop(name, None)  # of an update that was skipped; copies are made in order
        if self._side is None or not leaving:
            return
        self._side.after_work()
        for name in leaving:
            self._move(name, self._side.to_host)
        self._last = self._side.mark()

    def bring(self, groups: Iterable[_Group]) -> Iterator[_Group]:
        """Yield groups of parameters whose state is here; that of the next group is on its way meanwhile."""
        if not self.in_pieces:
            self.fetch(self._parameters)  # which a SWAPIN has done already
            self.settle()
            yield from groups
            return
        several = list(groups)
        for place, names in enumerate(several):
            for each in several[place : place + 2]:
                self.fetch(each)
            self.settle(names)
            yield names
            if place + 1 < len(several):
                self.store(names)

    def replaced(self) -> None:
        """Take note that the state was loaded, and is on the device."""
        self._here = set(self._parameters)
        self._arriving.clear()
        self.store()

    def wait(self) -> None:
        """Wait on the host until everything is where it goes, so that it can be read there by anybody."""
        if self._last is not None:
            self._last.synchronize()
            self.settle()
            self._last = None

    @property
    def arrives(self) -> bool:
        """Whether something may still be on its way to the device."""
        return bool(self._arriving)

    @property
    def nbytes(self) -> int:
        """Bytes that are in the memory of the host."""
        away = [parameter for name, parameter in self._parameters.items() if name not in self._here]
        return sum(value.nbytes for parameter in away for value in _large(self._optimizer, parameter).values())

    def _move(self, name: str, copied: Callable[[Tensor], Tensor]) -> None:
        parameter = self._parameters[name]
        for key, value in _large(self._optimizer, parameter).items():
            self._optimizer.state[parameter][key] = copied(value)


def _large(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
