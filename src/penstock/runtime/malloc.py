"""Setting of glibc's malloc that keeps freed memory in the process; page faults cost a pipeline several percent.

glibc returns freed memory to the system as soon as enough of it lies at the top of the heap, and a pipeline frees a
microbatch's activations and allocates as much for the next one, again and again. Every page that comes back is filled
with zeros and faults once. Memory is the price: what is kept lies in pieces between what is in use, and an aligned
tensor seldom fits into the place of one of its size. Without such pieces a process takes what the memory ledger says
and a few percent more (docs/benchmarks.md and docs/benchmarks-memory.md have figures).
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 32 << 20
"""Bytes; glibc serves no larger allocations from its heap."""
SMALL = 128 << 10
"""Bytes; glibc serves no larger ones from its heap until it has freed larger ones."""


def keep_freed_memory(largest: int = LARGEST) -> bool:
    """Make glibc keep freed memory for later allocations, in the whole process from now on; CPUs train faster then.

    Args:
        largest: bytes of the largest allocations whose memory is kept; that of larger ones goes back to the system
            when they are freed, so that the process takes less, and longer.

    Returns:
        Whether it does; elsewhere than on Linux with glibc nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, largest) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
