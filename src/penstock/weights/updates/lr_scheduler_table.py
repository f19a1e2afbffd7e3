"""torch's learning-rate schedulers, as a table of settings by update.

Updates are made while the caller's loop is still at an earlier batch, and predictions ask for the rates of later ones.
So a scheduler does not run on the optimizer of a stage: it runs on a stand-in with the same parameter groups, and the
settings that it gives update n are copied from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from penstock.errors import CapabilityError, ConfigError
from penstock.weights.optim.optimizer_factory import NEEDS_A_METRIC, refuse_instances

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
"""Makes a scheduler of an optimizer, such as ``lambda optimizer: OneCycleLR(optimizer, max_lr=1e-3, total_steps=500)``;
its steps are updates."""
_HOW = "lr_scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=1e-3, total_steps=500)"
_KEPT = 1024  # updates whose settings are remembered; for older ones the scheduler runs anew


class NoRateError(ConfigError):
    """A scheduler has no learning rate for an update; where one rank notices, all ranks raise it."""


def check_factory(factory: Any) -> None:
    """Refuse what makes no schedulers.

    Raises:
        ConfigError: it is a scheduler itself, or no function.
    """
    refuse_instances(None, factory)
    if not callable(factory):
        raise ConfigError(
            f"lr_scheduler must be a function, optimizer -> scheduler, such as {_HOW}; got {factory!r:.80}"
        )


def by_factor(factor: Callable[[int], float]) -> SchedulerFactory:
    """Return what makes a scheduler of a function: number of the update (0, 1, ...) -> factor on the rates."""
    return partial(LambdaLR, lr_lambda=factor)


class ScheduledSettings:
    """The settings of parameter groups by update, as a scheduler of torch has them.

    Args:
        factory: makes the scheduler.
        optimizer: whose groups are scheduled; it is not touched.

    Raises:
        CapabilityError: the factory returned something else, or a scheduler that needs a metric.
    """

    def __init__(self, factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> None:
        self._factory, self._defaults = factory, dict(optimizer.defaults)
        self._keys = {"lr"}  # of settings that it has ever changed
        self._ended: ValueError | None = None
        self._groups = [_settings_of(group) for group in optimizer.param_groups]
        self._begin()

    def check(self, update: int) -> Sequence[Mapping[str, Any]]:
        """Return what `at` does.

        Raises:
            NoRateError: the scheduler ends before that update.
        """
        try:
            return self.at(update)
        except ValueError as error:
            raise NoRateError(
                f"lr_scheduler has no rate for update {update + 1}: {error}. Give it as many steps as there are "
                "updates in all runs together, such as total_steps=epochs * len(loader)"
            ) from error

    def at(self, update: int) -> Sequence[Mapping[str, Any]]:
        """Return, for every group, what the scheduler changes for an update, counted from 0.

        Raises:
            ValueError: the scheduler ends before that update.
        """
        if update < self._first:
            self._begin()
        while update >= self._first + len(self._rows):
            if self._ended is not None:
                raise self._ended
            self._step()
        return self._rows[update - self._first]

    def near(self, update: int) -> Sequence[Mapping[str, Any]]:
        """Return the settings for an update or, where the scheduler ends before it, those for its last one."""
        try:
            return self.at(update)
        except ValueError:
            return self._rows[-1]

    def _step(self) -> None:
        self._stand_in.step()
        try:
            self._scheduler.step()
        except ValueError as error:  # as OneCycleLR raises after its total_steps
            self._ended = error
            raise
        self._note()

    def _begin(self) -> None:
        self._stand_in = _StandIn(self._groups, self._defaults)
        try:
            self._scheduler = self._factory(self._stand_in)
        except Exception as error:
            error.add_note(
                f"raised by lr_scheduler, which is called with the optimizer of each stage and returns a scheduler: "
                f"{_HOW}; of a function of the number of the update: lambda optimizer: LambdaLR(optimizer, function)"
            )
            raise
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise CapabilityError(NEEDS_A_METRIC)
        if not isinstance(self._scheduler, LRScheduler):
            raise CapabilityError(
                f"lr_scheduler returned {type(self._scheduler).__name__}, not a scheduler of torch; pass a function "
                f"that makes one, such as {_HOW}"
            )
        self._rows: deque[list[dict[str, Any]]] = deque()
        self._first, self._ended = 0, None
        self._note()

    def _note(self) -> None:
        groups = self._stand_in.param_groups
        for group, before in zip(groups, self._groups, strict=True):
            self._keys |= {key for key, value in before.items() if repr(group[key]) != repr(value)}
        self._rows.append([{key: group[key] for key in self._keys if key in group} for group in groups])
        if len(self._rows) > _KEPT:
            self._rows.popleft()
            self._first += 1


class _StandIn(torch.optim.Optimizer):
    """An optimizer with the groups of another one, which steps nothing."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__([{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups], defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count as a step, which schedulers look for."""


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
