"""Pipelines of one number per stage, in plain floats: y = w_{d-1} ... w_0 x, with the loss (y - 1)^2 / 2.

Stages run their passes one by one, as soon as they can, in the order of 1F1B, and have only what there is at that time:
no table of versions, no formula of delays, no autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

LR, MOMENTUM, DECAY = 0.04, 0.8, 0.03
BETAS, EPS = (0.8, 0.9), 1e-8
SKIPPED = 6  # the batch that has no weight


def rate(k: int) -> float:
    """Rises and falls, so that the rate of the next update is not the last one's, nor the largest one always."""
    return min(0.4 + k / 10, 1.0, max(2.2 - k / 10, 0.3))


class Stage:
    """Stashes weights; SGD with momentum and decay. Methods say what is different.

    Attributes:
        w: now.
        made: how many updates.
        history: w after each batch.
    """

    def __init__(self, w: float, s: int, d: int, m: int) -> None:
        self.w, self.s, self.d, self.m = w, s, d, m
        self.history, self.read, self.born = [w], {}, {}
        self.made, self.v = 0, 0.0
        self.backwards, self.partial = 0, 0.0  # how many in the span; what the open batch's gradient has come to
        self.tau = (d - 1 - s) / m

    def ahead(self, g: int) -> float:
        """The weight for the forward of microbatch g."""
        return self.w

    def back(self, g: int) -> float:
        """And for its backward."""
        return self.read[g]

    def factor(self) -> float:
        """On the rate."""
        return 1.0

    @property
    def lr(self) -> float:
        return LR * rate(self.made) * self.factor()

    def update(self, gradient: float) -> None:
        self.v = MOMENTUM * self.v + gradient + DECAY * self.w
        self.w -= self.lr * self.v

    def step(self, gradient: float | None) -> None:
        if gradient is not None:
            self.update(gradient)
            self.made += 1
        self.history.append(self.w)


class Newest(Stage):
    def back(self, g: int) -> float:
        return self.w


class PipeMare(Newest):
    K, D = 15, 0.135
    delta = 0.0

    def factor(self) -> float:
        return 1 / max(self.tau, 1) ** (1 - min(self.made / self.K, 1))

    def back(self, g: int) -> float:
        return self.w - (len(self.history) - 1 - self.born[g]) * self.delta

    def update(self, gradient: float) -> None:
        before = self.w
        super().update(gradient)
        if self.tau:
            gamma = self.D ** (1 / self.tau)
            self.delta = gamma * self.delta + (1 - gamma) * (self.w - before)


class NoT2(PipeMare):
    def back(self, g: int) -> float:
        return self.w


class NoT1(PipeMare):
    def factor(self) -> float:
        return 1.0


class PipeOptim(Newest):
    """Forwards predict, backwards read what is there."""

    def velocity(self) -> float:
        return self.v

    def horizon(self) -> float:
        return (self.d - self.s - 1) / self.m

    def predicted(self, by: float) -> float:
        return self.w - by * self.lr * self.velocity()

    def ahead(self, g: int) -> float:
        return self.predicted(self.horizon())


class SpecTrainStash(PipeOptim):
    def back(self, g: int) -> float:
        return self.read[g]


