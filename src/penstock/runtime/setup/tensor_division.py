"""Stages that several processes share by tensor parallelism: their blocks divided, and what must hold of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.tensor_group import TensorGroup
from penstock.errors import CapabilityError, ConfigError
from penstock.partition.tensor_parallel import Division, TensorSplit, check_alike, divide_blocks
from penstock.runtime.data.checksum import checksum
from penstock.runtime.plan.plan import PipelinePlan
from penstock.stage.stage_runtime import StageRuntime
from penstock.weights.optim.optimizer_adapters import is_separable, name_of, takes_rows
from penstock.weights.optim.step_hooks import hooks_take_rows


def divide_stage(blocks: Mapping[str, Any], plan: PipelinePlan, tensor: TensorGroup) -> Division:
    """Divide the blocks of a stage among the processes that share it.

    Args:
        blocks: of the stage, by name.
        plan: of the pipeline.
        tensor: the processes.

    Raises:
        ConfigError, CapabilityError: as of `divide_blocks`; or tied parameters of the stage are not divided alike.
    """
    if tensor.mesh is None:
        return Division()
    splits = divide_blocks(blocks, tensor.mesh)
    for name, owner in plan.inside.items():  # of other stages neither is here
        check_alike(name, splits.get(name), owner, splits.get(owner))
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


def check_division(grid: RankGrid, stages: Iterable[StageRuntime]) -> None:
    """Make sure that processes that share stages agree on what is not divided, and all stages on what is tied.

    Raises:
        ConfigError: what is not divided does not begin equal.
        CapabilityError: parameters that stages share are not divided alike.
        TransportError: a peer is dead.
    """
    if grid.tensor.size == 1:
        return
    mine, tied = [], []
    for runtime in stages:
        splits, index = runtime.module.division.splits, runtime.key.index
        same = sorted((name, tensor) for name, tensor in runtime.module.tensors.state().items() if name not in splits)
        mine.append((index, checksum(same, None)))
        for tie in runtime.ties:
            for first_name, name in zip(tie.names[0], tie.names_at(index), strict=True):
                split = splits.get(name)
                tied.append((first_name, name, None if split is None else (split.dimension, split.sections)))
    found = gather_json((mine, tied), "comparing tensor ranks", grid.everyone)
    known: dict[str, tuple[str, TensorSplit | None]] = {}
    for first_name, name, way in (each for _, others in found for each in others):
        split = None if way is None else TensorSplit(way[0], way[1], 0, grid.tensor.size)
        check_alike(name, split, *known.setdefault(first_name, (name, split)))
    for rank, (part, _) in enumerate(found):
        first = rank - rank % grid.tensor.size
        if part != found[first][0]:
            raise ConfigError(
                f"stages do not begin with the same weights on ranks {first} and {rank}, which share them by tensor "
                "parallelism; seed torch alike on all ranks before the blocks are made, or let them be made lazily"
            )
