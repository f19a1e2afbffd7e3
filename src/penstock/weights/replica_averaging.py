"""Synchronize the weights of one stage with parallel pipelines; `methods.data_parallel_sync` has the equations.

`begin` returns the tensors to be summed over all pipelines, `remembered` those of the optimizer state; once they hold
the sums, `end` computes the weights with which the pipeline continues. All pipelines compute the same from identical
sums, so their common state (the global model, its momentum, the reference) stays equal without being sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.weights.memory.buffers import Buffer
from penstock.weights.optim.optimizer_adapters import check_averages
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater
from penstock.weights.writes_between_runs import WrittenCheck

COMMON = ("common", "momentum")  # kinds of tensors that `copies` makes
_PULL = 0.9  # default of elastic: the share of its distance to the mean that the reference moves


class Agreement:
    """Combines the weights of one stage of one pipeline with those of the other pipelines.

    Args:
        combine: how pipelines are combined.
        width: w, the number of pipelines.
        pipeline: the index of this one.
        store, updater: of the stage.

    Attributes:
        combine, width, pipeline: as given.
        model: the common model, as large as the weights: V of bmuf, Z of elastic; None for average.
        motion: D of bmuf; None for the others.
        watch: detects writes into the weights between two runs.
    """

    def __init__(self, combine: Combine, width: int, pipeline: int, store: VersionStore, updater: Updater) -> None:
        self.combine, self.pipeline = combine, pipeline
        self.width, self._store, self._updater = width, store, updater
        if updater.optimizer is not None:
            check_averages(updater.optimizer, combine.optimizer_state == "average")
        self._eta = 1.0 - 1.0 / width if combine.momentum is None else combine.momentum
        self._pull = _PULL / width if combine.pull is None else combine.pull
        self.model = Buffer(store.layout, f"common model of {store.where}") if combine.kind != "average" else None
        self.motion = Buffer(store.layout, f"block momentum of {store.where}") if combine.kind == "bmuf" else None
        if self.model is not None:
            self.model.load(store.master.views)
        self.watch = WrittenCheck(store)
        self.watch.look()
        self._passing: list[Tensor] = []  # differences to the reference, and their sums
        self._learnt = torch.zeros(1)  # 1 if the optimizer has state; the sum counts the pipelines with state
        self._summed: list[Tensor] = []

    def begin(self) -> list[Tensor]:
        """Return the tensors to be summed over all pipelines."""
        master = self._store.master
        master.rewrite()
        self._learnt = torch.tensor([float(bool(self._updater.remembered()))])
        if self.combine.kind != "elastic":
            return [*master.flats, self._learnt]
        assert self.model is not None
        with torch.no_grad():
            self._passing = [own - z for own, z in zip(master.flats, self.model.flats, strict=True)]
        return [*self._passing, self._learnt]

    def remembered(self) -> list[Tensor]:
        """Return the tensors of optimizer state to be summed, too, once the sums of `begin` are there."""
        everybody = self._learnt.item() == self.width
        self._summed = self._updater.remembered() if self.combine.optimizer_state == "average" and everybody else []
        return self._summed

    @torch.no_grad()
    def end(self) -> None:
        """Compute the new weights from the sums."""
        torch.clear_autocast_cache()  # it holds casts of leaves whose memory changes now
        for tensor in self._summed:
            tensor.div_(self.width)
        self._summed = []
        if self.combine.optimizer_state == "reset":
            self._updater.forget()
        weights = self._store.master
        if self.combine.kind == "elastic":
            self._pull_together(weights)
        else:
            for flat in weights.flats:
                flat.div_(self.width)
            if self.combine.kind == "bmuf":
                self._move(weights)
        self._store.publish(self._store.newest)

    def _move(self, weights: Buffer) -> None:
        """Move the weights from the mean to the global model, or with Nesterov momentum beyond it."""
        assert self.model is not None
        assert self.motion is not None
        ahead = self._eta if self.combine.nesterov else 0.0
        self.model.rewrite()
        self.motion.rewrite()
        for own, v, d in zip(weights.flats, self.model.flats, self.motion.flats, strict=True):
            gained = own.neg_().add_(v)  # in place of the weights
            if ahead:
                gained.sub_(d, alpha=ahead)
            d.mul_(self._eta).add_(gained, alpha=self.combine.step)
            v.sub_(d)
            own.copy_(v)
            if ahead:
                own.sub_(d, alpha=ahead)

    def _pull_together(self, weights: Buffer) -> None:
        assert self.model is not None
        self.model.rewrite()
        for own, z, total in zip(weights.flats, self.model.flats, self._passing, strict=True):
            own.lerp_(z, self._pull)
            z.add_(total, alpha=self._pull)
        self._passing = []

    # --- state ------------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Restart, as at the start of training, from the weights as they were written between two runs."""
        if self.watch.written:
            self.load({})
            self.watch.taken_over = True

    def begin_span(self, batches: int) -> None:
        """Begin a span after `batches` batches; before the first batch there is no state to continue from."""
        if not batches:
            self.load({})

    def agrees(self, batch: int) -> bool:
        """Return whether all pipelines have the same newest weights before a batch, which is version `batch`."""
        return self.combine.agrees and (batch == 0 or self.combine.meets(batch - 1))

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of the state, and of the buffers in use during a synchronization."""
        roles = {}
        if self.model is not None:
            roles["common model"] = self.model.nbytes
        if self.motion is not None:
            roles["block momentum"] = self.motion.nbytes
        if self.combine.spec.passing:
            roles["sums over pipelines"] = sum(tensor.nbytes for tensor in self._passing)
        return roles

    def copies(self) -> dict[str, Tensor]:
        """Copy the common state, by kind and name of the parameter."""
        return {f"{kind}/{name}": view.clone() for kind, b in self._kept() for name, view in b.views.items()}

    def facts(self) -> dict[str, Any]:
        """Return plain values to be saved: none."""
        return {}

    def recall(self, facts: Mapping[str, Any]) -> None:
        """Restore what `facts` returned."""

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `copies` returned; where that is missing, restart as at the start of training.

        Args:
            saved: by kind and name of the parameter.
        """
        for kind, buffer in self._kept():
            own = {name: saved[f"{kind}/{name}"] for name in buffer.views if f"{kind}/{name}" in saved}
            nothing = {name: torch.zeros_like(view) for name, view in buffer.views.items()}
            buffer.load({**(nothing if kind == COMMON[1] else self._store.master.views), **own})
        self.watch.look()

    def _kept(self) -> list[tuple[str, Buffer]]:
        kinds = zip(COMMON, (self.model, self.motion), strict=True)
        return [(kind, buffer) for kind, buffer in kinds if buffer is not None]
