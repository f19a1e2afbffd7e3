"""Reports on batches: made when their loss is known, handed out when the stages before have what they wait for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.rank.loss_ledger import BatchLoss, LossLedger
from penstock.runtime.update.decisions import Decisions
from penstock.runtime.update.run_events import Evaluated
from penstock.stage.blocks.loss import AUXILIARY
from penstock.timeline import Waiting
from penstock.weights.decision import Decision


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
