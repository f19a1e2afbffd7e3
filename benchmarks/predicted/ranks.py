"""A rank of `benchmarks.predictions`: trains configurations, and pings its peer."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock
from benchmarks.arms import PenstockArm, make_optimizer, mean_loss
from benchmarks.network.worker import CpuClock, Worker, serve_as
from benchmarks.predicted.configurations import ALL_MODELS, Configuration, of_row
from penstock import gpt_blocks
from penstock.measure.this_machine import ping
from penstock.models.gpt import Layer

_PIECES = 6


class ConfiguredArm(PenstockArm):
    """A configuration; each run is a span.

    Args:
        configuration: of all ranks.
    """

    def __init__(self, configuration: Configuration) -> None:
        of = configuration
        self.microbatches, self.data = of.width * of.m, of.shape.data()
        self.pipeline = penstock.Pipeline(
            gpt_blocks(of.shape.shape, seed=0),
            method=of.method,
            stages=of.depth,
            microbatches=of.m,
            loss=mean_loss,
            optimizer=make_optimizer,
            partition=list(of.stages),
            recompute="block" if of.recompute else "none",
            data_parallel=penstock.DataParallel(of.width),
            group=dist.new_group(),
        )


class ConfiguredRanks(Worker):
    """The configurations of one rank."""

    def ping(self, sizes: list[int], patience: float = 60.0) -> dict[str, Any]:
        """Measure the link between the first two ranks."""
        pair = dist.new_group([0, 1])
        found = ping(pair, sizes, patience) if dist.get_rank() < 2 else []
        dist.barrier()
        return {"pings": found}

    def pace(self) -> dict[str, Any]:
        """Measure how fast the machine is just now: the first two ranks do the same piece of work at once.

        Returns:
            pace: seconds of it; 0 on other ranks.
        """
        dist.barrier()
        seconds = time_of_a_piece() if dist.get_rank() < 2 else 0.0
        dist.barrier()
        return {"pace": seconds}

    def build(self, name: str, configuration: dict[str, Any]) -> dict[str, Any]:
        """Make a configuration, and warm it up."""
        arm = ConfiguredArm(of_row(configuration))
        self._arms[name, "", ""] = arm
        self._cpu[name, "", ""] = CpuClock(arm.pipeline._ranks[0].recorder)
        arm.run(3)
        return {}

    def step(self, name: str, batches: int) -> dict[str, Any]:
        """Run a span.

        The last batch feeds the pipeline while the one before is finished, so nothing of its drain counts.

        Returns:
            What `turn` does; step: seconds from the second update of this rank to the last but one, for each batch;
            pace: of the machine, before and after.
        """
        before = self.pace()["pace"]
        found = self.turn(name, "", batches)
        found["pace"] = (before + self.pace()["pace"]) / 2
        (state,) = self._arms[name, "", ""].pipeline._ranks  # type: ignore[attr-defined]
        ends = [each[3] for each in state.recorder._entries if len(each) > 3 and each[4] == "STEP"][-batches:]
        return found | {"step": (ends[-2] - ends[1]) / (len(ends) - 3)}

    def calibrate(self, name: str, batches: int) -> dict[str, Any]:
        """Run a span, and tell what the rank did when.

        Returns:
            intervals: of its compute lane, the first seven fields of each.
        """
        start = time.perf_counter()
        self.turn(name, "", batches)
        (state,) = self._arms[name, "", ""].pipeline._ranks  # type: ignore[attr-defined]
        entries = [each for each in state.recorder._entries if len(each) > 3]  # others are changes of memory
        return {"intervals": [[*each[:5], "", each[6]] for each in entries if each[1] == "compute" and each[2] > start]}


def time_of_a_piece() -> float:
    """Return the mean seconds of a piece of work: a forward and a backward of two layers, in plain torch."""
    model = ALL_MODELS["middle"]
    layers = nn.Sequential(*(Layer(model.shape) for _ in range(2)))
    x = torch.randn(model.samples, model.shape.context, model.shape.width)
    layers(x).sum().backward()
    start = time.perf_counter()
    for _ in range(_PIECES):
        layers(x).sum().backward()
    return (time.perf_counter() - start) / _PIECES


if __name__ == "__main__":
    serve_as(ConfiguredRanks)
