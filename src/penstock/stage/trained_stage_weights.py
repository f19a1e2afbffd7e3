"""The weights of a stage that trains parameters: versions, gradients, and everything that an update changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from penstock.options.updates import UpdateOptions
from penstock.schedule.ir.schedule import Copy
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.weights.corrections.base import Corrector
from penstock.weights.decision import Decision
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.memory.emulated_delay_buffers import OlderVersions
from penstock.weights.memory.squared_norm import Squares, squared_norm
from penstock.weights.memory.user_parameter_hooks import ParameterHooks
from penstock.weights.provisional_update import Provisional
from penstock.weights.replica_averaging import Agreement
from penstock.weights.store import VersionStore
from penstock.weights.update_hooks import UpdateHooks, call_hooks
from penstock.weights.updates.updater import Updater
from penstock.weights.updates.version_step import VersionStep
from penstock.weights.wave_synchronous_updates import WaveWeights
from penstock.weights.writes_between_runs import WrittenCheck


@dataclass
class TrainedWeights(StageWeights):
    """The weights of a stage that trains parameters, all of which are here.

    `ShardedWeights` are those that parallel pipelines divide among them.

    Attributes:
        store: the versions and gradients.
        updater: the optimizer.
        options: of updates.
        average: exponential moving average of the weights, A(t+1) = decay A(t) + (1 - decay) W(t+1) at every update
            that is made, A(0) = W(0); None where none is kept.
        counted_elsewhere: parameters whose gradients count in the norm of another stage, which shares them.
        older: versions that training passes read instead of the newest; None where none is delayed.
        corrector: what is done about staleness; None for nothing.
        apart: where updates are provisional, copies are kept to undo them.
        provisional: the update that is not decided on yet.
        mean: c / N by the last batch that an update was made with and that had a loss weight.
        hooks: of the user, called after every update that is made.
        reads_late: passes read older versions on some stage, if not on this one (`older`).
        watch: detects writes into the newest weights between two runs, where the next one would read older ones, too.
        copied: another process has a copy of the stage, so there is a `watch`, too.
        rewritten: there were such writes; all stages `forget_older` once one of them is.
    """

    store: VersionStore
    updater: Updater
    options: UpdateOptions
    average: Buffer | None = None
    counted_elsewhere: Collection[str] = ()
    older: OlderVersions | None = None
    reads_late: bool = False
    agreement: Agreement | WaveWeights | None = None
    corrector: Corrector | None = None
    apart: bool = False
    provisional: Provisional | None = None
    mean: float = 1.0
    watch: WrittenCheck | None = None
    copied: bool = False
    rewritten: bool = False
    hooks: UpdateHooks = field(default_factory=UpdateHooks)

    # --- reading ----------------------------------------------------------------------------------------------------

    def handle(self, version: int | None = None) -> Handle | None:
        """Return a handle to read a version, the newest if None."""
        return self.store.read(self.store.newest if version is None else version)

    def newest_tensors(self) -> dict[str, Tensor]:
        """Return the newest value of every trained parameter."""
        return self.store.newest_tensors()

    def common_model(self, averaged: bool) -> Buffer | None:
        """Return what evaluations read instead of the newest version; None for that."""
        if averaged:
            return self.average
        if self.agreement is not None:
            return self.agreement.model
        return self.store.master if self.store.reads_ahead else None

    def presented(self, averaged: bool) -> Mapping[str, Tensor]:
        """Return what is shown as the stage's parameters instead of the newest version, by name."""
        found: dict[str, Tensor] = {}
        if self.store.newest and self.agreement is not None and self.agreement.model is not None:
            found |= self.agreement.model.views
        if averaged and self.average is not None:
            found |= self.average.views
        return found

    def predict(self, copy: Copy, versions: tuple[int, ...], batch: int, scale: float) -> None:
        """Create a derived copy."""
        assert self.corrector is not None
        *older, newest = versions
        gradient = self.store.gradients.get(newest)
        if gradient is not None:
            gradient.collect_sources()
        depends = self.corrector.look_ahead(batch - newest, gradient, self.mean / scale)
        if older:
            first, last = (self.store.read(version).whole for version in versions)
            write = partial(self.corrector.blend, first, last, newest - older[0])
        else:
            write = partial(self.corrector.predict, self.updater, self.store.master, copy.label)
        self.store.derived.create(copy, (versions, copy.label, depends), write)

    def not_finite(self) -> list[str]:
        """Return which of the newest weights are not finite, and whether the optimizer state is not."""
        found = [name for name, weights in self.store.held.items() if not _is_finite(weights)]
        remembered = [value for value in self.updater.tensors if value.is_floating_point()]
        return found if all(map(_is_finite, remembered)) else [*found, f"the state of {self.updater.name}"]

    # --- gradients --------------------------------------------------------------------------------------------------

    def gradient(self, batch: int) -> list[Tensor]:
        """Return the accumulated gradient of a batch as flat tensors."""
        return self.store.gradient(batch).flats

    def gradients_of(self, batch: int, names: Sequence[str]) -> list[Tensor]:
        """Return the accumulated gradients of some parameters; of sharded sums, of those with rows here."""
        views = self.store.summed(batch)
        return [views[name] for name in names if name in views]

    def gradient_squares(self, batch: int) -> Squares:
        """Return the squared norm of the gradient that is here."""
        found = self.store.summed(batch)
        return squared_norm(view for name, view in found.items() if name not in self.counted_elsewhere)

    @property
    def counted(self) -> int:
        """The numbers whose gradients count in the norm with this stage."""
        slots = self.store.layout.slots.items()
        return sum(math.prod(slot.shape) for name, slot in slots if name not in self.counted_elsewhere)

    def all_squares(self, batch: int) -> float:
        """Return the squared norm of the whole gradient."""
        return squared_norm(self.store.summed(batch).values())[0]

    # --- updates ----------------------------------------------------------------------------------------------------

    def step(self, batch: int, factor: float, keeps_old: bool) -> None:
        """Create version batch + 1: the optimizer update."""
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
        if self.older is not None:
            self.older.keep(batch, self.store.versions[batch].views)
        stepped = self.corrector.stepped if self.corrector is not None and self.corrector.watches else None
        if self.corrector is not None and self.corrector.compares and factor:
            self.corrector.before_step(self.store.gradient(batch), self.store.master, factor)
        ahead = self.corrector.ahead if self.corrector is not None and self.corrector.reads_ahead else None
        self.store.update(batch, VersionStep(self.updater, factor, stepped, ahead), keeps_old)
        self._stepped(factor)

    @property
    def _towards(self) -> float:
        """Return how far the average goes towards the new weights at an update."""
        return 1.0 - (self.options.ema_decay or 0.0)

    def _stepped(self, factor: float) -> None:
        """Go on after the optimizer's update: here all of the new version is there."""
        self._updated(factor)

    def _updated(self, factor: float) -> None:
        """Move the average towards the new version and call the hooks, unless the update was skipped."""
        if not factor:
            return
        if self.average is not None:
            self.average.approach(self.store.master, self._towards)
        if self.hooks:
            call_hooks(self.hooks, self.updater.updates, self.store)

    @property
    def keeps_average(self) -> bool:
        """Whether there is an average of the weights."""
        return self.average is not None

    def decided(self, mean: float) -> None:
        """Take note of c / N by the last batch that an update was made with."""
        self.mean = mean

    def swap(self, *, away: bool) -> None:
        """Begin to bring the optimizer state from the host's memory, or to move it there."""
        (self.updater.swap_out if away else self.updater.swap_in)()

    def settle_swap(self) -> Callable[[], None] | None:
        """Return what has the device wait for a state that is on its way; None where there is none."""
        offloaded = self.updater.offloaded
        return offloaded.settle if offloaded is not None and offloaded.arrives else None

    # --- updates that may be taken back -----------------------------------------------------------------------------

    def try_step(self, batch: int, factor: float) -> None:
        """Create version batch + 1 as `step` does, but so that it can be made again."""
        self.provisional = Provisional(self.store, self.updater, batch, self.apart)
        self.provisional.make(factor)

    def settle_step(self, decision: Decision) -> None:
        """Settle a provisional update; if it is rejected, make it again."""
        if self.provisional is None:
            return
        if decision.again:
            self.provisional.again(decision.factor)
        self.provisional.settle()
        self.provisional = None
        self._updated(decision.factor)

    # --- between spans ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt what was written into the newest version, and what was set in the optimizer, between two runs."""
        self.updater.rates.take_over(self.updater.updates)
        self.store.refresh()
        self.rewritten |= self.watch is not None and self.watch.written
        self.store.derived.forget()
        if self.agreement is not None:
            self.agreement.take_over()

    def take_hooks(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take over the hooks on the modules' trained parameters."""
        self.store.hooks = ParameterHooks(parameters, self.store.where)

    def begin_span(self, batches: int) -> None:
        """Begin a span after so many batches."""
        if self.agreement is not None:
            self.agreement.begin_span(batches)

    def forget_older(self) -> None:
        """Let the next batches read the newest weights, as at the start of training: some were written from outside."""
        self.rewritten = False
        self.store.forget_older()
        if self.older is not None:
            self.older.restart(self.store.newest, lambda *_: None)

    def end_span(self) -> None:
        """End a span, with the pipeline drained."""
        if self.agreement is not None:
            self.agreement.watch.look()
        self.watch_writes()

    def watch_writes(self) -> None:
        """Take note of the newest weights, so that what is written into them before the next run is noticed."""
        self.watch, self.rewritten = None, False
        if len(self.store.versions) > 1 or self.reads_late or self.store.reads_ahead or self.copied:
            self.watch = WrittenCheck(self.store)
            self.watch.look()

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer remembers on the device."""
        return self.updater.nbytes

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that it remembers in the memory of the host."""
        return self.updater.offloaded_nbytes

    def bytes_by_role(self) -> dict[str, int]:
        """Return the parameter-sized bytes by role, without the optimizer's."""
        roles = self.store.bytes_by_role()
        parts = {"averaged weights": self.average, "delayed weights": self.older, "correction": self.corrector}
        roles |= {role: part.nbytes for role, part in parts.items() if part is not None}
        if self.agreement is not None:
            roles |= self.agreement.bytes_by_role()
        if self.apart:
            roles["optimizer before"] = 0 if self.provisional is None else self.provisional.nbytes
        return roles


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither infinities nor NaN."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return not numbers.numel() or all(bool(end.isfinite()) for end in numbers.aminmax())  # without a copy
