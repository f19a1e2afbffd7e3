"""Activation recomputation: inputs and buffers saved instead of a graph, so that a forward can be run again.

The recomputed forward sees the module buffers as the first one did, and its changes to them are dropped: buffers are
updated once, in the order of the forwards. Its random numbers are the same because they depend on the microbatch alone
(`penstock.stage.blocks.rng`), or because the states of other generators are kept
(`penstock.stage.autograd.recompute`).
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError
from penstock.partition.replay.model_stages import ModelStage
from penstock.schedule.transforms.recompute import Segments
from penstock.stage.autograd.saved_bytes import storage_bytes

RecomputeMode = Literal["none", "block", "stage"]
RecomputeModes = RecomputeMode | tuple[RecomputeMode, ...]
"""Of all stages, or one for each."""
BufferPlace = tuple[nn.Module, str]
_State = tuple[int, int]
"""Identity and version counter of a tensor."""
_NO_GENERATORS = frozenset({bool, int, float, str, type(None), OrderedDict, set})
"""Types of most attributes of a module, told at once: this is asked at every recomputed block."""
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module
_FIXED = (ModuleType, FunctionType, BuiltinFunctionType, type)  # most of what code names, which never is a generator


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


# Random numbers from other generators than torch's default ones, which a recomputed forward has to draw again.
#
# Torch's own are seeded for every pass (`penstock.stage.blocks.rng`). Those of Python and numpy, and generators that a
# block holds, go on from pass to pass as in plain torch; so their states are kept where a forward has drawn from them.
# A block holds a generator that is an attribute of a module, or a variable that its code names, global or of a function
# around it; also in a list, tuple or dict there. Generators that it finds elsewhere (in another object, through a
# function that it calls) are not noticed.


class GeneratorState(NamedTuple):
    """The state of a generator, and how it is set."""

    state: Any
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def generator_states(blocks: Iterable[Any]) -> list[GeneratorState]:
    """Return the present states of Python's and numpy's generators, and of those that modules among blocks hold."""
    numpy = sys.modules.get("numpy")
    ways: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(random.getstate, random.setstate)]
    if numpy is not None:
        ways.append((numpy.random.get_state, numpy.random.set_state))
    own = {id(value): value for block in blocks for value in _held(block) if _is_own(value, numpy)}
    ways += [_ways(value, numpy) for value in own.values()]
    return [GeneratorState(get(), get, set_) for get, set_ in ways]


def drawn_from(before: Iterable[GeneratorState]) -> list[GeneratorState]:
    """Return those whose generators have drawn since."""
    return [known for known in before if not _same(known.state, known.get())]


@contextmanager
def drawing_again(states: Iterable[GeneratorState]) -> Iterator[None]:
    """Give generators their states from before a forward, and the present ones back on exit."""
    present = [(known, known.get()) for known in states]
    try:
        for known, _ in present:
            known.set(known.state)
        yield
    finally:
        for known, state in present:
            known.set(state)


def _held(block: Any) -> Iterator[Any]:
    """What a block holds, and what is in containers there."""
    modules = list(block.modules()) if isinstance(block, nn.Module) else []
    values = [value for module in modules for name, value in vars(module).items() if name not in _OF_TORCH]
    values += [value for kind in {type(module) for module in modules} for value in _named_by_class(kind)]
    if isinstance(block, FunctionType):
        values += [space[name] for space, name in _names(block) if name in space]
        values += _cells(block)
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        elif type(value) is dict:
            yield from value.values()
        elif type(value) not in _NO_GENERATORS:
            yield value


def _named_by_class(kind: type) -> Iterator[Any]:
    """What the methods of a module name."""
    for method in _methods(kind):
        yield from (space[name] for space, name in _names(method) if name in space)
        yield from _cells(method)


@lru_cache(maxsize=256)
def _methods(kind: type) -> tuple[FunctionType, ...]:
    """The methods of a module, but for those of torch and of its own layers, which draw from torch's generators."""
    kinds = [k for k in kind.__mro__ if k is not object and not k.__module__.startswith("torch.")]
    return tuple(value for k in kinds for value in vars(k).values() if isinstance(value, FunctionType))


@lru_cache(maxsize=1024)
def _names(function: FunctionType) -> tuple[tuple[dict[str, Any], str], ...]:
    """The global variables that a function names, and where they are."""
    space = function.__globals__
    return tuple((space, name) for name in function.__code__.co_names if not isinstance(space.get(name), _FIXED))


def _cells(function: FunctionType) -> list[Any]:
    """What a function finds in the functions around it, as far as that is set."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _is_own(value: Any, numpy: Any) -> bool:
    return isinstance(value, torch.Generator | random.Random) or (
        numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)
    )


def _ways(value: Any, numpy: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to read and set the state of a generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    bits = value.bit_generator
    return (lambda: bits.state), (lambda state: setattr(bits, "state", state))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        if set(map(type, one)) <= {int}:  # 625 of Python's generator
            return bool(one == other)
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
