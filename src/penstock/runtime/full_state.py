"""The whole model's parameters and buffers, gathered from the ranks that hold its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from penstock.comm.collective.gather import collective, gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.stage.stage_runtime import StageRuntime

_WHAT = "gathering the weights"


def with_all_names(state: Mapping[str, Tensor], stages: Iterable[StageRuntime]) -> dict[str, Tensor]:
    """Return copies on the CPU, shared parameters under each of their names, as the unsplit model has them."""
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    for stage in stages:
        whole |= {name: whole[first] for name, first in stage.module.aliases().items()}
    return whole


def gather_state(own: dict[str, Tensor], grid: RankGrid) -> dict[str, Tensor]:
    """Gather tensors by name on rank 0 of the group, one at a time; all ranks call this together.

    Args:
        own: of this rank, on the CPU; ranks of other pipelines than the first have nothing to add.
        grid: all ranks.

    Returns:
        Those of all ranks, in the order of ranks, on rank 0; nothing on the others.

    Raises:
        TransportError: a peer is dead, or did not call this within the group's time-out.
    """
    if grid.group is None:
        return own
    (key,) = grid.local
    mine = {name: tensor.contiguous() for name, tensor in own.items()} if key.pipeline == 0 else {}
    listed = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in mine.items()]
    everything = gather_json(listed, _WHAT, grid.control)
    messages = TaggedGroup(grid.control, Tag.STATE)
    with collective(_WHAT, grid.control):
        if grid.global_rank(key) != 0:
            for tensor in mine.values():
                messages.finish([messages.send(_bytes_of(tensor), 0)])
            return {}
        for rank, tensors in enumerate(everything):
            for name, dtype, shape in tensors if rank else ():
                mine[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                messages.finish([messages.receive(_bytes_of(mine[name]), rank)])
    return mine


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, so that types that the transport does not know travel, too."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
