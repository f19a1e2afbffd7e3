"""Tensor parallelism between processes: the T processes that share a stage, and the pipelines that these are part of.

Processes have three coordinates, as the dimensions of a device mesh: width (the pipeline), depth (the rank in it) and
inner (the *tensor rank*), which changes fastest. Processes with equal tensor ranks are pipelines as there are without
tensor parallelism: they have the same schedule and the same data, and messages and sums stay among them. What is added
up within a pass crosses tensor ranks only. So nobody waits for ever where nobody does without: all tensor ranks run one
program, and such a sum joins equal actions of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm.core.ticket import brief
from penstock.errors import CapabilityError, ConfigError, TransportError


@dataclass(frozen=True)
class TensorGroup:
    """The processes that hold the same stages, and which of them this is.

    Attributes:
        index: the tensor rank of this process.
        size: T, how many processes share each stage.
        pipelines: the process group of this tensor rank; None in one process.
        everyone: the process group of all tensor ranks; None in one process.
        mesh: of the processes that share the stages of this one, of one dimension; None where it is alone.
    """

    index: int
    size: int
    pipelines: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    mesh: DeviceMesh | None = None

    @classmethod
    def alone(cls, group: dist.ProcessGroup | None) -> TensorGroup:
        """Return that of a pipeline without tensor parallelism."""
        return cls(0, 1, group, group)

    @classmethod
    def around(cls, group: dist.ProcessGroup) -> TensorGroup:
        """Return that of pipelines that each process of a group has all ranks of, and shares all stages of.

        So are blocks measured and single ranks rehearsed. Nothing but what is added within passes crosses processes, so
        each clips gradients by its own norm.
        """
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("inner",))
        return cls(dist.get_rank(group), dist.get_world_size(group), None, group, mesh)

    @property
    def counts(self) -> bool:
        """Whether what all tensor ranks know alike, such as losses, counts here: on the first, or on each by itself."""
        return not self.index or self.pipelines is None

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all tensor ranks, which call this together, in their order.

        Raises:
            RuntimeError: a peer is dead.
        """
        assert self.mesh is not None, "there is nobody to gather from"
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, tensor.contiguous(), group=self.mesh.get_group())
        return found

    def says(self, value: bool) -> bool:
        """Return what the first tensor rank says; all call this together.

        Raises:
            RuntimeError: a peer is dead.
        """
        if self.mesh is None:
            return value
        said = torch.tensor([value])
        dist.broadcast(said, group=self.mesh.get_group(), group_src=0)
        return bool(said)


def tensor_group(group: dist.ProcessGroup | None, size: int, ranks: int, limit: timedelta) -> TensorGroup:
    """Divide a process group into tensor ranks; all processes of the job call this together.

    Args:
        group: of all processes, tensor ranks next to each other; None for one process.
        size: T, how many processes share each stage.
        ranks: of all pipelines, counted without tensor ranks.
        limit: how long a process waits for the others.

    Raises:
        ConfigError: the group has another number of processes.
        CapabilityError: there is no group, or one that is not the whole job, or without gloo.
    """
    if size == 1:
        return TensorGroup.alone(group)
    if group is None:
        raise CapabilityError(
            f"tensor_parallel={size}: {size} processes share each stage, and this is one process; start one for each "
            f"rank and tensor rank (torchrun --nproc-per-node {ranks * size}) and pass group=torch.distributed.group."
            "WORLD, or leave tensor_parallel out"
        )
    here, job = dist.get_world_size(group), dist.get_world_size()
    if here != ranks * size:
        raise ConfigError(
            f"{ranks} ranks with tensor_parallel={size} are {ranks * size} processes, but the process group has {here}"
        )
    if here != job:
        raise CapabilityError(
            f"tensor_parallel={size} makes process groups, in which all {job} processes of the job must take part, but "
            f"the pipelines have only {here}"
        )
    if "cpu:gloo" not in dist.get_backend_config(group):
        raise CapabilityError(f"tensor_parallel={size} runs over gloo so far; init_process_group('gloo')")
    job_ranks = dist.get_process_group_ranks(group)
    own, index = divmod(dist.get_rank(group), size)
    pipelines = [dist.new_group(job_ranks[i::size], limit, backend="gloo") for i in range(size)]
    sharing = [dist.new_group(job_ranks[r * size : (r + 1) * size], limit, backend="gloo") for r in range(ranks)]
    mesh = DeviceMesh.from_group(sharing[own], "cpu", mesh_dim_names=("inner",))
    return TensorGroup(index, size, pipelines[index], group, mesh)


def explain_lost_peer(error: RuntimeError, where: str) -> None:
    """Raise an error with the reason if a pass has failed because a process that shares the stage is gone.

    Args:
        error: of torch.
        where: the stage in messages.

    Raises:
        TransportError: so it is.
    """
    if "gloo" in str(error):
        reason = f"a process that shares the stage by tensor parallelism is dead or stalled ({brief(error)})"
        raise TransportError(f"{where}: {reason}") from error
