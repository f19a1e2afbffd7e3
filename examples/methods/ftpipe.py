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

    penstock train --file examples/methods/ftpipe.py:method=ftpipe --stages 4
    penstock verify --file examples/methods/ftpipe.py:method=ftpipe-aggregated --stages 4
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import penstock
from penstock.verify.reference import ReferencePlace, ReferenceReading, ReferenceStage, check_velocity, largest_delay
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.directions import check_predictable
from penstock.weights.updates.forecasts import Forecast, forecast
from penstock.weights.updates.updater import Updater

Weights = dict[str, Tensor]


class FTPipe(penstock.Corrector):
    """Corrects one stage.

    Args:
        ahead: use the rate of each update; otherwise that of the next one for all.
        weight_decay: include weight decay in the prediction.
    """

    predicts = True
    aggregated = False

    def __init__(self, layout: Layout, place: penstock.StagePlace, ahead: float, weight_decay: float) -> None:
        super().__init__(layout, place)
        self._ahead, self._decays = bool(ahead), bool(weight_decay)
        self._updates, self._factor = 0, 1.0
        self._gradient: penstock.Buffer | None = None

    def check(self, optimizer: Optimizer) -> None:
        """Accept SGD with momentum, Adam and AdamW."""
        if type(optimizer) not in (SGD, Adam, AdamW):
            raise penstock.CapabilityError(
                f"FTPipe supports SGD with momentum, Adam and AdamW, not {type(optimizer).__name__}; use one of "
                "these, or method lwp"
            )
        check_predictable(optimizer)

    def look_ahead(self, updates: int, gradient: penstock.Buffer | None, factor: float) -> object:
        """Store the horizon and the partial gradient for `predict`, and return a key of them."""
        self._updates, self._factor = updates, factor
        self._gradient = gradient if self.aggregated and updates else None
        return updates if self._gradient is None else (updates, object())

    def predict(self, updater: Updater, weights: penstock.Buffer, _: str, out: penstock.Buffer) -> None:
        """Write the prediction that the last `look_ahead` described."""
        forecast(updater, weights, self._guess, out)

    def _guess(self, known: Forecast) -> Tensor:
        if not self._updates or not known.optimizer.state.get(known.parameter):
            return known.weights
        walk = _walk_sgd if isinstance(known.optimizer, SGD) else _walk_adam
        rates = [known.rate(j if self._ahead else 1) for j in range(1, self._updates + 1)]
        gathered, decay = self._gathered(known.name), known.group["weight_decay"] if self._decays else 0.0
        found: Tensor = walk(known, rates, gathered, decay)
        return found

    def _gathered(self, name: str) -> Tensor | None:
        """Return the partial gradient of a parameter, or None if no backward has reached it."""
        if self._gradient is None or name in self._gradient.unwritten:
            return None
        g = self._gradient.views[name] * self._factor
        return torch.where(g.isfinite(), g, 0.0)


class Aggregated(FTPipe):
    """The same, with the gradient accumulated so far for the next update."""

    aggregated = True


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


class Known(NamedTuple):
    """Facts about a parameter when a version is made.

    Attributes:
        state: of the optimizer.
        group: the optimizer's settings.
        rates: of the next updates.
    """

    state: Mapping[str, Any]
    group: Mapping[str, Any]
    rates: list[float]


