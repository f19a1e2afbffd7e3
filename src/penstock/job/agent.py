"""The agent of torch elastic, torchrun's process on one machine, as a worker sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from penstock.job.place import job_place

_MARK = b"TORCHELASTIC_RUN_ID="


def end_agent(environment: Mapping[str, str]) -> None:
    """Ask the torchrun of this machine to end; does nothing unless torchrun has started a job on several machines.

    The first worker of a machine does it. An agent that is ending already is not harmed.

    Args:
        environment: the variables of this process.
    """
    place = job_place(environment)
    if place is None or place.launcher != "torchrun" or place.local_rank or place.local_size in (None, place.size):
        return
    with suppress(OSError):
        os.kill(_agent(), signal.SIGTERM)


def starts_again(environment: Mapping[str, str]) -> bool:
    """Return whether the agent of this worker would start all workers again if this one failed.

    Args:
        environment: the variables of this process.
    """
    count, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count.isdecimal() and most.isdecimal() and int(count) < int(most)


def _agent() -> int:
    """Return the process id of the agent: the nearest ancestor that was not itself started by one.

    Between it and this process may be shells.
    """
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):  # there is no /proc, or it is another user's
        while _MARK in Path(f"/proc/{process}/environ").read_bytes():
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process
