"""The grid of ranks: w parallel pipelines of d ranks each, all in one process or one process per rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.comm.core.tensor_group import TensorGroup, tensor_group
from penstock.errors import ConfigError
from penstock.schedule.ir.rank_numbers import RankNumbers
from penstock.schedule.ir.schedule import Stage

_LOG = logging.getLogger(__name__)
_LONGEST = 86400.0 * 365  # seconds; a time-out may be infinite, which is no duration to torch


class RankKey(NamedTuple):
    """A rank, as the index of its pipeline and its rank in that pipeline."""

    pipeline: int
    rank: int


class Holder(NamedTuple):
    """A stage of one of the parallel pipelines, which holds a copy of that stage's weights."""

    pipeline: int
    stage: Stage


Members = tuple[Holder, ...]


def patience(timeout: float) -> timedelta:
    """Return the time-out of torch for seconds that a rank waits for another one."""
    return timedelta(seconds=min(timeout, _LONGEST))


class RankGrid:
    """All ranks of all parallel pipelines, and the process group that connects them.

    Args:
        numbers: of the ranks: w pipelines of d ranks each, and their order.
        group: one process per rank, in this order; None for one process with all ranks. With tensor parallelism those
            of one tensor rank.
        timeout: seconds that a rank waits for another one; also of the control group, if it is made here.
        tensor: the processes that share the stages of this one; it is alone if None.
        first_only: one process has the ranks of the first pipeline; the others are not there.

    Attributes:
        local: the ranks of this process.
        first_only: as given.
        patience: the `timeout`.
        control: a process group on the CPU for small messages; None in one process.
        everyone: the same of all tensor ranks.

    Raises:
        ConfigError: `width` is not a positive integer, or the group's size is not w times d.
    """

    def __init__(
        self,
        numbers: RankNumbers,
        group: dist.ProcessGroup | None,
        timeout: float,
        tensor: TensorGroup | None = None,
        first_only: bool = False,
    ) -> None:
        self.numbers, self.group, self.first_only = numbers, group, first_only
        self.width, self.depth = width, depth = numbers.width, numbers.depth
        self.patience = patience(timeout)
        if group is None:
            here = range(1 if first_only else width)
            self.local = [RankKey(pipeline, rank) for pipeline in here for rank in range(depth)]
        else:
            size = dist.get_world_size(group)
            if size != width * depth:
                pipelines = f" times {width} parallel pipelines" if width > 1 else ""
                raise ConfigError(
                    f"the schedule has {depth} ranks{pipelines}, the process group {size}; start {width * depth} "
                    "processes (torchrun --nproc-per-node), or leave stages out to have one for each"
                )
            self.local = [RankKey(*numbers.place(dist.get_rank(group)))]
        self.control = _control_group(group, self.patience)
        self.tensor = tensor or TensorGroup.alone(group)
        self.everyone = self.tensor.everyone if self.tensor.size > 1 else self.control

    def __repr__(self) -> str:
        """Return its size, and what part of it is here."""
        here = "all in this process" if self.group is None else f"this is {self.local[0]}"
        here = "the first pipeline in this process" if self.first_only else here
        return f"<RankGrid of {self.width} x {self.depth} ranks, {here}>"

    def global_rank(self, key: RankKey) -> int:
        """Return the global number of a rank; with several processes it is the rank in the process group."""
        return self.numbers.number(*key)

    def on_tensor_rank(self, holder: Holder, index: int | None = None) -> Holder:
        """Return a holder with a number that tells it apart from those of other tensor ranks.

        Args:
            holder: of one tensor rank.
            index: which; that of this process if None.
        """
        return holder._replace(pipeline=holder.pipeline + self.width * (self.tensor.index if index is None else index))

    def process_of_all(self, holder: Holder) -> int:
        """Return the rank in `everyone` of the process that holds a stage, of those of all tensor ranks."""
        index, pipeline = divmod(holder.pipeline, self.width)
        return self.process(holder._replace(pipeline=pipeline)) * self.tensor.size + index

    def process(self, holder: Holder) -> int:
        """Return the group rank of the process that holds a stage."""
        return self.global_rank(RankKey(holder.pipeline, holder.stage.rank))

    @property
    def global_ranks(self) -> Iterator[int]:
        """The global numbers of this process's ranks."""
        return (self.global_rank(key) for key in self.local)

    @property
    def pipelines(self) -> list[int]:
        """The pipelines that this process has a rank of."""
        return sorted({key.pipeline for key in self.local})


def rank_grid(numbers: RankNumbers, group: dist.ProcessGroup | None, timeout: float, tensor: int = 1) -> RankGrid:
    """Return the grid of a process group, whose processes may share stages by tensor parallelism.

    Args:
        numbers, timeout: as of `RankGrid`.
        group: of all processes: those that share a stage next to each other, otherwise in the order of the numbers.
        tensor: T, how many processes share each stage.

    Raises:
        ConfigError, CapabilityError: as of `RankGrid` and `tensor_group`.
    """
    shared = tensor_group(group, tensor, numbers.width * numbers.depth, patience(timeout))
    return RankGrid(numbers, shared.pipelines, timeout, shared)


def check_group(group: Any) -> None:
    """Refuse what is no process group; None stands for a single process.

    Raises:
        ConfigError: it is none, or this process is not in it.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("this process is not a member of the group: make the pipeline on the ranks of the group only")
    raise ConfigError(
        f"group must be a process group, such as torch.distributed.group.WORLD, or None for one process; got {group!r}"
    )


def warn_if_alone() -> None:
    """Say in the log that a pipeline without a group runs here alone, where this is one of several processes."""
    if dist.get_world_size() > 1 if dist.is_initialized() else dist.is_torchelastic_launched():
        begin = "" if dist.is_initialized() else "torch.distributed.init_process_group('gloo') and "
        _LOG.warning(
            "the pipeline has no group, so each of the processes runs all of its ranks by itself; to run one rank in "
            "each: %sPipeline(..., group=torch.distributed.group.WORLD)",
            begin,
        )


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return device type -> backend of a process group, such as {"cpu": "gloo", "cuda": "nccl"}."""
    parts = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (part.partition(":") for part in parts)}


def _control_group(group: dist.ProcessGroup | None, limit: timedelta) -> dist.ProcessGroup | None:
    """Return the given group if it has gloo on the CPU, else make a gloo group of the same ranks."""
    if group is None or backends(group).get("cpu") == "gloo":
        return group
    made: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(group), limit, backend="gloo")
    return made
