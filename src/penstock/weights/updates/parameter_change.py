"""The change of one parameter by an update, for those who follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """A record of the change of one parameter by an update.

    Attributes:
        name: canonical name.
        before, after: its values; `after` may be modified. If nobody asked for those before, they are the same.
        gradient: the gradient that the optimizer was given.
        update: number of the update, from 0.
        optimizer, parameter, group: the optimizer, with its key there and its settings, including the rate.
        rate: the learning rate of the j-th update after this one, j from 1.
    """

    name: str
    before: Tensor
    after: Tensor
    gradient: Tensor
    update: int
    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    group: Mapping[str, Any]
    rate: Callable[[int], float]


Stepped = Callable[[Step], None]
"""A callback for each parameter that an update has changed."""

Ahead = Callable[[Step], Tensor]
"""What passes read of a parameter after an update, where they read ahead of it."""
