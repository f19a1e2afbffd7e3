"""Memory that is freed stays with the process: on the CPU, page faults cost a pipeline several percent of its time.

glibc gives freed memory back to the system as soon as enough of it lies at the top of the heap, and a pipeline frees a
microbatch's activations and takes as much for the next one, again and again. Every page that comes back is filled with
zeros and faults once (docs/benchmarks.md has figures). What a process holds at most stays the same.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 32 << 20  # bytes; glibc serves no larger ones from its heap


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed for what is taken next; whether it does (elsewhere nothing is changed).

    It holds for the whole process, from now on.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
