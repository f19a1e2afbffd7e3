"""Switch Python's cycle collector off while millions of small immutable values are made.

Actions, units and intervals refer only downwards, so they never form cycles; looking for some among them again and
again costs more than making them (a factor of 1.7 for the 390k instructions of 64 ranks and 1024 microbatches).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def no_collection(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` with the cycle collector off, and switch it on again if it was on."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return wrapper
