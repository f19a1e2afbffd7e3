"""Corrections of staleness, under the names of `penstock.schedule.methods.corrections`: what they all have in common.

A `Correction` says what is wanted, the same for all stages; on each of them it makes a `Corrector`, which takes part in
updates and backwards there.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from penstock.errors import ConfigError
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.directions import check_predictable
from penstock.weights.optim.step_info import Step
from penstock.weights.optim.updater import Updater


class StagePlace(NamedTuple):
    """Where a stage is.

    Attributes:
        stage, num_stages: which of how many.
        microbatches: m.
        delay: updates between the version that its forwards read and the one that is updated, mean over a batch.
        where: for messages.
    """

    stage: int
    num_stages: int
    microbatches: int
    delay: float
    where: str


def rescheduled(delay: float, updates: int, over: int) -> float:
    """PipeMare's T1: 1 / max(delay, 1)^(1 - min(updates / over, 1)); 1 if `over` is 0."""
    return float(max(delay, 1.0) ** -(1.0 - min(updates / over, 1.0))) if over else 1.0


def check_reschedule(over: int) -> None:
    """Make sure that a number of updates is one.

    Raises:
        ConfigError: it is negative.
    """
    if over < 0:
        raise ConfigError(f"reschedule (K) must be a number of updates, 0 for none; got {over}")


class Corrector:
    """On one stage; this one does nothing.

    Args:
        layout: of the parameters.
        place: of the stage.

    Attributes:
        name: of the correction.
        motion: backwards read the newest weights less n times this, where their forwards read weights that were n
            updates older; None for the newest weights themselves.
        watches: whether it is told of each parameter that an update changes.
        predicts: whether what the optimizer remembers is needed for predictions.
        began: updates that had been made when the correction began to act.
    """

    name = ""
    watches = False
    predicts = False

    def __init__(self, layout: Layout, place: StagePlace) -> None:
        self.layout, self.place = layout, place
        self.motion: Buffer | None = None
        self.began = 0

    @property
    def buffers(self) -> dict[str, Buffer]:
        """All that is parameter-sized, by name; a snapshot holds it."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that the correction goes with an optimizer.

        Raises:
            CapabilityError: it does not.
        """
        if self.predicts:
            check_predictable(optimizer)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the optimizer, or change its settings, before it steps.

        Raises:
            CapabilityError: the correction does not go with it.
        """
        self.check(optimizer)

    def rate(self, updates: int) -> float:  # noqa: ARG002
        """What the learning rate of the stage is multiplied by, after so many updates since it began."""
        return 1.0

    def backward_done(self, updater: Updater, read: Buffer, newest: Buffer) -> None:
        """A backward on weights that its forward has read is over, while these are still there."""

    def before_step(self, gradient: Buffer, newest: Buffer, factor: float) -> None:
        """An update follows.

        Args:
            gradient: of it, which nothing else reads any more.
            newest: the weights before it.
            factor: what the gradient will be multiplied by.
        """

    def stepped(self, step: Step) -> None:
        """An update has changed a parameter."""

    def estimate(self, weights: Buffer, gap: int, out: Buffer) -> None:
        """Write what forwards have read before the last `gap` updates: weights - gap * motion, cast once.

        Args:
            weights: the newest, as the optimizer steps them.
            gap: in updates.
            out: where to, in the precision that passes read.
        """
        assert self.motion is not None
        out.rewrite()
        with torch.no_grad():
            for name, view in out.views.items():
                view.copy_(weights.views[name] - gap * self.motion.views[name])

    def look_ahead(self, updates: int, gradient: Buffer | None, factor: float) -> object:  # noqa: ARG002
        """A derived copy is needed; `predict` follows, unless there is one with the same content.

        Args:
            updates: that will be made before the backward of its microbatch, after those that the newest weights have.
            gradient: what the next of them has gathered so far; None if nothing.
            factor: c / (N S) makes of it part of a gradient of the mean loss: S is the loss scale that is in it, N the
                loss weight of the batch before, since that of its own is not known yet.

        Returns:
            What, beside version and label, its content depends on.
        """
        return None

    def predict(self, updater: Updater, weights: Buffer, label: str, out: Buffer) -> None:
        """Write a derived copy of the newest weights.

        Args:
            updater: of the stage.
            weights: the newest.
            label: of the copy, as the schedule has it.
            out: where to.
        """
        raise NotImplementedError

    def blend(self, forward: Buffer, newest: Buffer, updates: int, out: Buffer) -> None:
        """Write what the backward of a microbatch reads.

        Args:
            forward: what its forward read.
            newest: the newest weights.
            updates: how many lie between the two.
            out: where to.
        """
        raise NotImplementedError


class Correction(Protocol):
    """What is wanted of all stages."""

    @property
    def name(self) -> str:
        """In the table of corrections."""
        ...

    def refuses(self, precision: torch.dtype | None, recompute: str, /) -> str | None:
        """Why it does not go with something, or None where it does."""
        ...

    def on(self, layout: Layout, place: StagePlace, /) -> Corrector:
        """For a stage with parameters of this layout."""
        ...
