"""Meetings of parallel pipelines that have weights of their own: averages now and then, and waves.

Every pipeline decides for itself about its updates. Only what concerns all of them is agreed on where they meet:
whether somebody wants the run to end, and what evaluations have found. That is handed in when the gradient of the batch
is complete, as decisions are, so that nobody waits for it where updates come later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.comm.collective.all_reduce import Reducer
from penstock.comm.collective.control_reduce import CONTROL_LANE, ControlReduce
from penstock.comm.collective.wave_exchange import Exchange, Posted
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.ticket import Ticket, Wait, wait_for
from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.update.decisions import Decisions
from penstock.schedule.ir.schedule import Action, Op, Stage
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.wave_lags import RECORD
from penstock.stage.stage_runtime import StageRuntime
from penstock.timeline import Waiting
from penstock.weights.replica_averaging import Agreement
from penstock.weights.wave_synchronous_updates import WaveWeights


class Party(NamedTuple):
    """The participants of meetings, as one rank sees them.

    Attributes:
        combine: how pipelines agree.
        pipeline: which of them this is.
        holders: by stage index, the copies of that stage in all pipelines.
        control: of all stages of all pipelines.
        decisions: this rank's part in them.
        recorder: takes down what happens.
    """

    combine: Combine
    pipeline: int
    holders: Mapping[int, tuple[Holder, ...]]
    control: ControlReduce
    decisions: Decisions
    recorder: Recorder

    def members(self, stage: Stage) -> tuple[Members, Holder]:
        """Return the copies of a stage in all pipelines, in their order, and the own one."""
        holders = self.holders[stage.index]
        return tuple(h for h in holders if h.stage.direction == stage.direction), Holder(self.pipeline, stage)


class Meetings(ABC):
    """The part of one rank in meetings. Batches are counted from the start of training."""

    def placed(self, average: Action) -> Action:
        """Place an AVERAGE of a schedule, which then stands in every period; `meets` says in which it exists.

        Meetings are counted from the start of training, not from the start of the span as `every` of the schedule.
        """
        return average._replace(unit=average.unit._replace(every=1))

    @abstractmethod
    def meets(self, batch: int) -> bool:
        """Return whether pipelines meet after the update of a batch."""

    @abstractmethod
    def contribute(self, stage: Stage, batch: int, last: bool) -> None:
        """Contribute what concerns all pipelines, if they meet after the update of this batch.

        Args:
            stage: whose.
            batch: which.
            last: it has the loss that is reported.
        """

    @abstractmethod
    def meet(self, stage: StageRuntime, batch: int, label: str, hold: Callable[[], None]) -> Iterator[Wait]:
        """Wait until everything needed from the other pipelines is there.

        Args:
            stage: whose.
            batch: which.
            label: of the action, for messages.
            hold: records the bytes that are held now.
        """

    @abstractmethod
    def end(self, stage: StageRuntime, batch: int) -> bool:
        """Go on with what pipelines have agreed on, once `meet` is over; returns whether the run is to end."""

    @abstractmethod
    def drain(
        self, stages: Sequence[StageRuntime], batch: int, hold: Callable[[], None]
    ) -> Generator[Wait, None, bool]:
        """Wait at the end of a span for whatever is outstanding.

        Args:
            stages: that are trained on this rank, with nothing in flight.
            batch: the next one.
            hold: records the bytes that are held now.

        Returns:
            Whether somebody wants the run to end.
        """


class NoMeetings(Meetings):
    """Null object for pipelines that hold the same weights, or a single one: they never meet."""

    def meets(self, batch: int) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def contribute(self, *_: object) -> None:
        """Nothing concerns other pipelines."""

    def meet(self, *_: object) -> Iterator[Wait]:
        """There is nobody to wait for."""
        raise AssertionError("pipelines that hold the same weights do not meet")

    def end(self, *_: object) -> bool:
        """Nothing is agreed on."""
        raise AssertionError("pipelines that hold the same weights do not meet")

    def drain(self, *_: object) -> Generator[Wait, None, bool]:
        """Nothing is outstanding."""
        yield from ()
        return False


class PartyMeetings(Meetings):
    """Base of meetings in which pipelines also vote on stop requests and share evaluations.

    Args:
        party: who meets.
    """

    def __init__(self, party: Party) -> None:
        self.combine, self._party = party.combine, party
        self._decisions, self._recorder = party.decisions, party.recorder
        self._votes: dict[tuple[Stage, int], Ticket] = {}

    def meets(self, batch: int) -> bool:
        """Return whether pipelines meet after the update of a batch."""
        return self.combine.meets(batch)

    def contribute(self, stage: Stage, batch: int, last: bool) -> None:
        """Vote, if pipelines meet after the update of this batch."""
        if self.combine.meets(batch):
            self._vote(stage, batch, last)

    def _vote(self, stage: Stage, batch: int, last: bool) -> None:
        vote = self._votes[stage, batch] = Ticket(f"{CONTROL_LANE} of all pipelines (batch {batch})")
        share = self._decisions.common_share(batch, last)
        self._party.control.contribute(Holder(self._party.pipeline, stage), batch, share, vote)

    def _wait_for_vote(self, stage: Stage, batch: int, what: str) -> Iterator[Wait]:
        cause = f"all pipelines: to meet after batch {batch}"
        yield from wait_for(self._recorder, self._votes[stage, batch], what, cause, Waiting.CONTROL)

    def _heard(self, stage: Stage, batch: int) -> bool:
        """Return whether the run is to end, by the votes on a batch."""
        return self._decisions.agree(batch, self._votes.pop((stage, batch)).result)

    def _wait_for(self, ticket: Ticket, stage: Stage, batch: int, what: str, cause: str) -> Iterator[Wait]:
        yield from wait_for(self._recorder, ticket, what, cause, Waiting.CONTROL)
        start, end = ticket.made_at, ticket.done_at
        place, op = (stage.index, stage.direction, batch), Op.AVERAGE
        self._recorder.add("collective", start, end, op.value, f"{op}{batch}", *place)


class Combining(PartyMeetings):
    """Meetings in which pipelines wait for the sums of their weights.

    Args:
        party: who meets.
        reducer: adds weights, and nothing else.
    """

    def __init__(self, party: Party, reducer: Reducer) -> None:
        super().__init__(party)
        self._reducer = reducer

    def meet(self, stage: StageRuntime, batch: int, label: str, hold: Callable[[], None]) -> Iterator[Wait]:
        """Wait until the sums over all pipelines are there."""
        what = f"rank {self._recorder.rank}, stage {stage.key.name}, {label}"
        cause = f"the other pipelines: to average batch {batch}"
        agreement = stage.weights.agreement
        if isinstance(agreement, Agreement):
            members, me = self._party.members(stage.key)
            sums = agreement.begin()
            hold()
            ticket = self._reducer.reduce(members, me, batch, sums)
            yield from self._wait_for(ticket, stage.key, batch, what, cause)
            remembered = agreement.remembered()
            if remembered:
                ticket = self._reducer.reduce(members, me, batch, remembered)
                yield from self._wait_for(ticket, stage.key, batch, what, cause)
        if (stage.key, batch) in self._votes:
            yield from self._wait_for_vote(stage.key, batch, what)

    def end(self, stage: StageRuntime, batch: int) -> bool:
        """Go on with the sums."""
        if isinstance(stage.weights.agreement, Agreement):
            stage.weights.agreement.end()
        return (stage.key, batch) in self._votes and self._heard(stage.key, batch)

    def drain(self, *_: object) -> Generator[Wait, None, bool]:
        """Nothing is outstanding: what pipelines have made since they met last stays their own."""
        yield from ()
        return False


# Meetings of parallel pipelines that may be some waves apart (HetPipe's wave synchronous parallel).
#
# At the end of a wave a stage posts what it has changed, and waits only for what is due of the others, which the lag
# says. Stages do so each for itself. The wish to end the run is handed in with every wave, and read as many waves later
# as the slowest of all sums: so nobody waits for it longer, and all pipelines end after the same batch.


class WaveCombining(PartyMeetings):
    """Exchanges the updates of waves, counted from the start of the span.

    Args:
        party: who meets.
        exchange: moves what stages have changed.
    """

    def __init__(self, party: Party, exchange: Exchange) -> None:
        super().__init__(party)
        self._exchange = exchange
        self._posted: dict[Stage, dict[int, Posted]] = {}  # by wave
        self._counts: dict[Stage, list[int]] = {}  # waves of each pipeline that have been waited for
        self._unread: dict[Stage, deque[int]] = {}  # batches whose votes are to be read

    def placed(self, average: Action) -> Action:
        """Place an AVERAGE at the end of a wave; it is named after the last batch that it adds."""
        placed = super().placed(average)
        return placed._replace(unit=placed.unit._replace(first=placed.unit.first + self.combine.behind))

    def meet(self, stage: StageRuntime, batch: int, label: str, hold: Callable[[], None]) -> Iterator[Wait]:
        """Post the own wave, and wait for the waves of others that are due."""
        what, unread = self._what(stage, label), self._unread.setdefault(stage.key, deque())
        waves = stage.weights.agreement
        if isinstance(waves, WaveWeights):
            self._push(stage.key, waves)
            hold()
            counts = self._here(stage.key, waves, waves.due(batch))
            yield from self._collect(stage.key, waves, counts, batch, what)
            if not self.combine.chosen:
                waves.record_lags(batch, counts)
        if (stage.key, batch) in self._votes:
            unread.append(batch)
            if self._is_due(stage.key):
                yield from self._wait_for_vote(stage.key, unread[0], what)

    def end(self, stage: StageRuntime, batch: int) -> bool:
        """Add what has come."""
        if isinstance(stage.weights.agreement, WaveWeights):
            self._take(stage.key, stage.weights.agreement)
        unread = self._unread[stage.key]
        return batch in unread and self._is_due(stage.key) and self._heard(stage.key, unread.popleft())

    def drain(
        self, stages: Sequence[StageRuntime], batch: int, hold: Callable[[], None]
    ) -> Generator[Wait, None, bool]:
        """End the wave under way, unless it has just begun, and wait for all there is."""
        for stage in stages:
            if isinstance(stage.weights.agreement, WaveWeights) and not self.combine.meets(batch - 1):
                self._push(stage.key, stage.weights.agreement)
            self._vote(stage.key, batch, last=False)
            self._unread.setdefault(stage.key, deque()).append(batch)
        hold()
        ends = False
        for stage in stages:
            what, waves = self._what(stage, f"draining before batch {batch}"), stage.weights.agreement
            if isinstance(waves, WaveWeights):
                yield from self._collect(stage.key, waves, waves.all(), batch - 1, what)
                self._take(stage.key, waves)
                waves.pull()
            for unread in self._unread.pop(stage.key):
                yield from self._wait_for_vote(stage.key, unread, what)
                ends |= self._heard(stage.key, unread)
        hold()
        return ends

    def _what(self, stage: StageRuntime, label: str) -> str:
        return f"rank {self._recorder.rank}, stage {stage.key.name}, {label}"

    def _is_due(self, stage: Stage) -> bool:
        """Return whether the oldest vote is due."""
        return len(self._unread[stage]) > self.combine.behind // self.combine.every

    def _push(self, stage: Stage, waves: WaveWeights) -> None:
        members, me = self._party.members(stage)
        wave, number = waves.push(), waves.taken[waves.pipeline] - 1
        self._posted.setdefault(stage, {})[number] = self._exchange.post(members, me, number, wave.updates)

    def _here(self, stage: Stage, waves: WaveWeights, due: list[int]) -> list[int]:
        """Return per pipeline how many waves to add: those that are due, or also those that have arrived."""
        if self.combine.lag != RECORD:
            return due
        posted, counts = self._posted[stage], list(due)
        for q in set(range(waves.width)) - {waves.pipeline}:
            while counts[q] in posted and posted[counts[q]].came[q].done:
                counts[q] += 1
        return counts

    def _collect(self, stage: Stage, waves: WaveWeights, counts: list[int], batch: int, what: str) -> Iterator[Wait]:
        """Wait until so many waves of each pipeline have arrived, and the complete ones have been sent to all."""
        posted, self._counts[stage] = self._posted[stage], counts
        for wave in range(waves.complete, max(counts)):
            for q, count in enumerate(counts):
                if waves.taken[q] <= wave < count:
                    cause = f"pipeline {q}: to end wave {wave}"
                    yield from self._wait_for(posted[wave].came[q], stage, batch, what, cause)
        for wave in range(waves.complete, min(counts)):
            cause = f"the other pipelines: to end wave {wave}"
            yield from self._wait_for(posted.pop(wave).sent, stage, batch, what, cause)

    def _take(self, stage: Stage, waves: WaveWeights) -> None:
        waves.take(self._counts.pop(stage))
