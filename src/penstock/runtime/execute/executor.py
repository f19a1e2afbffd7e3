"""The loop of one rank, its state, and how ranks wait: alone in a process, or in turns in one.

The executor is a generator. It yields a `Wait` when it needs a message that is not there, and a `Report` when one
is ready; `drive_one` and `drive_all` decide how to wait, for one rank or for all in one process. It plays the
schedule's own books (`penstock.schedule.stage_state`) along: they tell which versions are alive, and refuse at once
whatever the proof would have refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial

from penstock.comm.communicators import Communicators
from penstock.comm.core.gloo_threads import GlooThreads
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.ticket import Polling, Wait
from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.stage_routes import StageRoutes
from penstock.errors import TransportError
from penstock.options.parallelism import rank_numbers
from penstock.runtime.data.batch_source import BatchSource
from penstock.runtime.ops.bound import Bound
from penstock.runtime.ops.handlers import bind
from penstock.runtime.rank.batch_reports import LossLedger, Report, Reports
from penstock.runtime.rank.memory_ledger import MemoryLedger, StageMemory, WatchfulMemory
from penstock.runtime.rank.snapshot import Saving
from penstock.runtime.rank.span import AtBorder, RankSpan, StageSpan
from penstock.runtime.rank.stage_snapshot import SnapshotCapture
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.update.averaging_rounds import Combining, Meetings, NoMeetings, Party, WaveCombining
from penstock.runtime.update.gathers_and_reduce_scatters import Gathers, GradientPlaces
from penstock.runtime.update.update_step import TiedGradients, Updates
from penstock.schedule.ir.schedule import Op, Stage
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.schedule.stage_state.stage_constants import StageSpec

Run = Iterator[Wait | Report]
Holders = Mapping[int, tuple[Holder, ...]]


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


# How ranks wait: a process with one rank blocks, a process with all ranks runs another one.
#
# Executors are generators that yield a `Wait` where they need a message that is not there
# (`penstock.runtime.execute.executor`).


def drive_one(
    run: Run, timeout: float, polling: Polling, gloo: GlooThreads, failed: Callable[[], str]
) -> Iterator[Report]:
    """Run the only rank of this process.

    Args:
        run: its executor at work.
        timeout: seconds after which a missing message is an error.
        polling: for how long it looks before it sleeps.
        gloo: gloo's threads of this process.
        failed: asked now and then why a peer has failed.

    Raises:
        TransportError: a message did not come.
    """
    try:
        gloo.give_way()
        for event in run:
            if isinstance(event, Wait):
                gloo.follow()
                event.ticket.wait(timeout, event.what, polling, failed)
            else:
                gloo.restore()  # while the caller works
                yield event
                gloo.give_way()
    finally:
        gloo.restore()


def drive_all(runs: Sequence[Run], reporting: Collection[int]) -> Iterator[Report]:
    """Run all ranks in turns, each until it has to wait.

    Args:
        runs: the executors at work.
        reporting: the places of those whose reports are passed on.

    Raises:
        TransportError: every rank waits for another one.
    """
    blocked: dict[int, Wait | None] = dict.fromkeys(range(len(runs)))
    while blocked:
        moved = False
        for rank in list(blocked):
            wait = blocked[rank]
            if wait is not None and not wait.ticket.done:
                continue
            moved = True
            for event in runs[rank]:
                if isinstance(event, Wait):
                    blocked[rank] = event
                    break
                if rank in reporting:
                    yield event
            else:
                del blocked[rank]
        if not moved:
            stuck = "; ".join(f"{wait.what} on {wait.ticket.where}" for wait in blocked.values() if wait)
            raise TransportError(f"no rank can go on: {stuck}")


def build_span(
    state: RankState,
    lowered: Lowered,
    specs: Mapping[Stage, StageSpec],
    holders: Holders,
    links: Communicators,
    combine: Combine,
) -> RankSpan:
    """Build the state of a rank for spans of one schedule; see `penstock.runtime.execute.executor.Executor`."""
    schedule, recorder, decisions = lowered.schedule, state.recorder, state.decisions
    pipeline, rank = state.key
    numbers = rank_numbers(state.options.data_parallel, schedule.ranks)
    mailbox = Mailbox(numbers.of_pipeline(pipeline), lowered, links.transport, recorder)
    meetings, holders = _meetings(state, holders, links, combine)
    provisional = RULES[schedule.rule].provisional
    memory = MemoryLedger(recorder, state.stages.values())
    always = all(instruction.action.unit.every == 1 for instruction in lowered.programs[rank].period)
    gathers, kind = None, StageMemory
    if links.shards is not None:
        places = schedule.sharding.gradients
        apart = any(runtime.weights.keeps_sums_apart for runtime in state.stages.values())
        room = GradientPlaces(places) if places is not None and apart else None
        kind = StageMemory if room is None else WatchfulMemory
        level = schedule.sharding.level
        gathers = Gathers(pipeline, holders, links.shards, recorder, level, room, memory.freed)
    stages = {
        key: StageSpan(
            state.stages[key],
            spec,
            StageRoutes(schedule, key, mailbox, state.options.precision.between_stages),
            kind(memory, state.stages[key].weights),
            is_last=key.index == schedule.num_stages - 1,
            name=f"rank {recorder.rank}, stage {key.name}",
            repeats=always and not provisional and isinstance(meetings, NoMeetings),
        )
        for key, spec in specs.items()
    }
    tying = TiedGradients(pipeline, holders, links.ties, sum(bool(runtime.ties) for runtime in state.stages.values()))
    updates = Updates(pipeline, holders, links.reducer, tying, links.control, decisions, recorder, provisional, gathers)
    forwards = sum(instruction.action.op is Op.F for instruction in lowered.programs[rank].period)
    decides = any(spec.decides for spec in specs.values())
    losses = LossLedger(sum(stage.trained for stage in stages.values()), decides and not provisional)
    part = decides and len(holders[schedule.num_stages - 1]) > 1
    reports = Reports(forwards, decides, losses, decisions, recorder, part=part)
    return RankSpan(
        schedule, pipeline, stages, mailbox, recorder, decisions, updates, meetings, losses, reports, memory,
        state.options, provisional, state.stop,
    )  # fmt: skip


def _meetings(state: RankState, holders: Holders, links: Communicators, combine: Combine) -> tuple[Meetings, Holders]:
    """How the rank meets other pipelines, and the stages that hold the weights that it updates."""
    if links.global_control is None:
        return NoMeetings(), holders
    party = Party(combine, state.key.pipeline, holders, links.global_control, state.decisions, state.recorder)
    own = {index: tuple(h for h in all_ if h.pipeline == state.key.pipeline) for index, all_ in holders.items()}
    if links.averages is not None:
        return Combining(party, links.averages), own
    return (NoMeetings() if links.waves is None else WaveCombining(party, links.waves)), own
