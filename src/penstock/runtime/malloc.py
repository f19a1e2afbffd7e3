"""Setting of glibc's malloc that keeps freed memory in the process; page faults cost a pipeline several percent.

glibc returns freed memory to the system as soon as enough of it lies at the top of the heap, and a pipeline frees a
microbatch's activations and allocates as much for the next one, again and again. Every page that comes back is filled
with zeros and faults once (docs/benchmarks.md has figures). The peak memory of the process stays the same.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 32 << 20  # bytes; glibc serves no larger ones from its heap


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations, in the whole process from now on; CPUs train faster then.

    Returns:
        Whether it does; elsewhere than on Linux with glibc nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
