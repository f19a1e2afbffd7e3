"""Standard output and error that a command outlives: a closed terminal, a full disk, a reader that has ended."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO, cast

_COLOURS = r"\x1b\[[0-9;]*m"
_MOVES = r"\x1b\[(?:\?25[lh]|[0-9]*A|2K)"  # of a live display
_CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
_GONE = (errno.EIO, errno.EPIPE)  # the terminal has been closed; whoever read the pipe has ended


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Replace standard output and error by streams that never raise; yield the one of standard output.

    Closed ones lead to the null device, so that no file that is opened later takes their place.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.set_inheritable(number, True)
            if null != number:
                os.close(null)
    before = sys.stdout, sys.stderr
    needed = not (sys.stdout and sys.stderr)  # or else no file is opened: there may be no room for one
    with open(os.devnull, "w", encoding="utf-8") if needed else nullcontext(sys.stderr) as null_device:
        err = LastingStream(sys.stderr or null_device)
        out = LastingStream(sys.stdout or null_device, lambda why: err.write(f"warning: {why}\n"))
        if sys.stdout is None:
            out.fail("standard output is closed; what goes there is lost")
        sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before


class LastingStream:
    """Passes everything on to another stream, and drops what is written where that takes nothing any more.

    So a run whose terminal is closed can still finish its batches and save them, and one whose output `head` or a
    `tee` that was killed no longer reads, or goes to a full disk, goes on to its end. Characters that the stream does
    not have are escaped.

    Args:
        stream: such as standard output.
        tell: called once, with what was lost, unless a terminal or a reader has gone.

    Attributes:
        failure: why something was lost, in the same cases; None if nothing was.
    """

    def __init__(self, stream: TextIO, tell: Callable[[str], object] = lambda _: None) -> None:
        self._stream, self._tell = stream, tell
        self._terminal = not stream.closed and stream.isatty()
        self._controls = re.compile(f"{_COLOURS}|{_MOVES}|{_CONTROLS}" if self._terminal else f"{_COLOURS}|{_CONTROLS}")
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, if there is still a place for it; characters that would command a terminal are escaped."""
        try:
            self._stream.write(self._controls.sub(_escaped, text))
        except UnicodeEncodeError:
            encoding = self.encoding or "ascii"
            self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush what has been written, if there is still a place for it."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal, or was one."""
        return self._terminal

    def fail(self, why: str) -> None:
        """Say why something is lost."""
        self.failure = why
        self._tell(why)

    def _drop(self, error: OSError | ValueError) -> None:
        """Write to the null device from now on: what the stream holds would fail once more when Python ends."""
        with suppress(OSError, ValueError), open(os.devnull, "wb") as null_device:  # it may have no file
            os.dup2(null_device.fileno(), self._stream.fileno())
        if getattr(error, "errno", None) not in _GONE and self.failure is None:
            why = getattr(error, "strerror", None) or error
            self.fail(f"standard output cannot be written: {why}; what else goes there is lost")


def _escaped(found: re.Match[str]) -> str:
    """Return a sequence that stands for itself, or the escape of a character."""
    return found[0] if len(found[0]) > 1 else ascii(found[0])[1:-1]
