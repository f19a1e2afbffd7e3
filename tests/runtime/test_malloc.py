"""What is freed and taken again costs no page faults, once the process keeps it; or it goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.runtime.malloc import LARGEST, SMALL

TAKE_AND_FREE = """
import resource, sys
from penstock.runtime.malloc import keep_freed_memory

def once():
    parts = [bytearray(16 << 20) for _ in range(6)]
    for part in parts:
        part[::4096] = bytes(len(part) // 4096)

if sys.argv[1] != "default":
    assert keep_freed_memory(int(sys.argv[1]))
for _ in range(3):
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
with open("/proc/self/statm") as file:
    print(int(file.read().split()[1]) * resource.getpagesize())
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is glibc that is told")


def take_and_free(how: object) -> tuple[int, int]:
    """Page faults of five rounds, and resident bytes after them, in a process of its own."""
    run = subprocess.run([sys.executable, "-c", TAKE_AND_FREE, str(how)], capture_output=True, text=True, check=True)
    faults, resident = map(int, run.stdout.split())
    return faults, resident


@pytest.mark.slow
def test_freed_memory_stays() -> None:
    assert take_and_free(LARGEST)[0] < take_and_free("default")[0] / 10


def test_memory_of_larger_allocations_goes_back() -> None:
    assert take_and_free(LARGEST)[1] > take_and_free(SMALL)[1] + (90 << 20)
