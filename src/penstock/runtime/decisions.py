"""The decisions on batches as one rank learns them."""

from __future__ import annotations

import math

from penstock.runtime.node import Loss
from penstock.weights.decision import Decision, Policy, Scaler, Share, decide


class Decisions:
    """One rank's part in them; it lives as long as the pipeline.

    Args:
        policy: what stages decide by, the same on all ranks.
        divisor: c, which losses are divided by.

    Attributes:
        stopping: this rank wants the run to end.
    """

    def __init__(self, policy: Policy, divisor: float) -> None:
        self._clip, self._divisor = policy.clip, divisor
        self.scaler = Scaler(policy.loss_scale)
        self.stopping = False
        self._scales: dict[int, float] = {}  # of the batches that the last stage has begun
        self._last: Decision | None = None
        self._news: list[Decision] = []

    def scale(self, batch: int) -> float:
        """The loss scale of a batch, on the rank of the last stage: that of its first microbatch holds for all."""
        return self._scales.setdefault(batch, self.scaler.scale)

    def share(self, batch: int, squares: tuple[float, float], loss: Loss | None) -> Share:
        """What a node hands in; `loss` is that of the batch on the last stage, None elsewhere."""
        stop = float(self.stopping)
        if loss is None:
            return Share(*squares, stop=stop)
        return Share(*squares, loss.total, loss.weight, self._scales.get(batch, 1.0), stop)

    def settle(self, batch: int, weight: float, total: Share | None) -> Decision:
        """The decision on a batch.

        Args:
            batch: its number since the start of training.
            weight: N, as far as this pipeline knows.
            total: the sum of all shares; None where no stage needs the others.
        """
        if self._last is None or self._last.batch != batch:  # a rank that holds several nodes asks more than once
            scale = self._scales.pop(batch, 1.0)
            if total is None:
                alone = Share(weight=weight, scale=scale)
                self._last = decide(batch, alone, self._divisor, None)._replace(loss=math.nan, norm=math.nan)
            else:
                self._last = decide(batch, total, self._divisor, self._clip)
            self.scaler.learn(self._last)
            self._news.append(self._last)
        return self._last

    def give_back(self, unseen: list[Decision]) -> None:
        """Nobody has seen these, which a call of `news` returned."""
        self._news = unseen + self._news

    def news(self) -> tuple[Decision, ...]:
        """What has been decided since the last call."""
        news, self._news = tuple(self._news), []
        return news
