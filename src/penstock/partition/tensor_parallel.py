"""Blocks whose parameters are divided among the processes that share a stage, by torch's styles of tensor parallelism.

A block says itself how it is divided, in a method ``parallelize(mesh)`` that calls torch's `parallelize_module`. What
that leaves are parameters of type DTensor. Stages hold plain ones, the parts of this process, so that all that is known
of parameters (buffers, versions, optimizers, hooks) is about these; while a module computes, and no longer, a DTensor
over its part stands in the place of each. Gradients come back through it to the part.

Random numbers that a module draws for a divided value are the same on all processes: dropout between two divided layers
drops the same entries of every part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError, ConfigError
from penstock.partition.parameter_names import modules_in


@dataclass(frozen=True)
class TensorSplit:
    """How one parameter is divided.

    Attributes:
        dimension: along which.
        sections: the parameter consists of so many equal sections along it, each of which is divided, as the three of a
            weight that makes queries, keys and values.
        index, size: the part that is here, of how many.
    """

    dimension: int
    sections: int
    index: int
    size: int

    def own(self, whole: Tensor) -> Tensor:
        """Return the part that is here, with memory of its own.

        Raises:
            ConfigError: the tensor cannot be divided evenly.
        """
        count = whole.shape[self.dimension] if whole.dim() > self.dimension else 0
        if not count or count % (self.sections * self.size):
            raise ConfigError(
                f"dimension {self.dimension} of a tensor of shape {tuple(whole.shape)} cannot be divided into "
                f"{self.sections} x {self.size} equal parts (tensor_parallel={self.size})"
            )
        sections = whole.chunk(self.sections, self.dimension)
        return torch.cat([section.chunk(self.size, self.dimension)[self.index] for section in sections], self.dimension)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor of all parts, in their order."""
        sections = zip(*(part.chunk(self.sections, self.dimension) for part in parts), strict=True)
        return torch.cat([piece for section in sections for piece in section], self.dimension)

    def whole_shape(self, shape: Sequence[int]) -> torch.Size:
        """Return the shape of the whole tensor by that of a part."""
        return torch.Size(n * self.size if at == self.dimension else n for at, n in enumerate(shape))


@dataclass(frozen=True)
class Division:
    """What of a stage is divided among the processes that share it.

    Attributes:
        index: the tensor rank of this process.
        splits: by canonical name of a parameter.
        first_place: how many copies of the stage processes of tensor ranks before this one have.
    """

    index: int = 0
    splits: Mapping[str, TensorSplit] = field(default_factory=dict)
    first_place: int = 0


def divide_blocks(blocks: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, TensorSplit]:
    """Let blocks divide themselves among the processes of a mesh, and keep the parts of this one as plain parameters.

    Args:
        blocks: by name; those without a method ``parallelize`` stay as they are. A block with parameters that consist
            of sections says so in a dict ``tensor_sections``: by the name of a parameter in it, their number.
        mesh: of the processes that share the stage.

    Returns:
        How each divided parameter is, by its name.

    Raises:
        ConfigError: a block cannot be divided evenly.
        CapabilityError: it is divided in a way that is not offered, is on a GPU, or has hooks on what is divided; or
            a parameter of several modules is not divided alike in all.
    """
    from torch.distributed.tensor import DTensor  # takes half a second, which only this needs

    found: dict[str, TensorSplit] = {}
    parts: dict[nn.Parameter, tuple[str, TensorSplit | None, nn.Parameter]] = {}  # by what they are of
    for name, block in blocks.items():
        if not hasattr(block, "parallelize"):
            continue
        places = [(path, module, dict(module._parameters)) for path, module in modules_in(name, block)]
        sections = {f"{name}.{path}": n for path, n in getattr(block, "tensor_sections", {}).items()}
        block.parallelize(mesh)
        for path, module, before in places:
            for key, parameter in before.items():
                now: Any = module._parameters.get(key)
                if parameter is not None and isinstance(now, DTensor):
                    _check_own(f"{path}{key}", parameter)
                    split = _split_of(f"{path}{key}", now, parameter.shape, sections.get(f"{path}{key}", 1))
                    found |= {} if split is None else {f"{path}{key}": split}
                    if parameter not in parts:
                        part = parameter.detach() if split is None else split.own(parameter.detach())
                        parts[parameter] = f"{path}{key}", split, nn.Parameter(part, parameter.requires_grad)
                    first, others, module._parameters[key] = parts[parameter]
                    check_alike(f"{path}{key}", split, first, others)
                    _DTensorWhileComputing(key, now).attach(module)
    for name, block in blocks.items():
        for path, module in modules_in(name, block):
            for key, parameter in module._parameters.items():
                if parameter in parts:
                    check_alike(f"{path}{key}", None, *parts[parameter][:2])
                    module._parameters[key] = parts[parameter][2]
    return found


def check_alike(name: str, split: TensorSplit | None, other: str, others: TensorSplit | None) -> None:
    """Make sure that what is one parameter under two names is divided in one way.

    Raises:
        CapabilityError: it is not.
    """
    if split != others:
        ways = ["not at all" if way is None else f"along dimension {way.dimension}" for way in (split, others)]
        raise CapabilityError(
            f"{name} and {other} are one parameter, but are divided by tensor parallelism {ways[0]} and {ways[1]}; "
            "untie them, or let their blocks divide both in the same way"
        )


def whole_output(value: Any) -> Any:
    """Return what blocks have returned with whole tensors in place of DTensors; all processes call this together."""
    return pytree.tree_map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, value)


def _check_own(name: str, parameter: nn.Parameter) -> None:
    """Make sure that a parameter may be replaced by a part of it."""
    if not parameter.is_cpu:
        raise CapabilityError(f"{name} is on {parameter.device}, but tensor parallelism is offered on CPUs so far")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise CapabilityError(
            f"{name} is divided by tensor parallelism, and has hooks, which would be lost; leave them out, or let the "
            "block not divide it"
        )


def _split_of(name: str, divided: Any, shape: torch.Size, sections: int) -> TensorSplit | None:
    """Return how a DTensor is divided; None if it is the same everywhere."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = divided.device_mesh, divided.placements
    if len(placements) == 1 and type(placements[0]) is Replicate:
        return None
    if len(placements) != 1 or type(placements[0]) is not Shard or divided.shape != shape:
        raise CapabilityError(
            f"{name}, of shape {tuple(shape)}, is divided as {placements}; offered are equal parts along one dimension"
        )
    return TensorSplit(placements[0].dim, sections, mesh.get_local_rank(), mesh.size())


class _DTensorWhileComputing:
    """Hooks of a module that put a DTensor in the place of its part while it computes.

    Args:
        key: of the parameter.
        like: the DTensor that it was.
    """

    def __init__(self, key: str, like: Any) -> None:
        self._key, self._mesh, self._placements = key, like.device_mesh, like.placements
        self._shape, self._stride = like.shape, like.stride()
        self._parts: list[Any] = []

    def attach(self, module: nn.Module) -> None:
        """Register the hooks."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, _: Any) -> None:
        """Put the DTensor there."""
        from torch.distributed.tensor import DTensor

        part: Any = module._parameters[self._key]
        self._parts.append(part)
        module._parameters[self._key] = DTensor.from_local(  # type: ignore[assignment]
            part, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )

    def after(self, module: nn.Module, *_: Any) -> None:
        """Put the part back."""
        if self._parts:
            module._parameters[self._key] = self._parts.pop()
