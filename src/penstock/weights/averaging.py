"""What becomes of the weights of one stage when parallel pipelines meet; `penstock.schedule.methods.combine` has the
equations.

`begin` gives tensors whose sums over all pipelines are wanted, `remembered` those of the optimizer; once they hold the
sums, `end` makes the weights from which the pipeline goes on. All pipelines compute alike from sums of the same bits,
so what they have in common (the global model, its momentum, the reference) stays equal without being sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.schedule.methods.combine import Combine
from penstock.weights.memory.buffers import Buffer
from penstock.weights.optim.adapters import check_averages
from penstock.weights.optim.updater import Updater
from penstock.weights.store import VersionStore
from penstock.weights.written_check import WrittenCheck

COMMON = ("common", "momentum")  # kinds of tensors that `copies` makes
_PULL = 0.9  # of elastic: the share of the way that the reference goes


class Agreement:
    """Of one stage of one pipeline.

    Args:
        combine: how pipelines agree.
        width: w, how many there are.
        pipeline: which of them this is.
        store, updater: of the stage.

    Attributes:
        combine, width, pipeline: as given.
        model: what pipelines have in common, as large as the weights: V of bmuf, Z of elastic; None of average.
        motion: D of bmuf; None of the others.
        watch: notices what is written into the weights between two runs.
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
        self._learnt = torch.zeros(1)  # whether the optimizer remembers anything; of all pipelines, how many do
        self._summed: list[Tensor] = []

    def begin(self) -> list[Tensor]:
        """The tensors whose sums are wanted."""
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
        """What of the optimizer is to be averaged, too, once the sums of `begin` are there."""
        everybody = self._learnt.item() == self.width
        self._summed = self._updater.remembered() if self.combine.optimizer_state == "average" and everybody else []
        return self._summed

    @torch.no_grad()
    def end(self) -> None:
        """All sums are there."""
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
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
        """From the mean to the global model, or to where it will be if it goes on so."""
        assert self.model is not None
        assert self.motion is not None
        ahead = self._eta if self.combine.nesterov else 0.0
        self.model.rewrite()
        self.motion.rewrite()
        for own, v, d in zip(weights.flats, self.model.flats, self.motion.flats, strict=True):
            gained = own.neg_().add_(v)  # in the memory of the weights
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

    # --- what it keeps ----------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Begin anew, as at the start of training, from what has been written into the weights between two runs."""
        if self.watch.written:
            self.load({})
            self.watch.taken_over = True

    def begin_span(self, batches: int) -> None:
        """A span begins, after so many batches: before the first there is nothing to go on with."""
        if not batches:
            self.load({})

    def agrees(self, batch: int) -> bool:
        """Whether all pipelines have the same newest weights before a batch, which is version `batch`."""
        return self.combine.agrees and (batch == 0 or self.combine.meets(batch - 1))

    def bytes_by_role(self) -> dict[str, int]:
        """Bytes of what is kept, and of what only lives while pipelines meet."""
        roles = {}
        if self.model is not None:
            roles["common model"] = self.model.nbytes
        if self.motion is not None:
            roles["block momentum"] = self.motion.nbytes
        if self.combine.spec.passing:
            roles["sums over pipelines"] = sum(tensor.nbytes for tensor in self._passing)
        return roles

    def copies(self) -> dict[str, Tensor]:
        """Copies of what pipelines have in common, by kind and name of the parameter."""
        return {f"{kind}/{name}": view.clone() for kind, b in self._kept() for name, view in b.views.items()}

    def facts(self) -> dict[str, Any]:
        """Plain values that belong to it: none."""
        return {}

    def recall(self, facts: Mapping[str, Any]) -> None:
        """Go on with what `facts` said."""

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with what `copies` said; where that is missing, as at the start of training.

        Args:
            saved: by kind and name of the parameter, all of a kind or none.
        """
        for kind, buffer in self._kept():
            own = {name: saved[f"{kind}/{name}"] for name in buffer.views if f"{kind}/{name}" in saved}
            nothing = {name: torch.zeros_like(view) for name, view in buffer.views.items()}
            buffer.load(own or (nothing if kind == COMMON[1] else self._store.master.views))
        self.watch.look()

    def _kept(self) -> list[tuple[str, Buffer]]:
        kinds = zip(COMMON, (self.model, self.motion), strict=True)
        return [(kind, buffer) for kind, buffer in kinds if buffer is not None]
