"""The whole model's parameters and buffers, gathered from the ranks that hold its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.checks import in_brief
from penstock.comm.collective.control_plane import collective, gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.errors import ConfigError
from penstock.partition.parameter_names import block_of, tensors_in, tensors_of
from penstock.partition.replay.model_stages import UnitPart
from penstock.stage.stage_runtime import StageRuntime

WHAT = "gathering the weights for full_state_dict()"
_SHOWN = 5  # names in a message


class HeldByRank0(dict[str, Tensor]):
    """The empty state of a rank other than the first; it is not saved, as that would replace the file of rank 0."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "full_state_dict() gives the weights to rank 0 only, and this rank was to save its empty dict, perhaps "
            "over the file of rank 0. Write:\n    weights = pipeline.full_state_dict()  # on all ranks\n"
            "    if weights:\n        torch.save(weights, path)"
        )

    def __copy__(self) -> HeldByRank0:
        """Return another empty one."""
        return HeldByRank0()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldByRank0:
        """Return another empty one."""
        return HeldByRank0()

    copy = __copy__


def with_all_names(state: Mapping[str, Tensor], stages: Iterable[StageRuntime]) -> dict[str, Tensor]:
    """Return copies on the CPU, shared parameters under each of their names, as the unsplit model has them."""
    whole = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    for stage in stages:
        whole |= {name: whole[first] for name, first in stage.module.tensors.aliases().items()}
    return whole


def names_in(model: nn.Module, stages: Iterable[StageRuntime]) -> dict[str, list[str]]:
    """Return, by the names that tensors have in the pipeline, those that they have in the model they were taken from.

    Raises:
        ConfigError: the model does not hold a parameter of a stage.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model).items():
        names.setdefault(id(tensor), []).append(name)
    found = {}
    for stage in stages:
        for prefix, block in stage.module.modules.items():
            for name, tensor in tensors_in(prefix, block).items():
                if isinstance(block, UnitPart):  # of which a bare buffer is another tensor on another device
                    found[name] = names.get(id(tensor), [name])
                    continue
                if id(tensor) not in names:
                    raise ConfigError(
                        f"full_state_dict(model): {name} of block {prefix!r} is not a parameter or buffer of "
                        f"this {type(model).__name__}; pass the model itself that the blocks were taken from, not a "
                        "copy. Without it names are those of the blocks"
                    )
                found[name] = names[id(tensor)]
    return found


def with_the_rest(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state in the order of a model, with copies of what the model has beside its blocks."""
    rest = {name: tensor for name, tensor in tensors_of(model).items() if name not in state}
    whole = {**state, **{name: tensor.detach().to("cpu", copy=True) for name, tensor in rest.items()}}
    return {name: whole[name] for name in tensors_of(model)}


def shares_of(
    state: Mapping[str, Tensor], blocks: Mapping[str, Any], own: Mapping[str, nn.Module]
) -> dict[str, dict[str, Tensor]]:
    """Return, by block, what a state of the whole model holds of it, by the names within the block.

    Args:
        state: by the names of `Pipeline.full_state_dict`.
        blocks: all of the model; those that are modules here take their share.
        own: those that have to be there as a whole.

    Raises:
        ConfigError: something is unknown, missing, or of another shape; the message says all of it.
    """
    _check_tensors(state)
    shares: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        block = block_of(name, blocks)
        if block is None:
            raise ConfigError(
                f"load_state_dict: {name} belongs to no block; they are named {', '.join(list(blocks)[:3])}"
                f"{', ...' if len(blocks) > 3 else ''}. If these are the names of the unsplit model, load them into "
                "that, on every rank; the pipeline takes its values over:\n    model.load_state_dict(state)"
            )
        shares.setdefault(block, {})[name.removeprefix(f"{block}.")] = tensor
    wanted = {name: t for block, module in own.items() for name, t in tensors_in(block, module).items()}
    here = {block: own.get(block, blocks[block]) for block in shares}
    modules = {block: module for block, module in here.items() if isinstance(module, nn.Module)}
    _check_fits(state, wanted, [(f"{block}.", modules[block], shares[block]) for block in modules])
    return shares


