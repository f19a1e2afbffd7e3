"""The decisions of all stages on updates, as one rank receives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.options.updates import Divergence
from penstock.runtime.update.divergence import DivergenceDetector
from penstock.runtime.update.run_events import Evaluated, RunEvents, with_numbers
from penstock.runtime.update.stop_request import StopRequest, end_of
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.stage.blocks.loss import Loss, summed
from penstock.weights.decision import Decision, Policy, Scaler, Share, decide, packed_numbers


class Decisions:
    """The part of one rank in the decisions of all stages; it lives as long as the pipeline.

    Args:
        policy: what stages decide by, the same on all ranks.
        divisor: c, which losses are divided by.
        delay: batches whose decision a batch does not wait for: one with double-buffered weights, two with
            triple-buffered ones, also where they have been made by then because the pipeline was drained.
        divergence: what counts as one; nothing if None.
        combine: how parallel pipelines agree; where they have weights of their own, each decides for itself, and only
            where they meet it is told who wants the run to end, and what evaluations have found.
        pipeline: which of them this rank is of.
        counts: what it knows of losses counts; not on further tensor ranks, which know the same.

    Attributes:
        stop: the request to end the run.
        detector: looks for a divergence.
        weight: N of the last batch that had a loss weight; None before the first.
        events: for the caller.
    """

    def __init__(
        self,
        policy: Policy,
        divisor: float,
        delay: int,
        divergence: Divergence | None = None,
        combine: Combine = REDUCE,
        pipeline: int = 0,
        stop: StopRequest | None = None,
        counts: bool = True,
    ) -> None:
        self._counts = counts
        self._clip, self._divisor, self.delay = policy.max_grad_norm, divisor, delay
        self._combine, self._pipeline, self._agreed = combine, pipeline, -1
        self.scaler = Scaler(policy.loss_scale)
        self.detector = DivergenceDetector(divergence, self.scaler.scales)
        self.stop = StopRequest() if stop is None else stop
        self.weight: float | None = None
        self._scales: dict[int, float] = {}  # of the batches that the last stage has begun
        self._last: Decision | None = None
        self._decided = -1  # the last batch
        self.events = RunEvents()
        self._guessed: dict[int, float] = {}  # factors
        self._names: list[str] = []  # of the numbers beside losses, on ranks that have these
        self._noted: dict[int, Evaluated] = {}  # of this pipeline, until the decision on the batch tells the others

    @property
    def mean(self) -> float:
        """c / N by the last batch that had a loss weight, for gradients that are over c; 1 before the first."""
        return 1.0 if self.weight is None else self._divisor / self.weight

    def scale(self, batch: int) -> float:
        """Return the loss scale of a batch, on the rank of the last stage; all its microbatches have the same."""
        if batch not in self._scales:
            self._scales[batch] = self.scaler.before(self._decided - (batch - 1 - self.delay))
        return self._scales[batch]

    def share(self, batch: int, loss: Loss | None) -> Share:
        """Return the share of a stage without its gradient; `loss` is the batch's on the last stage, else None."""
        share = Share() if self._combine.apart else self.common_share(batch, loss is not None)
        if loss is None:
            return share
        scale = self._scales.get(batch, 1.0)
        self._names = sorted(loss.numbers) or self._names
        if not self._counts:
            return share._replace(scale=scale)
        numbers = packed_numbers(loss.numbers)
        return share._replace(loss=loss.total, weight=loss.weight, scale=scale, numbers=numbers, size=loss.size)

    def common_share(self, batch: int, last: bool) -> Share:
        """Return what concerns all pipelines; `last` on a last stage, which knows evaluations up to this batch."""
        noted = [self._noted.pop(b) for b in sorted(self._noted) if b <= batch] if last else []
        found, count = (math.fsum(part) for part in zip(*((n.total, n.weight) for n in noted), (0.0, 0.0), strict=True))
        numbers = summed([n.numbers for n in noted])
        self._names = sorted(numbers) or self._names
        if not self._counts:
            found, count, numbers = 0.0, 0.0, {}
        stop, beside = float(self.stop.left(batch)), packed_numbers(numbers)
        return Share(stop=stop, evaluated=found, evaluated_weight=count, evaluated_numbers=beside)

    def agree(self, batch: int, total: Share) -> bool:
        """Record the votes of all pipelines after a batch; return whether the run is to end."""
        if total.evaluated_weight and batch != self._agreed:  # a rank that holds several stages asks more than once
            every = self._combine.every
            version = (batch - self.delay) // every * every  # evaluations are of versions made by meetings
            self._evaluated_everywhere(version, total)
        self._agreed = batch
        return bool(total.stop)

    def settle(self, batch: int, weight: float, total: Share | None) -> Decision:
        """Decide on a batch.

        Args:
            batch: its number since the start of training.
            weight: N, as far as this pipeline knows.
            total: the sum of all shares; None where no stage needs the others.
        """
        if self._last is None or self._last.batch != batch:  # a rank that holds several stages asks more than once
            scale = self._scales.pop(batch, 1.0)
            if total is None:
                alone = Share(weight=weight, scale=scale)
                self._last = decide(batch, alone, self._divisor, None)._replace(loss=math.nan, norm=math.nan)
            else:
                numbers = dict(zip(self._names, total.numbers, strict=False))
                self._last = decide(batch, total, self._divisor, self._clip)._replace(numbers=numbers)
                self.stop.agree(end_of(batch, total.stop))
            self._decided = batch
            self.weight = float(self._last.weight) if self._last.weight else self.weight
            if total is not None and total.evaluated_weight:
                self._evaluated_everywhere(batch - self.delay, total)
            elif total is None and batch in self._noted:
                self.events.evaluated(self._noted.pop(batch))
            self.scaler.learn(self._last)
            self.detector.observe(self._last)
            self.events.decided(self._last)
        return self._last

    def _evaluated_everywhere(self, version: int, total: Share) -> None:
        numbers = dict(zip(self._names, total.evaluated_numbers, strict=False))
        self.events.evaluated_everywhere(
            with_numbers(Evaluated(version, total.evaluated, total.evaluated_weight), numbers)
        )

    def guess(self, batch: int, weight: float) -> float:
        """Return the factor of an update that waits for no other stage: as if unclipped and finite.

        Args:
            batch: its number since the start of training.
            weight: N of the whole batch.
        """
        alone = Share(weight=weight, scale=self.scaler.scale)
        factor = self._guessed[batch] = decide(batch, alone, self._divisor, None).factor
        return factor

    def surely_rejects(self, squares: float, factor: float) -> bool:
        """Return whether a stage's own squared gradient norm already implies another factor than this.

        With a margin for roundings, which must not decide otherwise here than for all stages.
        """
        return not math.isfinite(squares) or (
            self._clip is not None and math.sqrt(squares) * factor > 1.001 * self._clip
        )

    def validate(self, batch: int, total: Share) -> Decision:
        """Decide on a batch that has been guessed; the decision says `again` if the guess was wrong."""
        decision = self.settle(batch, math.nan, total)
        if batch in self._guessed:  # a rank that holds several stages asks more than once
            wrong = decision.factor != self._guessed.pop(batch)
            if wrong or self.scaler.scale != self.scaler.before(1):
                self._scales.pop(batch + 1, None)  # forwards that have begun run again, under the scale of now
                decision = self._last = decision._replace(again=True)
                self.events.correct(decision)
        return decision

    @property
    def key(self) -> str:
        """The name of its state in a snapshot."""
        return f"decisions.{self._pipeline}" if self._combine.apart and self._pipeline else "decisions"

    def state(self) -> dict[str, Any]:
        """Return the state for a snapshot, the same on all ranks."""
        state: dict[str, Any] = {"told": [list(found) for found in told]} if (told := self.events.evaluations) else {}
        state |= {} if self.weight is None else {"weight": self.weight}
        state |= self.scaler.state() if self.scaler.scales else {}
        watched = self.detector.state()
        return state | ({"detector": watched} if watched else {})

    def load(self, batch: int, state: Mapping[str, Any]) -> None:
        """Restore a state; the next batch follows it."""
        self.events.restart(state.get("told", ()))
        self.weight = state.get("weight")
        if "scale" in state and self.scaler.scales:
            self.scaler.load(state)
        self.detector.load(state.get("detector", {}))
        self._decided, self._last, self._agreed = batch - 1, None, -1
        self._scales.clear()
        self._guessed.clear()
        self._noted.clear()

    def note(self, batch: int, found: Evaluated) -> None:
        """Note this pipeline's part of an evaluation before `batch`; the decision on that batch shares it."""
        self._noted[batch] = found

    def take_noted(self) -> list[Evaluated]:
        """Take what no decision has shared: where pipelines meet now and then, what came after the last meeting."""
        taken, self._noted = list(self._noted.values()), {}
        return taken if self._counts else []
