"""Pipelined backpropagation's remedies for delay: spike compensation and linear weight prediction, or both.

Kosson et al., Pipelined Backpropagation at Scale (arXiv 2003.11666). With a delay of D updates, momentum m, rate eta:

    spike compensation  v <- m v + g;  w <- w - eta (a v + b g),  a = m^D,  b = (1 - m^D) / (1 - m):
                        a delayed gradient contributes at once what it would have contributed by now
    prediction          forwards read w - eta D v (velocity form), or w + D (w(t) - w(t-1)) (weight form)

D is the mean delay of the stage; the last stage has none and is trained plainly. At D = 1 spike
compensation is torch's Nesterov momentum.

    penstock train --file examples/methods/pipelined_backprop.py:method=spike-lwp --stages 4
    penstock verify --file examples/methods/pipelined_backprop.py:method=lwp --stages 4
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import SGD, Optimizer

import penstock
from penstock.verify.reference import (
    Newest,
    ReferencePlace,
    ReferencePrediction,
    ReferenceReading,
    ReferenceStage,
    check_velocity,
    mean_delay,
)
from penstock.weights.memory.buffers import Layout
from penstock.weights.updates.forecasts import go_on
from penstock.weights.updates.parameter_change import Step
from penstock.weights.updates.updater import Updater


class PipelinedBackprop(penstock.Corrector):
    """Corrects one stage; subclasses say how.

    Attributes:
        spike: use spike compensation.
        form: of the prediction: "none", "velocity" or "weights".
    """

    spike, form = False, "none"

    def __init__(self, layout: Layout, place: penstock.StagePlace) -> None:
        super().__init__(layout, place)
        self._delay = float(place.delay)
        moving = self.form == "weights" and place.delay > 0
        self.predicts = self.form == "velocity"
        self.watches = (self.spike and place.delay > 0) or moving
        self._last = penstock.Buffer(layout, f"last motion of {place.where}") if moving else None

    @property
    def buffers(self) -> dict[str, penstock.Buffer]:
        """Return w(t) - w(t-1), for the weight form."""
        return {} if self._last is None else {"motion": self._last}

    def check(self, optimizer: Optimizer) -> None:
        """Accept plain SGD with momentum for spike compensation, and predictable optimizers for predictions."""
        super().check(optimizer)
        if self.spike:
            check_momentum(optimizer)

    def stepped(self, step: Step) -> None:
        """Replace the step by that of spike compensation, and store the motion."""
        if self.spike:
            momentum, decay = step.group["momentum"], step.group["weight_decay"]
            gradient = step.gradient.add(step.before, alpha=decay) if decay else step.gradient
            velocity = step.optimizer.state[step.parameter]["momentum_buffer"]
            a = momentum**self._delay
            b = (1.0 - a) / (1.0 - momentum)
            step.after.copy_(step.before - step.group["lr"] * (a * velocity + b * gradient))
        if self._last is not None:
            torch.sub(step.after, step.before, out=self._last.views[step.name])

    def predict(self, updater: Updater, weights: penstock.Buffer, _: str, out: penstock.Buffer) -> None:
        """Write the weights predicted D updates ahead."""
        if self.predicts or self._last is None:
            go_on(updater, weights, self._delay if self.predicts else 0.0, False, out)
            return
        out.rewrite()
        with torch.no_grad():
            for name, view in out.views.items():
                view.copy_(weights.views[name] + self._delay * self._last.views[name])


def check_momentum(optimizer: Optimizer) -> None:
    """Refuse all but plain SGD with momentum."""
    plain = isinstance(optimizer, SGD) and all(
        group["momentum"] and not (group["nesterov"] or group["dampening"] or group["maximize"])
        for group in optimizer.param_groups
    )
    if not plain:
        raise penstock.CapabilityError(
            "spike compensation replaces the momentum of SGD (without nesterov, dampening or maximize), not that of "
            f"{type(optimizer).__name__} with these settings; use optimizer sgd with momentum, or another method"
        )


class LastChange(ReferenceReading):
    """Forwards of the reference read W + D (the change by the last update); backwards the newest weights."""

    def __init__(self, delay: float) -> None:
        self.delay, self.repeats = delay, False
        self.ahead: list[dict[str, torch.Tensor]] = []
        self.change: dict[str, torch.Tensor] | None = None

    def on_version(self, stage: ReferenceStage) -> None:
        newest = stage.versions[-1]
        if stage.made:
            self.change = {name: w - stage.versions[-2][name] for name, w in newest.items()}
        change = self.change
        self.ahead.append(newest if change is None else {n: w + self.delay * change[n] for n, w in newest.items()})

    def read(self, stage: ReferenceStage, version: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return self.ahead[version], stage.versions[-1]


class Spike:
    """Makes an update of a stage of the reference: v <- m v + g; W <- W - lr (a v + b g)."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __call__(self, stage: ReferenceStage) -> None:
        for group in stage.optimizer.param_groups:
            m, lr, decay = group["momentum"], group["lr"], group["weight_decay"]
            a, b = m**self.delay, (1.0 - m**self.delay) / (1.0 - m)
            for parameter in group["params"]:
                g = parameter.grad + decay * parameter.detach() if decay else parameter.grad
                v = stage.optimizer.state[parameter].get("momentum_buffer")
                v = g.clone() if v is None else m * v + g
                stage.optimizer.state[parameter]["momentum_buffer"] = v
                parameter.copy_(parameter - lr * (a * v + b * g))


def reference(spike: bool, form: str) -> Callable[[ReferenceStage, ReferencePlace], None]:
    """Return the function that sets how a stage of the reference reads and steps."""

    def equations(stage: ReferenceStage, place: ReferencePlace) -> None:
        delay = mean_delay(*place)
        if spike and stage.optimizer is not None:
            check_momentum(stage.optimizer)
            stage.step = Spike(delay)
        if form == "velocity":
            if stage.optimizer is not None:
                check_velocity(stage.optimizer)
            stage.reading = ReferencePrediction(delay, None)
        else:
            stage.reading = LastChange(delay) if form == "weights" else Newest()

    return equations


def method(name: str, title: str, spike: bool, form: str) -> penstock.Method:
    """Return one of the five methods."""
    rule = "newest" if form == "none" else "predicted-forward"
    corrector = type(name, (PipelinedBackprop,), {"spike": spike, "form": form})
    return penstock.Method(
        name,
        title,
        "arXiv 2003.11666",
        order="endless-1f1b",
        rule=rule,
        correction=penstock.CorrectionSpec(
            name,
            title,
            rules=(rule, "stash" if form == "none" else "predicted-stash"),
            buffers=int(form == "weights"),
            alike=not spike,
            watches=spike or form == "weights",
            rewrites=spike,
            recomputes=form == "none",
            corrector=corrector,
        ),
        settings={"optimizer.name": "sgd", "optimizer.nesterov": False} if spike else {},
        reference=reference(spike, form),
    )


spike = method("spike", "pipelined backpropagation with spike compensation", True, "none")
lwp = method("lwp", "pipelined backpropagation with linear weight prediction", False, "velocity")
lwp_weights = method("lwp-weights", "the same, predicted from the last motion of the weights", False, "weights")
spike_lwp = method("spike-lwp", "spike compensation and linear weight prediction", True, "velocity")
spike_lwp_weights = method("spike-lwp-weights", "the same, predicted from the last motion", True, "weights")
