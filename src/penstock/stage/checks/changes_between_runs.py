"""What users change on the modules of a stage between two runs.

A run computes with tensors of its own in the place of the modules' parameters, which its optimizer steps. So values
that were assigned to parameters, or that came with other `Parameter` objects, have to be taken over; and a change that
the optimizer could not follow is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.partition.parameter_names import modules_in
from penstock.partition.tied import UNTIED

_INSTEAD = "make a new Pipeline of the changed modules (a checkpoint from before the change can be loaded into it)"
_ANEW = (
    "make a new Pipeline of the changed modules, which begins with their present weights, and with optimizers that are "
    "new (a checkpoint from before the change does not fit it)"
)
ParameterPlaces = dict[str, list[tuple[nn.Module, str]]]
"""By canonical name, where a parameter stands: modules, and its name there."""


class FoundParameters(NamedTuple):
    """The parameters of some blocks.

    Attributes:
        originals: by canonical name: that of their first place.
        places: where they stand.
        paths: the canonical name of every name that one has.
    """

    originals: dict[str, nn.Parameter]
    places: ParameterPlaces
    paths: dict[str, str]


def find_parameters(blocks: Mapping[str, Any]) -> FoundParameters:
    """Return the parameters of all blocks that are modules."""
    found = FoundParameters({}, {}, {})
    names: dict[int, str] = {}
    for prefix, block in blocks.items():
        for path, module in modules_in(prefix, block):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = names.setdefault(id(parameter), f"{path}{key}")
                found.paths[f"{path}{key}"] = name
                found.places.setdefault(name, []).append((module, key))
                found.originals[name] = parameter
    return found


def check_changes(before: FoundParameters, now: FoundParameters, trained: Mapping[str, Tensor], where: str) -> None:
    """Make sure that the parameters are those from before but for their values.

    Args:
        before, now: the parameters.
        trained: the present weights of those that the optimizer steps.
        where: the stage in messages.

    Raises:
        ConfigError: one is new, gone, or no longer of its kind.
    """
    for path in before.paths.keys() ^ now.paths.keys():
        what = "is new" if path in now.paths else "is gone"
        raise ConfigError(f"{where}: {path} {what} since the pipeline was made, but its optimizer is not; {_ANEW}")
    for path, name in before.paths.items():
        if now.paths[path] != name and name == path:
            raise ConfigError(
                f"{where}: {path} has become one parameter with {now.paths[path]} since the pipeline was made, which "
                f"would go on training two; {_INSTEAD}"
            )
        if now.paths[path] != name:
            raise ConfigError(f"{where}: {path} and {name} {UNTIED}")
    for name, parameter in now.originals.items():
        known = trained.get(name, before.originals[name])
        if parameter.requires_grad != (name in trained):
            what = "requires gradients now" if parameter.requires_grad else "no longer requires gradients"
            raise ConfigError(
                f"{where}: {name} {what}, but what is trained is settled when the pipeline is made; {_INSTEAD}"
            )
        if parameter.shape != known.shape:
            raise ConfigError(
                f"{where}: {name} has shape {tuple(parameter.shape)} now, and had {tuple(known.shape)} when the "
                f"pipeline was made; {_ANEW}"
            )
        if parameter.is_meta and not known.is_meta:
            raise ConfigError(
                f"{where}: {name} has no values any more (it is on the device 'meta' now); load some with "
                "load_state_dict(assign=True) before the next run"
            )
        if parameter.dtype != known.dtype:
            raise ConfigError(
                f"{where}: {name} is {parameter.dtype} now, and was {known.dtype} when the pipeline was made; to "
                f"compute in less pass precision='bf16' or 'fp16', or {_INSTEAD}"
            )


@torch.no_grad()
def take_over_values(now: FoundParameters, trained: Mapping[str, Tensor]) -> list[str]:
    """Copy what was assigned to trained parameters to where their weights are.

    Returns:
        The names of those whose memory is another one.
    """
    moved = [name for name, weights in trained.items() if now.originals[name].data_ptr() != weights.data_ptr()]
    for name in moved:
        trained[name].copy_(now.originals[name])
    return moved
