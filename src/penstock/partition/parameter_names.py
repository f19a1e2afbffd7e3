"""Names of parameters and buffers: those within a block, after the name of the block.

Blocks that were made of a whole model are an exception: what is in them has the name that it has in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.partition.replay.model_stages import UnitPart


def prefix_of(name: str, block: Any) -> str:
    """Return what stands before the names within a block, such as "layers.0."; nothing for a part of a model."""
    return "" if isinstance(block, UnitPart) else f"{name}."


def modules_in(name: str, block: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block, each with what stands before the names of its own parameters.

    Nothing comes of a block that is no module.
    """
    outer = prefix_of(name, block)
    for path, module in block.named_modules() if isinstance(block, nn.Module) else ():
        yield f"{outer}{path}.".lstrip(".") if path else outer, module


def tensors_in(name: str, block: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by full name, under each of their names."""
    outer = prefix_of(name, block)
    return {f"{outer}{path}": tensor for path, tensor in tensors_of(block).items()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers under each of their names, which need not be those of a state_dict."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        kept = {key: t for key, t in part._buffers.items() if key not in part._non_persistent_buffers_set}
        own = {key: t for key, t in {**part._parameters, **kept}.items() if t is not None}
        found |= {f"{prefix}.{key}".removeprefix("."): tensor for key, tensor in own.items()}
    return found


def block_of(name: str, blocks: Mapping[str, Any]) -> str | None:
    """Return the block that a parameter or buffer belongs to by its full name; None if there is none.

    Blocks may be nested by name, as "transformer" and "transformer.h.0" are: the longest one that fits has it.
    """
    for block, part in blocks.items():
        if isinstance(part, UnitPart) and name in part.names:
            return block
    fitting = [b for b, part in blocks.items() if name.startswith(f"{b}.") and not isinstance(part, UnitPart)]
    return max(fitting, key=len, default=None)
