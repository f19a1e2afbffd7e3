"""What is known of one parameter when it is stepped, and when its next values are guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Forecast(NamedTuple):
    """What is known of one parameter when its next values are guessed.

    Attributes:
        name: canonical.
        weights: its newest values.
        optimizer, parameter, group: whose, with its settings.
        rate: the learning rate of the j-th update from now, j from 1.
    """

    name: str
    weights: Tensor
    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    group: Mapping[str, Any]
    rate: Callable[[int], float]


class Step(NamedTuple):
    """What an update did to one parameter.

    Attributes:
        name: canonical.
        before, after: its values; `after` may be written into.
        gradient: that the optimizer was given.
        update: its number, from 0.
        optimizer, parameter, group: whose, with its settings and the rate of this update.
    """

    name: str
    before: Tensor
    after: Tensor
    gradient: Tensor
    update: int
    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    group: Mapping[str, Any]


Stepped = Callable[[Step], None]
"""Is told of each parameter that an update has changed."""
