"""Stages that several processes share by tensor parallelism: their blocks divided, and what must hold of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.tensor_group import TensorGroup
from penstock.errors import CapabilityError, ConfigError
from penstock.partition.tensor_parallel import Division, divide_blocks
from penstock.runtime.data.checksum import checksum
from penstock.runtime.plan.plan import PipelinePlan
from penstock.stage.stage_runtime import StageRuntime
from penstock.weights.optim.optimizer_adapters import is_separable, name_of, takes_rows
from penstock.weights.optim.step_hooks import hooks_take_rows


def divide_stage(blocks: Mapping[str, Any], where: str, plan: PipelinePlan, tensor: TensorGroup) -> Division:
    """Divide the blocks of a stage among the processes that share it.

    Args:
        blocks: of the stage, by name.
        where: the stage in messages.
        plan: of the pipeline.
        tensor: the processes.

    Raises:
        ConfigError, CapabilityError: as of `divide_blocks`; or what is divided is one with another parameter.
    """
    if tensor.mesh is None:
        return Division()
    splits = divide_blocks(blocks, tensor.mesh)
    tied = {name for tie in plan.ties for names in tie.names for name in names}
    shared = sorted(splits.keys() & (tied | {*plan.inside, *plan.inside.values()}))
    if shared:
        raise CapabilityError(
            f"{where}: {shared[0]} is divided by tensor_parallel={tensor.size}, and is one parameter with another, "
            "which is not offered; untie them, or leave it undivided"
        )
    copies = plan.options.data_parallel.width * plan.schedule.directions
    return Division(tensor.index, splits, tensor.index * copies)


def check_steps_parts(optimizer: Optimizer) -> None:
    """Make sure that an optimizer can step parts of parameters, as tensor parallelism leaves them.

    Raises:
        CapabilityError: it needs whole parameters.
    """
    if not (is_separable(optimizer) and takes_rows(optimizer) and hooks_take_rows(optimizer)):
        raise CapabilityError(
            f"{name_of(optimizer)} looks at parameters as a whole, or has step hooks, and tensor parallelism leaves "
            "each process a part of them; use an optimizer that steps element by element, such as AdamW, or set "
            "tensor_parallel to 1"
        )


def check_undivided(grid: RankGrid, stages: Iterable[StageRuntime]) -> None:
    """Make sure that what is not divided among the processes that share a stage begins equal on all of them.

    Raises:
        ConfigError: it differs.
        TransportError: a peer is dead.
    """
    if grid.tensor.size == 1:
        return
    mine = []
    for runtime in stages:
        splits = runtime.module.division.splits
        same = sorted((name, tensor) for name, tensor in runtime.module.state().items() if name not in splits)
        mine.append((runtime.key.index, checksum(same, None)))
    found = gather_json(mine, "comparing tensor ranks", grid.everyone)
    for rank, part in enumerate(found):
        first = rank - rank % grid.tensor.size
        if part != found[first]:
            raise ConfigError(
                f"stages do not begin with the same weights on ranks {first} and {rank}, which share them by tensor "
                "parallelism; seed torch alike on all ranks before the blocks are made, or let them be made lazily"
            )
