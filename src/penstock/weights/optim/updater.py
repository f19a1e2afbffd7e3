"""One optimizer per stage, stepping from version t to version t+1.

The optimizer is any `torch.optim` class, built by the user's factory on parameters of its own. These never enter a
graph: before a step their `.data` is pointed at the buffers in question. Where an update is in place, that is the
buffer of the weights. Where it rotates, the new version is written over the gradient: a few parameters at a time, the
gradient moves to a scratch tensor, the old weights are copied to where it was, and the optimizer steps there in place.
The scratch is as large as the largest parameter, or 4 MiB if that is more; optimizer state exists once, whatever the
number of versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.scratch import Scratch
from penstock.weights.optim.adapters import is_separable, name_of
from penstock.weights.optim.directions import direction
from penstock.weights.optim.step_info import Forecast, Step, Stepped
from penstock.weights.optim.undo import check_undoable, undo_step

_COUNTERS = ("step", "mu_product")  # as torch's optimizers call them
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters of a stage -> its optimizer, such as ``lambda named: torch.optim.AdamW(named, lr=1e-3)``."""


class Updater:
    """Steps the parameters of one stage.

    Args:
        factory: builds the optimizer; if it has a method `undone`, that is told of optimizers whose last step was taken
            back.
        layout: the parameters of the stage.
        first: the buffer of version 0.
        rotates: whether updates are written over the gradient, or somebody is told how they move parameters.
        rate: update ordinal (0, 1, ...) -> factor on the learning rates that the factory set.
        begin: told of the optimizer before it steps.

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
    ) -> None:
        # Made on memory of their own: a Parameter made on a view would share the buffer's version counter for ever.
        self.parameters = {name: nn.Parameter(torch.empty_like(view)) for name, view in first.views.items()}
        for name, parameter in self.parameters.items():
            parameter.data = first.views[name]
        self.optimizer = factory(list(self.parameters.items())) if self.parameters else None
        self.updates = 0
        self._told: Callable[[torch.optim.Optimizer], None] | None = getattr(factory, "undone", None)
        self._rate = rate
        self._scratch: Scratch | None = None
        if self.optimizer is None:
            return
        _check_capability(self.optimizer, self.parameters)
        self._changed: list[dict[str, Any]] = [{} for _ in self.optimizer.param_groups]  # what they were before
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.correct(rate, begin)
        self.prepare(layout, rotates)

    def correct(
        self, rate: Callable[[int], float] | None, begin: Callable[[torch.optim.Optimizer], None] | None
    ) -> None:
        """Step with these rates; `begin` may change settings, of which what another one has changed is undone."""
        self._rate = rate
        if self.optimizer is None:
            return
        groups = self.optimizer.param_groups
        for group, changed, initial in zip(groups, self._changed, self._rates, strict=True):
            group.update(changed, lr=initial)
        before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        if begin is not None:
            begin(self.optimizer)
        self._changed = [
            {key: value for key, value in known.items() if repr(group[key]) != repr(value)}
            for group, known in zip(groups, before, strict=True)
        ]
        self._settings = [_settings(group) for group in self.optimizer.param_groups]

    def prepare(self, layout: Layout, rotates: bool) -> None:
        """Make the scratch that updates over the gradient take, or let go of it where there are none."""
        if not rotates or self.optimizer is None:
            self._scratch = None
        elif self._scratch is None:
            self._scratch = Scratch(layout, separable=is_separable(self.optimizer))

    def follow(self, weights: Buffer) -> None:
        """Let go of whatever buffer the parameters lie in, for this one: after a skipped update it is another."""
        for name, parameter in self.parameters.items():
            parameter.data = weights.views[name]

    @property
    def name(self) -> str:
        """What kind of optimizer it is."""
        return "nothing" if self.optimizer is None else name_of(self.optimizer)

    def stepper(self, name: str) -> str:
        """What kind of optimizer steps a parameter."""
        return self.name if self.optimizer is None else name_of(self.optimizer, self.parameters[name])

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state and scratch."""
        return sum(t.nbytes for t in self.tensors) + (self._scratch.nbytes if self._scratch else 0)

    @property
    def tensors(self) -> list[Tensor]:
        """What the optimizer remembers in tensors."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def state(self) -> dict[tuple[str, str], Any]:
        """Copies of what the optimizer remembers, by kind and parameter: tensors and plain values.

        Raises:
            CapabilityError: it remembers something else, or something in its groups.
        """
        found: dict[tuple[str, str], Any] = {}
        for group, before in zip(self.optimizer.param_groups, self._settings, strict=True) if self.optimizer else ():
            changed = sorted(key for key, value in _settings(group).items() if value != before.get(key))
            if changed:
                raise CapabilityError(
                    f"{self.name} changes {', '.join(changed)} in its parameter groups while it trains; a checkpoint "
                    "holds what is kept for each parameter, so a run could not go on from it"
                )
        for name, parameter in self.parameters.items():
            for key, value in (self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}).items():
                if isinstance(value, Tensor):
                    found[key, name] = value.clone()
                elif value is None or isinstance(value, bool | int | float | str):
                    found[key, name] = value
                else:
                    raise CapabilityError(
                        f"{self.name} remembers a {type(value).__name__} ({key} of {name}), which "
                        "a checkpoint cannot hold; it takes tensors and plain values"
                    )
        return found

    def load(self, updates: int, state: Mapping[tuple[str, str], Any]) -> None:
        """Go on where `state` was taken.

        Args:
            updates: made so far, which the learning rate follows.
            state: what the optimizer remembers, by kind and parameter.
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
            if isinstance(value, Tensor):  # counters stay where they are, but for optimizers that count on the device
                value = value.to(parameter.device if name in on_device or value.dim() else "cpu", copy=True)
            here[key] = value

    def remembered(self) -> list[Tensor]:
        """What the optimizer remembers for the elements of its parameters, in one order; no counters of steps."""
        if self.optimizer is None:
            return []
        states = [(parameter, self.optimizer.state.get(parameter, {})) for parameter in self.parameters.values()]
        found = [(p, key, state[key]) for p, state in states for key in sorted(state)]  # `load` finds them in any order
        return [
            value
            for parameter, key, value in found
            if isinstance(value, Tensor)
            and (value.is_floating_point() or value.is_complex())
            and (value.dim() or (not parameter.dim() and key not in _COUNTERS))
        ]

    def forget(self) -> None:
        """Begin anew with nothing remembered, but for the number of updates, which the learning rate follows."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def in_place(self, weights: Buffer, gradient: Buffer, factor: float, stepped: Stepped | None = None) -> None:
        """Step in the buffer of the weights.

        Args:
            weights: version t; becomes version t+1.
            gradient: of the loss sum, over the constant c.
            factor: c / N; the gradient is multiplied by it first.
            stepped: told of each parameter.
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
        """Step a few parameters at a time, so that what they were takes no more than the scratch."""
        self._schedule_rate()
        with torch.no_grad():
            for before in self._scratch.groups if self._scratch else ():
                for name, scratch in before.items():
                    scratch.copy_(weights.views[name])
                self._point(before, weights, gradient.views)
                self._optimizer_step()
                self._tell_of(before, before, weights.views, gradient.views, stepped)
        self.updates += 1

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
        """The learning rates of an update, by its number, for each parameter."""
        factor = 1.0 if self._rate is None else self._rate(update)
        groups = [] if self.optimizer is None else zip(self.optimizer.param_groups, self._rates, strict=True)
        known = {id(p): factor * float(rate) for group, rate in groups for p in group["params"]}
        return {name: known[id(parameter)] for name, parameter in self.parameters.items()}

    def predict(self, weights: Buffer, updates: float, uncorrected: bool, out: Buffer) -> None:
        """Write into `out` what `weights` are expected to be some updates later, at the rate of the next one."""

        def guess(known: Forecast) -> Tensor:
            found = (known.optimizer, known.parameter, known.group, uncorrected)
            ahead = direction(*found) if updates else None
            return known.weights if ahead is None else known.weights - (updates * known.rate(1)) * ahead

        self.foresee(weights, guess, out)

    def foresee(self, weights: Buffer, guess: Callable[[Forecast], Tensor], out: Buffer) -> None:
        """Write into `out` what is guessed of each parameter of `weights`, the newest ones."""
        out.rewrite()
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        place = {id(p): (group, r) for group, r in zip(groups, self._rates, strict=True) for p in group["params"]}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                assert self.optimizer is not None
                group, rate = place[id(parameter)]
                view, ahead = weights.views[name], partial(self._ahead, rate)
                out.views[name].copy_(guess(Forecast(name, view, self.optimizer, parameter, group, ahead)))

    def _ahead(self, rate: float, update: int) -> float:
        """The rate of the n-th update from now, of a group with this initial one."""
        return rate * (1.0 if self._rate is None else self._rate(self.updates + update - 1))

    def check_undoable(self) -> None:
        """Make sure that steps can be undone in place.

        Raises:
            CapabilityError: they cannot; the message says which can.
        """
        if self.optimizer is not None:
            check_undoable(self.optimizer)

    def undo(self, weights: Buffer, gradient: Buffer) -> None:
        """Take the last step back, which was in place, up to roundings."""
        assert self.optimizer is not None
        weights.rewrite()
        self._point(self.parameters, weights, gradient.views)
        gradients = {p: gradient.views[name] for name, p in self.parameters.items()}
        undo_step(self.optimizer, gradients, first=self.updates == 1)
        self.optimizer.zero_grad(set_to_none=True)
        self.updates -= 1
        self._tell()

    def go_back(self, updates: int, state: Mapping[tuple[str, str], Any]) -> None:
        """Forget the last step, if there was one, of what is remembered: `state` is from before it."""
        if self.updates != updates:
            self.load(updates, state)
            self._tell()

    def _tell(self) -> None:
        if self._told is not None and self.optimizer is not None:
            self._told(self.optimizer)

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
            factor: what the gradient is multiplied by.
            gradient: stays as it is.
            stepped: told of each parameter.
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
        self.updates += 1

    def _point(self, names: Iterable[str], buffer: Buffer, gradients: dict[str, Tensor]) -> None:
        for name in names:
            parameter = self.parameters[name]
            parameter.data = buffer.views[name]
            parameter.grad = gradients[name]

    def _step(self) -> None:
        self._schedule_rate()
        self._optimizer_step()
        self.updates += 1

    def _schedule_rate(self) -> None:
        if self.optimizer is not None and self._rate is not None:
            factor = self._rate(self.updates)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def _optimizer_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def _check_capability(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CapabilityError(f"the optimizer factory returned {type(optimizer).__name__}, not a torch optimizer")
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


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says, in a form that can be compared, but for the rate, which follows a schedule."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "param_names", "lr")}
