"""Pipelined backpropagation's remedies for delay: spike compensation and linear weight prediction, or both.

Kosson et al., Pipelined Backpropagation at Scale (arXiv 2003.11666). With a delay of D updates, momentum m, rate eta:

    spike compensation  v <- m v + g;  w <- w - eta (a v + b g),  a = m^D,  b = (1 - m^D) / (1 - m):
                        a delayed gradient contributes at once what it would have contributed by now
    prediction          forwards read w - eta D v (velocity form), or w + D (w(t) - w(t-1)) (weight form)

D is the mean delay of the stage; the last stage has none and is trained plainly. At D = 1 spike
compensation is torch's Nesterov momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import SGD

from penstock.errors import CapabilityError
from penstock.weights.corrections.base import NO_RECOMPUTE, Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.optimizer_adapters import name_of
from penstock.weights.updates.forecasts import go_on
from penstock.weights.updates.parameter_change import Step
from penstock.weights.updates.updater import Updater

Form = Literal["none", "velocity", "weights"]


@dataclass(frozen=True)
class PipelinedBackprop:
    """Settings of spike compensation and linear weight prediction.

    Args:
        name: its name in the table of corrections.
        spike: use spike compensation.
        prediction: the form of prediction, if any.
    """

    name: str
    spike: bool
    prediction: Form

    def refuses(self, _precision: torch.dtype | None, recompute: str) -> str | None:
        """Return why recompute is not supported, since a recomputed forward would need its copy again."""
        if recompute != "none" and self.prediction != "none":
            return NO_RECOMPUTE
        return None

    def on(self, layout: Layout, place: StagePlace) -> _BackpropOnStage:
        """Create the corrector of a stage."""
        return _BackpropOnStage(self, layout, place)


class _BackpropOnStage(Corrector):
    def __init__(self, wanted: PipelinedBackprop, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted, self._delay = wanted, float(place.delay)
        moving = wanted.prediction == "weights"
        self.predicts = wanted.prediction == "velocity"
        self.watches = (wanted.spike or moving) and place.delay > 0
        self._last = Buffer(layout, f"last motion of {place.where}") if moving and place.delay > 0 else None

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Return w(t) - w(t-1), for the weight form."""
        return {} if self._last is None else {"motion": self._last}

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept plain SGD with momentum for spike compensation, and predictable optimizers for predictions."""
        super().check(optimizer)
        if not self._wanted.spike:
            return
        plain = isinstance(optimizer, SGD) and all(
            group["momentum"] and not (group["nesterov"] or group["dampening"] or group["maximize"])
            for group in optimizer.param_groups
        )
        if not plain:
            raise CapabilityError(
                "spike compensation replaces the momentum of SGD (without nesterov, dampening or maximize), not that "
                f"of {name_of(optimizer)} with these settings; use optimizer sgd with momentum, or another method"
            )

    def stepped(self, step: Step) -> None:
        """Replace the step by that of spike compensation, and store the motion."""
        if self._wanted.spike:
            momentum, decay = step.group["momentum"], step.group["weight_decay"]
            gradient = step.gradient.add(step.before, alpha=decay) if decay else step.gradient
            velocity = step.optimizer.state[step.parameter]["momentum_buffer"]
            a = momentum**self._delay
            b = (1.0 - a) / (1.0 - momentum)
            step.after.copy_(step.before - step.group["lr"] * (a * velocity + b * gradient))
        if self._last is not None:
            torch.sub(step.after, step.before, out=self._last.views[step.name])

    def predict(self, updater: Updater, weights: Buffer, label: str, out: Buffer) -> None:  # noqa: ARG002
        """Write the weights predicted D updates ahead."""
        if self.predicts or self._last is None:
            go_on(updater, weights, self._delay if self.predicts else 0.0, False, out)
            return
        out.rewrite()
        with torch.no_grad():
            for name, view in out.views.items():
                view.copy_(weights.views[name] + self._delay * self._last.views[name])
