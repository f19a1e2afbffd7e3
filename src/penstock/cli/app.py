"""The command-line application: its commands, and what becomes of the errors that they raise."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.failures import fail, said_of_system, said_of_usage
from penstock.cli.options import FLAG
from penstock.errors import ConfigError, InterruptedRunError, PenstockError, UnsavedRunError, WorkerError
from penstock.view.closed_terminal_stream import lasting_streams


def _in_paragraphs(text: str) -> str:
    """Return a docstring with a line for each paragraph, which a terminal wraps where it ends."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


_MODULES = {
    "methods": "study_commands",
    "show": "study_commands",
    "simulate": "study_commands",
    "train": "train",
    "sample": "train",
    "config": "train",
    "verify": "verify",
    "compare": "compare",
    "profile": "plans.profile",
    "plan": "plans.plan",
    "scale": "plans.scale",
}
"""The module of each command."""
_RUNS = ("train", "compare")  # what these have done lies in folders


class _InPlainWords:
    """Help that calls values by their names, without Python's types and the ranges of numbers, which errors tell."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help among them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            said: dict[str, Any] = {"_get_number_range_help_str": lambda: None}
            if parameter.param_type_name == "argument":
                said["display_type_rich"] = lambda **_: None
            elif parameter.is_flag:
                said["metavar"] = FLAG
            vars(parameter).update(said)
        return parameters


class _Group(_InPlainWords, TyperGroup):
    """The list of all commands."""


class _Command(_InPlainWords, TyperCommand):
    """A command."""


def make_app(asked: str | None = None) -> typer.Typer:
    """Return the application with all commands, or with the one that is asked for, if there is such a one.

    Typer makes a validator for every argument of every command, which takes longer than some commands do.
    """
    app = typer.Typer(
        name="penstock",
        cls=_Group,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_options,
    )
    for name in (asked,) if asked in _MODULES else _MODULES:
        command = getattr(import_module(f"penstock.cli.{_MODULES[name]}"), name)
        app.command(cls=_Command, help=_in_paragraphs(command.__doc__ or ""))(command)
    return app


def _print_version(wanted: bool) -> None:
    """Print the version and end, if `--version` is given."""
    if wanted:
        from penstock import __version__

        sys.stdout.write(f"penstock {__version__}\n")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", metavar=FLAG, callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pipeline-parallel training on PyTorch: schedules are proven, drawn, simulated and run."""


def main() -> None:
    """Run the command line: user errors exit with a message and code 2, worker failures with code 1.

    A run of which no checkpoint could be written exits with 3; a command that is ended by a signal with 128 + its
    number, as in shells; one whose output was lost, as a disk is full or it was closed, with 1, unless it is a run.
    """
    arguments = sys.argv[1:] or ["--help"]
    with lasting_streams() as out:
        code = _exit_code(arguments)
    sys.exit(code or int(out.failure is not None and arguments[0] not in _RUNS))


def _check_working_folder() -> None:
    """Refuse to work in a folder that has been removed, where torch cannot be loaded and no name leads anywhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working folder has been removed; change to another one (cd), and try again") from None


def _exit_code(arguments: list[str]) -> int:
    """Run a command; return its exit code, or end with it."""
    try:
        _check_working_folder()
        code: Any = make_app(arguments[0])(args=arguments, prog_name="penstock", standalone_mode=False)
    except WorkerError as error:
        if error.trace:
            sys.stderr.write(error.trace.rstrip() + "\n\n")
        fail(str(error), error.hint, 1)
    except InterruptedRunError as error:
        fail(str(error), error.hint, 128 + error.signal)
    except UnsavedRunError as error:
        fail(str(error), error.hint, 3)
    except PenstockError as error:
        fail(str(error), error.hint, 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 128 + signal.SIGINT
    except (OSError, MemoryError, ImportError, SystemError) as error:
        fail(*said_of_system(error), 1)
    except Exception as error:
        said = said_of_usage(error)
        if said is None:
            raise
        fail(*said, 2)
    return code if isinstance(code, int) else 0
