"""A text stream that outlives its terminal, or the program at the other end of its pipe."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TextIO, cast

from rich.console import Console

_GONE = (errno.EIO, errno.EPIPE)  # the terminal has been closed; whoever read the pipe has ended


def lasting_console() -> Console:
    """Return a console on standard output that outlives its terminal or its reader."""
    return Console(file=cast(TextIO, LastingStream(sys.stdout)))


class LastingStream:
    """Passes everything on to another stream, and drops what is written after its terminal or its reader has gone.

    So a run whose terminal is closed can still finish its batches and save them, and one whose output `head` or a
    `tee` that was killed no longer reads goes on to its end.

    Args:
        stream: such as standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()

    def write(self, text: str) -> int:
        """Write a text, if there is still a place for it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            return self._drop(error, len(text))

    def flush(self) -> None:
        """Flush what has been written, if there is still a place for it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error, 0)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal, or was one."""
        return self._terminal

    def fileno(self) -> int:
        """Return the number of the stream's file."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return self._stream.encoding

    def _drop(self, error: OSError, length: int) -> int:
        """Return a length as if that had been written; raise an error that is about something else.

        From now on the stream writes to the null device: what it holds would fail once more when Python ends.
        """
        if error.errno not in _GONE:
            raise error
        with suppress(OSError):  # it may have no file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        return length
