"""Gives tied parameters of several stages the same initial values, and makes sure that they are stepped alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import Holder, RankGrid
from penstock.comm.core.tagged_group import Tag
from penstock.errors import ConfigError
from penstock.partition.tied import Tie
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights


def equalise(ties: Sequence[Tie], schedule: Schedule, grid: RankGrid, ranks: Sequence[RankState]) -> None:
    """Give all copies of tied parameters the values that the first stage has; all processes call this together.

    Raises:
        ConfigError: their shapes differ, a stage does not train one of them, or their optimizers are not the same.
        TransportError: a peer is dead.
    """
    for tie in ties:
        here = {Holder(w.key.pipeline, n): w.stages[n] for w in ranks for n in w.stages if n.index in tie.stages}
        found: list[tuple[int, Any, Any]] = [
            (h.stage.index, _shapes(tie, h.stage.index, stage), _steppers(tie, h.stage.index, stage))
            for h, stage in here.items()
        ]
        if grid.group is not None:
            parts = gather_json(found, "comparing shared parameters", grid.control)
            found = [(index, shapes, steppers) for part in parts for index, shapes, steppers in part]
        for index, shapes, steppers in found:
            if isinstance(shapes, str):
                raise ConfigError(shapes)
            if shapes != found[0][1]:
                raise ConfigError(
                    f"{', '.join(tie.names_at(index))} of stage {index} have shapes {shapes}, of stage {found[0][0]} "
                    f"{found[0][1]}; what is one parameter has one shape"
                )
            _check_alike(tie, (found[0][0], index), (found[0][2], steppers))
        first, *others = tie.stages
        for pipeline, place, index in product(grid.pipelines, range(schedule.directions), others):
            if (first, place) not in schedule.stage_at:
                continue
            source, target = (Holder(pipeline, schedule.stage_at[c, place]) for c in (first, index))
            _copy(tie, source, target, here, grid)
            other = here.get(target)
            if other is not None and isinstance(other.weights, TrainedWeights):
                other.weights.store.refresh()


def _shapes(tie: Tie, index: int, stage: StageRuntime) -> list[list[int]] | str:
    """Return the shapes of tied parameters on a stage, or the error message there, which all ranks are to raise."""
    try:
        return [list(view.shape) for view in _values(tie, index, stage)]
    except ConfigError as error:
        return str(error)


def _steppers(tie: Tie, index: int, stage: StageRuntime) -> list[dict[str, str]]:
    """Return, for each tied parameter on a stage, the optimizer that steps it and its settings, as text."""
    weights = stage.weights
    if not isinstance(weights, TrainedWeights) or weights.updater.optimizer is None:
        return []
    found, parameters = [], weights.updater.parameters
    for name in (name for name in tie.names_at(index) if name in parameters):
        groups = weights.updater.optimizer.param_groups
        group = next((each for each in groups if any(p is parameters[name] for p in each["params"])), {})
        settings = {key: repr(value) for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
        found.append({"optimizer": weights.updater.stepper(name), **settings})
    return found


def _check_alike(tie: Tie, stages: tuple[int, int], steppers: tuple[Sequence[Any], Sequence[Any]]) -> None:
    """Make sure that copies of tied parameters are stepped alike on two stages, as they would not stay equal else.

    Raises:
        ConfigError: they are not.
    """
    for *names, first, second in zip(*map(tie.names_at, stages), *steppers, strict=False):
        key = next((key for key in {**first, **second} if first.get(key) != second.get(key)), None)
        if key is not None:
            raise ConfigError(
                f"{names[0]} of stage {stages[0]} and {names[1]} of stage {stages[1]} are one parameter, but stepped "
                f"with {key} {first.get(key)} and {second.get(key)}, so they would not stay equal; give both names to "
                "the same optimizer, in groups with the same settings"
            )


def _values(tie: Tie, index: int, stage: StageRuntime) -> list[Tensor]:
    """Return the present values of tied parameters on a stage.

    Raises:
        ConfigError: the stage does not train one of them.
    """
    names, trained = tie.names_at(index), stage.module.tensors.trained
    missing = [name for name in names if name not in trained]
    if missing or not isinstance(stage.weights, TrainedWeights):
        raise ConfigError(f"tied: {stage.module.where} trains no parameter {missing[0] if missing else names[0]!r}")
    views = stage.weights.store.master.views
    return [views[name] for name in names]


def _copy(tie: Tie, source: Holder, target: Holder, here: Mapping[Holder, StageRuntime], grid: RankGrid) -> None:
    """Copy tied parameters from the first stage to another one, within this process or between two."""
    owner, other = here.get(source), here.get(target)
    first, index = source.stage.index, target.stage.index
    with torch.no_grad():
        if owner is not None and other is not None:
            for mine, theirs in zip(_values(tie, first, owner), _values(tie, index, other), strict=True):
                theirs.copy_(mine)
        elif owner is not None:
            for mine in _values(tie, first, owner):
                dist.send(mine.cpu(), group=grid.control, tag=Tag.INITIAL_WEIGHTS, group_dst=grid.process(target))
        elif other is not None:
            for theirs in _values(tie, index, other):
                received = torch.empty(theirs.shape, dtype=theirs.dtype)
                dist.recv(received, group=grid.control, tag=Tag.INITIAL_WEIGHTS, group_src=grid.process(source))
                theirs.copy_(received)
