"""A stand-in for the copies of an accelerator: they are made as late as the order of its work allows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class LateCopies:
    """A side stream whose copies are made when work or a thread has to wait for them; until then there is rubbish.

    So whoever writes what is being copied, or reads a copy, without waiting for it changes the numbers.

    Attributes:
        made: the number of copies made to the host, and of those back.
        waits: the threads that have waited for copies.
        waited: how often the work of the device has.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._queue: list[Callable[[], object]] = []
        self._done, self._lock = 0, threading.Lock()
        self.made = [0, 0]
        self.waits: list[int] = []
        self.waited = 0
        self.open = False  # copies that follow wait for all work so far

    def after_work(self) -> None:
        self.open = True

    def to_host(self, tensor: Tensor) -> Tensor:
        assert self.open
        return self._later(tensor, 0)

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._later(tensor, 1)

    def _later(self, tensor: Tensor, way: int) -> Tensor:
        copy = torch.full_like(tensor, 77)
        self.made[way] += 1
        self._queue.append(partial(copy.copy_, tensor.detach()))
        return copy

    def mark(self) -> Moment:
        self.open = False
        return Moment(self, len(self._queue))

    def before_work(self, copies: Moment) -> None:
        self.waited += 1
        self.make(copies.count)

    def make(self, count: int) -> None:
        with self._lock, torch.no_grad():
            while self._done < count:
                self._queue[self._done]()
                self._queue[self._done] = bool
                self._done += 1


class Moment:
    def __init__(self, copies: LateCopies, count: int) -> None:
        self.copies, self.count = copies, count

    def synchronize(self) -> None:
        self.copies.waits.append(threading.get_ident())
        self.copies.make(self.count)