def check_fits_model(state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Make sure that a model can load a state.

    Raises:
        ConfigError: something is unknown, missing, or of another shape; the message says all of it.
    """
    _check_tensors(state)
    _check_fits(state, tensors_of(model), [("", model, state)])


def _check_fits(
    state: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    shares: Iterable[tuple[str, nn.Module, Mapping[str, Tensor]]],
) -> None:
    """Compare a state with modules.

    Args:
        state: all of it.
        wanted: what has to be in it, under one of its names.
        shares: what stands before the names in a module, the module, and what the state has of it.

    Raises:
        ConfigError: something is unknown, missing, or of another shape.
    """
    found = {id(t) for name, t in wanted.items() if name in state}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in found]
    unexpected, sizes = [], []
    for prefix, module, share in shares:
        known, renames = tensors_of(module), _renames(module)
        unexpected += [f"{prefix}{path}" for path in share if path not in known and not renames]
        sizes += [
            f"size mismatch for {prefix}{path}: copying a param with shape {share[path].shape} from checkpoint, the "
            f"shape in current model is {tensor.shape}."
            for path, tensor in known.items()
            if path in share and share[path].shape != tensor.shape
        ]
    faults = [
        *([f"Missing key(s) in state_dict: {_quoted(missing)}."] if missing else []),
        *([f"Unexpected key(s) in state_dict: {_quoted(unexpected)}."] if unexpected else []),
        *sizes[:_SHOWN],
        *([f"and {len(sizes) - _SHOWN} more size mismatches."] if len(sizes) > _SHOWN else []),
    ]
    if faults:
        raise ConfigError(
            "load_state_dict: nothing has been loaded; every rank loads the state of the whole model, as "
            "full_state_dict() has returned it on rank 0:\n    " + "\n    ".join(faults)
        )


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f'"{name}"' for name in names[:_SHOWN]) + more


def _renames(module: nn.Module) -> bool:
    """Whether a module may take names that it does not have: it has hooks for loading, or does that in its own way."""
    return any(
        part._load_state_dict_pre_hooks or not type(part)._load_from_state_dict.__module__.startswith("torch.")
        for part in module.modules()
    )


def _check_tensors(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(f"load_state_dict takes what full_state_dict() returned, not {in_brief(state)}")
    other = next((name for name, tensor in state.items() if not isinstance(tensor, Tensor)), None)
    if other is not None:
        raise ConfigError(
            f"load_state_dict takes tensors by name, as full_state_dict() returns them; {other!r} is of type "
            f"{type(state[other]).__name__}. To save and load weights, optimizers and the number of batches:\n"
            "    checkpoints = penstock.Checkpoints(pipeline, folder)\n"
            "    checkpoints.load()  # before the run; pipeline.run(..., save=checkpoints.every(100)) saves"
        )


def with_whole_tensors(own: Mapping[str, Tensor], grid: RankGrid, stages: Iterable[StageRuntime]) -> dict[str, Tensor]:
    """Return a state with the whole of what processes share by tensor parallelism; they call this together.

    Raises:
        TransportError: a peer is dead.
    """
    splits = {name: split for stage in stages for name, split in stage.module.division.splits.items()}
    if grid.tensor.size == 1:
        return dict(own)
    with collective(WHAT, grid.everyone):
        return {n: splits[n].whole(grid.tensor.gather(t)) if n in splits else t for n, t in own.items()}


def own_parts(state: Mapping[str, Tensor], stages: Iterable[StageRuntime]) -> dict[str, Tensor]:
    """Return a state of the whole model with the parts of this process in place of what its stages share."""
    splits = {name: split for stage in stages for name, split in stage.module.division.splits.items()}
    now = {name: tensor.shape for stage in stages for name, tensor in stage.module.tensors.trained.items()}

    def of(name: str, tensor: Tensor) -> Tensor:
        split = splits.get(name)
        fits = split is not None and isinstance(tensor, Tensor) and tensor.shape == split.whole_shape(now[name])
        return split.own(tensor) if split is not None and fits else tensor

    return {name: of(name, tensor) for name, tensor in state.items()}


def gather_state(own: dict[str, Tensor], grid: RankGrid, fault: str | None = None) -> dict[str, Tensor]:
    """Gather tensors by name on rank 0 of the group, one at a time; all ranks call this together.

    Args:
        own: of this rank, on the CPU; ranks of other pipelines than the first, and other tensor ranks, add nothing.
        grid: all ranks.
        fault: why this rank has none.

    Returns:
        Those of all ranks, in the order of ranks, on rank 0; nothing on the others.

    Raises:
        ConfigError: a rank has a fault.
        TransportError: a peer is dead, or did not call this within the group's time-out.
    """
    if grid.group is None:
        if fault is not None:
            raise ConfigError(fault)
        return own
    (key,) = grid.local
    adds = key.pipeline == 0 and not grid.tensor.index
    mine = {name: tensor.contiguous() for name, tensor in own.items()} if adds else {}
    listed = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in mine.items()]
    everything = gather_json(fault or listed, WHAT, grid.everyone)
    fault = next((one for one in everything if isinstance(one, str)), None)
    if fault is not None:
        raise ConfigError(fault)
    messages = TaggedGroup(grid.everyone, Tag.STATE)
    with collective(WHAT, grid.everyone):
        if dist.get_rank(grid.everyone) != 0:
            for tensor in mine.values():
                messages.finish([messages.send(_bytes_of(tensor), 0)])
            return HeldByRank0()
        for rank, tensors in enumerate(everything):
            for name, dtype, shape in tensors if rank else ():
                mine[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                messages.finish([messages.receive(_bytes_of(mine[name]), rank)])
    return mine


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, so that types that the transport does not know travel, too."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