class Decaying(ReferenceReading):
    """Forwards predict the weights at their microbatch's own update, as if no gradient came in between ("msnag").

    n is the number of updates that the stage makes between the forward and that update; lr_j is the rate of the j-th of
    them (`sched_aware`). g is zero or, aggregated, the gradient of those microbatches of the open batch that this stage
    has finished.

        SGD             W - sum_{j=1..n} lr_j gamma^(j-1) * (gamma v + (1 - dampening) g)
        Adam, AdamW     for j = 1..n: W <- W - lr_j / (1 - b1^(i+j)) * b1^(j-1) * (b1 m + (1 - b1) g)
                                               / (sqrt(s / (1 - b2^(i+j))) + eps)

    where v is SGD's buffer, also under Nesterov's momentum, m and s are Adam's two moments and i its steps so far. The
    code has the aggregated form for Adam only; for SGD it is written by analogy ("penstock"). Also our interpretation:
    g is the sum of the gradients of losses over N, the loss weight of the last earlier batch that had one, as that of
    the batch itself is not known before it is complete, and g is not clipped; its infinite and NaN elements count as
    zero, since such a batch makes no update; before the first update nothing is predicted (s is 0 then, and the code
    would move by g / eps); weight decay is not part of a prediction.

    Args:
        place: of the stage.
        optimizer: of the stage, if it is trained.
        aggregated: g is part of it.
    """

    def __init__(self, place: ReferencePlace, optimizer: Optimizer | None, aggregated: bool) -> None:
        self.place, self.updates, self.repeats = place, largest_delay(*place), False
        self.aggregated = aggregated
        self.known: list[dict[str, Known]] = []  # per version and name
        self.sums: dict[tuple[int, int], list[Weights]] = {}  # (batch, pipeline) -> by number of microbatches
        self.open: Callable[[int], Weights] = lambda _: {}  # version -> g, by name
        if optimizer is not None:
            check_velocity(optimizer)

    def before_microbatch(self, t: int, part: int, place: int, divisor: float, weights: Sequence[float]) -> None:
        """Set g for the next microbatch of batch t, from those that the stage has done: in 1F1B, d-1-s fewer."""
        done = max(0, place - (self.place.depth - 1 - self.place.stage)) % self.place.microbatches

        def gathered(version: int) -> Weights:
            if not (self.aggregated and done and version < t):
                return {}
            n = next((weight for weight in reversed(weights[:version]) if weight), divisor)
            return {name: g * (divisor / n) for name, g in self.sums[version, part][done - 1].items()}

        self.open = gathered

    def after_microbatch(self, stage: ReferenceStage, t: int, part: int, scale: float) -> None:
        """Record the sums after one more microbatch of batch t, whose loss is multiplied by `scale`."""
        if self.aggregated:
            sums = {name: (g / scale).nan_to_num(0.0, 0.0, 0.0) for name, g in stage.part.items()}
            self.sums.setdefault((t, part), []).append(sums)

    def on_version(self, stage: ReferenceStage) -> None:
        """Record what predictions from this version need."""
        known = {}
        if stage.optimizer is not None:
            names = {parameter: name for name, parameter in stage.newest.items()}
            for group, initial in zip(stage.optimizer.param_groups, stage.rates, strict=True):
                for p in group["params"]:
                    state = copy.deepcopy(stage.optimizer.state.get(p, {}))
                    known[names[p]] = Known(state, dict(group), [stage.rate(initial, j) for j in range(self.updates)])
        self.known.append(known)

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the prediction from the version for the forward, and the newest for the backward."""
        n = len(stage.versions) - 1 - version
        weights, g = dict(stage.versions[version]), self.open(version)
        for name, known in self.known[version].items():
            if n and known.state:
                weights[name] = _ahead(weights[name], n, known, g.get(name))
        return weights, stage.versions[-1]


def _ahead(w: Tensor, n: int, known: Known, g: Tensor | None) -> Tensor:
    """Return W after n updates whose gradients are zero, except g in the first one."""
    state, group, rates = known
    g = None if g is None else g.to(w.dtype)
    if "betas" not in group:
        gamma, v = group["momentum"], state["momentum_buffer"]
        if g is not None:
            v = gamma * v + (1.0 - group["dampening"]) * g
        share: float = sum(rates[j - 1] * gamma ** (j if g is None else j - 1) for j in range(1, n + 1))
        moved: Tensor = w - share * v
        return moved
    b1, b2 = group["betas"]
    first, done = state["exp_avg"], float(state["step"])
    if g is not None:
        first = b1 * first + (1.0 - b1) * g
    for j in range(1, n + 1):
        size = (state["exp_avg_sq"] / (1.0 - b2 ** (done + j))).sqrt() + group["eps"]
        share = rates[j - 1] / (1.0 - b1 ** (done + j)) * b1 ** (j if g is None else j - 1)
        w = w - share * first / size
    return w


def reference(aggregated: bool) -> Callable[..., None]:
    """Return the function that sets what a stage of the reference reads."""

    def equations(stage: ReferenceStage, place: ReferencePlace, *, ahead: float, weight_decay: float) -> None:
        if weight_decay or not ahead:
            raise penstock.ConfigError(
                "the reference of FTPipe predicts without weight decay, and each update at its own rate; verify it "
                "with ahead=1 and weight_decay=0"
            )
        if aggregated and place.delays is not None:
            raise penstock.ConfigError("the reference of ftpipe-aggregated knows the order of 1F1B alone")
        stage.reading = Decaying(place, stage.optimizer, aggregated)

    return equations


def method(name: str, title: str, corrector: type[FTPipe]) -> penstock.Method:
    """Return one of the two methods."""
    return penstock.Method(
        name,
        title,
        "FTPipe, USENIX ATC 2021, and its code",
        order="endless-1f1b",
        rule="predicted-forward",
        correction=penstock.CorrectionSpec(
            name,
            title,
            rules=("predicted-forward", "predicted-stash"),
            options={
                "ahead": penstock.Option(
                    1.0,
                    "1: each update ahead at its own rate (FTPipe's sched_aware); 0: all at the next one's",
                    "switch",
                ),
                "weight_decay": penstock.Option(
                    0.0, "1: weight decay is part of the prediction, as in FTPipe's code; 0: it is not", "switch"
                ),
            },
            recomputes=False,
            corrector=corrector,
        ),
        reference=reference(corrector.aggregated),
    )


ftpipe = method("ftpipe", "FTPipe, weights predicted by momentum that decays (msnag)", FTPipe)
ftpipe_aggregated = method("ftpipe-aggregated", "the same with the gradient under way (aggmsnag)", Aggregated)
