"""Load schedules from a user's file: an order function in Python, the text form, or torch's CSV."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path

from penstock.errors import ConfigError, PenstockError
from penstock.schedule.build import extend, prove
from penstock.schedule.ir.order import NO_OPTIONS, Options, OrderFunction
from penstock.schedule.proof.check import Proof
from penstock.schedule.text import parse_schedule
from penstock.schedule.torch_csv import from_torch_csv


def prove_file(path: Path, stages: int, microbatches: int, options: Options = NO_OPTIONS) -> Proof:
    """Load the schedule in a file and prove it.

    Args:
        path: `*.py` with a function (stages, microbatches, *, options) that returns an order: the one called `order`,
            or the only function. `*.csv` as `torch.distributed.pipelining` writes it. Otherwise, the text form.
        stages, microbatches, options: arguments of the function; the other forms hold a finished schedule.

    Raises:
        ConfigError: the file cannot be read, or its function fails.
        ScheduleError: the schedule is wrong; the message names the action at fault.
    """
    if path.suffix == ".py":
        function = load_function(path)
        try:
            return prove(function, stages, microbatches, options=options)
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_failure(path, error)) from error
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a schedule from {str(path)!r}: {error}") from None
    return extend(from_torch_csv(text, path.stem) if path.suffix == ".csv" else parse_schedule(text, str(path)))


def load_function(path: Path) -> OrderFunction:
    """Import a Python file and return the order function in it.

    Raises:
        ConfigError: the file cannot be imported, or it is ambiguous which of its functions is the order.
    """
    spec = importlib.util.spec_from_file_location(f"penstock order in {path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"there is no Python file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(_failure(path, error)) from error
    finally:
        del sys.modules[spec.name]
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    named = vars(module).get("order")
    found = named if callable(named) else (next(iter(own.values())) if len(own) == 1 else None)
    if found is None:
        raise ConfigError(
            f"{path} must hold one function (stages, microbatches) that returns an order, or call it `order`; it holds "
            f"{', '.join(own) or 'none'}"
        )
    return found


def _failure(path: Path, error: BaseException) -> str:
    """Return the error in a user's file, with the line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
    where = f", line {lines[-1]}" if lines else ""
    return f"{path}{where}: {type(error).__name__}: {error}"
