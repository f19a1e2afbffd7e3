"""Schedules that another rank has built, from which this rank makes its plan.

A method by its name is the same schedule everywhere, and an order that is a user's function is called on rank 0 only. A
schedule that was made before is there on every rank; what options add to it is not added again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.runtime.plan.actions_for_options import GivenSchedule, schedule_of
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

    def check_asked(self, given: GivenSchedule, blocks: int) -> None:
        """Make sure that this rank asks for what was built.

        Args:
            given: the schedule as this rank asks for it.
            blocks: of its model.

        Raises:
            OtherScheduleError: it asks for another one.
        """
        if self.asked != identity(given) or sum(self.balance) != blocks:
            raise OtherScheduleError(f"{described(given)}, {blocks} blocks")

    def whole_from(self, build: Callable[[], Schedule]) -> Schedule:
        """Return the schedule with every action; `build` makes the same one, if somebody wants to see all of it."""
        return rank_schedule(self.whole, build)


def ranks_of(given: GivenSchedule) -> int:
    """Return the number of ranks of a schedule; that of a method, or an order, is known before it is built.

    Raises:
        ConfigError: the schedule is none.
    """
    return given.stages if isinstance(given, ScheduleRequest) else schedule_of(given).ranks


def described(given: GivenSchedule) -> str:
    """Return name, rule and sizes of a schedule, which is not built for that."""
    if not isinstance(given, ScheduleRequest):
        made = schedule_of(given)
        return f"{made.name} ({made.rule}), {made.num_stages} stages, {made.microbatches} microbatches"
    rule = given.rule or ("flush" if callable(given.method) else find_method(given.method).rule)
    return f"{_name(given.method)} ({rule}), {given.stages} stages, {given.microbatches} microbatches"


def identity(given: GivenSchedule) -> str:
    """Return what is the same on two ranks if their schedules are the same; of functions, it is their name."""
    if not isinstance(given, ScheduleRequest):
        return sha256(str(schedule_of(given)).encode()).hexdigest()
    asked = (getattr(given, name) for name in ScheduleRequest.__dataclass_fields__ if name != "options")
    return repr((*map(_name, asked), sorted((key, _name(value)) for key, value in given.options.items())))


def _name(value: object) -> str:
    """A value as text, the same in every process."""
    return str(getattr(value, "__qualname__", type(value).__name__) if callable(value) else value)
