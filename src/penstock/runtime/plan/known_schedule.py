"""Schedules that another rank has built, from which this rank makes its plan.

A method by its name is the same schedule everywhere. An order that is a user's function, or a schedule that was made
before, is there on every rank anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.runtime.plan.requirements import GivenSchedule, schedule_of
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.rank_schedule import Json, rank_schedule, schedule_facts


class OtherScheduleError(ConfigError):
    """This rank asks for another schedule than the one that has been built; the message says for which."""


class KnownSchedule(NamedTuple):
    """The facts of a schedule (`penstock.schedule.rank_schedule.schedule_facts`) that another rank has built.

    Attributes:
        asked: the `identity` of what it was asked for.
        plain: of the schedule as it was asked for.
        whole: of the same with every action that options need.
        balance: how many blocks each stage has.
    """

    asked: str
    plain: Json
    whole: Json
    balance: list[int]

    @classmethod
    def of(cls, given: GivenSchedule, whole: Schedule, balance: list[int]) -> KnownSchedule:
        """Return what other ranks need to know.

        Args:
            given: the schedule as it was asked for.
            whole: with every action, proven.
            balance: how many blocks each stage has.
        """
        return cls(identity(given), schedule_facts(schedule_of(given)), schedule_facts(whole), balance)

    def given_as(self, request: ScheduleRequest) -> ScheduleRequest:
        """Return a request whose schedule is not built here."""
        asked = replace(request)
        asked.__dict__["schedule"] = rank_schedule(self.plain, lambda: request.schedule)
        return asked

    def whole_from(self, build: Callable[[], Schedule]) -> Schedule:
        """Return the schedule with every action; `build` makes the same one, if somebody wants to see all of it."""
        return rank_schedule(self.whole, build)


def is_named(given: GivenSchedule) -> bool:
    """Return whether a schedule is a method by its name, which stands for the same one on every rank."""
    return isinstance(given, ScheduleRequest) and not any(
        map(callable, (given.method, given.order, *given.options.values()))
    )


def ranks_of(given: GivenSchedule) -> int:
    """Return the number of ranks of a schedule; that of a method is known before it is built.

    Raises:
        ConfigError, ScheduleError: the schedule is none, or cannot be built.
    """
    return given.stages if isinstance(given, ScheduleRequest) and is_named(given) else schedule_of(given).ranks


def described(given: GivenSchedule) -> str:
    """Return name, rule and sizes of a schedule, which is not built for that if it has a name."""
    if not isinstance(given, ScheduleRequest) or not is_named(given):
        made = schedule_of(given)
        return f"{made.name} ({made.rule}), {made.num_stages} stages, {made.microbatches} microbatches"
    rule = given.rule or find_method(str(given.method)).rule
    return f"{given.method} ({rule}), {given.stages} stages, {given.microbatches} microbatches"


def identity(given: GivenSchedule) -> str:
    """Return what is the same on two ranks if their schedules are the same."""
    if not isinstance(given, ScheduleRequest) or not is_named(given):
        return str(schedule_of(given))
    asked = (getattr(given, name) for name in ScheduleRequest.__dataclass_fields__ if name != "options")
    return repr((*map(str, asked), sorted((key, str(value)) for key, value in given.options.items())))
