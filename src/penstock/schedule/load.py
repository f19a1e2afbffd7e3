"""Load schedules from a user's file: an order function in Python, the text form, or torch's CSV."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.checks import in_words
from penstock.errors import ConfigError, PenstockError
from penstock.guarded_files import read_given
from penstock.schedule.add_options import extend
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.order import NO_OPTIONS, Options, OrderFunction
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.torch_csv import from_torch_csv


def holds_function(path: Path) -> bool:
    """Return whether a file holds a function of stages and microbatches, and not a finished schedule."""
    return path.suffix == ".py"


def prove_file(
    path: Path,
    stages: int | None = None,
    microbatches: int | None = None,
    options: Options = NO_OPTIONS,
    rule: str | None = None,
) -> Proof:
    """Load the schedule in a file and prove it; arguments and errors as of `read_file`."""
    with _said_of(path):
        found = _read(path, stages, microbatches, options, rule)
        return found.prove() if isinstance(found, ScheduleRequest) else extend(found)


def read_file(
    path: Path,
    stages: int | None = None,
    microbatches: int | None = None,
    options: Options = NO_OPTIONS,
    rule: str | None = None,
) -> Schedule:
    """Load the schedule in a file, for somebody else to prove it.

    Args:
        path: `*.py` with a function (stages, microbatches, *, options) that returns an order: the one called `order`,
            or the only function. `*.csv` as `torch.distributed.pipelining` writes it. Otherwise, the text form.
        stages, microbatches, options: arguments of the function; the other forms hold a finished schedule, which takes
            none.
        rule: the version rule under which the function's order is run, "flush" if None; the text form names its own.

    Raises:
        ConfigError: the file cannot be read, its function fails or lacks arguments, or it takes none and some are
            given.
        ScheduleError: the schedule is wrong; the message names the action at fault.
    """
    with _said_of(path):
        found = _read(path, stages, microbatches, options, rule)
        return found.schedule if isinstance(found, ScheduleRequest) else found


def _read(
    path: Path, stages: int | None, microbatches: int | None, options: Options, rule: str | None
) -> ScheduleRequest | Schedule:
    """Return what a file holds: a schedule, or what a function in it is asked for."""
    sizes = {"stages": stages, "microbatches": microbatches}
    given = [*(name for name, size in sizes.items() if size is not None), *options, *([] if rule is None else ["rule"])]
    if given and not holds_function(path):
        raise ConfigError(f"{path} holds a finished schedule; leave {in_words(given, 'and')} out")
    if holds_function(path):
        if stages is None or microbatches is None:
            raise ConfigError(
                f"the order in {str(path)!r} is a function of stages and microbatches; give both, such as "
                f"load_schedule({str(path)!r}, stages=4, microbatches=8)"
            )
        return _asked(path, stages, microbatches, options, rule)
    text = _text_of(path)
    if path.suffix == ".csv":
        return from_torch_csv(text, path.stem)
    return parse_schedule(text, str(path), path.stem)


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """Name the file in errors, where they do not."""
    try:
        yield
    except PenstockError as error:
        if str(path) in str(error):
            raise
        said = str(error).removeprefix(f"{path.stem}: ")
        raise type(error)(f"{path}: {said}") from error.__cause__


def _asked(path: Path, stages: int, microbatches: int, options: Options, rule: str | None) -> ScheduleRequest:
    """Ask the order function in a Python file for a schedule."""
    function = load_function(path)
    taken = inspect.signature(function)
    try:
        taken.bind(stages, microbatches)
    except TypeError:
        raise ConfigError(f"{path}: the function must take (stages, microbatches), but takes {taken}") from None
    return ScheduleRequest(_named(_guarded(path, function), path.stem), stages, microbatches, rule, options=options)


def _named(function: OrderFunction, name: str) -> OrderFunction:
    """Return a function that does the same under the name of its file, which the schedule then has."""

    def order(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    order.__name__ = name
    order.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return order


def _text_of(path: Path) -> str:
    """Return the text in a file.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        text = read_given(path)
    except OSError as error:
        raise ConfigError(f"cannot read a schedule from {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        text = "\0"
    except ValueError as error:
        raise ConfigError(f"cannot read a schedule from {str(path)!r}: {error}") from None
    if "\0" in text:
        raise ConfigError(f"cannot read a schedule from {str(path)!r}: it is not text")
    return text


def load_function(path: Path) -> OrderFunction:
    """Import a Python file and return the order function in it.

    Raises:
        ConfigError: the file cannot be imported, or it is ambiguous which of its functions is the order.
    """
    module = _run(path, _source_of(path))
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    named = vars(module).get("order")
    found = named if callable(named) else (next(iter(own.values())) if len(own) == 1 else None)
    if found is None:
        held = f"it holds {in_words(own, 'and')}; call one of them order" if own else "it holds none"
        raise ConfigError(f"{path} must hold a function order(stages, microbatches) that returns an order; {held}")
    return found


def load_method(path: Path | str, name: str | None = None) -> Method:
    """Import a Python file and return the method in it.

    Args:
        path: a file in which a `Method` stands.
        name: of the method, if there are several.

    Raises:
        ConfigError: the file cannot be imported, or holds no method, or several, and none is named.
    """
    path = Path(path)
    return method_in(path, _source_of(path), name)


def method_in(path: Path, source: str | bytes, name: str | None = None) -> Method:
    """Return the method in the text of a Python file; arguments and errors as of `load_method`."""
    held: dict[str, Method] = {}
    for value in vars(_run(path, source)).values():
        if isinstance(value, Method) and held.setdefault(value.name, value) is not value:
            raise ConfigError(f"{path} holds two methods of the name {value.name!r}; give one of them another")
    if name is not None and name not in held:
        raise ConfigError(f"{path} holds no method {name!r}; it holds {in_words(held, 'and') if held else 'none'}")
    if name is None and len(held) != 1:
        first = next(iter(held), None)
        several = f"{in_words(held, 'and')}; choose one: {path}:method={first}" if held else "none"
        raise ConfigError(f"{path} is to hold a penstock.Method; it holds {several}")
    found = find_method(held[name or next(iter(held))])
    if isinstance(found.order, str) or found.order in ORDERS.values():
        return found
    return replace(found, order=_guarded(path, found.order))


def _guarded(path: Path, function: OrderFunction) -> OrderFunction:
    """Return an order function whose errors name the file and the line."""

    @functools.wraps(function)
    def order(*arguments: Any, **options: Any) -> Any:
        try:
            made = function(*arguments, **options)
            return list(made) if isinstance(made, Iterator) else made
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(_failure(path, error)) from error

    return order


def source_of_method(path: Path) -> str | None:
    """Return the text of a Python file that holds a method; None if it holds none, but an order perhaps.

    Raises:
        ConfigError: the file cannot be imported.
    """
    source = _source_of(path)
    if not any(isinstance(value, Method) for value in vars(_run(path, source)).values()):
        return None
    return source.decode()


def _source_of(path: Path) -> bytes:
    if path.suffix != ".py" or not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        raise ConfigError(f"there is no Python file {str(path)!r}")
    return path.read_bytes()


def _run(path: Path, source: str | bytes) -> ModuleType:
    """Import the text of a Python file."""
    module = ModuleType(f"penstock order in {path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        # Not from bytecode, which would lie beside it, and might be that of a second ago.
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        raise ConfigError(_failure(path, error)) from error
    finally:
        del sys.modules[module.__name__]
    return module


def _failure(path: Path, error: BaseException) -> str:
    """Return the error in a user's file, with the line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
    said = str(error)
    if isinstance(error, SyntaxError):
        lines, said = [error.lineno], error.msg
    where = f", line {lines[-1]}" if lines else ""
    return f"{path}{where}: {type(error).__name__}: {said}"
