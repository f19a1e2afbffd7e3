"""One optimizer per stage, stepping from version t to version t+1.

The optimizer is any `torch.optim` class, built by the user's factory on parameters of its own. These never enter a
graph: before a step their `.data` is pointed at the buffers in question. If an update is in place, that is the buffer
of the weights. If it rotates, the new version is written over the gradient: a few parameters at a time, the gradient
moves to a scratch tensor, the old weights are copied to its place, and the optimizer steps there in place. The scratch
is as large as the largest parameter, or 4 MiB if that is more; optimizer state exists once, whatever the number of
versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.comm.core.devices import SideStream
from penstock.errors import CapabilityError
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.gradient_scratch import Scratch, step_groups
from penstock.weights.memory.row_shards import RowShards, Steppable
from penstock.weights.optim.offloaded_state import OffloadedState
from penstock.weights.optim.optimizer_adapters import is_separable, name_of
from penstock.weights.optim.optimizer_factory import OptimizerFactory, make_optimizer
from penstock.weights.optim.optimizer_state import copy_state, remembered_values, restore_state, state_tensors
from penstock.weights.optim.step_hooks import step_hooks
from penstock.weights.optim.undo import check_undoable, undo_step
from penstock.weights.updates.lr_scheduler_table import SchedulerFactory
from penstock.weights.updates.optimizer_step import OptimizerStep, drop_gradients
from penstock.weights.updates.parameter_change import Step, Stepped
from penstock.weights.updates.rates import Factor, Rates

_Group = TypeVar("_Group", bound=Collection[str])


class Updater:
    """Steps the parameters of one stage with the user's optimizer.

    Args:
        factory: builds the optimizer; its method `undone`, if any, is called with optimizers whose last step was
            undone.
        layout: the layout of the parameters of the stage.
        first: where they are in version 0.
        rotates: True if updates are written over the gradient, or a callback needs the values before and after.
        factor: by which the learning rates are multiplied, by update.
        begin: called with the optimizer before it steps.
        scheduler: makes a scheduler of torch that sets rates, and momentum if it does that, update by update.

    Attributes:
        parameters: by name, as the optimizer has them.
        own: the names of those that are stepped here, or some rows of them.
        optimizer: None for a stage without parameters.
        offloaded: the optimizer state, if it is in the memory of the host between updates.
        updates: made so far.
        rates: the learning rates of all updates.

    Raises:
        CapabilityError: the optimizer cannot step a pipeline stage.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        layout: Layout,
        first: Steppable,
        rotates: bool,
        factor: Factor | None = None,
        begin: Callable[[torch.optim.Optimizer], None] | None = None,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        # One made on a view would share the buffer's version counter forever; none has memory before it gets that.
        self.parameters = {name: nn.Parameter(view.new_empty(0)) for name, view in first.views.items()}
        for name, parameter in self.parameters.items():
            parameter.data = first.views[name]
        self.optimizer = make_optimizer(factory, self.parameters) if self.parameters else None
        self.offloaded: OffloadedState | None = None
        self.updates = 0
        self._told: Callable[[torch.optim.Optimizer], None] | None = getattr(factory, "undone", None)
        self._scratch: Scratch | None = None
        self._layout = layout
        self.own = list(self.parameters)
        self._make_step = OptimizerStep(self.optimizer, self.parameters)
        self.rates = Rates(self.optimizer, self.parameters, scheduler)
        self.rates.correct(factor, begin)
        self.prepare(layout, rotates)

    def prepare(self, layout: Layout, rotates: bool) -> None:
        """Allocate the scratch for updates over the gradient, or free it if there are none."""
        self._layout = layout
        if not rotates or self.optimizer is None:
            self._scratch = None
        elif self._scratch is None:
            self._scratch = Scratch(layout, self._separable)

    def offload(self, in_pieces: bool, side: SideStream | None) -> None:
        """Keep the optimizer state in the memory of the host between updates; arguments as of `OffloadedState`."""
        if self.optimizer is not None:
            self.offloaded = OffloadedState(self.optimizer, self.parameters, in_pieces, side)

    def swap_in(self) -> None:
        """Begin to bring the optimizer state to the device, or that of the parameters that are stepped first."""
        if self.offloaded is not None:
            self.offloaded.fetch(self._pieces[0])

    def swap_out(self) -> None:
        """Begin to move it back."""
        if self.offloaded is not None:
            self.offloaded.store()

    @property
    def _pieces(self) -> Sequence[Collection[str]]:
        """The names of the parameters that are stepped together where updates are in place."""
        if self.offloaded is None or not self.offloaded.in_pieces or self.optimizer is None:
            return [self.own]
        return self._groups or step_groups(self._layout, self._separable) or [self.own]

    @property
    def _separable(self) -> bool:
        return self.optimizer is not None and is_separable(self.optimizer) and not step_hooks(self.optimizer)

    def _brought(self, groups: Sequence[_Group]) -> Iterable[_Group]:
        """Return groups of parameters, each with its state where it is stepped."""
        return groups if self.offloaded is None else self.offloaded.bring(groups)

    def divide(self, shards: RowShards, weights: Steppable) -> None:
        """Step only the own rows from now on.

        Parameters without any stay in their groups, so that these are the same everywhere, but get no gradient.

        Args:
            shards: who owns which rows.
            weights: the own rows.
        """
        self.own = list(weights.views)
        for name, parameter in self.parameters.items():
            state = {} if self.optimizer is None else self.optimizer.state.get(parameter, {})  # Adagrad begins with one
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                    state[key] = shards.rows(name).of(value).clone()
            if name not in weights.views and self.optimizer is not None:
                self.optimizer.state.pop(parameter, None)
        self.follow(weights)

    @property
    def _groups(self) -> Sequence[Mapping[str, Tensor]]:
        """The groups of parameters that are stepped together, each with its places in the scratch.

        Step hooks may have come since the scratch was made; they see all parameters together.
        """
        if self._scratch is None or self.optimizer is None:
            return ()
        if len(self._scratch.groups) > 1 and step_hooks(self.optimizer):
            self._scratch = Scratch(self._layout, separable=False)
        return self._scratch.groups

    def follow(self, weights: Steppable) -> None:
        """Point the parameters at this buffer; after a skipped update the weights may be in another one."""
        for name, parameter in self.parameters.items():
            parameter.data = weights.views[name] if name in weights.views else parameter.new_empty(0)

    @property
    def name(self) -> str:
        """The class name of the optimizer."""
        return "nothing" if self.optimizer is None else name_of(self.optimizer)

    def stepper(self, name: str) -> str:
        """Return the class name of the optimizer that steps a parameter."""
        return self.name if self.optimizer is None else name_of(self.optimizer, self.parameters[name])

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state and scratch, without what is in the memory of the host."""
        state = [] if self.optimizer is None else state_tensors(self.optimizer)
        scratch = self._scratch.nbytes if self._scratch else 0
        return sum(tensor.nbytes for tensor in state) - self.offloaded_nbytes + scratch

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes of optimizer state in the memory of the host."""
        return 0 if self.offloaded is None else self.offloaded.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer state, wherever they are."""
        self.wait_for_copies()
        return [] if self.optimizer is None else state_tensors(self.optimizer)

    def wait_for_copies(self) -> None:
        """Wait until the optimizer state can be read, wherever it is."""
        if self.offloaded is not None:
            self.offloaded.wait()

    def state(self, copied: Callable[[Tensor], Tensor] = torch.clone) -> dict[tuple[str, str], Any]:
        """Copy the optimizer state, by kind and parameter: tensors and plain values.

        Args:
            copied: copies a tensor.

        Raises:
            CapabilityError: it holds other objects, or state in its parameter groups.
        """
        changed = self.rates.changed_by_optimizer(self.updates)
        if changed:
            raise CapabilityError(
                f"{self.name} changes {', '.join(changed)} in its parameter groups during training; a checkpoint "
                "holds only state by parameter, so a run could not be resumed from it"
            )
        self.wait_for_copies()
        return {} if self.optimizer is None else copy_state(self.optimizer, self.parameters, copied)

    def load(self, updates: int, state: Iterable[tuple[tuple[str, str], Any]]) -> None:
        """Restore a state that `state` returned.

        Args:
            updates: number of updates made so far, which the learning rate follows.
            state: kind and parameter, and the value, one at a time.
        """
        self.updates = updates
        if self.optimizer is not None:
            restore_state(self.optimizer, self.parameters, state)
        if self.offloaded is not None:
            self.offloaded.replaced()

    def remembered(self) -> list[Tensor]:
        """Return the state tensors with a value per element of a parameter, in a fixed order; no step counters."""
        return [] if self.optimizer is None else remembered_values(self.optimizer, self.parameters)

    def forget(self) -> None:
        """Clear the optimizer state, except the number of updates, which the learning rate follows."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def in_place(self, weights: Steppable, gradient: Steppable, factor: float, stepped: Stepped | None = None) -> None:
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
        self.rates.put(self.updates)
        for names in self._brought(self._pieces):
            self._make_step.make(names, weights.views, gradient.views)
        self._updated()

    def _tell_steps(self, weights: Steppable, gradient: Steppable, stepped: Stepped) -> None:
        """Step a few parameters at a time, so that their previous values need no more memory than the scratch.

        Without a scratch, nobody asks for their previous values.
        """
        self.rates.put(self.updates)
        with torch.no_grad():
            if self._scratch is None:
                for names in self._brought(self._pieces):
                    self._make_step.make(names, weights.views, gradient.views)
                    self._tell_of(names, weights.views, weights.views, gradient.views, stepped)
            for before in self._brought(self._groups):
                for name, scratch in before.items():
                    scratch.copy_(weights.views[name])
                self._make_step.make(before, weights.views, gradient.views)
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
        groups = {id(p): (g, place) for place, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        for name in names:
            parameter = self.parameters[name]
            figures = before[name], after[name], gradients[name]
            group, place = groups[id(parameter)]
            rate = partial(self._rate_after, self.updates, place)
            stepped(Step(name, *figures, self.updates, self.optimizer, parameter, group, rate))

    def _rate_after(self, update: int, place: int, later: int) -> float:
        """Return the rate of a group at the `later`-th update after one."""
        return self.rates.of_group(place, update + later)

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
        self._make_step.point(self.parameters, weights.views, gradient.views)
        gradients = {p: gradient.views[name] for name, p in self.parameters.items()}
        undo_step(self.optimizer, gradients, first=self.updates == 1)
        drop_gradients(self.optimizer)
        self.updates -= 1
        self._tell()

    def go_back(self, updates: int, state: Mapping[tuple[str, str], Any]) -> None:
        """Restore the optimizer state from before the last step, if there was one."""
        if self.updates != updates:
            self.load(updates, state.items())
            self._tell()

    def _tell(self) -> None:
        if self._told is not None and self.optimizer is not None:
            self._told(self.optimizer)
            self.rates.note()

    def rotate(
        self,
        old: Steppable,
        new: Steppable,
        factor: float,
        gradient: Steppable | None = None,
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
        self.rates.put(self.updates)
        with torch.no_grad():
            for gradients in self._brought(self._groups):
                for name, scaled in gradients.items():
                    if factor == 1.0:
                        scaled.copy_(source[name])
                    else:
                        torch.mul(source[name], factor, out=scaled)
                    new.views[name].copy_(old.views[name])
                self._make_step.make(gradients, new.views, gradients)
                if stepped is not None:
                    self._tell_of(gradients, old.views, new.views, gradients, stepped)
        self._updated()

    def _updated(self) -> None:
        self.updates += 1
        self.rates.note()
