"""Runs of 2BW whose layers are sharded, and what its reference says of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.schedule.ir.schedule import Schedule
from support.cases import Case, Outcome, expected
from support.schedules import make_schedule

CLIP = 0.4  # of most batches
TWO, THREE = (("chunks", 2),), (("chunks", 3),)


def layered(m: int, width: int, options: Any = THREE, **changes: Any) -> Case:
    """Twenty updates on two ranks, drained in between."""
    given = {"spans": (12, 8), "clip": CLIP} | changes
    return Case("2bw-layered", 2, m, width=width, options=options, **given)


@cache
def plain(case: Case) -> Schedule:
    """The schedule of a case before it is sharded."""
    return make_schedule(case.method, case.depth, case.m, options=dict(case.options), sharding="none")


@cache
def said(case: Case) -> Outcome:
    """What the reference says."""
    return expected(case)
