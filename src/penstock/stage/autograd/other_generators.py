"""Random numbers from other generators than torch's default ones, which a recomputed forward has to draw again.

Torch's own are seeded for every pass (`penstock.stage.rng`). Those of Python and numpy, and generators that a module
holds as attributes, go on from pass to pass as in plain torch; so their states are kept where a forward has drawn from
them. Generators that a block finds elsewhere (in a closure, a list, a global variable) are not noticed.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

_NO_GENERATORS = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set})
"""Types of most attributes of a module, told at once: this is asked at every recomputed block."""


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
    modules = [module for block in blocks if isinstance(block, nn.Module) for module in block.modules()]
    values = [v for module in modules for v in vars(module).values() if type(v) not in _NO_GENERATORS]
    ways += [_ways(value, numpy) for value in values if _is_own(value, numpy)]
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
