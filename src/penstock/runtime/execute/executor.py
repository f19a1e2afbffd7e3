"""The loop of one rank: it runs its bound instructions in order and yields where it has to wait.

The executor is a generator. It yields a `Wait` when it needs a message that is not there, and a `Report` when one
is ready; `runtime.execute.drive_ranks` decides how to wait, for one rank or for all in one process. It
plays the schedule's own books (`penstock.schedule.stage_state`) along: they tell which versions are alive, and
refuse at once whatever the proof would have refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial

from penstock.comm.communicators import Communicators
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.ticket import Wait
from penstock.runtime.data.batch_source import BatchSource
from penstock.runtime.execute.build_rank_span import build_span
from penstock.runtime.ops.bound import Bound
from penstock.runtime.ops.handlers import bind
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.rank.snapshot import Saving
from penstock.runtime.rank.snapshot_capture import SnapshotCapture
from penstock.runtime.rank.span import AtBorder
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Stage
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.schedule.stage_state.stage_constants import StageSpec


class Executor:
    """Runs one rank.

    Args:
        state: its stages, its record, its part in decisions.
        lowered: the schedule with its messages.
        specs: what the books of each stage on this rank need to know.
        holders: by stage index, the copies of that stage in all parallel pipelines.
        links: to the other ranks.
        combine: how parallel pipelines agree.
    """

    def __init__(
        self,
        state: RankState,
        lowered: Lowered,
        specs: Mapping[Stage, StageSpec],
        holders: Mapping[int, tuple[Holder, ...]],
        links: Communicators,
        combine: Combine = REDUCE,
    ) -> None:
        self._state, self._links = state, links
        self._span = build_span(state, lowered, specs, holders, links, combine)
        program = lowered.programs[state.key.rank]
        self._period, self._epilogue, rejected = bind(program, self._span)
        self._places_reports = program.places_reports
        self._rejected = rejected or self._period  # from a VALIDATE on that rejects

    @property
    def summing(self) -> bool:
        """Whether gradients of this rank may be added to those of others at this moment."""
        return self._span.updates.summing

    @property
    def begun(self) -> int:
        """The last batch that has begun here, counted from the start of training; -1 if none has."""
        return self._span.begun

    def close(self) -> None:
        """Stop whatever runs in the background."""
        self._links.close()

    def run(
        self,
        source: BatchSource,
        start: int,
        older: int,
        at_border: AtBorder | None = None,
        saving: Saving | None = None,
    ) -> Iterator[Wait | Report]:
        """Run one span of at least one batch, from an empty pipeline to an empty pipeline.

        Args:
            source: the data; where data enters it is asked whether batches follow.
            start: number of the span's first batch since the start of training.
            older: the oldest version that the span begins with: 0, or less where there are some before the newest.
            at_border: what to do before the first forward of a batch, given its number since the start of training.
            saving: snapshots to take on the way.
        """
        span, t = self._span, 0
        span.begin(source, start, older, at_border, self._capture(saving, start))
        yield from self._play([bound for bound in self._period if bound.ahead], -1)  # as the period before would have
        while True:
            span.rejected = False
            yield from self._play(self._period, t)
            t += 1
            if not span.more:
                break
        yield from self._drain(t)

    def _play(self, bounds: Sequence[Bound], t: int) -> Iterator[Wait | Report]:
        """Run the instructions of the period (or epilogue) of batch t, or the others from a rejection on."""
        span, reports = self._span, self._span.reports
        for place, bound in enumerate(bounds, 1):
            if reports.ready and bound.report_lag is not None:
                yield from reports.hand_out(span.start + t - bound.report_lag)
            if (t < bound.settled and not bound.exists(t)) or (bound.ahead and not span.more):
                continue
            waits = bound.run(t)
            if waits is not None:
                yield from waits
            if span.rejected and bounds is self._period:  # up to here the two programs are the same
                yield from self._play(self._rejected[place:], t)
                return

    def _drain(self, t: int) -> Iterator[Wait | Report]:
        """Run the epilogue after t batches."""
        span = self._span
        for stage in span.stages.values():
            stage.books.drain(t)
        span.rejected = False
        yield from self._play(self._epilogue, t)
        if self._places_reports:
            yield from span.reports.hand_out()  # others may wait for this rank's before they go on
        for stage in span.stages.values():
            yield from span.complete(stage, f"{stage.name}, the end of the run")
            if not stage.trained:
                span.capture.untrained(stage.runtime, span.start + t)
            span.capture.before_update(stage.runtime)  # whoever reads or writes the weights between two runs
        yield from span.make_whole(span.start + t)
        yield from span.reports.hand_out()
        trained = [stage.runtime for stage in span.stages.values() if stage.trained]
        ends = yield from span.meetings.drain(trained, span.start + t, span.hold_bytes)
        if ends:
            span.stop.agree()
        yield from span.mailbox.flush()

    def gather_rest(self, version: int) -> Generator[Wait, None, Callable[[], None]]:
        """Make the newest weights of all stages whole between two batches; returns what gives the memory back.

        Args:
            version: the newest.
        """
        span = self._span
        rest = yield from span.gather_rest(version, f"rank {span.recorder.rank}, evaluation of version {version}")
        return partial(span.release, rest, version)

    def _capture(self, saving: Saving | None, start: int) -> SnapshotCapture:
        span = self._span
        return SnapshotCapture(saving, start, span.decisions, span.recorder, self._state.snapshots, self._state.side)
