"""Parallel pipelines on torch's device mesh, and process groups of the ranks that hold the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm.collective.control_plane import collective
from penstock.comm.core.rank_grid import Members, RankGrid, backends
from penstock.errors import CapabilityError, ConfigError
from penstock.schedule.ir.rank_numbers import RANK_ORDERS, RankNumbers, RankOrder

_DIMENSIONS: Mapping[tuple[str, ...], RankOrder] = MappingProxyType({
    ("width", "depth"): "tp-pp-dp",
    ("width", "depth", "inner"): "tp-pp-dp",
    ("depth", "width"): "tp-dp-pp",
    ("depth", "width", "inner"): "tp-dp-pp",
})  # fmt: skip

Groups = Mapping[frozenset[int], dist.ProcessGroup]
"""Ranks in the grid's group -> the process group of just these ranks."""


class MeshSizes(NamedTuple):
    """What a device mesh says of the processes of a pipeline.

    Attributes:
        numbers: of the ranks.
        tensor: T, how many processes share each stage.
        group: of all processes, in the order of the mesh.
    """

    numbers: RankNumbers
    tensor: int
    group: dist.ProcessGroup | None


def from_mesh(mesh: DeviceMesh | None, numbers: RankNumbers, tensor: int, group: dist.ProcessGroup | None) -> MeshSizes:
    """Return the numbers of ranks, how many of them share stages, and the group of all processes.

    Args:
        mesh: with dimensions (width, depth) or (width, depth, inner), or depth first; None if there is none.
        numbers: those that the user gave, with the depth of the schedule; with a mesh a width of 1, and the usual
            order, are those of the mesh.
        tensor: T that the user gave; with a mesh 1 is that of the mesh.
        group: the mesh's ranks, in its order; the whole job if None.

    Raises:
        ConfigError: mesh, numbers, tensor and group contradict each other.
    """
    if mesh is None:
        return MeshSizes(numbers, tensor, group)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {mesh!r:.80}")
    names = mesh.mesh_dim_names or ()
    order = _DIMENSIONS.get(names)
    if order is None:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions named {names}; name them {' or '.join(map(str, _DIMENSIONS))}"
        )
    sizes = dict(zip(names, mesh.shape, strict=True))
    inner = sizes.get("inner", 1)
    if tensor not in (1, inner):
        raise ConfigError(
            f"tensor_parallel is {tensor}, but the inner dimension of the mesh is {inner}; leave tensor_parallel out"
        )
    if sizes["depth"] != numbers.depth:
        raise ConfigError(f"the schedule has {numbers.depth} ranks, but the depth of the mesh is {sizes['depth']}")
    if numbers.width not in (1, sizes["width"]):
        raise ConfigError(
            f"data_parallel is {numbers.width}, but the mesh has a width of {sizes['width']}; leave data_parallel out"
        )
    if numbers.order not in (RANK_ORDERS[0], order):
        raise ConfigError(
            f"rank_order is {numbers.order!r}, but the dimensions of the mesh are {names}, which is {order!r}; leave "
            "rank_order out"
        )
    whole: dist.ProcessGroup | None = dist.group.WORLD if group is None else group
    assert whole is not None, "a mesh makes the default group"
    ranks, found = mesh.mesh.flatten().tolist(), dist.get_process_group_ranks(whole)
    if ranks != found:
        raise ConfigError(
            f"the mesh has the ranks {ranks}, but {'the job' if group is None else 'group'} has {found}; pass a group "
            "of the mesh's ranks, in the mesh's order"
        )
    return MeshSizes(RankNumbers(sizes["width"], numbers.depth, order), inner, whole)


def groups_of_holders(grid: RankGrid, holders: Iterable[Members], mesh: DeviceMesh | None) -> Groups:
    """Make a process group for each stage that is held several times; without a mesh all ranks of the job call this.

    The groups are made once and used by all spans.

    Args:
        grid: all ranks.
        holders: the holders of each stage.
        mesh: its groups along the width are used where they are not needed for something else.

    Raises:
        TransportError: a peer is dead, or did not take part in time.
        CapabilityError: the pipelines do not span the whole job, so that some of its ranks would not take part.
    """
    if grid.group is None or grid.width == 1:
        return {}
    mine = None if mesh is None else mesh.get_group("width")
    # With one stage this may be the pipelines' own group, on which other collectives may interleave.
    if mine is not None and mine is not grid.control and backends(mine).get("cpu") == "gloo":
        return {frozenset(dist.get_group_rank(grid.group, r) for r in dist.get_process_group_ranks(mine)): mine}
    here, everywhere = dist.get_world_size(grid.group), dist.get_world_size()
    if here != everywhere:
        raise CapabilityError(
            f"reduce='fast' makes process groups, in which all {everywhere} ranks of the job must take part, but the "
            f"pipelines have only {here}. Pass a device mesh whose groups along the width exist already and are used "
            "for nothing else, or use reduce='ordered'"
        )
    wanted = dict.fromkeys(frozenset(map(grid.process, members)) for members in holders)  # in the same order everywhere
    with collective("making groups of equal stages", grid.control):
        return {
            ranks: dist.new_group(
                [dist.get_global_rank(grid.group, rank) for rank in ranks], grid.patience, backend="gloo"
            )
            for ranks in wanted
        }


def width_mesh(grid: RankGrid, mesh: DeviceMesh | None, device: str) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same stages; if there is none yet, all ranks of the job make it.

    Args:
        grid: all ranks.
        mesh: of the pipelines, if they have one.
        device: the type of their devices.

    Raises:
        TransportError: a peer is dead, or did not take part in time.
        CapabilityError: the pipelines do not span the whole job, so that some of its ranks would not take part.
    """
    if mesh is not None:
        return mesh["width"]
    assert grid.group is not None
    here, everywhere = dist.get_world_size(grid.group), dist.get_world_size()
    if here != everywhere:
        raise CapabilityError(
            f"a device mesh is made by all {everywhere} ranks of the job, but the pipelines have only {here}; pass the "
            "mesh of their ranks, DataParallel(mesh=...)"
        )
    numbers = [[grid.numbers.number(pipeline, rank) for rank in range(grid.depth)] for pipeline in range(grid.width)]
    ranks = [[dist.get_global_rank(grid.group, number) for number in row] for row in numbers]
    with collective("making a device mesh", grid.control):
        return DeviceMesh(device, ranks, mesh_dim_names=("width", "depth"))["width"]
