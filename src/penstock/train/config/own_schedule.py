"""Reads the order of a user's own that a configuration names: from then on the configuration holds the schedule itself.

So a run can be resumed whatever has become of the file, every process trains the same schedule, and the configuration
in a run folder says which one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.load import holds_function, method_in, prove_file, read_file, source_of_method
from penstock.schedule.methods.choice import MethodChoice, method
from penstock.schedule.methods.corrections import correction_fault
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.method_parsing import (
    CORRECTION,
    METHOD,
    OWN,
    RULE,
    WrittenOrder,
    numbers_of,
    split_options,
)
from penstock.schedule.text_parser import parse_schedule


@lru_cache(maxsize=8)
def schedule_in(text: str) -> Schedule:
    """Return the schedule of a configuration, which holds it as text.

    Raises:
        ScheduleError: it cannot be read.
    """
    return parse_schedule(text)


@lru_cache(maxsize=8)
def held_method(text: str) -> Method | None:
    """Return the method of a configuration, which holds the Python file of it as text; None for a schedule.

    Raises:
        ConfigError: the file fails.
    """
    said, _, source = text.partition("\n")
    if not said.startswith(_METHOD):
        return None
    path, _, name = said.removeprefix(_METHOD).rpartition(f":{METHOD}=")
    return method_in(Path(path), source, name)


def read_own_method(text: str, rule: str | None, correction: str | None) -> tuple[str, MethodChoice] | None:
    """Read the method in a file: the text that a configuration holds, and the method with its options.

    None if it is no file with a method.

    Args:
        text: FILE:option=N, with `method=NAME` if it holds several.
        rule, correction: given beside it.

    Raises:
        ConfigError: the file fails; or a rule or a correction is given, though the method has its own.
    """
    if not is_file(text) or not holds_function(path := Path(text.split(":")[0])):
        return None
    _, options = split_options(text, OWN)
    source = source_of_method(path) if os.path.isfile(path) else None
    if source is None:
        if METHOD in options:
            raise ConfigError(f"{path} is no file with a penstock.Method, as {METHOD}={options[METHOD]} asks for")
        return None
    row = method_in(path, source, None if options.get(METHOD) is None else str(options[METHOD]))
    for key, value, its in ((RULE, rule, row.rule), (CORRECTION, correction, row.spec)):
        if (given := options.get(key) or value) is not None:
            raise ConfigError(f"{key}: method {row.name!r} in {path} has its own, {its}; leave {given!r} out")
    return f"{_METHOD}{path}:{METHOD}={row.name}\n{source}", method(row, **numbers_of(options))


_METHOD = "# method in "


def refuse_code(text: object, holder: object) -> None:
    """Refuse the Python of a method in a file that may be somebody else's.

    Raises:
        ConfigError: it stands there.
    """
    if isinstance(text, str) and text.startswith(_METHOD):
        raise ConfigError(
            f"{str(holder)!r} holds the Python code of a method of one's own, which runs only where a run goes on "
            "(penstock train --resume FOLDER, penstock compare --out FOLDER); elsewhere give the file with --file"
        )


def own_row(text: str, correction: str | None = None) -> Method:
    """Return the row of a method of one's own, or what stands for one: name, rule and correction of a schedule."""
    if (row := held_method(text)) is not None:
        return row
    schedule = schedule_in(text)
    return Method(schedule.name, "an order of your own", "", "", schedule.rule, correction or "none")


def own_schedule(text: str, correction: str | None) -> Schedule:
    """Return a schedule of one's own that can be trained.

    Raises:
        ConfigError: its rule and its correction do not go together, or the rule needs one.
        ScheduleError: it cannot be read.
    """
    schedule = schedule_in(text)
    if fault := correction_fault(RULES[schedule.rule], correction or "none"):
        raise ConfigError(f"{schedule.name}: {fault}")
    return schedule


def is_same(one: str, other: str) -> bool:
    """Return whether two texts hold the same schedule, or the same method."""
    rows = held_method(one), held_method(other)
    if rows[0] is None or rows[1] is None:
        return rows[0] is rows[1] and schedule_in(one) == schedule_in(other)
    return rows[0].name == rows[1].name and one.partition("\n")[2] == other.partition("\n")[2]


def is_file(schedule: str) -> bool:
    """Return whether a `schedule` is the name of a file, not yet a schedule as text."""
    return "\n" not in schedule


def read_own_schedule(own: WrittenOrder, stages: int, microbatches: int, *, proves: bool = True) -> str:
    """Read the schedule in a file, prove it, and return it as text, with the name of the file in its first line.

    Args:
        own: the file, with the options and the rule of its order.
        stages, microbatches: of the pipeline; only functions take them.
        proves: False where somebody else proves it.

    Raises:
        ConfigError: the file cannot be read, its function fails, or it holds a finished schedule and options are given.
        ScheduleError: the schedule is wrong.
    """
    path = Path(own.file)
    takes = holds_function(path)  # the sizes of a finished schedule are compared by `size_fault`
    asked = path, stages if takes else None, microbatches if takes else None, own.options, own.rule
    schedule = prove_file(*asked).schedule if proves else read_file(*asked)
    said = "".join(f":{name}={value}" for name, value in own.options.items())
    ruled = "" if own.rule is None else f":rule={own.rule}"
    return f"# {path}{said}{ruled}\n{str(schedule).strip()}\n"


def size_fault(text: str, sizes: Mapping[str, Any]) -> str | None:
    """Return how a schedule differs from the sizes that are wanted; None if it does not, or for a method.

    Args:
        text: the schedule.
        sizes: `stages` and `microbatches`; None for any.
    """
    if held_method(text) is not None:
        return None
    schedule = schedule_in(text)
    held = {"stages": schedule.ranks, "microbatches": schedule.microbatches}
    other = {key: wanted for key, number in held.items() if (wanted := sizes.get(key)) not in (None, number)}
    if not other:
        return None
    said = text.splitlines()[0].removeprefix("# ")
    differing = " and ".join(f"{key} is {value}" for key, value in other.items())
    wanted = " and ".join(f"{key} to {held[key]}" for key in other)
    sizes_held = f"{held['stages']} ranks and {held['microbatches']} microbatches"
    return f"the schedule of {said} is for {sizes_held}, but {differing}; set {wanted}"
