"""Reports on batches and their losses: made when a loss is known, handed out when the stages begin the next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.update.decisions import Decisions
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.stage.blocks.loss import AUXILIARY, Loss, UnreadLoss, read_losses, summed
from penstock.timeline import Waiting
from penstock.weights.decision import Decision, check_size, common_size


@dataclass(frozen=True)
class Report:
    """What is known of a batch when its last forward is done: `Pipeline.run` yields one for each.

    Callers of all ranks may wait for each other while they have it, as in an all_reduce of their own, and for their
    devices. On ranks of the last stage, parallel pipelines report a batch when its update is decided on, which is when
    they hear of each other's losses; the other ranks then report it late enough to have taken part. Where pipelines
    agree only now and then (`Combine`), loss and weight are of this one's part.

    Attributes:
        batch: its number since the start of training.
        loss: the mean over the batch. None on ranks without the last stage, and where the weight is zero.
        weight: what the loss sum was divided by, such as the number of samples; None on ranks without the last stage.
        seconds: when it was known, in seconds since the pipeline was made.
        decided: the updates that were made or skipped since the last report. Their loss and norm are NaN unless all
            stages decide about them (with `max_grad_norm`, a loss scale or parallel pipelines). They lag behind the
            losses; `Pipeline.decided` has those that come after the last report.
        evaluated: what evaluations have found since the last report (on all ranks where all stages decide together, or
            the pipeline is drained for them, else on that of the last stage).
        numbers: what the loss has returned beside its sum and weight, added up over the batch; and as "auxiliary", the
            losses of `penstock.auxiliary`, times the weight. Empty on ranks without the last stage.
    """

    batch: int
    loss: float | None
    weight: float | None
    seconds: float
    decided: tuple[Decision, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the figures; of decisions and evaluations their number."""
        loss = "None" if self.loss is None else f"{self.loss:.6g}"
        more = f", {len(self.decided)} decided" * bool(self.decided)
        more += f", {len(self.evaluated)} evaluated" * bool(self.evaluated)
        more += f", numbers={self.numbers}" * bool(self.numbers)
        weight = "None" if self.weight is None else f"{self.weight:g}"
        return f"Report(batch={self.batch}, loss={loss}, weight={weight}, seconds={self.seconds:.4g}{more})"

    @property
    def auxiliary(self) -> float | None:
        """The mean of the losses of `penstock.auxiliary`, each times its coefficient; None where there are none."""
        return self.numbers[AUXILIARY] / self.weight if self.weight and AUXILIARY in self.numbers else None


class Reports:
    """Makes the reports of one rank in one span.

    Args:
        forwards: of a batch on this rank.
        shares: stages decide together, so the loss of a batch is contributed.
        losses: of the rank.
        decisions: its part in them.
        recorder: of the time that the caller takes.
        part: the losses of this rank are of a part of each batch; that of the whole comes with the decision.

    Attributes:
        ready: the reports that are to be handed out, and whether they are of evaluations.
    """

    def __init__(
        self, forwards: int, shares: bool, losses: LossLedger, decisions: Decisions, recorder: Recorder, *, part: bool
    ) -> None:
        self._wanted, self._shares, self._losses = forwards, shares, losses
        self._decisions, self._recorder, self._part = decisions, recorder, part
        self._forwards: dict[int, int] = {}  # done, of each batch
        self._undecided: set[int] = set()  # batches whose reports wait for the decision
        self.ready = deque[tuple[Report, bool]]()

    def forward_done(self, batch: int, *, evaluation: bool) -> None:
        """Count a forward; the last of a batch makes its report."""
        done = self._forwards.get(batch, 0) + 1
        if done < self._wanted:
            self._forwards[batch] = done
            return
        self._forwards.pop(batch, None)
        found = self._losses.close(batch, shares=self._shares and not evaluation, trains=not evaluation)
        if found is not None and not evaluation:
            self._losses.learn_here(batch, found.weight)
        if found is not None and self._part and not evaluation:
            self._undecided.add(batch)
        else:
            self._add(batch, found, evaluation=evaluation)

    def decided(self, decision: Decision) -> None:
        """Make the report of a batch that waited for this decision; a rank that holds several stages tells it again."""
        if decision.batch in self._undecided:
            self._undecided.remove(decision.batch)
            mean = decision.loss if decision.weight else None
            self._add(decision.batch, BatchLoss(mean, decision.weight, decision.numbers), evaluation=False)

    def _add(self, batch: int, found: BatchLoss | None, *, evaluation: bool) -> None:
        loss, weight, numbers = found or (None, None, {})
        report = Report(batch, loss, weight, self._recorder.at(self._recorder.now()), numbers=numbers)
        self.ready.append((report, evaluation))

    def hand_out(self, last: float = math.inf) -> Iterator[Report]:
        """Yield the reports that are ready, up to a batch; the caller may take any time with them."""
        while self.ready and self.ready[0][0].batch <= last:
            report, evaluation = self.ready.popleft()
            if not evaluation:
                events = self._decisions.events
                report = replace(report, decided=events.take_decided(), evaluated=events.take_evaluated())
            start = self._recorder.now()
            yield report
            end, label = self._recorder.now(), f"report of batch {report.batch}"
            self._recorder.add("compute", start, end, Waiting.CALLER, label, cause="the caller")


