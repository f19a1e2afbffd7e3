"""What is kept of a forward that will be run again instead of its graph: its input, and the buffers that it changes.

Run again, it sees the buffers as they were, and what it changes in them is dropped: buffers are updated once, in the
order of the forwards. Its random numbers are the same because they depend on the microbatch (`randomness`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError
from penstock.schedule.transforms.recompute import Segments
from penstock.stage.autograd.saved_bytes import storage_bytes

Recompute = Literal["none", "block", "stage"]
BufferPlace = tuple[nn.Module, str]
_State = tuple[int, int]
"""Identity and version counter of a tensor."""


@dataclass
class Kept:
    """What a graph is made of again.

    Attributes:
        names: the blocks.
        value, wants: their input (where that will come again, only meanwhile), and which of its leaves want a gradient.
        inputs: state of the input's tensors.
        states: of all buffers of the blocks.
        buffers: copies of those that a forward changes, as they were.
        nbytes: bytes that are kept.
    """

    names: Sequence[str]
    value: Any
    wants: tuple[bool, ...]
    inputs: list[_State]
    states: dict[BufferPlace, _State]
    buffers: dict[BufferPlace, Tensor]
    nbytes: int


class Keeper:
    """Keeps what it takes to run blocks of a stage again.

    Args:
        blocks: of the stage, by name.
        where: for messages.
        keeps_inputs: else the input of a forward comes again before it is run again, from the recompute of the stage
            before (`penstock.schedule.transforms.recompute`, segments).
    """

    def __init__(self, blocks: Mapping[str, Any], where: str, keeps_inputs: bool = True) -> None:
        self._blocks, self._where, self.keeps_inputs = blocks, where, keeps_inputs
        self._restless: dict[tuple[str, ...], set[BufferPlace]] = {}  # buffers that a forward of these blocks changes

    def keep(self, names: Sequence[str], value: Any, wants: tuple[bool, ...], known: Collection[int]) -> Kept:
        """Keep the input of some blocks, and the buffers that they may change; `settle` once they have run.

        Args:
            names: the blocks.
            value, wants: their input.
            known: addresses of memory that lives anyway.
        """
        leaves, places = pytree.tree_leaves(value), self.buffers(names)
        restless = self._restless.get(tuple(names), places.keys())
        buffers = {place: tensor.clone() for place, tensor in places.items() if place in restless}
        states = {place: _state(tensor) for place, tensor in places.items()}
        nbytes = storage_bytes(leaves, known) if self.keeps_inputs else 0
        return Kept(names, value, wants, _states(leaves), states, buffers, nbytes)

    def settle(self, kept: Kept) -> None:
        """The blocks have run: forget the buffers that they have left alone.

        Raises:
            ConfigError: they have written into their input, or into a buffer for the first time.
        """
        if _states(pytree.tree_leaves(kept.value)) != kept.inputs:
            raise ConfigError(
                f"{self._where}: a block writes in place into its input, so it cannot be run again; let it make a new "
                "tensor (inplace=False), or turn recompute off"
            )
        changed = {
            place
            for place, tensor in self.buffers(kept.names).items()
            if kept.states[place] != _state(tensor)
            # Batch norm updates its statistics without a word to autograd, so values are compared, too.
            or (place in kept.buffers and not torch.equal(kept.buffers[place], tensor))
        }
        lost = changed - kept.buffers.keys()
        if lost:
            module, key = lost.pop()
            raise ConfigError(
                f"{self._where}: a forward has changed buffer {key!r} of a {type(module).__name__} that it had left "
                "alone at first, so it cannot be run again as it was; turn recompute off"
            )
        restless = self._restless.setdefault(tuple(kept.names), set())
        restless.update(changed)  # one that this forward has left alone may be changed by a later one
        kept.buffers = {place: tensor for place, tensor in kept.buffers.items() if place in restless}
        kept.nbytes += sum(tensor.nbytes for tensor in kept.buffers.values())
        if not self.keeps_inputs:
            kept.value, kept.inputs = None, []

    def give(self, kept: Kept, value: Any) -> None:
        """The input of some blocks has come again."""
        kept.value, kept.inputs = value, _states(pytree.tree_leaves(value))

    @contextmanager
    def as_it_was(self, kept: Kept) -> Iterator[None]:
        """Let the modules see their buffers as they were, and afterwards as they are.

        Raises:
            ConfigError: the input is not what it was.
        """
        if _states(pytree.tree_leaves(kept.value)) != kept.inputs:
            raise ConfigError(
                f"{self._where}: the input of a forward has been written into before that was run again; let the data "
                "be new tensors in every microbatch, or turn recompute off"
            )
        present = {(module, key): module._buffers[key] for module, key in kept.buffers}
        try:
            for (module, key), tensor in kept.buffers.items():
                module._buffers[key] = tensor
            yield
        finally:
            for (module, key), buffer in present.items():
                module._buffers[key] = buffer

    def buffers(self, names: Sequence[str]) -> dict[BufferPlace, Tensor]:
        """Those of the modules among some blocks."""
        blocks = [self._blocks[name] for name in names]
        modules = [module for block in blocks if isinstance(block, nn.Module) for module in block.modules()]
        return {(m, key): tensor for m in modules for key, tensor in m._buffers.items() if tensor is not None}


def parts_to_recompute(names: Sequence[str], recompute: Recompute, in_schedule: bool) -> list[Sequence[str]]:
    """The blocks of a stage that are run again together; empty where their graphs are kept.

    Args:
        names: all blocks of the stage.
        recompute: what the user asks for.
        in_schedule: the schedule recomputes this stage in actions of its own.
    """
    if in_schedule:
        return [names]
    return [[name] for name in names] if recompute == "block" else []


def check_recompute(recompute: str, segments: Segments) -> None:
    """Make sure that the user asks for recomputes of a known kind, and for segments of stages only where there are any.

    Raises:
        ConfigError: the kind is unknown, or nothing is recomputed in such segments.
    """
    if recompute not in get_args(Recompute):
        raise ConfigError(f"recompute must be one of {', '.join(get_args(Recompute))}; got {recompute!r}")
    if recompute != "stage" and segments != 1:
        raise ConfigError(
            f"segments={segments!r} is for recompute='stage', where stages run forwards again together; recompute is "
            f"{recompute!r}"
        )


def _state(tensor: Tensor) -> _State:
    return id(tensor), tensor._version


def _states(leaves: Sequence[object]) -> list[_State]:
    return [_state(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
