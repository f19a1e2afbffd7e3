"""Reads the order of a user's own that a configuration names: from then on the configuration holds the schedule itself.

So a run can be resumed whatever has become of the file, every process trains the same schedule, and the configuration
in a run folder says which one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.load import holds_function, prove_file, read_file
from penstock.schedule.methods.corrections import correction_fault
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.method_parsing import WrittenOrder
from penstock.schedule.text_parser import parse_schedule


@lru_cache(maxsize=8)
def schedule_in(text: str) -> Schedule:
    """Return the schedule of a configuration, which holds it as text.

    Raises:
        ScheduleError: it cannot be read.
    """
    return parse_schedule(text)


def own_row(text: str, correction: str | None = None) -> Method:
    """Return what stands for a row of the method table: name, rule and correction of a schedule of one's own."""
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
    """Return how a schedule differs from the sizes that are wanted; None if it does not.

    Args:
        text: the schedule.
        sizes: `stages` and `microbatches`; None for any.
    """
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
