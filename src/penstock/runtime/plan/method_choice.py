"""From a method by its name to the schedule that it asks for, and its correction."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.methods.choice import MethodChoice, method
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.registry import correction_of


def correction_by(chosen: MethodChoice) -> Correction | None:
    """Return the correction of a method that has been chosen; None if it has none.

    Raises:
        ConfigError: an option without a default is missing.
    """
    return correction_of(chosen.name, **chosen.correction)


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
    return ScheduleRequest(chosen.name, stages, microbatches, options=chosen.options), correction_by(chosen)


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
