"""A recorder that stands in for that of CUDA graphs: it calls functions again; and tiny pipelines to use it on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.options.run import Device
from penstock.runtime.pipeline import Pipeline


class Again:
    """Recorded work that calls the function again.

    A GPU records without running anything; here a forward runs when it is recorded, so that its output has a shape.
    """

    def __init__(self, work: Callable[[], None], log: list[str]) -> None:
        self._work, self._log = work, log
        self._name = (work.func if isinstance(work, partial) else work).__name__
        if "forward" in self._name:
            work()

    def replay(self) -> None:
        self._log.append(self._name)
        self._work()


class CallsAgain:
    """Stands in for the recorder of CUDA graphs."""

    def __init__(self) -> None:
        self.replayed = list[str]()
        self.pools = set[object]()
        self.recorded = 0

    def pool(self) -> object:
        return object()

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, work: Callable[[], None], pool: object) -> Again:
        self.recorded += 1
        self.pools.add(pool)
        return Again(work, self.replayed)


def tiny(first: nn.Module | None = None, cuda_graphs: bool = True, **changes: Any) -> Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 3) if first is None else first, nn.Linear(3, 2)]
    arguments: dict[str, Any] = {"method": "1f1b", "microbatches": 2, "stages": 2, "loss": F.mse_loss}
    arguments |= {"optimizer": torch.optim.SGD, "device": Device(cuda_graphs=cuda_graphs)}
    with torch.no_grad():
        for block in blocks:
            for parameter in block.parameters():
                parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(3))
    return Pipeline(blocks, **arguments | changes)


def pairs(batches: int, samples: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.rand(samples, 3, generator=generator), torch.rand(samples, 2, generator=generator))
        for _ in range(batches)
    ]
