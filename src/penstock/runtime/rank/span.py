"""The state of one rank during a span: what its bound actions share.

A span lies between two drains. Microbatches and batches are counted from its start here, as in the schedule; what
leaves the rank (reports, headers, versions of the store) is counted from the start of training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.comm.core.ticket import Wait
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.stage_routes import StageRoutes
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.options.all_options import PipelineOptions
from penstock.runtime.data.batch_source import BatchSource
from penstock.runtime.rank.batch_reports import LossLedger, Reports
from penstock.runtime.rank.live_version_tracker import StageBooks
from penstock.runtime.rank.memory_ledger import MemoryLedger, StageMemory
from penstock.runtime.rank.stage_snapshot import SnapshotCapture
from penstock.runtime.update.averaging_rounds import Meetings
from penstock.runtime.update.decisions import Decisions
from penstock.runtime.update.stop_request import StopRequest
from penstock.runtime.update.update_step import Updates
from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.schedule.stage_state.stage_constants import StageSpec
from penstock.stage.stage_runtime import StageRuntime

AtBorder = Callable[[int], Iterator[Wait]]


class StageSpan:
    """One stage of the rank during a span.

    Args:
        runtime: its tensors.
        spec: what the schedule's books of it need to know.
        routes: where its inputs and outputs lie.
        is_last: reports are of its loss.
        name: rank (counted through all pipelines) and stage, for messages.
        memory: reports its parameter-sized memory.
        repeats: every period of it has the same actions, with the same effects.

    Attributes:
        books: the schedule's books, played along with the actions.
        begun: the last batch that it has begun, counted from the start of training.
        drafts: forwards that have read a version not decided on yet.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        spec: StageSpec,
        routes: StageRoutes,
        memory: StageMemory,
        *,
        is_last: bool,
        name: str,
        repeats: bool,
    ) -> None:
        self.runtime, self.spec, self.routes, self.memory = runtime, spec, routes, memory
        self.is_last, self.name = is_last, name
        self._repeats = repeats
        self.books = StageBooks(spec, repeats=repeats)
        self.begun = -1
        self.drafts: dict[Piece, Any] = {}

    @property
    def trained(self) -> bool:
        """Whether the schedule trains it."""
        return self.spec.share > 0

    def begin_span(self, older: int) -> None:
        """Open the books for a new span, whose first batch may read version `older`."""
        self.books = StageBooks(replace(self.spec, older=older), repeats=self._repeats)
        self.begun = -1
        self.drafts.clear()


@dataclass
class RankSpan:
    """One rank during a span, for the actions that are bound to it.

    Attributes:
        schedule: of the span.
        pipeline: which of the parallel pipelines.
        stages: of the rank.
        mailbox: its messages.
        recorder: its trace and live bytes.
        decisions: its part in the decisions of all stages.
        updates: its part in gradient sums, decisions and steps.
        meetings: how it meets the other pipelines.
        losses: of its batches.
        reports: on its batches.
        memory: bytes of parameter-sized memory by role.
        options: of the pipeline.
        provisional: updates do not wait for decisions.
        stop: the request to end the run.
        capture: takes the snapshots of this span.
        source: the data of this span.
        held: activations kept for other stages.
        at_border: what comes before the first forward of a batch, given its number since the start of training.
        start: the first batch of the span, counted from the start of training.
        older: the oldest version that there is of those from before the span, counted from its first one: 0, or less.
        more: whether another batch follows the one under way.
        begun: the last batch that any stage of the rank has begun; no forward of an earlier one comes after that.
        rejected: whether the last VALIDATE has rejected its version.
    """

    schedule: Schedule
    pipeline: int
    stages: Mapping[Stage, StageSpan]
    mailbox: Mailbox
    recorder: Recorder
    decisions: Decisions
    updates: Updates
    meetings: Meetings
    losses: LossLedger
    reports: Reports
    memory: MemoryLedger
    options: PipelineOptions
    provisional: bool
    stop: StopRequest
    capture: SnapshotCapture = field(init=False)
    source: BatchSource = field(init=False)
    held: dict[Stage, dict[Piece, TensorMessage]] = field(default_factory=dict)
    at_border: AtBorder | None = None
    start: int = 0
    older: int = 0
    more: bool = True
    begun: int = -1
    rejected: bool = False

    def begin(
        self, source: BatchSource, start: int, older: int, at_border: AtBorder | None, capture: SnapshotCapture
    ) -> None:
        """Begin a span; see the attributes."""
        self.source, self.start, self.older, self.at_border, self.capture = source, start, older, at_border, capture
        self.more, self.begun, self.rejected = True, -1, False
        for stage in self.stages.values():
            stage.begin_span(older)
        if self.updates.gathers is not None:
            self.updates.gathers.begin_run(self._trained)

    def begin_batch(self, stage: StageSpan, batch: int) -> Iterator[Wait]:
        """Do what comes before the first forward of a batch on a stage, and on the rank."""
        first = batch > self.begun
        if first:
            self.recorder.read_clock()
        self.begun = stage.begun = batch
        if self.updates.gathers is not None and not self.updates.gathers.full:
            waited = self.stages.values() if first and self.at_border is not None else (stage,)
            for each in waited:
                yield from self.complete(each, f"{each.name}, batch {batch}")
        if stage.trained:
            self.capture.before_forward(stage.runtime, batch)
        else:
            self.capture.untrained(stage.runtime, batch)
        if first and self.at_border is not None:
            yield from self.at_border(batch)

    def complete(self, stage: StageSpan, what: str, version: int | None = None) -> Iterator[Wait]:
        """Wait until a version of a stage is whole, where updates are sharded; a snapshot of it may be due.

        Args:
            stage: which.
            what: comes next, for messages.
            version: which one; None for the newest.
        """
        if self.updates.gathers is not None and not self.updates.gathers.full:
            made = yield from self.updates.gathers.wait(stage.runtime.key, what, version)
            if made is not None:
                self.capture.after_step(stage.runtime, made)

    @property
    def _trained(self) -> list[StageRuntime]:
        """The trained stages, in an order that parallel pipelines have in common."""
        return [stage.runtime for _, stage in sorted(self.stages.items()) if stage.trained]

    def gather_rest(self, version: int, what: str) -> Generator[Wait, None, list[StageRuntime]]:
        """Make a version whole for an evaluation, where it is shards; returns what to `release` then."""
        if self.updates.gathers is None:
            return []
        rest = yield from self.updates.gathers.gather_rest(self._trained, version, what)
        self.memory.record(optimizers=False)
        return rest

    def release(self, stages: Sequence[StageRuntime], version: int) -> None:
        """Give back what `gather_rest` has made whole."""
        if stages:
            for stage in stages:
                stage.release(version)
            self.memory.record(optimizers=False)

    def make_whole(self, version: int) -> Iterator[Wait]:
        """Make the newest weights whole until the next span, where they are rows."""
        if self.updates.gathers is not None:
            yield from self.updates.gathers.end_run(
                self._trained, version, f"rank {self.recorder.rank}, end of the run"
            )
            self.memory.record(optimizers=False)

    def hold_bytes(self) -> None:
        """Record what the parameter-sized memory of the rank is used for, while pipelines meet."""
        self.capture.record()
        self.memory.record(optimizers=True)
