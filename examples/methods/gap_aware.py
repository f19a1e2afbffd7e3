"""Gap-aware gradients: the further the weights have moved since the forward, the smaller the gradient.

Barkai et al., Gap-Aware Mitigation of Gradient Staleness (arXiv 1909.10802), in the form of FTPipe (Eliad et al.,
USENIX ATC 2021, and its code), element by element:

    g <- g / (1 + |w_now - w_stash| / (rate (sqrt(r / (1 - G^t)) + eps))),   r <- G r + (1 - G) v^2

with v the momentum of SGD before the update, rate the highest learning rate so far of the parameter's group, and t the
number of the update, from 1; g includes weight decay, which so is divided, too. It is defined for one microbatch per
update. Gradients are clipped by their norm before the division.

    penstock train --file examples/methods/gap_aware.py --stages 4
    penstock verify --file examples/methods/gap_aware.py:average=0.99
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim import SGD

import penstock
from penstock.verify.reference import ReferencePlace, ReferenceStage

if TYPE_CHECKING:
    from penstock.weights.memory.buffers import Layout
    from penstock.weights.updates.parameter_change import Step
    from penstock.weights.updates.updater import Updater


class GapAware(penstock.Corrector):
    """Corrects one stage.

    Args:
        average: G.
        eps: added to the denominator.
    """

    def __init__(self, layout: Layout, place: penstock.StagePlace, average: float, eps: float) -> None:
        super().__init__(layout, place)
        if place.microbatches != 1:
            raise penstock.CapabilityError(
                f"{place.where}: gap-aware gradients need one microbatch per update, not {place.microbatches}; set "
                "microbatches=1, or use method stash"
            )
        self._average, self._eps = average, eps
        self._rates: dict[str, float] = {}  # the highest of the first `_rated` updates, by parameter
        self._rated = 0
        self.watches = self.compares = place.delay > 0
        names = ("squares", "penalty") if self.watches else ()
        self._buffers = {name: penstock.Buffer(layout, f"{name} of {place.where}") for name in names}
        self._decays: dict[str, float] = {}  # weight decay of the gradient being accumulated

    @property
    def buffers(self) -> dict[str, penstock.Buffer]:
        """Return the running mean of the squares of momentum, and the divisor of the current gradient."""
        return self._buffers

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept SGD with momentum, whose state is read."""
        if not isinstance(optimizer, SGD) or not all(group["momentum"] for group in optimizer.param_groups):
            raise penstock.CapabilityError(
                f"gap-aware gradients need SGD with momentum, not {type(optimizer).__name__} with these settings"
            )

    def backward_done(self, updater: Updater, read: penstock.Buffer, newest: penstock.Buffer) -> None:
        """Update the divisor by the distance that the weights have moved since the forward."""
        assert updater.optimizer is not None
        updates = updater.updates + 1 - self.began
        while self._rated < updates:  # several updates after a restart
            rates = updater.rates.at(self.began + self._rated)
            self._rates = {name: max(rate, self._rates.get(name, 0.0)) for name, rate in rates.items()}
            self._rated += 1
        if updates == 1:
            self._begin(updater.optimizer, updater.parameters)
        decays = {id(p): group["weight_decay"] for group in updater.optimizer.param_groups for p in group["params"]}
        self._decays = {name: decays.get(id(parameter), 0.0) for name, parameter in updater.parameters.items()}
        with torch.no_grad():
            for name, penalty in self._buffers["penalty"].views.items():
                mean = self._buffers["squares"].views[name] / (1.0 - self._average**updates)
                rate = self._rates[name]
                size = mean.sqrt_().add_(self._eps).mul_(rate)
                gap = (newest.views[name] - read.views[name]).abs_()
                penalty.copy_(gap.div_(size).add_(1.0) if rate else torch.ones_like(gap))

    def _begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Start the mean from the momentum found at the first update, which a previous method may have left."""
        for name, squares in self._buffers["squares"].views.items():
            velocity = optimizer.state.get(parameters[name], {}).get("momentum_buffer")
            if velocity is not None:
                squares.copy_(velocity**2 * (1.0 - self._average))

    def before_step(self, gradient: penstock.Buffer, newest: penstock.Buffer, factor: float) -> None:
        """Divide the gradient, and compensate the weight decay that the optimizer will add undivided."""
        with torch.no_grad():
            for name, view in gradient.views.items():
                penalty, decay = self._buffers["penalty"].views[name], self._decays[name]
                view.div_(penalty)
                if decay:
                    view.addcmul_(newest.views[name], 1.0 / penalty - 1.0, value=decay / factor)

    def stepped(self, step: Step) -> None:
        """Update the mean of squares with the new momentum, for the next update."""
        velocity = step.optimizer.state[step.parameter]["momentum_buffer"]
        squares = self._buffers["squares"].views[step.name]
        squares.mul_(self._average).add_(velocity**2, alpha=1.0 - self._average)


class ReferenceStep:
    """Makes an update of a stage of the reference.

    C of the equation above is the largest possible step: the largest rate so far times (sqrt(ra / (1 - G^n)) + eps) in
    the n-th update, ra <- G ra + (1 - G) b^2 with the momentum buffer before this update (or the gradient itself if
    there is no momentum). Where the largest rate is 0, nothing is divided.
    """

    def __init__(self, average: float, eps: float) -> None:
        self.average, self.eps, self.updates = average, eps, 0
        self.squares: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.largest: dict[int, float] = {}  # rate by number of the parameter group

    def __call__(self, stage: ReferenceStage) -> None:
        optimizer = stage.optimizer
        self.updates += 1
        names = {parameter: name for name, parameter in stage.newest.items()}
        for number, group in enumerate(optimizer.param_groups):
            self.largest[number] = max(self.largest.get(number, 0.0), group["lr"])
            for p in group["params"]:
                v = optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) if group["momentum"] else p.grad
                ra = self.average * self.squares.get(p, torch.zeros_like(p)) + (1.0 - self.average) * v**2
                self.squares[p] = ra
                if self.largest[number] > 0:
                    size = self.largest[number] * ((ra / (1.0 - self.average**self.updates)).sqrt() + self.eps)
                    penalty = 1.0 + (p - stage.versions[stage.read][names[p]]).abs() / size
                    decay = group["weight_decay"]
                    p.grad = p.grad / penalty + decay * p * (1.0 / penalty - 1.0)  # the optimizer adds decay * p
        optimizer.step()


def reference(stage: ReferenceStage, place: ReferencePlace, *, average: float, eps: float) -> None:
    """Set how a stage of the reference makes its updates; it reads what `stash` reads."""
    if place.microbatches > 1:
        raise penstock.CapabilityError(f"gap-aware needs one microbatch per update, not {place.microbatches}")
    if stage.optimizer is not None:
        stage.step = ReferenceStep(average, eps)


method = penstock.Method(
    "gap-aware",
    "gap-aware gradients on stashed weights",
    "arXiv 1909.10802, in FTPipe's form (USENIX ATC 2021)",
    order="endless-1f1b",
    rule="stash",
    correction=penstock.CorrectionSpec(
        "gap-aware",
        "gradients count the less the further the weights have moved",
        rules=("stash",),
        buffers=2,
        options={
            "average": penstock.Option(0.999, "G, of the mean of squares of momentum", "share below 1"),
            "eps": penstock.Option(1e-8, "against division by zero", "above 0"),
        },
        alike=False,
        watches=True,
        low_precision=False,
        exact=False,  # a gap is the difference of weights that are nearly the same
        corrector=GapAware,
    ),
    settings={"optimizer.name": "sgd", "microbatches": 1},
    reference=reference,
)
