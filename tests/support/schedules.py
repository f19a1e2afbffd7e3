"""Schedules for tests: built and proven, without their proof."""

from __future__ import annotations

from typing import Any

from penstock.schedule.ir.schedule import Schedule
from support.own_methods import prove


def make_schedule(*arguments: Any, **options: Any) -> Schedule:
    """The schedule of what `penstock.schedule.build.prove` takes."""
    return prove(*arguments, **options).schedule
