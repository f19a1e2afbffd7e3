"""Print results: for people, and for programs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.errors import ConfigError
from penstock.guarded_files import check_regular, write_whole


def print_words(console: Console, text: Text) -> None:
    """Print a text, which a terminal shows with no word divided; who reads the output gets it on one line."""
    console.print(text, soft_wrap=not console.is_terminal)


def check_can_write(*files: Path | None) -> None:
    """Refuse files that cannot be written, before anything is measured or searched for them.

    Raises:
        ConfigError: the folder of one is not there, or something else than a file has its name.
    """
    for file in files:
        if file is None:
            continue
        if not os.path.isdir(file.parent):
            raise ConfigError(f"cannot write {str(file)!r}: there is no folder {str(file.parent)!r}; make it first")
        try:
            if os.path.lexists(file):
                check_regular(file)
        except OSError as error:
            raise ConfigError(f"cannot write {str(file)!r}: {error.strerror or error}") from None


def write_file(what: str, path: Path, text: str) -> None:
    """Write a file as a whole.

    Args:
        what: it is, such as "plan".
        path: where.
        text: of it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write the {what} {str(path)!r}: {error.strerror or error}") from None


def say_written(what: str, path: Path, following: str = "") -> None:
    """Print that a file was written and what to do next, each on a line that can be copied whole.

    Args:
        what: was written, such as "plan".
        path: where.
        following: the next command, with {} in place of the path.
    """
    console = Console()
    console.print(Text(f"Wrote the {what} {path}."), soft_wrap=True)
    if following:
        console.print(Text(f"Next: {following.format(shlex.quote(str(path)))}"), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
