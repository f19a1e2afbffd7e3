"""Two parallel pipelines whose states are sharded or replicated: arms of Penstock and of torch."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleLoopedBFS

import penstock
from benchmarks.arms import Data, PenstockArm, Task

WIDTH, CHUNKS = 2, 4
"""Parallel pipelines, and stages per rank."""


class ParallelPipelinesArm(PenstockArm):
    """A method of Penstock on two parallel pipelines; each run is a span.

    Args:
        method: of all ranks.
        chunks: stages of a rank.
        sharding: of the state over the pipelines.
        m: microbatches per batch and pipeline.
        data: what it trains on.
        task: the model in parts.
    """

    def __init__(self, method: str, chunks: int, sharding: str | None, m: int, data: Data, task: Task) -> None:
        self.microbatches, self.data = WIDTH * m, data
        depth = dist.get_world_size() // WIDTH
        stages = depth * chunks
        self.pipeline = penstock.Pipeline(
            task.stages(stages),
            method=penstock.method(method, chunks=chunks) if chunks > 1 else method,
            stages=depth,
            microbatches=m,
            loss=task.loss,
            optimizer=task.optimizer,
            partition=[1] * stages,
            data_parallel=penstock.DataParallel(WIDTH, sharding=sharding),
            group=dist.new_group(),
        )


class LoopedFsdpArm:
    """torch's breadth-first schedule over stages that `fully_shard` divides among two pipelines.

    Args:
        m: microbatches per batch and pipeline.
        data: what it trains on.
        task: the model in parts.
    """

    def __init__(self, m: int, data: Data, task: Task) -> None:
        depth = dist.get_world_size() // WIDTH
        mesh = init_device_mesh("cpu", (WIDTH, depth), mesh_dim_names=("shard", "pipeline"))
        self.pipeline, self.rank = divmod(dist.get_rank(), depth)
        self.microbatches, self.data, count = WIDTH * m, data, depth * CHUNKS
        parts = task.stages(count)
        own = range(self.rank, count, depth)
        for index in own:
            fully_shard(parts[index], mesh=mesh["shard"])
        group = mesh["pipeline"].get_group()
        stages = [PipelineStage(parts[index], index, count, mesh.device_type, group=group) for index in own]  # type: ignore[arg-type]
        self.schedule = ScheduleLoopedBFS(stages, n_microbatches=m, loss_fn=task.loss)
        self.takes_target = count - 1 in own
        self.optimizer = task.optimizer([p for index in own for p in parts[index].parameters()])

    def run(self, batches: int) -> None:
        """Make a step of the schedule and of the optimizer per batch."""
        for inputs, targets in self.data.joined(batches, self.microbatches):
            x, y = (tensor.chunk(WIDTH)[self.pipeline] for tensor in (inputs, targets))
            arguments = [x] if self.rank == 0 else []
            self.schedule.step(*arguments, **({"target": y, "losses": []} if self.takes_target else {}))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Do nothing: nothing is in flight between batches."""
