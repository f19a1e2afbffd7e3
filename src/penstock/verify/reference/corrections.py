"""Corrections for delayed weights, stage by stage: in the weights that are read, the learning rate, and the update."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from penstock.errors import CapabilityError
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


class Spike:
    """Spike compensation (Kosson et al., arXiv 2003.11666) of SGD with momentum m: a late gradient catches up at once.

    v <- m v + g; W <- W - lr (a v + b g), with a = m^D, b = (1 - m^D) / (1 - m). D = 1 is Nesterov's momentum.

    Args:
        delay: D, the mean delay of the stage, in updates.
        optimizer: of the stage; its state holds v.

    Raises:
        CapabilityError: the optimizer is not SGD with momentum, or does more than these equations.
    """

    def __init__(self, delay: float, optimizer: Optimizer) -> None:
        self.delay = delay
        _check_momentum(optimizer, "spike compensation")

    def __call__(self, stage: ReferenceStage) -> None:
        """Make an update."""
        optimizer = stage.optimizer
        assert optimizer is not None
        for group in optimizer.param_groups:
            m, lr = group["momentum"], group["lr"]
            a, b = m**self.delay, (1.0 - m**self.delay) / (1.0 - m)
            for parameter in group["params"]:
                g = _with_decay(parameter, group["weight_decay"])
                v = optimizer.state[parameter].get("momentum_buffer")
                v = g.clone() if v is None else m * v + g
                optimizer.state[parameter]["momentum_buffer"] = v
                parameter.copy_(parameter - lr * (a * v + b * g))


class ReferenceGapAware:
    """Gap-aware penalty (Barkai et al., arXiv 1909.10802), as in FTPipe's code for SGD on stashed weights.

    The gradient with its decay is divided, element by element, by 1 + |W(t) - W(v)| / C, where the forward read W(v),
    and C is the largest possible step: the largest rate so far times (sqrt(ra / (1 - G^n)) + eps) in the n-th update.
    ra is the running average of the squares of the momentum buffer before this update (of the gradient itself if there
    is no momentum), ra <- G ra + (1 - G) b^2. Where the largest rate is 0, nothing is divided.

    Args:
        average: G.
        eps: against division by zero.
        microbatches: m.
        optimizer: of the stage.

    Raises:
        CapabilityError: the optimizer is not SGD, or several microbatches, which have different gaps, make an update.
    """

    def __init__(self, average: float, eps: float, microbatches: int, optimizer: Optimizer) -> None:
        self.average, self.eps = average, eps
        self.squares: dict[nn.Parameter, Tensor] = {}
        self.largest: dict[int, float] = {}  # rate by number of the parameter group
        self.updates = 0
        if microbatches > 1:
            raise CapabilityError(
                f"gap-aware divides the gradient of each microbatch by its own gap, but an update has {microbatches} "
                "microbatches: set microbatches to 1"
            )
        if not isinstance(optimizer, SGD):
            raise CapabilityError(f"gap-aware is defined for SGD only, not for {type(optimizer).__name__}")

    def __call__(self, stage: ReferenceStage) -> None:
        """Make an update."""
        optimizer = stage.optimizer
        assert optimizer is not None
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


def adapt_momentum(optimizer: Optimizer, s: int, d: int) -> None:
    """Set the momentum of stage s of d to 0.9 + 0.09 (d-1-s)/d: older gradients, more momentum (arXiv 2505.01099).

    Raises:
        CapabilityError: the optimizer has neither momentum nor betas.
    """
    momentum = 0.9 + (d - 1 - s) / d * 0.09
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        elif group.get("momentum"):
            group["momentum"] = momentum
        else:
            raise CapabilityError(
                f"nag-pp-no-stash gives each stage a momentum, which {type(optimizer).__name__} does not have: use "
                "NAdam"
            )


def _check_momentum(optimizer: Optimizer, who: str) -> None:
    plain = isinstance(optimizer, SGD) and all(
        g["momentum"] and not (g["dampening"] or g["nesterov"] or g["maximize"]) for g in optimizer.param_groups
    )
    if not plain:
        raise CapabilityError(
            f"{who} is defined for SGD with momentum, without dampening and Nesterov's momentum; the optimizer is "
            f"{type(optimizer).__name__} with other settings or of another kind: change it"
        )


def _with_decay(parameter: nn.Parameter, decay: float) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad + decay * parameter.detach() if decay else parameter.grad
