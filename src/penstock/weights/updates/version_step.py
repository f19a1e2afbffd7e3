"""The step that makes the next version of the weights of a stage."""

from __future__ import annotations

from typing import NamedTuple

import torch

from penstock.weights.memory.row_shards import Steppable
from penstock.weights.updates.parameter_change import Ahead, Step, Stepped
from penstock.weights.updates.updater import Updater


class VersionStep(NamedTuple):
    """The step that makes the next version of the weights of a stage; a store says in which buffers.

    Attributes:
        updater: makes it.
        factor: on the gradient; zero leaves the weights as they are.
        stepped: called for each parameter that changes.
        ahead: what passes read after the update, where they read ahead of it.
    """

    updater: Updater
    factor: float
    stepped: Stepped | None = None
    ahead: Ahead | None = None

    def in_place(self, weights: Steppable, gradient: Steppable) -> None:
        """Step in the buffer of the weights."""
        if self.factor:
            self.updater.in_place(weights, gradient, self.factor, self.stepped)

    def over_gradient(self, old: Steppable, new: Steppable) -> None:
        """Step from the old weights into the buffer that holds the gradient; the factor is not zero."""
        self.updater.rotate(old, new, self.factor, stepped=self.stepped)

    def with_forecast(self, weights: Steppable, gradient: Steppable, out: Steppable) -> None:
        """Step in the memory of the weights, and write what passes read; a skipped update predicts nothing.

        Args:
            weights, gradient: of the update.
            out: written over; it may be the gradient.
        """
        ahead = self.ahead
        assert ahead is not None
        out.rewrite()
        if not self.factor:
            with torch.no_grad():
                for name, view in weights.views.items():
                    out.views[name].copy_(view)
            return

        def write(step: Step) -> None:
            out.views[step.name].copy_(ahead(step))

        self.updater.in_place(weights, gradient, self.factor, write)
