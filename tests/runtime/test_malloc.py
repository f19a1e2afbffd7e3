"""What is freed and taken again costs no page faults, once the process keeps it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TAKE_AND_FREE = """
import resource, sys
from penstock.runtime.malloc import keep_freed_memory

def once():
    parts = [bytearray(16 << 20) for _ in range(6)]
    for part in parts:
        part[::4096] = bytes(len(part) // 4096)

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of five rounds, in a process of its own."""
    run = subprocess.run([sys.executable, "-c", TAKE_AND_FREE, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is glibc that is told")
def test_freed_memory_stays() -> None:
    assert faults("keep") < faults("default") / 10
