"""Gap-aware gradients: the further the weights have moved since the forward, the smaller the gradient.

Barkai et al., Gap-Aware Mitigation of Gradient Staleness (arXiv 1909.10802), in the form of FTPipe (Eliad et al.,
USENIX ATC 2021, and its code), element by element:

    g <- g / (1 + |w_now - w_stash| / (rate (sqrt(r / (1 - G^t)) + eps))),   r <- G r + (1 - G) v^2

with v the momentum of SGD before the update, rate the highest learning rate so far of the parameter's group, and t the
number of the update, from 1; g includes weight decay, which so is divided, too. It is defined for one microbatch per
update. Gradients are clipped by their norm before the division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim import SGD

from penstock.errors import CapabilityError
from penstock.weights.corrections.base import Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.optimizer_adapters import name_of
from penstock.weights.updates.parameter_change import Step
from penstock.weights.updates.updater import Updater


@dataclass(frozen=True)
class GapAware:
    """Settings of gap-aware gradients.

    Args:
        average: G.
        eps: added to the denominator.
    """

    average: float = 0.999
    eps: float = 1e-8
    name: str = "gap-aware"

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return why low precision is not supported: it keeps no stash of full-precision weights."""
        if _precision is not None:
            return "gap-aware gradients need fp32 weights; set precision to fp32, or use method stash"
        return None

    def on(self, layout: Layout, place: StagePlace) -> _GapAwareOnStage:
        """Create the corrector of a stage."""
        return _GapAwareOnStage(self, layout, place)


class _GapAwareOnStage(Corrector):
    def __init__(self, wanted: GapAware, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        if place.microbatches != 1:
            raise CapabilityError(
                f"{place.where}: gap-aware gradients need one microbatch per update, not {place.microbatches}; set "
                "microbatches=1, or use method stash"
            )
        self._wanted = wanted
        self._rates: dict[str, float] = {}  # the highest of the first `_rated` updates, by parameter
        self._rated = 0
        self.watches = self.compares = place.delay > 0
        names = ("squares", "penalty") if self.watches else ()
        self._buffers = {name: Buffer(layout, f"{name} of {place.where}") for name in names}
        self._decays: dict[str, float] = {}  # weight decay of the gradient being accumulated

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Return the running mean of the squares of momentum, and the divisor of the current gradient."""
        return self._buffers

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept SGD with momentum, whose state is read."""
        if not isinstance(optimizer, SGD) or not all(group["momentum"] for group in optimizer.param_groups):
            raise CapabilityError(
                f"gap-aware gradients need SGD with momentum, not {name_of(optimizer)} with these settings"
            )

    def backward_done(self, updater: Updater, read: Buffer, newest: Buffer) -> None:
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
                mean = self._buffers["squares"].views[name] / (1.0 - self._wanted.average**updates)
                rate = self._rates[name]
                size = mean.sqrt_().add_(self._wanted.eps).mul_(rate)
                gap = (newest.views[name] - read.views[name]).abs_()
                penalty.copy_(gap.div_(size).add_(1.0) if rate else torch.ones_like(gap))

    def _begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Start the mean from the momentum found at the first update, which a previous method may have left."""
        for name, squares in self._buffers["squares"].views.items():
            velocity = optimizer.state.get(parameters[name], {}).get("momentum_buffer")
            if velocity is not None:
                squares.copy_(velocity**2 * (1.0 - self._wanted.average))

    def before_step(self, gradient: Buffer, newest: Buffer, factor: float) -> None:
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
        squares.mul_(self._wanted.average).add_(velocity**2, alpha=1.0 - self._wanted.average)