class SpecTrain(PipeOptim):
    def horizon(self) -> float:
        return (self.s // 2 + self.d - self.s - 1) / self.m

    def back(self, g: int) -> float:
        return self.predicted((self.s // 2) / self.m)


class XPipe(PipeOptim):
    """The first microbatch of each batch predicts for all."""

    def ahead(self, g: int) -> float:
        if g % self.m == 0:
            self.copy = self.predicted(round(Fraction(2 * (self.d + self.m - 2) - self.s, 2 * self.m)))
        return self.copy

    def back(self, g: int) -> float:
        if g % self.m == 0:
            self.behind = self.predicted(round(Fraction(self.m + self.s // 2 - 1, self.m)))
        return self.behind


class Lwp(PipeOptim):
    def horizon(self) -> float:
        return self.tau


class LwpWeight(Newest):
    change = 0.0

    def ahead(self, g: int) -> float:
        return self.w + self.tau * self.change

    def update(self, gradient: float) -> None:
        before = self.w
        super().update(gradient)
        self.change = self.w - before


class Spike(Stage):
    def update(self, gradient: float) -> None:
        a, b = MOMENTUM**self.tau, (1 - MOMENTUM**self.tau) / (1 - MOMENTUM)
        gradient += DECAY * self.w
        self.v = MOMENTUM * self.v + gradient
        self.w -= self.lr * (a * self.v + b * gradient)


class SpikeNewest(Spike, Newest):
    """Without a stash."""


class SpikeLwp(Spike, Lwp):
    pass


class GapAware(Stage):
    G, ra, largest = 0.9, 0.0, 0.0

    def update(self, gradient: float) -> None:
        self.largest = max(self.largest, self.lr)
        self.ra = self.G * self.ra + (1 - self.G) * self.v**2
        size = self.largest * ((self.ra / (1 - self.G ** (self.made + 1))) ** 0.5 + 1e-8)
        penalty = 1 + abs(self.w - self.read[self.backwards - 1]) / size
        self.v = MOMENTUM * self.v + (gradient + DECAY * self.w) / penalty
        self.w -= self.lr * self.v


class AdamW(Stage):
    """AdamW instead of SGD."""

    first = second = 0.0

    def update(self, gradient: float) -> None:
        lr, n = self.lr, self.made + 1
        self.w *= 1 - lr * DECAY
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        self.w -= lr * self.first / (1 - BETAS[0] ** n) / ((self.second / (1 - BETAS[1] ** n)) ** 0.5 + EPS)

    def velocity(self) -> float:
        return self.by_power(self.made)

    def by_power(self, n: int) -> float:
        if not self.made:
            return 0.0
        return self.first / (1 - BETAS[0] ** n) / ((self.second / (1 - BETAS[1] ** n)) ** 0.5 + EPS)


class SpecTrainAdamW(AdamW, SpecTrain):
    pass


class XPipeAdamW(AdamW, XPipe):
    pass


class XPipeAsPrinted(AdamW, XPipe):
    def velocity(self) -> float:
        return self.by_power(1)


class NagPP(Stage):
    """NAdam instead of SGD."""

    first = second = 0.0
    product = 1.0

    def beta(self) -> float:
        return 0.99

    def update(self, gradient: float) -> None:
        n, beta2 = self.made + 1, 0.999
        now, then = (self.beta() * (1 - 0.5 * 0.96 ** (0.004 * k)) for k in (n, n + 1))
        self.product *= now
        self.first = self.beta() * self.first + (1 - self.beta()) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient**2
        size = (self.second / (1 - beta2**n)) ** 0.5 + EPS
        self.w -= self.lr * (1 - now) / (1 - self.product) * gradient / size
        self.w -= self.lr * then / (1 - self.product * then) * self.first / size


class NagPPNoStash(NagPP, NoT2):
    def beta(self) -> float:
        return 0.9 + (self.d - (self.s + 1)) / self.d * 0.09

    def update(self, gradient: float) -> None:
        NagPP.update(self, gradient)


def order(s: int, d: int, count: int) -> Iterator[tuple[str, int]]:
    """The passes of stage s in 1F1B over so many microbatches."""
    ahead = min(d - 1 - s, count)
    yield from (("F", g) for g in range(ahead))
    for g in range(count):
        if ahead + g < count:
            yield "F", ahead + g
        yield "B", g


def run(stages: Sequence[Stage], spans: Sequence[Sequence[Sequence[float]]]) -> None:
    """Train on spans of batches of inputs; between two spans the pipeline is empty."""
    done = 0
    for batches in spans:
        _run_span(stages, [x for batch in batches for x in batch], len(batches[0]), done)
        done += len(batches)


def _run_span(stages: Sequence[Stage], xs: Sequence[float], m: int, done: int) -> None:
    d = len(stages)
    todo = [list(order(s, d, len(xs))) for s in range(d)]
    inputs = [dict(enumerate(xs)), *({} for _ in range(d))]  # of each stage, and the output
    slopes: list[dict[int, float]] = [{} for _ in range(d + 1)]  # of the loss by the input of each stage
    sums = [0.0] * d
    while any(todo):
        for s, stage in enumerate(stages):
            if not todo[s]:
                continue
            op, g = todo[s][0]
            if op == "F" and g in inputs[s]:
                stage.read[g], stage.born[g] = stage.ahead(g), len(stage.history) - 1
                inputs[s + 1][g] = stage.read[g] * inputs[s][g]
                if s == d - 1:
                    slopes[d][g] = inputs[d][g] - 1.0
            elif op == "B" and g in slopes[s + 1]:
                slopes[s][g] = slopes[s + 1][g] * stage.back(g)
                sums[s] += slopes[s + 1][g] * inputs[s][g]
                stage.backwards = g + 1
                if g % m == m - 1:
                    stage.step(None if done + g // m == SKIPPED else sums[s] / m)
                    sums[s] = 0.0
            else:
                continue
            todo[s].pop(0)
