"""Predictions of weights some updates ahead, from the newest weights, the state of the optimizer and coming rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.weights.memory.buffers import Buffer
from penstock.weights.optim.directions import direction
from penstock.weights.updates.updater import Updater


class Forecast(NamedTuple):
    """The inputs for predicting the next values of one parameter.

    Attributes:
        name: canonical name.
        weights: its newest values.
        optimizer, parameter, group: the optimizer that steps it, with its key there and its settings.
        rate: the learning rate of the j-th update from now, j from 1.
    """

    name: str
    weights: Tensor
    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    group: Mapping[str, Any]
    rate: Callable[[int], float]


def forecast(updater: Updater, weights: Buffer, guess: Callable[[Forecast], Tensor], out: Buffer) -> None:
    """Write the values that `guess` predicts for each parameter into `out`.

    Args:
        updater: has made the weights.
        weights: the newest ones.
        guess: of the next values of one parameter.
        out: written over.
    """
    out.rewrite()
    rates, made = updater.rates, updater.updates
    place = {id(p): (group, number) for number, group in enumerate(rates.groups) for p in group["params"]}

    def rate(number: int, ahead: int) -> float:
        return rates.of_group(number, made + ahead - 1)

    with torch.no_grad():
        for name, parameter in updater.parameters.items():
            assert updater.optimizer is not None
            group, number = place[id(parameter)]
            known = Forecast(name, weights.views[name], updater.optimizer, parameter, group, partial(rate, number))
            out.views[name].copy_(guess(known))


def go_on(updater: Updater, weights: Buffer, updates: float, uncorrected: bool, out: Buffer) -> None:
    """Write the weights into `out` that are expected if the optimizer goes on in its direction.

    Args:
        updater, weights, out: as of `forecast`.
        updates: how many, at the rate of the next one.
        uncorrected: leave out Adam's bias correction.
    """

    def guess(known: Forecast) -> Tensor:
        found = (known.optimizer, known.parameter, known.group, uncorrected)
        ahead = direction(*found) if updates else None
        return known.weights if ahead is None else known.weights - (updates * known.rate(1)) * ahead

    forecast(updater, weights, guess, out)
