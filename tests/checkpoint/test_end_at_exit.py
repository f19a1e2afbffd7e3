"""The end of Python waits for the checkpoint that is being written, within limits, whatever ends the script."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from penstock.checkpoint.format import checkpoints
from penstock.checkpoint.writer import end_at_exit

pytestmark = pytest.mark.processes

SCRIPT = """
import atexit, os, sys, time
from pathlib import Path
import torch
from penstock.checkpoint import format as disk
from penstock.checkpoint.rank_announcements import LocalPosts
from penstock.checkpoint.writer import Writer
from support.written_checkpoints import Told, snapshot

folder, parts, seconds, timeout, how = sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:5]), sys.argv[5]
real = disk.save_file

def slow(*arguments, **options):
    sys.stdout.write("writing\\n")  # whole lines: two threads write
    sys.stdout.flush()
    time.sleep(seconds)
    real(*arguments, **options)

disk.save_file = slow

def tell(batch, failure):
    print("told", batch, failure, flush=True)

def main():
    places = [(index, 0) for index in range(parts)]
    one = Writer(Path(folder), places, [(0, 0)], 2, lambda _: {}, LocalPosts(), timeout, timeout / 4, tell)
    one.sink(snapshot(4, w=torch.ones(50)))

main()  # its writer lives on in what it does
atexit.register(lambda: (sys.stdout.write("ended\\n"), sys.stdout.flush()))
if how == "at once":
    atexit.register(os._exit, 4)
if how == "raise":
    raise RuntimeError("mine")
if how == "exit":
    sys.exit(3)
"""


def script(folder: Path, parts: int, seconds: float, timeout: float, how: str = "end") -> subprocess.Popen[str]:
    """A process that ends while its disk takes some seconds for a checkpoint of some parts, of which it writes one."""
    arguments = [sys.executable, "-c", SCRIPT, str(folder), *map(str, (parts, seconds, timeout)), how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(arguments, text=True, env={**os.environ, "PYTHONPATH": path}, **pipes)


@pytest.mark.parametrize(("how", "wanted"), [("end", 0), ("raise", 1), pytest.param("exit", 3, marks=pytest.mark.long)])
def test_what_is_being_written_is_completed(tmp_path: Path, how: str, wanted: int) -> None:
    process = script(tmp_path, 1, 1.0, 20.0, how)
    printed, err = process.communicate(timeout=60)
    assert process.returncode == wanted, err
    assert "told 4 None" in printed
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000004"]
    assert ("RuntimeError: mine" in err) == (how == "raise")
    assert "FATAL" not in err


@pytest.mark.long
def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    process = script(tmp_path, 1, 600.0, 2.0)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    reason = "it was not completed within 2.5 seconds after the end of the script"
    assert f"the checkpoint after 4 batches was not written: {reason}" in err
    assert checkpoints(tmp_path) == []


@pytest.mark.long
def test_the_files_of_another_rank_are_waited_for_less_long(tmp_path: Path) -> None:
    """It may have failed: here nobody writes the second stage."""
    process = script(tmp_path, 2, 0.0, 8.0)
    printed, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "told 4 a stage was not written within 2 seconds" in printed


@pytest.mark.long
def test_another_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    process = script(tmp_path, 1, 600.0, 300.0)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"writing\n", "ended\n"}
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "the checkpoint after 4 batches was not written: interrupted" in err


@pytest.mark.long
def test_who_ends_at_once_does_not_wait(tmp_path: Path) -> None:
    """As workers do that have failed."""
    process = script(tmp_path, 1, 600.0, 300.0, "at once")
    process.communicate(timeout=60)
    assert process.returncode == 4


def test_nothing_keeps_an_object_until_the_end() -> None:
    class Owner:
        def end(self) -> None:
            raise AssertionError

    owner = Owner()
    end_at_exit(owner)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
