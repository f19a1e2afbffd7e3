"""A process group of many ranks that are threads of this process, and what each of them sends and asks for."""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Network:
    """Carries tensors between ranks, and counts messages and bytes of each rank, sent and received."""

    def __init__(self) -> None:
        self.messages: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self._lanes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()  # the threads of two ranks may both be first on their lane, or count at once

    def end(self, rank: int) -> Callable[..., End]:
        """What takes the place of `TaggedGroup` on a rank."""
        return lambda *_: End(self, rank)

    def carry(self, tensor: Tensor, source: int, target: int) -> None:
        with self._lock:
            for rank in (source, target):
                self.messages[rank] += 1
                self.bytes[rank] += tensor.nbytes
            lane = self._lanes[source, target]
        lane.put(tensor.clone())

    def take(self, source: int, target: int) -> Tensor:
        with self._lock:
            lane = self._lanes[source, target]
        return lane.get(timeout=60)


class End:
    """The messages of one rank."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def send(self, tensor: Tensor, rank: int) -> None:
        self._network.carry(tensor, self._rank, rank)

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], Any]:
        return lambda: tensor.copy_(self._network.take(rank, self._rank))

    def finish(self, works: Sequence[Callable[[], Any] | None]) -> None:
        for work in works:
            if work is not None:
                work()
