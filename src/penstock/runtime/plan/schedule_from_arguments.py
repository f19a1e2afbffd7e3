"""Turns a method's name, or a schedule, into the request for a plan and the correction of stale weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.checks import check_whole
from penstock.errors import ConfigError
from penstock.runtime.plan.actions_for_options import GivenSchedule, schedule_of
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.order import OrderFunction
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.choice import MethodChoice, ProofOfChoice, method as own_choice
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.method_parsing import written_method
from penstock.schedule.proof.proof import Proof
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.registry import correction_of


def correction_with(schedule: GivenSchedule) -> Correction | None:
    """Return the correction of the method that a schedule was made for; None if it has none, or for other schedules.

    Raises:
        ConfigError: an option without a default is missing.
    """
    chosen = schedule.chosen if isinstance(schedule, ProofOfChoice) else None
    return None if chosen is None else correction_of(chosen.name, **chosen.correction)


Chosen = Schedule | Proof | str | Method | MethodChoice | OrderFunction
"""What ranks run: a method (its name, a `Method`, or what `penstock.method` returns), an order, or a schedule."""


def request_for(
    method: Chosen, correction: Correction | None, stages: int | Callable[[], int], microbatches: int | None
) -> tuple[GivenSchedule, Correction | None]:
    """Return the schedule that a pipeline is to have, and its correction.

    Args:
        method: or an order, or a schedule.
        correction: given beside a schedule.
        stages: of a method; a function is called where there is one.
        microbatches: of a method.

    Raises:
        ConfigError: it is none of these, there is no such method, or a number is missing.
    """
    if not isinstance(method, str | Method | MethodChoice) and not _is_order(method):
        given = cast(GivenSchedule, method)
        schedule_of(given)  # refuses what is none
        return given, correction or correction_with(given)
    if correction is not None:
        raise ConfigError("a method brings its correction: method=penstock.method(name, option=...)")
    return request_of(method, stages() if callable(stages) else stages, microbatches)


def request_of(
    chosen: str | Method | MethodChoice | OrderFunction, stages: int, microbatches: int | None
) -> tuple[ScheduleRequest, Correction | None]:
    """Return the schedule that a method asks for, and its correction.

    Args:
        chosen: the method, or an order of one's own.
        stages, microbatches: as of `make_schedule`.

    Raises:
        ConfigError: there is no such method, or a number is missing.
    """
    if isinstance(chosen, str):
        chosen = written_method(chosen)
    if isinstance(chosen, Method):
        chosen = own_choice(chosen)
    if microbatches is None:
        raise ConfigError("how many microbatches is a batch split into? Give microbatches=, such as microbatches=8")
    check_whole("stages", stages)
    check_whole("microbatches", microbatches)
    if not isinstance(chosen, MethodChoice):
        return ScheduleRequest(chosen, stages, microbatches), None
    request = ScheduleRequest(chosen.name, stages, microbatches, options=chosen.options)
    return request, correction_of(chosen.name, **chosen.correction)


def _is_order(value: object) -> TypeGuard[OrderFunction]:
    """Return whether a value may be a function that makes an order, and not something else that can be called."""
    return callable(value) and not isinstance(value, type | nn.Module)


def with_asked_in_flight(given: GivenSchedule, in_flight: int | Sequence[int] | str | None) -> GivenSchedule:
    """Return a schedule with other microbatches in flight than its order has, where some are asked for.

    Raises:
        ConfigError: the schedule is finished.
    """
    if in_flight is None:
        return given
    if not isinstance(given, ScheduleRequest):
        raise ConfigError(
            f"in_flight={in_flight!r:.80} is an option of the order of a method; a schedule that is given has its "
            "order already: leave in_flight out, or give it to make_schedule(..., options={'in_flight': ...})"
        )
    return replace(given, options={**given.options, "in_flight": in_flight})


def default_stages(width: int, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> int:
    """Return as many stages as there are ranks in each of `width` pipelines.

    Raises:
        ConfigError: there is no group to tell, or pipelines cannot share it evenly.
    """
    if mesh is not None and "depth" in (mesh.mesh_dim_names or ()):
        return mesh.size((mesh.mesh_dim_names or ()).index("depth"))
    if group is None:
        begin = "" if dist.is_initialized() else " (after torch.distributed.init_process_group, which was not called)"
        raise ConfigError(
            "into how many stages is the model cut? Give stages=, such as stages=4, to run them all in this process; "
            f"or group=torch.distributed.group.WORLD{begin}, to run one stage in each of its processes"
        )
    ranks = dist.get_world_size(group)
    if ranks % width:
        raise ConfigError(
            f"the group has {ranks} ranks, which {width} pipelines cannot share evenly; start a multiple of {width} "
            "processes, or change data_parallel="
        )
    return ranks // width
