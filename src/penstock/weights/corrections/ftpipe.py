"""FTPipe's weight prediction from momentum that decays over the coming updates.

Eliad et al., USENIX ATC 2021, and its code (`msnag`, and `aggmsnag` for several microbatches per update). A forward
reads the weights as they will be after the n updates between it and its own backward, if all gradients until then are
zero. For j = 1..n, with lr_j the rate of the j-th update from now (its "sched_aware"):

    SGD         w <- w - lr_j gamma^j v; all together w - sum_j (lr_j gamma^j) v
    Adam        w <- w - lr_j / (1 - beta1^(t+j)) beta1^j m / (sqrt(s / (1 - beta2^(t+j))) + eps), after t updates

v is SGD's momentum buffer, also with Nesterov momentum. If aggregated, the gradient g accumulated so far for the next
update is added at j = 1: v <- gamma v + g, m <- beta1 m + (1 - beta1) g. It is divided by N, the loss weight of the
last batch (with a weight) that has updated the stage, since that of its own batch is not known before its last
microbatch; so the divisor c changes nothing. It excludes the loss scale, is not clipped, and is that of this pipeline
only where there are several, though N is of all; elements that are not finite count as zero, since their batch will
make no update and must not affect other batches. FTPipe aggregates with Adam and AdamW; the same for SGD is our
interpretation (variant "penstock"), and so are these details of g. Weight decay is not part of a prediction, as with
the other methods here, unless `decays` is set; then it continues as in FTPipe's code: decoupled, w is multiplied by
1 - lr_j decay before each update; otherwise decay w is added to the gradient of each.

n is what FTPipe's scheduler expects: the number of microbatches b with done backwards <= b < done forwards that end an
update, b mod m = m - 1. Here it is the number of the forward's batch minus that of the newest version. Before the first
update there is no optimizer state, and the prediction is the weights themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from penstock.errors import CapabilityError
from penstock.weights.corrections.base import NO_RECOMPUTE, Corrector, StagePlace
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.optim.directions import check_predictable
from penstock.weights.optim.optimizer_adapters import name_of
from penstock.weights.updates.forecasts import Forecast, forecast
from penstock.weights.updates.updater import Updater


@dataclass(frozen=True)
class FTPipe:
    """Settings of FTPipe's predictions.

    Args:
        aggregated: include the gradient accumulated so far for the next update.
        ahead: use the rate of each update; otherwise that of the next one for all.
        decays: include weight decay in the prediction.
    """

    aggregated: bool = False
    ahead: bool = True
    decays: bool = False

    @property
    def name(self) -> str:
        """Its name in the table of corrections."""
        return "ftpipe-aggregated" if self.aggregated else "ftpipe"

    def refuses(self, _precision: torch.dtype | None, recompute: str) -> str | None:
        """Return why recompute is not supported, since a recomputed forward would need its copy again."""
        if recompute != "none":
            return NO_RECOMPUTE
        return None

    def on(self, layout: Layout, place: StagePlace) -> _FTPipeOnStage:
        """Create the corrector of a stage."""
        return _FTPipeOnStage(self, layout, place)


class _FTPipeOnStage(Corrector):
    predicts = True

    def __init__(self, wanted: FTPipe, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted = wanted
        self._updates, self._factor = 0, 1.0
        self._gradient: Buffer | None = None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept SGD with momentum, Adam and AdamW."""
        if type(optimizer) not in (SGD, Adam, AdamW):
            raise CapabilityError(
                f"{self._wanted.name} supports SGD with momentum, Adam and AdamW, not {name_of(optimizer)}; use one of "
                "these, or method lwp"
            )
        check_predictable(optimizer)

    def look_ahead(self, updates: int, gradient: Buffer | None, factor: float) -> object:
        """Store the horizon and the partial gradient for `predict`, and return a key of them."""
        self._updates, self._factor = updates, factor
        self._gradient = gradient if self._wanted.aggregated and updates else None
        return updates if self._gradient is None else (updates, object())

    def predict(self, updater: Updater, weights: Buffer, label: str, out: Buffer) -> None:  # noqa: ARG002
        """Write the prediction that the last `look_ahead` described."""
        forecast(updater, weights, self._guess, out)

    def _guess(self, known: Forecast) -> Tensor:
        if not self._updates or not known.optimizer.state.get(known.parameter):
            return known.weights
        walk = _walk_sgd if isinstance(known.optimizer, SGD) else _walk_adam
        rates = [known.rate(j if self._wanted.ahead else 1) for j in range(1, self._updates + 1)]
        gathered, decay = self._gathered(known.name), known.group["weight_decay"] if self._wanted.decays else 0.0
        found: Tensor = walk(known, rates, gathered, decay)
        return found

    def _gathered(self, name: str) -> Tensor | None:
        """Return the partial gradient of a parameter, or None if no backward has reached it."""
        if self._gradient is None or name in self._gradient.unwritten:
            return None
        g = self._gradient.views[name] * self._factor
        return torch.where(g.isfinite(), g, 0.0)


def _walk_sgd(known: Forecast, rates: list[float], gathered: Tensor | None, decay: float) -> Tensor:
    w, gamma, taken = known.weights, float(known.group["momentum"]), 1.0 - known.group["dampening"]
    v: Tensor = known.optimizer.state[known.parameter]["momentum_buffer"]
    if not decay:
        begun = gathered is not None  # then v already includes j = 1
        v = gamma * v + taken * gathered.to(v.dtype) if gathered is not None else v
        return w - sum(rate * gamma ** (j - begun) for j, rate in enumerate(rates, 1)) * v
    for j, rate in enumerate(rates, 1):
        gradient = decay * w
        if j == 1 and gathered is not None:
            gradient = gradient + gathered.to(v.dtype)
        v = gamma * v + taken * gradient
        w = w - rate * v
    return w


def _walk_adam(known: Forecast, rates: list[float], gathered: Tensor | None, decay: float) -> Tensor:
    (beta1, beta2), eps, w = known.group["betas"], known.group["eps"], known.weights
    state, decoupled = known.optimizer.state[known.parameter], known.group["decoupled_weight_decay"]
    t, mean, begun = int(state["step"]), state["exp_avg"], 0  # `mean` is as of `begun` updates from now
    if gathered is not None and (decoupled or not decay):
        mean, begun = beta1 * mean + (1.0 - beta1) * gathered.to(mean.dtype), 1
    for j, rate in enumerate(rates, 1):
        if decay and decoupled:
            w = w * (1.0 - rate * decay)
        elif decay:
            gradient = decay * w
            if j == 1 and gathered is not None:
                gradient = gradient + gathered.to(mean.dtype)
            mean, begun = beta1 * mean + (1.0 - beta1) * gradient, j
        share = rate / (1.0 - beta1 ** (t + j)) * beta1 ** (j - begun)
        w = w - share * mean / ((state["exp_avg_sq"] / (1.0 - beta2 ** (t + j))).sqrt() + eps)
    return w
