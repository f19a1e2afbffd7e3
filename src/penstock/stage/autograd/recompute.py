"""Activation recomputation: inputs and buffers saved instead of a graph, so that a forward can be run again.

The recomputed forward sees the module buffers as the first one did, and its changes to them are dropped: buffers are
updated once, in the order of the forwards. Its random numbers are the same because they depend on the microbatch alone
(`penstock.stage.blocks.rng`), or because the states of other generators are kept
(`penstock.stage.autograd.other_generators`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError
from penstock.partition.replay.model_stages import ModelStage
from penstock.schedule.transforms.recompute import Segments
from penstock.stage.autograd.other_generators import GeneratorState, drawing_again, drawn_from, generator_states
from penstock.stage.autograd.saved_bytes import storage_bytes

RecomputeMode = Literal["none", "block", "stage"]
RecomputeModes = RecomputeMode | tuple[RecomputeMode, ...]
"""Of all stages, or one for each."""
BufferPlace = tuple[nn.Module, str]
_State = tuple[int, int]
"""Identity and version counter of a tensor."""


@dataclass
class RecomputeInput:
    """The saved input of some blocks, from which their graph is made again.

    Attributes:
        names: the blocks.
        value: their input; None between forward and recomputation if it comes again from the stage before.
        wants: which leaves of the input want a gradient.
        inputs: states of the input's tensors, to notice writes.
        states: states of all buffers of the blocks.
        buffers: copies of the buffers that a forward changes, from before it.
        nbytes: bytes that are saved.
        generators: states from before the forward of generators that it has drawn from, besides torch's own.
        frozen: states of frozen parameters by name, before the first forward of these blocks.
        frames: what code of a whole model between its layers would have found, for each stage of one.
    """

    names: Sequence[str]
    value: Any
    wants: tuple[bool, ...]
    inputs: list[_State]
    states: dict[BufferPlace, _State]
    buffers: dict[BufferPlace, Tensor]
    nbytes: int
    generators: list[GeneratorState]
    frozen: dict[str, _State]
    frames: dict[ModelStage, Any]


class RecomputeInputSaver:
    """Saves the inputs and buffers that recomputing the blocks of one stage takes.

    Args:
        blocks: of the stage, by name.
        where: the stage in messages.
        saves_inputs: False if inputs come again before each recomputation, from that of the stage before
            (`penstock.schedule.transforms.recompute`, segments).
        drawing: returns the names of the blocks that may draw random numbers in the present pass; all if None.
    """

    def __init__(
        self,
        blocks: Mapping[str, Any],
        where: str,
        saves_inputs: bool = True,
        drawing: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._drawing = drawing or (lambda: blocks.keys())
        self._blocks, self._where, self.saves_inputs = blocks, where, saves_inputs
        self._restless: dict[tuple[str, ...], set[BufferPlace]] = {}  # buffers that a forward of these blocks changes

    def before_forward(
        self, names: Sequence[str], value: Any, wants: tuple[bool, ...], known: Collection[int]
    ) -> RecomputeInput:
        """Save the input of some blocks and the buffers that they may change; `after_forward` follows.

        Args:
            names: the blocks.
            value, wants: their input.
            known: identities of storages that live anyway.
        """
        leaves, places = pytree.tree_leaves(value), buffers_of([self._blocks[name] for name in names])
        restless = self._restless.get(tuple(names), places.keys())
        buffers = {place: tensor.clone() for place, tensor in places.items() if place in restless}
        states = {place: _state(tensor) for place, tensor in places.items()}
        nbytes = storage_bytes(leaves, known) if self.saves_inputs else 0
        drawing = self._drawing()  # the loss may be among them
        generators = generator_states(self._blocks[name] for name in names if name in drawing) if drawing else []
        frozen = {} if tuple(names) in self._restless else self._frozen(names)
        frames = frames_of(self._blocks[name] for name in names)
        return RecomputeInput(names, value, wants, _states(leaves), states, buffers, nbytes, generators, frozen, frames)

    def after_forward(self, kept: RecomputeInput) -> None:
        """Drop the copies of buffers that the blocks have not changed.

        Raises:
            ConfigError: the blocks have written into their input, into a frozen parameter, or into a buffer for the
                first time.
        """
        if _states(pytree.tree_leaves(kept.value)) != kept.inputs:
            raise ConfigError(
                f"{self._where}: a block writes in place into its input, so it cannot be run again; let it make a new "
                "tensor (inplace=False), or turn recompute off"
            )
        now = self._frozen(kept.names) if kept.frozen else {}
        written = next((name for name, state in kept.frozen.items() if now.get(name) != state), None)
        if written is not None:
            raise ConfigError(
                f"{self._where}: a forward has written into frozen parameter {written!r}, so it cannot be run again as "
                "it was; make it a buffer (register_buffer), which is put back meanwhile, or turn recompute off"
            )
        changed = {
            place
            for place, tensor in buffers_of([self._blocks[name] for name in kept.names]).items()
            if kept.states.get(place, _state(tensor)) != _state(tensor)  # one that it has made is there next time, too
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
        kept.generators = drawn_from(kept.generators)
        kept.nbytes += sum(tensor.nbytes for tensor in kept.buffers.values())
        if not self.saves_inputs:
            kept.value, kept.inputs = None, []

    def provide(self, kept: RecomputeInput, value: Any) -> None:
        """Take the input again that the stage before has recomputed."""
        kept.value, kept.inputs = value, _states(pytree.tree_leaves(value))

    @contextmanager
    def as_in_forward(self, kept: RecomputeInput) -> Iterator[None]:
        """Give modules their buffers, and generators their states, from before the forward; the present ones on exit.

        Raises:
            ConfigError: the input has been written into since.
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
            for stage, found in kept.frames.items():
                stage.found = found
            with drawing_again(kept.generators):
                yield
        finally:
            for (module, key), buffer in present.items():
                module._buffers[key] = buffer
            for stage in kept.frames:
                stage.found = None

    def _frozen(self, names: Sequence[str]) -> dict[str, _State]:
        """Return states of the frozen parameters of some blocks, by name."""
        blocks = [(name, block) for name in names if isinstance(block := self._blocks[name], nn.Module)]
        named = [pair for name, block in blocks for pair in block.named_parameters(prefix=name)]
        return {name: _state(parameter) for name, parameter in named if not parameter.requires_grad}


