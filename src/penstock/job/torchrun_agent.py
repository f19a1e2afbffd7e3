"""The agent of torch elastic, torchrun's process on one machine, as a worker sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from penstock.job.place import job_place

_MARK = b"TORCHELASTIC_RUN_ID="


class Agent:
    """The torchrun of this machine, which has started this worker.

    Make it when the worker starts: once the agent has died, it is no ancestor of this process any more.

    Args:
        environment: the variables of this process.

    Attributes:
        starts_again: whether it would start all workers again if this one failed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        count, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        self.starts_again = count.isdecimal() and most.isdecimal() and int(count) < int(most)
        place = job_place(environment)
        serves = place is not None and place.launcher == "torchrun"
        self._process = _nearest_ancestor_outside() if serves else None
        self._begun = None if self._process is None else _begun(self._process)
        self._ends = place is not None and not place.local_rank and place.local_size not in (None, place.size)

    @property
    def is_gone(self) -> bool:
        """Whether there was an agent that has died, so that this worker is an orphan; False where nothing can tell."""
        return self._begun is not None and _begun(self._process or 0) != self._begun

    def end(self) -> None:
        """Ask it to end; does nothing unless torchrun has started a job on several machines.

        The first worker of a machine does it. An agent that is ending already is not harmed.
        """
        if self._process is None or not self._ends or self.is_gone:
            return
        with suppress(OSError):
            os.kill(self._process, signal.SIGTERM)


def _nearest_ancestor_outside() -> int:
    """Return the process id of the agent: the nearest ancestor that was not itself started by one.

    Between it and this process may be shells.
    """
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):  # there is no /proc, or it is another user's
        while _MARK in Path(f"/proc/{process}/environ").read_bytes():
            process = int(_fields(process)[1])
    return process


def _begun(process: int) -> str | None:
    """Return the time when a process was started, which tells it from a later one of its number; None if it is dead."""
    try:
        fields = _fields(process)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _fields(process: int) -> list[str]:
    """Return what the system says of a process after its name: its state, its parent, and so on (proc(5))."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
