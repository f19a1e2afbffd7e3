"""The claim of one `Checkpoints` to the folder of a run: two that write to one folder would mix their checkpoints.

    .checkpoints.lock    who writes, as JSON; locked (flock) by its owner for as long as that lives

Whoever only reads from the folder shares the lock with others that do. It goes with its owner, however that ends.
Loading takes a folder over from an owner in the same process, which then writes no more; an owner in another process
keeps it. While one completes a checkpoint, or clears incomplete ones away, it also has a lock on the folder itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.guarded_files import open_regular, parse_json

LOCK = ".checkpoints.lock"
_PATIENCE = 3.0  # seconds that a killed process may take to be gone
_LOOK = 0.1


@contextmanager
def reading(run: Path) -> Iterator[None]:
    """Read from the folder of a run while nobody writes there; nothing is written for that.

    Raises:
        CheckpointError: a run writes there.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # no run has claimed it yet; whatever else is wrong is found by whoever reads
            file = stack.enter_context(open_regular(run / LOCK)).fileno()
            if not _comes(file, fcntl.LOCK_SH):
                host, process = Owner(run).holder()
                raise CheckpointError(
                    f"a run is under way in {str(run)!r}: process {process} on {host} writes there; wait until it has "
                    "ended, or end it with Ctrl-C"
                )
        yield


def _comes(file: int, how: int) -> bool:
    """Return whether a lock could be had in time."""
    deadline = time.monotonic() + _PATIENCE
    while not _locks(file, how):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True


def _locks(file: int, how: int) -> bool:
    """Return whether a file could be locked at once; so can any on a file system without locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Owner:
    """One claim to a folder.

    Args:
        run: the folder.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._path = run, run / LOCK
        self._file: int | None = None

    @contextmanager
    def writing(self, take_over: bool = False) -> Iterator[None]:
        """Own the folder from now on, and let nobody take it over for as long as this lasts.

        Raises:
            CheckpointError: as of `claim`; or another owner in this process is writing, and does not end.
            OSError: the folder is not writable.
        """
        if not take_over:
            self.claim()  # which may wait for another one that is writing
        folder = os.open(self._run, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _comes(folder, fcntl.LOCK_EX):
                raise CheckpointError(f"a checkpoint is being written to {str(self._run)!r}; try again when it is done")
            self.claim(take_over)
            yield
        finally:
            os.close(folder)

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
            host, process = self.holder()
            here = (host, process) == (socket.gethostname(), os.getpid())
            if here and take_over:
                with suppress(FileNotFoundError):
                    self._path.unlink()  # the lock of the former owner stays on what is no file any more
            elif time.monotonic() > deadline and self._is_read():
                raise CheckpointError(f"another process reads from {str(self._run)!r}; try again when it has ended")
            elif time.monotonic() > deadline:  # until then one in this process that is gone may finish what it writes
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
        if not _locks(file, fcntl.LOCK_EX) or not self._is_current(file):  # the latter: taken over in between
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

    def _is_read(self) -> bool:
        """Return whether those that have the lock share it."""
        with suppress(OSError), open_regular(self._path) as file:
            return _locks(file.fileno(), fcntl.LOCK_SH)
        return False

    def holder(self) -> tuple[str, int]:
        """Return host and process that have the folder, as far as they have written that."""
        try:
            with open_regular(self._path) as file:
                host, process = parse_json(file.read(1000).decode())
            return str(host), int(process)
        except (OSError, ValueError, TypeError):
            return "unknown", 0
