"""Random numbers from other generators than torch's default ones, which a recomputed forward has to draw again.

Torch's own are seeded for every pass (`penstock.stage.blocks.rng`). Those of Python and numpy, and generators that a
block holds, go on from pass to pass as in plain torch; so their states are kept where a forward has drawn from them. A
block holds a generator that is an attribute of a module, or a variable that its code names, global or of a function
around it; also in a list, tuple or dict there. Generators that it finds elsewhere (in another object, through a
function that it calls) are not noticed.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

_NO_GENERATORS = frozenset({bool, int, float, str, type(None), OrderedDict, set})
"""Types of most attributes of a module, told at once: this is asked at every recomputed block."""
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module
_FIXED = (ModuleType, FunctionType, BuiltinFunctionType, type)  # most of what code names, which never is a generator


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
