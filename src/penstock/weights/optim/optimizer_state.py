"""The state of an optimizer by kind and parameter name: copied, restored, and what has a value per element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError
from penstock.weights.optim.optimizer_adapters import name_of

_COUNTERS = ("step", "mu_product")  # their names in torch's optimizers


def check_by_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps something for all of its parameters in its state, where stages know no place.

    Raises:
        CapabilityError: it does.
    """
    other = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
    if other is not None:
        raise CapabilityError(
            f"{name_of(optimizer)} keeps {other!r:.80} in its state, which no checkpoint of a stage can hold: keep it "
            f"for each parameter (self.state[parameter][{other!r:.80}]), or as an attribute if it never changes"
        )


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of the state.

    Raises:
        CapabilityError: as of `check_by_parameter`.
    """
    check_by_parameter(optimizer)
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def copy_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    copied: Callable[[Tensor], Tensor] = torch.clone,
) -> dict[tuple[str, str], Any]:
    """Copy the state, by kind and parameter name: tensors and plain values.

    Args:
        optimizer: whose.
        parameters: that it steps, by name.
        copied: copies a tensor.

    Raises:
        CapabilityError: it holds other objects, or as of `check_by_parameter`.
    """
    check_by_parameter(optimizer)
    found: dict[tuple[str, str], Any] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[key, name] = copied(value)
            elif value is None or isinstance(value, bool | int | float | str):
                found[key, name] = value
            else:
                raise CapabilityError(
                    f"{name_of(optimizer)} has a {type(value).__name__} in its state ({key} of {name}), which a "
                    "checkpoint cannot hold; it can hold tensors and plain values"
                )
    return found


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Iterable[tuple[tuple[str, str], Any]],
) -> None:
    """Replace the state by the items of what `copy_state` returned; they are copied one at a time."""
    optimizer.state.clear()
    groups = [group for group in optimizer.param_groups if group.get("capturable") or group.get("fused")]
    counted = {p for group in groups for p in group["params"]}
    for (key, name), value in state:
        parameter = parameters[name]
        if isinstance(value, Tensor):
            # Step counters stay on their device, except for optimizers that count on the accelerator.
            value = value.to(parameter.device if parameter in counted or value.dim() else "cpu", copy=True)
        optimizer.state[parameter][key] = value


def remembered_values(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the state tensors with a value per element of a parameter, in a fixed order; no step counters."""
    found = [
        (parameter, key, state[key])
        for parameter in parameters.values()
        for state in [optimizer.state.get(parameter, {})]
        for key in sorted(state)  # restoring may have put them in any order
    ]
    return [
        value
        for parameter, key, value in found
        if isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and (value.dim() or (not parameter.dim() and key.rpartition(".")[2] not in _COUNTERS))
    ]
