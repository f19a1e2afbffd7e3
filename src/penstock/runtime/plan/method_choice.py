"""A method by its name, with the options of its order and of its correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.order import options_of
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.table import find_method
from penstock.schedule.orders import ORDERS
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.registry import correction_of


@dataclass(frozen=True)
class MethodChoice:
    """What `method` returns.

    Attributes:
        name: of the row of the method table.
        options: of its order.
        correction: what it does about staleness; None for nothing.
    """

    name: str
    options: Mapping[str, int] = field(default_factory=dict)
    correction: Correction | None = None


def method(name: str, **options: Any) -> MethodChoice:
    """Choose a method, such as ``method("pipemare", reschedule=500)`` or ``method("interleaved", chunks=4)``.

    Args:
        name: of a row of the method table (`penstock methods`), or another name for it.
        options: of its order and of its correction.

    Raises:
        ConfigError: there is no such method or option, or an option without a default is missing.
    """
    row = find_method(name)
    of_order, of_correction = options_of(ORDERS[row.order]), CORRECTIONS[row.correction].options
    unknown = [option for option in options if option not in {*of_order, *of_correction}]
    if unknown:
        known = sorted({*of_order, *of_correction})
        hint = did_you_mean(unknown[0], known)
        has = f"its options are {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"method {row.name!r} has no option {unknown[0]!r}.{hint} ({has})")
    correction = correction_of(row.name, **{k: v for k, v in options.items() if k in of_correction})
    return MethodChoice(row.name, {k: v for k, v in options.items() if k in of_order}, correction)


def request_of(
    chosen: str | MethodChoice,
    stages: int | None,
    microbatches: int | None,
    width: int,
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
) -> tuple[ScheduleRequest, Correction | None]:
    """Return the schedule that a method asks for, and its correction.

    Args:
        chosen: the method.
        stages: as of `make_schedule`; as many as the mesh is deep, or the group has ranks per pipeline, if None.
        microbatches: m.
        width: the number of parallel pipelines.
        group, mesh: as of `penstock.runtime.pipeline.Pipeline`.

    Raises:
        ConfigError: there is no such method, or a number is missing.
    """
    if not isinstance(chosen, MethodChoice):
        if not isinstance(chosen, str):
            raise ConfigError(
                f"method must be a name, or what penstock.method returned, not {chosen!r:.80}; a schedule goes to "
                "schedule="
            )
        chosen = method(chosen)
    if microbatches is None:
        raise ConfigError("how many microbatches is a batch split into? Give microbatches=, such as microbatches=8")
    if stages is None:
        stages = _default_stages(width, group, mesh)
    return ScheduleRequest(chosen.name, stages, microbatches, options=chosen.options), chosen.correction


def _default_stages(width: int, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> int:
    """As many as there are ranks in a pipeline."""
    if mesh is not None and "depth" in (mesh.mesh_dim_names or ()):
        return mesh.size((mesh.mesh_dim_names or ()).index("depth"))
    if group is None:
        raise ConfigError(
            "into how many stages is the model cut? Give stages=, such as stages=4; or a group, whose ranks are one "
            "stage each"
        )
    ranks = dist.get_world_size(group)
    if ranks % width:
        raise ConfigError(f"the group has {ranks} ranks, which {width} pipelines cannot share evenly; give stages=")
    return ranks // width