def frames_of(blocks: Iterable[Any]) -> dict[ModelStage, Any]:
    """Return what code between layers of whole models would find, by stage."""
    return {block: block.state() for block in blocks if isinstance(block, ModelStage)}


def buffers_of(blocks: Iterable[Any]) -> dict[BufferPlace, Tensor]:
    """Return the buffers of the modules among some blocks."""
    modules = [module for block in blocks if isinstance(block, nn.Module) for module in block.modules()]
    return {(m, key): tensor for m in modules for key, tensor in m._buffers.items() if tensor is not None}


def copied_buffers(blocks: Iterable[Any]) -> dict[BufferPlace, Tensor]:
    """Return copies of the buffers of some blocks, to be put back."""
    return {place: tensor.clone() for place, tensor in buffers_of(blocks).items()}


@torch.no_grad()
def put_back(before: Mapping[BufferPlace, Tensor], blocks: Iterable[Any]) -> None:
    """Write what buffers of some blocks held before into those that are there now."""
    present = buffers_of(blocks)
    for place, tensor in before.items():
        present[place].copy_(tensor)


def parts_to_recompute(names: Sequence[str], recompute: RecomputeMode, in_schedule: bool) -> list[Sequence[str]]:
    """Group the blocks of a stage that are recomputed together; empty where their graphs are kept.

    Args:
        names: all blocks of the stage.
        recompute: what the user asks for.
        in_schedule: the schedule recomputes this stage in actions of its own.
    """
    if in_schedule:
        return [names]
    return [[name] for name in names] if recompute == "block" else []


def check_recompute(recompute: object, segments: Segments) -> None:
    """Make sure that the user asks for recomputes of a known kind, and for segments of stages only where there are any.

    Raises:
        ConfigError: the kind is unknown, or nothing is recomputed in such segments.
    """
    known = get_args(RecomputeMode)
    if recompute == "auto":
        raise ConfigError(
            "recompute='auto' is chosen before a pipeline is made: penstock.choose_recompute(...) measures a "
            "microbatch and returns what to pass as recompute (penstock train takes recompute=auto with memory_limit)"
        )
    wanted = recompute if isinstance(recompute, tuple) else (recompute,)
    if not wanted or not all(isinstance(mode, str) and mode in known for mode in wanted):
        raise ConfigError(
            f"recompute must be one of {', '.join(known)}, or a list with one of these for each stage; got "
            f"{recompute!r:.80}"
        )
    if recompute != "stage" and segments != 1:
        raise ConfigError(
            f"segments={segments!r} is for recompute='stage', where stages recompute forwards together; recompute is "
            f"{recompute!r}"
        )


def _state(tensor: Tensor) -> _State:
    return id(tensor), tensor._version


def _states(leaves: Sequence[object]) -> list[_State]:
    return [_state(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
