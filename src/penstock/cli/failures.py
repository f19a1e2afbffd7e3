"""Reports the errors of commands, and ends them with the right exit codes."""

from __future__ import annotations

import os
import socket
import sys
import zlib
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

from penstock.checks import nearest_of
from penstock.cli.output import print_words
from penstock.job.place import job_place

if TYPE_CHECKING:
    from pydantic import BaseModel

_PATIENCE = timedelta(seconds=5)  # with the store of a job


def fail(message: str, hint: str, code: int) -> NoReturn:
    """Print an error on standard error and end; of the workers of torchrun only the first with a message prints it."""
    if is_first_to_say(message):
        console = Console(stderr=True)
        print_words(console, Text.assemble(("error: ", "bold red"), message))
        if hint:
            console.print(Text(hint), soft_wrap=True)  # a command in it can be copied whole
    sys.exit(code)


def is_first_to_say(message: str) -> bool:
    """Return whether this process is to print a message.

    False in a worker of torchrun if another one has asked for the same message since the workers were started, as it
    then prints it. True everywhere else, and where the store of the job cannot be reached.
    """
    try:
        place = job_place(os.environ)
        if place is None or not place.served:
            return True
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        socket.create_connection((place.address, place.port), 1.0).close()  # where nobody listens torch tries for long
        store = TCPStore(place.address, place.port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"penstock/said/{start}/{zlib.crc32(message.encode()):08x}", 1)) == 1
    except Exception:  # whatever is wrong with the store, the message matters more
        return True


def said_of_system(error: OSError | MemoryError | ImportError | SystemError) -> tuple[str, str]:
    """Return message and hint for what the system has refused: a disk, files to open, memory, a library."""
    if isinstance(error, MemoryError):
        return "there is no memory left", "ulimit -v and free tell how much there may be"
    if isinstance(error, SystemError):  # so does an import end that finds no memory
        return f"Python has failed: {error}", "ulimit -v and free tell how much memory there may be"
    if isinstance(error, ModuleNotFoundError):
        return f"a module is missing: {error}", ""
    if isinstance(error, ImportError):
        return f"a module cannot be imported: {error}", "ulimit -v and ulimit -n tell how much a process may take"
    places = [repr(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*places, error.strerror or repr(error)]), ""


def said_of_usage(error: Exception) -> tuple[str, str] | None:
    """Return message and hint for arguments that a command does not take; None if `error` is about something else."""
    if not hasattr(error, "format_message"):  # the classes lie in click or in typer, by the version
        return None
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    command = "penstock COMMAND" if context is None else context.command_path
    hint, message = f"{command} --help lists what it takes", str(error.format_message()).rstrip(".")
    given = _given_for(getattr(error, "param", None), sys.argv)
    message += "" if given is None or given in message else f", got {given!r:.80}"
    if context is not None and type(error).__name__ == "NoSuchOption":
        message = f"there is no option {option}"
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        hint = _instead(str(option), command, known) or hint
    elif context is not None and "unexpected extra" in message:
        hint = _as_option(context, message, sys.argv) or hint
    return f"{message[0].lower()}{message[1:]}".replace(": Input", ": input"), hint


def _given_for(parameter: Any, words: Sequence[str]) -> str | None:
    """Return the value that an option has at last among the words of a command line; None if it has none there."""
    names, found = tuple(getattr(parameter, "opts", ())), None
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in names:
            found = value or next(iter(words[place + 1 :]), None)
    return found


def _as_option(context: Any, message: str, words: Sequence[str]) -> str:
    """Return how a profile is given that stands alone; empty if the command takes none, or has one."""
    takes_it = any("--profile" in parameter.opts for parameter in context.command.params)
    alone = next((word for word in words[2:] if word.endswith((".yaml", ".yml")) and f"({word})" in message), "")
    given = any(word.partition("=")[0] == "--profile" for word in words)
    return f"write {context.command_path} --profile {alone}" if takes_it and alone and not given else ""


_SIMILAR = 0.7
"""How similar the name of an option or a key must be to an unknown option to be suggested for it, from 0 to 1."""


def _instead(option: str, command: str, known: Collection[str]) -> str:
    """Return how to do what an unknown option is meant to; empty if that cannot be guessed."""
    if option in ("--method", "--methods", "--schedule"):
        return f"give methods without an option, as in {command} 2bw"
    from penstock.compare.config import ComparisonConfig
    from penstock.train.config.key_reference import known_keys, suggested_keys
    from penstock.train.config.schema import TrainConfig

    schemas: dict[str, type[BaseModel]] = {"train": TrainConfig, "verify": TrainConfig, "compare": ComparisonConfig}
    schema, word = schemas.get(command.rpartition(" ")[2]), option.lstrip("-").replace("-", "_")
    options = {name.lstrip("-").replace("-", "_"): f"did you mean {name}?" for name in known}
    if schema is None:
        keys, similar = [], options
    else:
        keys = suggested_keys(word, schema, cutoff=1.0)  # the same word
        similar = {key.rpartition(".")[2]: f"write --set {key}=..." for key in known_keys(schema)} | options
    if keys:
        ways = [f"--{key} ..." if f"--{key}" in known else f"--set {key}=..." for key in keys]
        return f"write {' or '.join(ways)}"
    return next((similar[name] for name in nearest_of(word, similar, 1, _SIMILAR)), "")
