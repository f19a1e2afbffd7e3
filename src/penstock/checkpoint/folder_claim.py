"""The claim of one `Checkpoints` to the folder of a run: two that write to one folder would mix their checkpoints.

    .checkpoints.lock    who writes, as JSON; locked (flock) by its owner for as long as that lives

The lock goes with its owner, however that ends. Loading takes a folder over from an owner in the same process, which
then writes no more; an owner in another process keeps it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.guarded_files import open_regular, parse_json

LOCK = ".checkpoints.lock"
_PATIENCE = 3.0  # seconds that a killed process may take to be gone
_LOOK = 0.1


class Owner:
    """One claim to a folder.

    Args:
        run: the folder.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._path = run, run / LOCK
        self._file: int | None = None

    def claim(self, take_over: bool = False) -> None:
        """Own the folder from now on.

        Args:
            take_over: also if another owner in this process has it.

        Raises:
            CheckpointError: another one has it, or has taken it over.
            OSError: the folder is not writable.
        """
        if self._file is not None and self._is_current(self._file):
            return
        if self._file is not None and not take_over:
            raise CheckpointError(f"another Checkpoints has been loaded from {str(self._run)!r}, and writes there now")
        self._run.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _PATIENCE
        while not self._take():
            host, process = self._holder()
            here = (host, process) == (socket.gethostname(), os.getpid())
            if here and take_over:
                with suppress(FileNotFoundError):
                    self._path.unlink()  # the lock of the former owner stays on what is no file any more
            elif here or time.monotonic() > deadline:
                who = "of this process" if here else f"of process {process} on {host}"
                raise CheckpointError(
                    f"another Checkpoints {who} writes to {str(self._run)!r}; give each pipeline and each run a folder "
                    "of its own"
                )
            else:
                time.sleep(_LOOK)

    def _take(self) -> bool:
        """Lock the file and write who has it; return whether that has worked."""
        with open_regular(self._path, os.O_RDWR | os.O_CREAT, "r+b") as opened:
            file = os.dup(opened.fileno())
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:  # a file system without locks: nothing is checked there
            pass
        if not locked or not self._is_current(file):  # the latter: taken over in between
            os.close(file)
            return False
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps([socket.gethostname(), os.getpid()]).encode(), 0)
        self._file = file
        return True

    def _is_current(self, file: int) -> bool:
        """Return whether a file is still the one in the folder."""
        try:
            return os.path.samestat(os.fstat(file), self._path.lstat())
        except FileNotFoundError:
            return False

    def _holder(self) -> tuple[str, int]:
        """Return host and process that have the folder, as far as they have written that."""
        try:
            with open_regular(self._path) as file:
                host, process = parse_json(file.read(1000).decode())
            return str(host), int(process)
        except (OSError, ValueError, TypeError):
            return "unknown", 0