class BatchLoss(NamedTuple):
    """The loss of a whole batch on a rank.

    Attributes:
        mean: the loss sum / weight; None where the weight is zero.
        weight: N, what the sum is divided by.
        numbers: sums of what the loss has returned beside it.
    """

    mean: float | None
    weight: float
    numbers: Mapping[str, float]


class LossLedger:
    """Adds the losses of microbatches, and knows the loss weight N of batches until they are updated with.

    Batches are counted from the start of training. The last stage knows N after the last forward of a batch; to the
    other stages it rides on gradients, or comes with the decision of all stages.

    Args:
        steps: updates of a batch on this rank: its trained stages.
        waits: updates take N from the decision of all stages.
    """

    def __init__(self, steps: int, waits: bool) -> None:
        self._steps, self._waits = steps, waits
        self._losses: dict[int, dict[Piece, UnreadLoss]] = {}
        self._weights: dict[int, tuple[float, int]] = {}  # N, and the updates that still ask for it
        self._shares: dict[int, Loss] = {}  # of batches that stages have not decided on

    def add(self, batch: int, key: Piece, loss: UnreadLoss) -> None:
        """Add the loss of a microbatch (or slice); of one that is added twice the last counts."""
        self._losses.setdefault(batch, {})[key] = loss

    def close(self, batch: int, shares: bool, *, trains: bool = True) -> BatchLoss | None:
        """Sum up a batch whose last forward is done; None on ranks that know no loss.

        Args:
            batch: which.
            shares: keep the sum until it is contributed to a decision.
            trains: the means of all microbatches have to be of as many elements of each sample.
        """
        losses = self._losses.pop(batch, None)
        if losses is None:
            return None
        totals, weights, each, sizes = zip(*read_losses([*losses.values()]), strict=True)
        total, weight, numbers = sum(totals), sum(weights), summed(each)
        size = common_size(sizes) if trains else 0.0
        check_size(batch, size)
        if shares:
            self._shares[batch] = Loss(total, weight, numbers, size)
        return BatchLoss(total / weight if weight else None, weight, numbers)

    def share(self, batch: int) -> Loss | None:
        """The sum of a batch for the decision of all stages, once; None where it is not known."""
        return self._shares.pop(batch, None)

    def learn(self, batch: int, weight: float) -> None:
        """Note the loss weight of a whole batch; NaN says that the sender did not know it."""
        if weight == weight and batch not in self._weights:
            self._weights[batch] = weight, self._steps

    def learn_here(self, batch: int, weight: float) -> None:
        """Note the loss weight of a batch that ends on this rank, unless updates wait for the decision anyway."""
        if not self._waits:
            self.learn(batch, weight)

    def weight(self, batch: int) -> float:
        """The loss weight of a whole batch; NaN while it is not known."""
        found = self._weights.get(batch)
        return math.nan if found is None else found[0]

    def weight_for_update(self, batch: int) -> float:
        """The same for one of the updates of this rank; the last one forgets it."""
        weight, left = self._weights.pop(batch, (math.nan, 0))
        assert self._waits or not math.isnan(weight), f"the weight of batch {batch} is not known"
        if left > 1:
            self._weights[batch] = weight, left - 1
        return weight
