"""Global decisions on a batch: loss scale, clipping, skipped updates; and parameters that stages share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import reduce
from typing import NamedTuple

import torch

from penstock.verify.reference.stage import ReferenceStage


class Scaling(NamedTuple):
    """Rule of the loss scale: times `growth` after `interval` finite batches, times `backoff` after an overflow."""

    initial: float
    growth: float
    backoff: float
    interval: int


class Scale:
    """The loss scale over the batches of a run."""

    def __init__(self, scaling: Scaling | None) -> None:
        self.scaling, self.now = scaling, 1.0 if scaling is None else scaling.initial
        self.calm = self.heard = 0
        self.votes: list[bool | None] = []  # per batch, whether it overflowed; None if it had no weight
        self.used: list[float] = []

    def at(self, known: int) -> float:
        """Return S of the next batch, computed from the first `known` batches."""
        for used, overflow in zip(self.used[self.heard : known], self.votes[self.heard : known], strict=True):
            if self.scaling is None or overflow is None:
                continue
            if overflow and used <= self.now:
                self.now, self.calm = self.now * self.scaling.backoff, 0
            elif not overflow and used == self.now:
                self.calm += 1
                if self.calm == self.scaling.interval:
                    self.now, self.calm = self.now * self.scaling.growth, 0
        self.heard = known
        self.used.append(self.now)
        return self.now


def factor_and_norm(
    stages: list[ReferenceStage],
    c: float,
    weight: float,
    scale: float,
    clip: float | None,
    votes: bool,
    tied: Collection[str],
) -> tuple[float, float]:
    """Return the factor on the sum of gradients (0: no update), and the norm of the gradient of the mean loss."""
    if not weight:
        return 0.0, math.nan
    mean = c / (weight * scale)
    if clip is None and not votes:
        return mean, math.nan
    gradients = {name: g for stage in stages for name, g in stage.gradient.items() if name not in tied}
    norm = math.sqrt(math.fsum(n * n for g in gradients.values() for n in _row_norms(g))) * mean
    if not math.isfinite(norm):
        return 0.0, norm
    return mean * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))), norm


def _row_norms(gradient: torch.Tensor) -> list[float]:
    """Return the norms of the rows of a gradient, of parts of 16,384 elements where they are longer."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    if real.dim() < 2:
        return [abs(element) for element in real.reshape(-1).tolist()]
    parts = [part for row in real.reshape(len(real), -1) for part in row.split(16384)]
    return [float(torch.linalg.vector_norm(part)) for part in parts]


def equal_copies(stages: list[ReferenceStage], tied: Mapping[str, str]) -> None:
    """Initialize all copies of a parameter with one value."""
    everything = {name: (stage, parameter) for stage in stages for name, parameter in stage.newest.items()}
    for name, owner in tied.items():
        stage, copy_ = everything[name]
        copy_.data.copy_(everything[owner][1].data)
        stage.versions[0][name] = copy_.detach().clone()


def tie_gradients(stages: list[ReferenceStage], tied: Mapping[str, str]) -> None:
    """Replace the gradient of each copy of a parameter by the sum over all copies, that of the first stage first."""
    holder = {name: stage for stage in stages for name in stage.gradient}
    for owner in dict.fromkeys(tied.values()):
        names = [owner, *(name for name in holder if tied.get(name) == owner)]
        total = reduce(torch.add, [holder[name].gradient[name] for name in names])
        for name in names:
            holder[name].gradient[name] = total
