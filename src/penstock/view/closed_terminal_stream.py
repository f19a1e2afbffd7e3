"""A text stream that outlives its terminal."""

from __future__ import annotations

import errno
import sys
from typing import TextIO, cast

from rich.console import Console


def lasting_console() -> Console:
    """Return a console on standard output that outlives its terminal."""
    return Console(file=cast(TextIO, LastingStream(sys.stdout)))


class LastingStream:
    """Passes everything on to another stream, and drops what is written after its terminal has gone.

    So a run whose terminal is closed can still finish its batches and save them.

    Args:
        stream: such as standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

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
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the number of the stream's file."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return self._stream.encoding

    def _drop(self, error: OSError, length: int) -> int:
        """Return a length as if that had been written; raise an error that is about something else."""
        if error.errno != errno.EIO:
            raise error
        return length
