"""Corrections for delayed weights, stage by stage: in the weights that are read, the learning rate, and the update."""

from __future__ import annotations

import torch

from penstock.verify.reference.stage import ReferenceReading, ReferenceStage, Weights, step


class Newest(ReferenceReading):
    """Backwards read the newest weights."""

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the given version for the forward and the newest one for the backward."""
        return stage.versions[version], stage.versions[-1]

    def again(self, stage: ReferenceStage, _version: int, moment: int) -> Weights | None:
        """Return the version that is newest at that moment."""
        return stage.versions[moment]


class Discrepancy(ReferenceReading):
    """PipeMare's T2 (arXiv 1910.05124): backwards use an estimate of the weights that their forwards read.

    delta <- gamma * delta + (1 - gamma) * (W(t+1) - W(t)) after each update, from 0 on, gamma = decay^(1/delay); the
    backward of a microbatch of batch t whose forward read version v reads W(t) - (t - v) * delta. T2 extrapolates back
    in time. A stage without delay has no delta. A forward that is recomputed when version r is the newest reads
    W(r) - (r - v) * delta of that moment: its backward's estimate if r = t, and W(v) itself if r = v.

    Args:
        delay: the mean delay of the stage, in updates.
        decay: D; the fraction of a change that is left after `delay` updates.
    """

    def __init__(self, delay: float, decay: float) -> None:
        self.gamma = decay ** (1.0 / delay) if delay else None
        self.delta: Weights = {}
        self.past: dict[int, Weights] = {}  # delta by the version that was newest

    def on_version(self, stage: ReferenceStage) -> None:
        """Update delta."""
        if stage.made and self.gamma is not None:
            before, after = stage.versions[-2:]
            delta = self.delta or {name: torch.zeros_like(w) for name, w in after.items()}
            self.delta = {n: self.gamma * delta[n] + (1.0 - self.gamma) * (w - before[n]) for n, w in after.items()}
        self.past[len(stage.versions) - 1] = self.delta

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the version, and an estimate of it from the newest one."""
        return stage.versions[version], self.again(stage, version, len(stage.versions) - 1)

    def again(self, stage: ReferenceStage, version: int, moment: int) -> Weights:
        """Return an estimate of the version from the one that is newest at that moment."""
        newest, delta, delay = stage.versions[moment], self.past.get(moment), moment - version
        if not delta or not delay:
            return newest
        return {name: w - delay * delta[name] for name, w in newest.items()}


class Blend(ReferenceReading):
    """I-TiMePReSt (arXiv 2509.23241): backwards read weights between those of their forward and the newest.

    lambda W(v) + (1 - lambda) W(t), lambda = beta^(t - v), for a microbatch of batch t whose forward read version v.
    The abstract says that the share of the old weights falls exponentially with the updates in between, but neither
    gives the base nor says whether skipped updates count: our interpretation ("penstock") is that the base is one
    number, and that they count. Without updates in between they are W(v), bit for bit.

    Args:
        beta: from 0 (newest weights wherever there are newer ones) to 1 (those of the forward).
    """

    repeats = False

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the version, and the blend of it with the newest."""
        old, newest, updates = stage.versions[version], stage.versions[-1], len(stage.versions) - 1 - version
        if not updates:
            return old, None
        share = self.beta**updates
        return old, {name: share * w + (1.0 - share) * newest[name] for name, w in old.items()}


class Rescheduling:
    """PipeMare's T1 (arXiv 1910.05124): divides the rate of update k, from 0, by max(tau, 1)^(1 - min(k/K, 1)).

    Args:
        delay: tau, the mean delay of the stage, in updates.
        updates: K, the number of updates until the rate is no longer divided; 0 for never.
    """

    def __init__(self, delay: float, updates: float) -> None:
        self.delay, self.updates = max(delay, 1.0), updates

    def __call__(self, k: int) -> float:
        """Return the factor on the rate."""
        return self.delay ** -(1.0 - min(k / self.updates, 1.0)) if self.updates else 1.0


class Feedback:
    """Error feedback at the level of updates: our interpretation ("penstock") of arXiv 2606.30634, not having its text.

    With a delay of one, update t is made from the gradient at W(t-1), which is what update t-1 should have used. u_t is
    the change that the optimizer makes with it, decay included; the error of update t-1 is u_t - u_{t-1}, and is
    corrected:

        W(t+1) = W(t) + u_t + (u_t - u_{t-1}),    the first update made: W + u

    so that W has then moved by all u up to t, and once more by u_t in place of the update that is not known yet. It
    takes one buffer, u_{t-1}. The optimizer's state is that of the u.
    """

    def __init__(self) -> None:
        self.last: Weights | None = None

    def __call__(self, stage: ReferenceStage) -> None:
        """Make an update."""
        before = stage.copy_newest()
        step(stage)
        now = {name: parameter.detach() - before[name] for name, parameter in stage.newest.items()}
        if self.last is not None:
            for name, parameter in stage.newest.items():
                parameter.copy_(before[name] + now[name] + (now[name] - self.last[name]))
        self.last = now
