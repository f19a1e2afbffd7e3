"""What is decided about a batch for all stages together: loss scale, clipping, whether there is an update; and ties."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import reduce
from typing import NamedTuple

import torch

from penstock.verify.reference.stage import ReferenceStage


class Scaling(NamedTuple):
    """How the loss scale changes: by `growth` after `interval` finite batches, by `backoff` after an overflow."""

    initial: float
    growth: float
    backoff: float
    interval: int


class Scale:
    """The loss scale, which learns from the batches one after the other."""

    def __init__(self, scaling: Scaling | None) -> None:
        self.scaling, self.now = scaling, 1.0 if scaling is None else scaling.initial
        self.calm = self.heard = 0
        self.votes: list[bool | None] = []  # per batch, whether it overflowed; None if it had no weight
        self.used: list[float] = []

    def at(self, known: int) -> float:
        """S of the next batch, from the first `known` batches."""
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
    nodes: list[ReferenceStage],
    c: float,
    weight: float,
    scale: float,
    clip: float | None,
    votes: bool,
    tied: Collection[str],
) -> tuple[float, float]:
    """What the sum of gradients is multiplied by (0: no update), and the norm of the gradient of the mean loss."""
    if not weight:
        return 0.0, math.nan
    mean = c / (weight * scale)
    if clip is None and not votes:
        return mean, math.nan
    gradients = {name: g for node in nodes for name, g in node.gradient.items() if name not in tied}
    norms = [float(torch.linalg.vector_norm(g)) for g in gradients.values()]
    norm = math.sqrt(math.fsum(n * n for n in norms)) * mean
    if not math.isfinite(norm):
        return 0.0, norm
    return mean * (1.0 if clip is None else min(1.0, clip / (norm + 1e-6))), norm


def equal_copies(nodes: list[ReferenceStage], tied: Mapping[str, str]) -> None:
    """Begin with one value for what is one parameter."""
    everything = {name: (node, parameter) for node in nodes for name, parameter in node.newest.items()}
    for name, owner in tied.items():
        node, copy_ = everything[name]
        copy_.data.copy_(everything[owner][1].data)
        node.versions[0][name] = copy_.detach().clone()


def tie_gradients(nodes: list[ReferenceStage], tied: Mapping[str, str]) -> None:
    """All copies of a parameter get the sum of their gradients, the first stage's first."""
    holder = {name: node for node in nodes for name in node.gradient}
    for owner in dict.fromkeys(tied.values()):
        names = [owner, *(name for name in holder if tied.get(name) == owner)]
        total = reduce(torch.add, [holder[name].gradient[name] for name in names])
        for name in names:
            holder[name].gradient[name] = total
