"""A stage with its weights: what F, B and STEP do to tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.saved import SavedBytes, signature
from penstock.runtime.stage import Flight, Stage, edges_of, open_inputs, run_backward, trained_leaves
from penstock.schedule.ir import Node
from penstock.weights.buffers import Handle
from penstock.weights.store import VersionStore
from penstock.weights.update import Updater


@dataclass(frozen=True)
class Loss:
    """Loss sum and weight of one microbatch."""

    total: float
    weight: float


@dataclass
class NodeRuntime:
    """One stage at work.

    Attributes:
        store, updater: None where the stage has no trained parameters.
        divisor: c; backward runs on the loss sum divided by it, an update multiplies by c / N.
        flights: microbatches between forward and backward, by their number in the span.
    """

    node: Node
    stage: Stage
    store: VersionStore | None
    updater: Updater | None
    divisor: float
    flights: dict[int, Flight] = field(default_factory=dict)
    _saved: dict[tuple[object, ...], int] = field(default_factory=dict)
    _fixed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Note the memory that lives anyway, to tell it from activations."""
        self._fixed = {t.untyped_storage().data_ptr() for t in self.stage.fixed}
        if self.store is not None:
            self._fixed |= self.store.storages

    def forward(
        self, k: int, value: Any, wants: tuple[bool, ...], version: int | None, target: Any, has_loss: bool
    ) -> tuple[Any, Loss | None]:
        """Run the blocks on a microbatch and keep what its backward needs.

        Args:
            k: the microbatch, counted through the span.
            value: the input tree, cut off from other graphs.
            wants: which of its leaves want a gradient; none for the model's own input.
            version: the weights to read.
            target: what the loss compares with, where `has_loss`.
            has_loss: whether this is the last stage.

        Returns:
            The output (still in its graph), or None and the loss on the last stage.
        """
        handle = self._claim(version)
        value, opened, leaves = open_inputs(value, wants)
        key = signature((value, target))
        counter = None if key in self._saved else SavedBytes(self._fixed)
        if counter is None:
            output, total, loss = self._compute(value, target, has_loss)
        else:
            with counter:
                output, total, loss = self._compute(value, target, has_loss)
            counter.add(opened.values())
            self._saved[key] = counter.total
            self._check_owned(output if total is None else total, handle, opened)
        edges = edges_of(output if total is None else total)
        if total is not None and edges == [None] and (opened or self.store is not None):
            raise ConfigError(
                f"{self.stage.where}: the loss has no graph, so nothing would be learnt; it was detached, or made "
                "under torch.no_grad()"
            )
        seed = None if total is None else torch.ones_like(total.detach()) / self.divisor
        self.flights[k] = Flight(handle, opened, leaves, edges, seed, self._saved[key])
        return output, loss

    @torch.no_grad()
    def evaluate(self, value: Any, target: Any, has_loss: bool) -> tuple[Any, Loss | None]:
        """Run the blocks on the newest weights and keep nothing."""
        self._claim(self.store.newest if self.store is not None else None)
        output, _, loss = self._compute(value, target, has_loss)
        return output, loss

    def backward(self, k: int, batch: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        """Backward of a microbatch; weight gradients are added to the gradient of `batch`.

        Args:
            k: the microbatch, counted through the span.
            batch: its batch, counted from the start of training.
            gradients: of the output's leaves; None on the last stage.

        Returns:
            The gradients of the input's leaves, None where none is wanted.
        """
        flight = self.flights.pop(k)
        if flight.handle is not None and self.store is not None:
            flight.handle.check(f"the backward of microbatch {k} on {self.stage.where}")
            self.store.accumulate(flight.handle, batch)
            self.stage.bind(flight.handle.buffer.leaves)  # blocks may run their forward again (torch's checkpoint)
        return run_backward(flight, [flight.seed] if gradients is None else gradients)

    def step(self, batch: int, weight: float, keeps_old: bool) -> None:
        """Bear version batch + 1.

        Args:
            batch: counted from the start of training.
            weight: N, the loss weight of the batch; zero skips the update.
            keeps_old: version `batch` stays readable, so the new one is written over the gradient.
        """
        if self.store is None or self.updater is None:
            return
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
        factor = self.divisor / weight if weight else 0.0
        if keeps_old:
            old, new = self.store.rotate(batch)
            if weight:
                self.updater.rotate(old, new, factor)
            else:
                new.load(old.views)
        else:
            weights, gradient = self.store.overwrite(batch)
            if weight:
                self.updater.in_place(weights, gradient, factor)

    def restore(self) -> None:
        """Give the modules their own parameters back, over the newest weights."""
        if self.store is not None:
            self.stage.restore(self.store.tensors(self.store.newest))

    def _check_owned(self, result: Any, handle: Handle | None, opened: dict[int, Tensor]) -> None:
        """Make sure that whatever would gather a gradient is stepped by somebody."""
        known = {id(t) for t in (*opened.values(), *(handle.buffer.leaves.values() if handle is not None else ()))}
        foreign = next((t for t in trained_leaves(result) if id(t) not in known), None)
        if foreign is not None:
            raise ConfigError(
                f"{self.stage.where}: a block or the loss trains a tensor of shape {tuple(foreign.shape)} that belongs "
                "to no module among the blocks, so no optimizer would ever step it; pass the module that owns it as a "
                "block (not one of its methods), or detach it"
            )

    def _claim(self, version: int | None) -> Handle | None:
        """Claim a version and let the modules compute with it."""
        if self.store is None or version is None:
            return None
        handle = self.store.read(version)
        self.stage.bind(handle.buffer.leaves)
        return handle

    def _compute(self, value: Any, target: Any, has_loss: bool) -> tuple[Any, Tensor | None, Loss | None]:
        try:
            output = self.stage.apply(value)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                raise ConfigError(
                    f"{self.stage.where}: a block writes in place into what the stage received, or into a parameter; "
                    "let it make a new tensor (inplace=False), or cut the model elsewhere"
                ) from error
            raise
        if not has_loss:
            return output, None, None
        total, weight = self.stage.evaluate_loss(output, target)
        return None, total, Loss(float(total.detach()), weight)
