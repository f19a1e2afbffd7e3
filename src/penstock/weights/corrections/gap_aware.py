"""Gap-aware gradients: the further the weights have moved since the forward, the less a gradient counts.

Barkai et al., Gap-Aware Mitigation of Gradient Staleness (arXiv 1909.10802), in the form of FTPipe (Eliad et al.,
USENIX ATC 2021, and its code), element by element:

    g <- g / (1 + |w_now - w_stash| / (rate (sqrt(r / (1 - G^t)) + eps))),   r <- G r + (1 - G) v^2

with v the momentum of SGD before the update, rate the highest learning rate so far of the parameter's group, and t the
number of the update, from 1; g with its weight decay, so that this is divided alike. It is made for one microbatch per
update. The norm by which gradients are clipped is that before the division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim import SGD

from penstock.errors import CapabilityError, ConfigError
from penstock.weights.corrections.base import Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.adapters import name_of
from penstock.weights.optim.step_info import Step
from penstock.weights.optim.updater import Updater


@dataclass(frozen=True)
class GapAware:
    """What is wanted.

    Args:
        average: G.
        eps: against division by zero.
    """

    average: float = 0.999
    eps: float = 1e-8
    name: str = "gap-aware"

    def __post_init__(self) -> None:
        """Make sure that the numbers make sense."""
        if not 0 <= self.average < 1 or not self.eps > 0:
            raise ConfigError(f"average must lie in [0, 1) and eps above 0; got {self.average} and {self.eps}")

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Low precision has no stash of full weights."""
        if _precision is not None:
            return "gap-aware gradients are offered in fp32 so far; set precision to fp32, or take method stash"
        return None

    def on(self, layout: Layout, place: StagePlace) -> _GapAwareOnStage:
        """For a stage."""
        return _GapAwareOnStage(self, layout, place)


class _GapAwareOnStage(Corrector):
    def __init__(self, wanted: GapAware, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        if place.microbatches != 1:
            raise CapabilityError(
                f"{place.where}: gap-aware gradients are made for one microbatch per update, not {place.microbatches}; "
                "take microbatches=1, or method stash"
            )
        self._wanted = wanted
        self._rates: dict[str, float] = {}  # the highest of so many updates, by parameter
        self._rated = 0
        self.watches = place.delay > 0
        names = ("squares", "penalty") if self.watches else ()
        self._buffers = {name: Buffer(layout, f"{name} of {place.where}") for name in names}
        self._decays: dict[str, float] = {}  # of the gradient under way

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The mean of the squares of momentum, and what the gradient under way will be divided by."""
        return self._buffers

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """It reads the momentum of SGD."""
        if not isinstance(optimizer, SGD) or not all(group["momentum"] for group in optimizer.param_groups):
            raise CapabilityError(f"gap-aware gradients need SGD with momentum, not {name_of(optimizer)} as it is set")

    def backward_done(self, updater: Updater, read: Buffer, newest: Buffer) -> None:
        """How far the weights have moved since the forward."""
        if not self.watches:
            return
        assert updater.optimizer is not None
        updates = updater.updates + 1 - self.began
        while self._rated < updates:  # many at once after a restart
            rates = updater.rates_of(self.began + self._rated)
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
        """The mean begins with the momentum that the first update finds: of a method before this one, or none."""
        for name, squares in self._buffers["squares"].views.items():
            velocity = optimizer.state.get(parameters[name], {}).get("momentum_buffer")
            if velocity is not None:
                squares.copy_(velocity**2 * (1.0 - self._wanted.average))

    def before_step(self, gradient: Buffer, newest: Buffer, factor: float) -> None:
        """Divide; the optimizer will add the whole decay, so what is too much of it is taken off here."""
        if not self.watches:
            return
        with torch.no_grad():
            for name, view in gradient.views.items():
                penalty, decay = self._buffers["penalty"].views[name], self._decays[name]
                view.div_(penalty)
                if decay:
                    view.addcmul_(newest.views[name], 1.0 / penalty - 1.0, value=decay / factor)

    def stepped(self, step: Step) -> None:
        """What momentum is now counts from the next update on."""
        velocity = step.optimizer.state[step.parameter]["momentum_buffer"]
        squares = self._buffers["squares"].views[step.name]
        squares.mul_(self._wanted.average).add_(velocity**2, alpha=1.0 - self._wanted.average)
