"""The learning rates (and other settings) of a stage's optimizer, update by update.

They come from the factory or were set by hand, are replaced by a scheduler of torch if there is one, and are multiplied
by the factor of a correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.weights.optim.optimizer_adapters import name_of
from penstock.weights.updates.hand_set_param_groups import GroupSettings
from penstock.weights.updates.lr_scheduler_table import ScheduledSettings, SchedulerFactory

Factor = Callable[[int], float]
"""The number of an update (0, 1, ...) -> a factor on its learning rates."""


class Rates:
    """The settings of an optimizer's parameter groups at every update. Updates are counted from 0.

    Args:
        optimizer: whose groups are set; None for a stage without parameters.
        parameters: of the stage, by name.
        scheduler: makes a scheduler of torch that sets rates, and momentum if it does that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        self._name = "nothing" if optimizer is None else name_of(optimizer)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._settings = GroupSettings(optimizer)
        self._factor: Factor | None = None
        self._scheduled: ScheduledSettings | None = None
        if optimizer is not None and scheduler is not None:
            self._scheduled = ScheduledSettings(scheduler, optimizer)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self._settings.groups

    @property
    def scheduled(self) -> ScheduledSettings | None:
        """What a scheduler of torch sets, by update; None where there is none."""
        return self._scheduled

    # --- what they come from ----------------------------------------------------------------------------------------

    def correct(self, factor: Factor | None, begin: Callable[[torch.optim.Optimizer], None] | None) -> None:
        """Set the factor, and let `begin` change settings, after undoing the changes of a previous one."""
        self._factor = factor
        if self._scheduled is None:
            self._settings.take_over()
        self._settings.correct(begin)

    def take_over(self, update: int) -> None:
        """Take what was set by hand since the last update as what schedules and corrections start from.

        Args:
            update: the next one.

        Raises:
            ConfigError: a scheduler sets it, so it would be lost; or parameters were added to the optimizer.
        """
        self._settings.check_members()
        if self._scheduled is not None:
            for moved, scheduled in zip(self._settings.moved(), self._scheduled.near(update), strict=True):
                for key in sorted(moved.keys() & scheduled.keys()):
                    what = "learning rate" if key == "lr" else key
                    raise ConfigError(
                        f"the {what} of {self._name} was set to {moved[key]} by hand, but lr_scheduler sets it at "
                        "every update; leave one of them out"
                    )
        self._settings.take_over()

    def follow(self, first: Rates) -> None:
        """Take over what was set by hand for another copy of the stage."""
        self._settings.put(first._settings.by_hand)

    @property
    def groups_by_hand(self) -> list[dict[str, Any]]:
        """Per parameter group, what was set by hand between runs and differs from what the factory has set."""
        return self._settings.by_hand

    def by_hand(self) -> dict[tuple[str, str], Any]:
        """Return what was set by hand between runs, by setting and parameter, as plain values.

        Raises:
            CapabilityError: a checkpoint cannot hold it.
        """
        return self._settings.state(self._names)

    def load(self, state: Mapping[str, Mapping[str, Any]], update: int) -> None:
        """Restore what `by_hand` returned, by parameter and setting; all others are those of the factory.

        Args:
            state: by parameter and setting.
            update: the next one.

        Raises:
            CheckpointError: a group has parameters with different settings.
        """
        self._settings.load(state, self._names, self._scheduled_keys(update))

    def changed_by_optimizer(self, update: int) -> list[str]:
        """Return which settings of its first such group the optimizer itself has changed by `update`."""
        for place, without in enumerate(self._scheduled_keys(update)):
            changed = self._settings.changed(place, without)
            if changed:
                return changed
        return []

    def _scheduled_keys(self, update: int) -> list[set[str]]:
        """What a scheduler sets, per group."""
        if self._scheduled is None:
            return [set() for _ in self.groups]
        return [set(row) for row in self._scheduled.near(update)]

    # --- what they are ----------------------------------------------------------------------------------------------

    def at(self, update: int) -> dict[str, float]:
        """Return the learning rate of each parameter at an update."""
        places = {id(p): place for place, group in enumerate(self.groups) for p in group["params"]}
        return {name: self.of_group(places[key], update) for key, name in self._names.items()}

    def of_group(self, place: int, update: int) -> float:
        """Return the learning rate of a parameter group at an update."""
        rate = self._settings.rates[place] if self._scheduled is None else self._scheduled.near(update)[place]["lr"]
        return float(rate) * (1.0 if self._factor is None else self._factor(update))

    def put(self, update: int) -> None:
        """Set those of an update, which is made next.

        Raises:
            ConfigError: somebody else has set them since the last one, or added groups.
        """
        moved = self._settings.moved_rate()
        if moved is not None:
            raise ConfigError(
                f"the learning rate of {self._name} was set from {moved[0]} to {moved[1]} during a run. The loop over "
                "reports is not in step with updates, so a scheduler stepped there acts on the wrong ones; pass "
                "Pipeline(lr_scheduler=lambda optimizer: OneCycleLR(optimizer, ...)), or set rates between two runs"
            )
        if self._factor is None and self._scheduled is None:
            return
        factor = 1.0 if self._factor is None else self._factor(update)
        for group, row in zip(self.groups, self._rows(update), strict=True):
            group.update(row, lr=row["lr"] * factor)

    def note(self) -> None:
        """Note the settings after an update: whatever changes before the next run is set by hand."""
        self._settings.note()

    def _rows(self, update: int) -> Sequence[Mapping[str, Any]]:
        """The settings of an update per group, before the factor."""
        if self._scheduled is None:
            return [{"lr": rate} for rate in self._settings.rates]
        return self._scheduled.check(update)
