"""One optimizer per stage, stepping from version t to version t+1.

The optimizer is any `torch.optim` class, built by the user's factory on parameters of its own. These never enter a
graph: before a step their `.data` is pointed at the buffers in question. If an update is in place, that is the buffer
of the weights. If it rotates, the new version is written over the gradient: a few parameters at a time, the gradient
moves to a scratch tensor, the old weights are copied to its place, and the optimizer steps there in place. The scratch
is as large as the largest parameter, or 4 MiB if that is more; optimizer state exists once, whatever the number of
versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.scratch import Scratch
from penstock.weights.optim.adapters import is_separable, name_of
from penstock.weights.optim.directions import direction
from penstock.weights.optim.group_settings import GroupSettings
from penstock.weights.optim.lr_schedulers import ScheduledSettings, SchedulerFactory
from penstock.weights.optim.step_info import Forecast, Step, Stepped
from penstock.weights.optim.undo import check_undoable, undo_step

_COUNTERS = ("step", "mu_product")  # their names in torch's optimizers
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Builds an optimizer from the named parameters of a stage, such as ``lambda named: torch.optim.AdamW(named,
lr=1e-3)``."""


class Updater:
    """Steps the parameters of one stage with the user's optimizer.

    Args:
        factory: builds the optimizer; its method `undone`, if any, is called with optimizers whose last step was
            undone.
        layout: the layout of the parameters of the stage.
        first: the buffer of version 0.
        rotates: True if updates are written over the gradient, or a callback needs the values before and after.
        rate: update ordinal (0, 1, ...) -> factor on the learning rates that the factory set.
        begin: called with the optimizer before it steps.
        scheduler: makes a scheduler of torch that sets rates, and momentum if it does that, update by update.

    Raises:
        CapabilityError: the optimizer cannot step a pipeline stage.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        layout: Layout,
        first: Buffer,
        rotates: bool,
        rate: Callable[[int], float] | None = None,
        begin: Callable[[torch.optim.Optimizer], None] | None = None,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        # Parameters get their own memory: one made on a view would share the buffer's version counter forever.
        self.parameters = {name: nn.Parameter(torch.empty_like(view)) for name, view in first.views.items()}
        for name, parameter in self.parameters.items():
            parameter.data = first.views[name]
        self.optimizer: torch.optim.Optimizer | None = None
        self.updates = 0
        self._told: Callable[[torch.optim.Optimizer], None] | None = getattr(factory, "undone", None)
        self._rate = rate
        self._scratch: Scratch | None = None
        self._scheduled: ScheduledSettings | None = None
        if self.parameters:
            self.optimizer = _make(factory, self.parameters)
        self._settings = GroupSettings(self.optimizer)
        if self.optimizer is None:
            return
        if scheduler is not None:
            self._scheduled = ScheduledSettings(scheduler, self.optimizer)
        self.correct(rate, begin)
        self.prepare(layout, rotates)

    def correct(
        self, rate: Callable[[int], float] | None, begin: Callable[[torch.optim.Optimizer], None] | None
    ) -> None:
        """Set the rate factors and let `begin` change settings, after undoing the changes of a previous one."""
        self._rate = rate
        if self._scheduled is None:
            self._settings.take_over()
        self._settings.correct(begin)

    def take_over(self) -> None:
        """Take what was set by hand since the last update as what schedules and corrections start from.

        Raises:
            ConfigError: a scheduler sets it, so it would be lost.
        """
        if self._scheduled is not None:
            for moved, scheduled in zip(self._settings.moved(), self._scheduled.near(self.updates), strict=True):
                for key in sorted(moved.keys() & scheduled.keys()):
                    what = "learning rate" if key == "lr" else key
                    raise ConfigError(
                        f"the {what} of {self.name} was set to {moved[key]} by hand, but lr_scheduler sets it at every "
                        "update; leave one of them out"
                    )
        self._settings.take_over()

    def follow_settings(self, first: Updater) -> None:
        """Take over what was set by hand for another copy of the stage."""
        self._settings.put(first._settings.by_hand)

    @property
    def by_hand(self) -> list[dict[str, Any]]:
        """Per parameter group, what was set by hand between runs and differs from what the factory has set."""
        return self._settings.by_hand

    def settings_by_hand(self) -> dict[tuple[str, str], Any]:
        """Return what was set by hand between runs, by setting and parameter, as plain values.

        Raises:
            CapabilityError: a checkpoint cannot hold it.
        """
        return self._settings.state(self._names)

    def load_settings(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `settings_by_hand` returned, by parameter and setting; all others are those of the factory.

        Raises:
            CheckpointError: a group has parameters with different settings.
        """
        self._settings.load(state, self._names, self._scheduled_keys())

    @property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def _scheduled_keys(self) -> list[set[str]]:
        """What a scheduler sets, per group."""
        if self._scheduled is None:
            return [set() for _ in self._groups]
        return [set(row) for row in self._scheduled.near(self.updates)]

    def prepare(self, layout: Layout, rotates: bool) -> None:
        """Allocate the scratch for updates over the gradient, or free it if there are none."""
        if not rotates or self.optimizer is None:
            self._scratch = None
        elif self._scratch is None:
            self._scratch = Scratch(layout, separable=is_separable(self.optimizer))

    def follow(self, weights: Buffer) -> None:
        """Point the parameters at this buffer; after a skipped update the weights may be in another one."""
        for name, parameter in self.parameters.items():
            parameter.data = weights.views[name]

    @property
    def name(self) -> str:
        """The class name of the optimizer."""
        return "nothing" if self.optimizer is None else name_of(self.optimizer)

    def stepper(self, name: str) -> str:
        """Return the class name of the optimizer that steps a parameter."""
        return self.name if self.optimizer is None else name_of(self.optimizer, self.parameters[name])

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state and scratch."""
        return sum(t.nbytes for t in self.tensors) + (self._scratch.nbytes if self._scratch else 0)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer state."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def state(self) -> dict[tuple[str, str], Any]:
        """Copy the optimizer state, by kind and parameter: tensors and plain values.

        Raises:
            CapabilityError: it holds other objects, or state in its parameter groups.
        """
        found: dict[tuple[str, str], Any] = {}
        for place, without in enumerate(self._scheduled_keys()):
            changed = self._settings.changed(place, without)
            if changed:
                raise CapabilityError(
                    f"{self.name} changes {', '.join(changed)} in its parameter groups during training; a checkpoint "
                    "holds only state by parameter, so a run could not be resumed from it"
                )
        for name, parameter in self.parameters.items():
            for key, value in (self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}).items():
                if isinstance(value, Tensor):
                    found[key, name] = value.clone()
                elif value is None or isinstance(value, bool | int | float | str):
                    found[key, name] = value
                else:
                    raise CapabilityError(
                        f"{self.name} has a {type(value).__name__} in its state ({key} of {name}), which a checkpoint "
                        "cannot hold; it can hold tensors and plain values"
                    )
        return found

    def load(self, updates: int, state: Mapping[tuple[str, str], Any]) -> None:
        """Restore a state that `state` returned.

        Args:
            updates: number of updates made so far, which the learning rate follows.
            state: the optimizer state, by kind and parameter.
        """
        self.updates = updates
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        groups = [g for g in self.optimizer.param_groups if g.get("capturable") or g.get("fused")]
        counted = {p for group in groups for p in group["params"]}
        on_device = {name for name, parameter in self.parameters.items() if parameter in counted}
        for (key, name), value in state.items():
            parameter = self.parameters[name]
            here = self.optimizer.state[parameter]
            if isinstance(
                value, Tensor
            ):  # step counters stay on their device, except for optimizers that count on the accelerator
                value = value.to(parameter.device if name in on_device or value.dim() else "cpu", copy=True)
            here[key] = value

    def remembered(self) -> list[Tensor]:
        """Return the state tensors with a value per element of a parameter, in a fixed order; no step counters."""
        if self.optimizer is None:
            return []
        states = [(parameter, self.optimizer.state.get(parameter, {})) for parameter in self.parameters.values()]
        found = [
            (p, key, state[key]) for p, state in states for key in sorted(state)
        ]  # `load` may restore them in any order
        return [
            value
            for parameter, key, value in found
            if isinstance(value, Tensor)
            and (value.is_floating_point() or value.is_complex())
            and (value.dim() or (not parameter.dim() and key not in _COUNTERS))
        ]

    def forget(self) -> None:
        """Clear the optimizer state, except the number of updates, which the learning rate follows."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def in_place(self, weights: Buffer, gradient: Buffer, factor: float, stepped: Stepped | None = None) -> None:
        """Step in the buffer of the weights.

        Args:
            weights: version t; becomes version t+1.
            gradient: gradient of the loss sum, divided by the constant c.
            factor: c / N; the gradient is multiplied by it first.
            stepped: called for each parameter.
        """
        weights.rewrite()
        if factor != 1.0:
            gradient.scale(factor)
        if stepped is not None:
            self._tell_steps(weights, gradient, stepped)
            return
        self._point(self.parameters, weights, gradient.views)
        self._step()

    def _tell_steps(self, weights: Buffer, gradient: Buffer, stepped: Stepped) -> None:
        """Step a few parameters at a time, so that their previous values need no more memory than the scratch."""
        self._schedule_rate()
        with torch.no_grad():
            for before in self._scratch.groups if self._scratch else ():
                for name, scratch in before.items():
                    scratch.copy_(weights.views[name])
                self._point(before, weights, gradient.views)
                self._optimizer_step()
                self._tell_of(before, before, weights.views, gradient.views, stepped)
        self._updated()

    def _tell_of(
        self,
        names: Iterable[str],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        stepped: Stepped,
    ) -> None:
        assert self.optimizer is not None
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for name in names:
            parameter = self.parameters[name]
            figures = before[name], after[name], gradients[name]
            stepped(Step(name, *figures, self.updates, self.optimizer, parameter, groups[id(parameter)]))

    def rates_of(self, update: int) -> dict[str, float]:
        """Return the learning rates of an update, by its number, for each parameter."""
        known = {
            id(p): self._rate_of(place, update) for place, group in enumerate(self._groups) for p in group["params"]
        }
        return {name: known[id(parameter)] for name, parameter in self.parameters.items()}

    def predict(self, weights: Buffer, updates: float, uncorrected: bool, out: Buffer) -> None:
        """Write the weights expected some updates later into `out`, at the rate of the next update."""

        def guess(known: Forecast) -> Tensor:
            found = (known.optimizer, known.parameter, known.group, uncorrected)
            ahead = direction(*found) if updates else None
            return known.weights if ahead is None else known.weights - (updates * known.rate(1)) * ahead

        self.foresee(weights, guess, out)

    def foresee(self, weights: Buffer, guess: Callable[[Forecast], Tensor], out: Buffer) -> None:
        """Write the values that `guess` predicts for each parameter of `weights`, the newest ones, into `out`."""
        out.rewrite()
        place = {id(p): (group, number) for number, group in enumerate(self._groups) for p in group["params"]}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                assert self.optimizer is not None
                group, number = place[id(parameter)]
                view, ahead = weights.views[name], partial(self._ahead, number)
                out.views[name].copy_(guess(Forecast(name, view, self.optimizer, parameter, group, ahead)))

    def _ahead(self, place: int, update: int) -> float:
        """Return the rate of a group at the `update`-th update from now."""
        return self._rate_of(place, self.updates + update - 1)

    def _rate_of(self, place: int, update: int) -> float:
        """Return the rate of a group at an update, by its number."""
        rate = self._settings.rates[place] if self._scheduled is None else self._scheduled.near(update)[place]["lr"]
        return float(rate) * (1.0 if self._rate is None else self._rate(update))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._settings.groups

    def check_undoable(self) -> None:
        """Raise an error if steps cannot be undone in place.

        Raises:
            CapabilityError: they cannot; the message names the optimizers whose steps can.
        """
        if self.optimizer is not None:
            check_undoable(self.optimizer)

    def undo(self, weights: Buffer, gradient: Buffer) -> None:
        """Undo the last step, which was in place, up to rounding errors."""
        assert self.optimizer is not None
        weights.rewrite()
        self._point(self.parameters, weights, gradient.views)
        gradients = {p: gradient.views[name] for name, p in self.parameters.items()}
        undo_step(self.optimizer, gradients, first=self.updates == 1)
        self.optimizer.zero_grad(set_to_none=True)
        self.updates -= 1
        self._tell()

    def go_back(self, updates: int, state: Mapping[tuple[str, str], Any]) -> None:
        """Restore the optimizer state from before the last step, if there was one."""
        if self.updates != updates:
            self.load(updates, state)
            self._tell()

    def _tell(self) -> None:
        if self._told is not None and self.optimizer is not None:
            self._told(self.optimizer)
            self._settings.note()

    def rotate(
        self,
        old: Buffer,
        new: Buffer,
        factor: float,
        gradient: Buffer | None = None,
        stepped: Stepped | None = None,
    ) -> None:
        """Step from `old` into `new`, which on return holds version t+1.

        Args:
            old: version t.
            new: holds the gradient on entry, unless that is given.
            factor: the factor on the gradient.
            gradient: a gradient that is left unchanged.
            stepped: called for each parameter.
        """
        source = (gradient or new).views
        new.rewrite()
        self._schedule_rate()
        with torch.no_grad():
            for gradients in self._scratch.groups if self._scratch else ():
                for name, scaled in gradients.items():
                    if factor == 1.0:
                        scaled.copy_(source[name])
                    else:
                        torch.mul(source[name], factor, out=scaled)
                    new.views[name].copy_(old.views[name])
                self._point(gradients, new, gradients)
                self._optimizer_step()
                if stepped is not None:
                    self._tell_of(gradients, old.views, new.views, gradients, stepped)
        self._updated()

    def _point(self, names: Iterable[str], buffer: Buffer, gradients: dict[str, Tensor]) -> None:
        for name in names:
            parameter = self.parameters[name]
            parameter.data = buffer.views[name]
            parameter.grad = gradients[name]

    def _step(self) -> None:
        self._schedule_rate()
        self._optimizer_step()
        self._updated()

    def _updated(self) -> None:
        self.updates += 1
        self._settings.note()

    def _schedule_rate(self) -> None:
        """Set the rates of the next update.

        Raises:
            ConfigError: somebody else has set them since the last one.
        """
        moved = self._settings.moved_rate()
        if moved is not None:
            raise ConfigError(
                f"the learning rate of {self.name} was set from {moved[0]} to {moved[1]} during a run. The loop over "
                "reports is not in step with updates, so a scheduler stepped there acts on the wrong ones; pass "
                "Pipeline(lr_scheduler=lambda optimizer: OneCycleLR(optimizer, ...)), or set rates between two runs"
            )
        if self._rate is None and self._scheduled is None:
            return
        factor = 1.0 if self._rate is None else self._rate(self.updates)
        constant = [{"lr": rate} for rate in self._settings.rates]
        rows = constant if self._scheduled is None else self._scheduled.check(self.updates)
        for group, row in zip(self._groups, rows, strict=True):
            group.update(row, lr=row["lr"] * factor)

    @property
    def scheduled(self) -> ScheduledSettings | None:
        """What a scheduler of torch sets, by update; None where there is none."""
        return self._scheduled

    def _optimizer_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def _make(factory: Any, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of a stage.

    Raises:
        ConfigError: the factory is an optimizer itself, or no function.
        CapabilityError: what it makes cannot step a stage.
    """
    if isinstance(factory, torch.optim.Optimizer):
        name = type(factory).__name__
        raise ConfigError(
            f"optimizer is an instance of {name}, but every stage needs one of its own; pass a function that "
            f"makes it from named parameters:\n    make = lambda named: torch.optim.{name}(named, lr=...)\n"
            "    pipeline = penstock.Pipeline(..., optimizer=make)"
        )
    if not callable(factory):
        raise ConfigError(
            f"optimizer must be a function, named parameters -> optimizer, such as lambda named: "
            f"torch.optim.AdamW(named, lr=1e-3); got {factory!r:.80}"
        )
    try:
        optimizer: torch.optim.Optimizer = factory(list(parameters.items()))
    except Exception as error:
        error.add_note(
            "raised by optimizer, which is called with the pairs (name, parameter) of a stage, as named_parameters() "
            "yields them: optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), or [p for _, p in named] in place "
            "of named"
        )
        raise
    _check_capability(optimizer, parameters)
    return optimizer


def _check_capability(optimizer: Any, parameters: dict[str, nn.Parameter]) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CapabilityError(f"the optimizer factory returned {name}, not a torch optimizer; did it forget return?")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CapabilityError(
            f"{name} needs a closure that evaluates the model again, which a pipeline stage cannot do; "
            "use an optimizer whose step() takes no closure, such as AdamW"
        )
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [key for key, p in parameters.items() if id(p) not in covered]
    if missing:
        raise CapabilityError(
            f"the optimizer factory left out {len(missing)} trained parameters, the first of them {missing[0]}; "
            "pass them all to the optimizer, or freeze some with requires_grad=False"
        )
