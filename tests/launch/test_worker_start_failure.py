"""What the user is told when the process that workers are forked from dies before it has forked any."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.launch.fork_server import why_not_started
from support.command_line import start

LAUNCH = """
import multiprocessing
from penstock.launch.launch import launch_local

set_forkserver_preload = multiprocessing.set_forkserver_preload
multiprocessing.set_forkserver_preload = lambda names: set_forkserver_preload(["dies_at_start"])
for attempt in range(2):  # a second launch is not hindered by what the first one has looked at
    try:
        launch_local(2, print)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
KILLED = "import os, signal\nos.kill(os.getpid(), signal.{})"
EVERY = "WorkerError: workers could not be started: the process that imports everything for them "


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "said", "advice"),
    [
        (KILLED.format("SIGKILL"), "was ended by SIGKILL. ", "(`dmesg` tells)"),
        pytest.param(
            KILLED.format("SIGSEGV"),
            "was ended by SIGSEGV. ",
            "a library has crashed; `python -c",
            marks=pytest.mark.long,
        ),
        ("raise RuntimeError('no such library')", "ended with exit code 1 ", "If no traceback stands above, `python"),
    ],
    ids=["killed", "crashed", "raised"],
)
def test_a_fork_server_that_dies_at_start_is_named(module: str, said: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "dies_at_start.py").write_text(module)
    (tmp_path / "launch.py").write_text(LAUNCH)
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run = start(tmp_path / "launch.py", env=os.environ | {"PYTHONPATH": path})
    lines = run.stdout.splitlines()
    assert len(lines) == 2, run.stderr
    assert all(line.startswith(EVERY + said) and advice in line for line in lines)


def test_an_error_of_the_system_is_said_in_its_words() -> None:
    said = why_not_started(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    assert said.startswith(f"workers could not be started: {os.strerror(errno.EAGAIN)}. Look for limits")
