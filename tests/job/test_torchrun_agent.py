"""The torchrun of a machine as its workers see it: found behind shells, asked to end, and missed when it has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.job import place as module
from penstock.job.place import Agent

PLACE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
ON_ONE_OF_TWO = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """A process that stands for the agent of this one."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(module, "_nearest_ancestor_outside", lambda: process.pid)
    return process


def test_an_agent_that_has_died_is_missed_and_nobody_in_its_place_is_signalled(
    agent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while its parent has not taken notice, or when its number belongs to another process."""
    found, signalled = Agent(PLACE | ON_ONE_OF_TWO), list[int]()
    assert not found.is_gone
    agent.kill()
    patience = time.monotonic() + 10
    while module._begun(agent.pid) is not None:
        assert time.monotonic() < patience
        time.sleep(0.01)
    monkeypatch.setattr(os, "kill", lambda process, number: signalled.append(process))
    assert found.is_gone  # a zombie
    agent.wait()
    assert found.is_gone
    monkeypatch.setattr(module, "_begun", lambda process: "later")
    assert found.is_gone
    found.end()
    assert not signalled


@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        (PLACE | ON_ONE_OF_TWO, True),
        (PLACE | ON_ONE_OF_TWO | {"LOCAL_RANK": "1"}, False),
        (PLACE | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, False),
        ({k: v for k, v in (PLACE | ON_ONE_OF_TWO).items() if k != "TORCHELASTIC_RUN_ID"}, False),
        ({}, False),
    ],
    ids=["first of a machine", "second", "one machine", "srun", "no job"],
)
def test_the_first_worker_of_each_machine_ends_its_agent(
    agent: subprocess.Popen[bytes], environment: dict[str, str], ends: bool
) -> None:
    Agent(environment).end()
    if not ends:
        assert agent.poll() is None
        agent.kill()
    assert agent.wait(timeout=10) == -(signal.SIGTERM if ends else signal.SIGKILL)
