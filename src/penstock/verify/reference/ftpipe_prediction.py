"""FTPipe's weight prediction (Eliad et al., USENIX ATC 2021, and its public code) with decaying velocities."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.errors import CapabilityError
from penstock.verify.reference.stage import ReferenceReading, ReferenceStage, Weights


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
        updates: the largest n of the stage.
        stash: backwards read the weights that their forward read, not the newest ones.
        optimizer: of the stage, if it is trained.

    Attributes:
        open: g, by name, set before each read; empty for zero.

    Raises:
        CapabilityError: the optimizer is neither SGD with momentum nor Adam nor AdamW.
    """

    def __init__(self, updates: int, stash: bool, optimizer: Optimizer | None) -> None:
        self.updates, self.stash, self.repeats = updates, stash, stash
        self.known: list[dict[str, Known]] = []  # per version and name
        self.open: Weights = {}
        if optimizer is not None:
            _check(optimizer)

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
        """Return the prediction from the version for the forward, and for the backward the same or the newest."""
        n = len(stage.versions) - 1 - version
        weights = dict(stage.versions[version])
        for name, known in self.known[version].items():
            if n and known.state:
                weights[name] = _ahead(weights[name], n, known, self.open.get(name))
        return weights, None if self.stash else stage.versions[-1]


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


class Partials:
    """Sums of the gradients of each stage after each microbatch of a batch, per pipeline.

    Attributes:
        before: loss weights of batches before the first one, where training is resumed.
    """

    before: Sequence[float] = ()

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int, int], list[Weights]] = {}  # (stage, batch, part) -> by number of microbatches

    def note(self, stages: list[ReferenceStage], t: int, part: int, scale: float) -> None:
        """Record the sums after one more microbatch of batch t, whose loss is multiplied by `scale`, of a part."""
        for s, stage in enumerate(stages):
            self.sums.setdefault((s, t, part), []).append(
                {name: (g / scale).nan_to_num(0.0, 0.0, 0.0) for name, g in stage.part.items()}
            )

    def set_open(
        self,
        stages: list[ReferenceStage],
        versions: list[int],
        part: int,
        t: int,
        done: list[int],
        c: float,
        weights: list[float],
    ) -> None:
        """Set g of each stage for the next microbatch of batch t of a part, from the microbatches it has done.

        Losses have been divided by c; `weights` are the loss weights of the batches so far.
        """
        for s, (stage, version, count) in enumerate(zip(stages, versions, done, strict=True)):
            if isinstance(stage.reading, Decaying):
                n = next((weight for weight in reversed([*self.before, *weights[:version]]) if weight), c)
                known = self.sums[s, version, part][count - 1] if count and version < t else {}
                stage.reading.open = {name: g * (c / n) for name, g in known.items()}


def _check(optimizer: Optimizer) -> None:
    fits = isinstance(optimizer, SGD | Adam | AdamW)
    if not fits or any(group.get("momentum") == 0 or group.get("amsgrad") for group in optimizer.param_groups):
        raise CapabilityError(
            f"FTPipe's prediction is defined for SGD with momentum, Adam and AdamW (without amsgrad), not for "
            f"{type(optimizer).__name__} with these settings: change the optimizer"
        )
