"""Meetings of parallel pipelines that have weights of their own, without tensors: what these hold, and who waits.

It follows `penstock.runtime.update.averaging_rounds` and `wave_synchronous_parallel`. What is there all the time, such
as a common model, is counted elsewhere (`penstock.simulate.memory.predicted`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.schedule.ir.schedule import Op, Stage, Unit
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.wave_lags import RECORD, stage_place
from penstock.simulate.memory.fake_transport import Completion, Rendezvous, wait
from penstock.simulate.memory.held import Held, HeldKind, Holdings


class PostedWave(NamedTuple):
    """One wave that a stage has posted.

    Attributes:
        sent: complete when all other pipelines have posted it.
        came: by pipeline, complete when that one has posted it.
    """

    sent: Completion
    came: Mapping[int, Completion]


class FakeWaveExchange:
    """Exchanges waves between pipelines: what one has posted is with all others that have posted the same wave.

    Args:
        width: pipelines.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._open: dict[tuple[Stage, int], dict[int, PostedWave]] = {}

    def post(self, stage: Stage, wave: int, pipeline: int) -> PostedWave:
        """Post a wave of a stage."""
        here = self._open.setdefault((stage, wave), {})
        mine = PostedWave(Completion(), {q: Completion() for q in range(self._width) if q != pipeline})
        for other, posted in here.items():
            mine.came[other].complete()
            posted.came[pipeline].complete()
        here[pipeline] = mine
        if len(here) == self._width:
            del self._open[stage, wave]
            for posted in here.values():
                posted.sent.complete()
        return mine


class SimulatedMeetings:
    """The meetings of one rank of one pipeline.

    Args:
        combine: how pipelines agree.
        width: pipelines.
        pipeline: which of them.
        meet: collectives of ranks.
        exchange: of waves.
        holdings: of the rank.
        voting: stages of all pipelines that vote on each meeting.
    """

    def __init__(
        self,
        combine: Combine,
        width: int,
        pipeline: int,
        meet: Rendezvous,
        exchange: FakeWaveExchange,
        holdings: Holdings,
        voting: int,
    ) -> None:
        self._combine, self._width, self._pipeline = combine, width, pipeline
        self._meet, self._exchange, self._holdings, self._voting = meet, exchange, holdings, voting
        self._votes: dict[tuple[Stage, int], Completion] = {}
        self._waves: dict[Stage, _Waves] = {}
        self.start = 0

    @property
    def resets(self) -> bool:
        """Whether optimizers forget what they remember when pipelines meet."""
        return self._combine.optimizer_state == "reset"

    def placed(self, unit: Unit) -> Unit:
        """Place an AVERAGE at the meeting, or the end of the wave; `exists` says in which batches it is."""
        behind = self._combine.behind if self._is_in_waves else 0
        return unit._replace(first=unit.first + behind, every=1)

    def exists(self, batch: int) -> bool:
        """Return whether pipelines meet after the update of a batch of the span."""
        return self._combine.meets(self.start + batch)

    def vote(self, stage: Stage, batch: int) -> None:
        """Contribute to what concerns all pipelines, if they meet after the update of a batch."""
        if self._combine.apart and self.exists(batch):
            self._votes[stage, batch] = self._meet.join((Op.AVERAGE, batch), self._voting)

    def average(self, stage: Stage, batch: int) -> Iterator[Completion]:
        """Meet after the update of a batch."""
        if self._is_in_waves:
            yield from self._end_wave(stage, batch)
            return
        passing = Held(HeldKind.PASSING, stage.index)
        self._holdings.change(passing, 1)
        for what in ("weights", "optimizer")[: 1 + (self._combine.optimizer_state == "average")]:
            yield from wait(self._meet.join((Op.AVERAGE, what, stage, batch), self._width))
        if (stage, batch) in self._votes:
            yield from wait(self._votes.pop((stage, batch)))
        self._holdings.change(passing, -1)

    def drain(self, stages: list[Stage], batches: int) -> Iterator[Completion]:
        """End the waves under way at the end of a span of so many batches, and wait for all there is."""
        if self._is_in_waves:
            if not self.exists(batches - 1):
                for stage in stages:
                    self._waves_of(stage).push()
            for stage in stages:
                waves = self._waves_of(stage)
                yield from waves.collect([waves.taken[self._pipeline]] * self._width)
            self._waves.clear()
            self._votes.clear()
        self.start += batches

    @property
    def _is_in_waves(self) -> bool:
        return self._combine.spec.per_wave > 0

    def _waves_of(self, stage: Stage) -> _Waves:
        if stage not in self._waves:
            self._waves[stage] = _Waves(
                self._combine, self._width, self._pipeline, stage, self._exchange, self._holdings
            )
        return self._waves[stage]

    def _end_wave(self, stage: Stage, batch: int) -> Iterator[Completion]:
        """Post the own wave, and wait for those of others that are due, and the votes on as old a one."""
        waves = self._waves_of(stage)
        waves.push()
        yield from waves.await_(waves.due(self.start + batch))
        if (stage, batch) in self._votes:
            waves.unread.append(batch)
            if len(waves.unread) > self._combine.behind // self._combine.every:
                yield from wait(self._votes.pop((stage, waves.unread.popleft())))
        waves.take()


class _Waves:
    """The waves of one stage of one pipeline since the last drain.

    Args:
        combine, width, pipeline, exchange, holdings: as of `SimulatedMeetings`.
        stage: whose.

    Attributes:
        taken: by pipeline, how many waves its weights include.
        unread: batches whose votes are to be waited for.
    """

    def __init__(
        self, combine: Combine, width: int, pipeline: int, stage: Stage, exchange: FakeWaveExchange, holdings: Holdings
    ) -> None:
        self._combine, self._pipeline, self._stage, self._holdings = combine, pipeline, stage, holdings
        self._width, self._exchange = width, exchange
        self.taken = [0] * width
        self.unread: deque[int] = deque()
        self._posted: dict[int, PostedWave] = {}
        self._counts = self.taken

    def push(self) -> None:
        """End a wave: there are the own changes, and room for those of the others."""
        number = self.taken[self._pipeline]
        self._holdings.change(Held(HeldKind.WAVE, self._stage.index), 1)
        self._posted[number] = self._exchange.post(self._stage, number, self._pipeline)
        self.taken[self._pipeline] += 1

    def due(self, batch: int) -> list[int]:
        """Return by pipeline how many waves are to be added: those that are due, or also those that have arrived."""
        ended = self.taken[self._pipeline]
        lags = self._combine.lags(self._width)
        if isinstance(self._combine.lag, Mapping):
            lags = tuple(self._combine.lag[stage_place(self._pipeline, self._stage.name)][batch])
        counts = [max(ended - lag, taken) for lag, taken in zip(lags, self.taken, strict=True)]
        counts[self._pipeline] = ended
        if self._combine.lag == RECORD:
            for q in set(range(self._width)) - {self._pipeline}:
                while counts[q] in self._posted and self._posted[counts[q]].came[q].done:
                    counts[q] += 1
        return counts

    def await_(self, counts: list[int]) -> Iterator[Completion]:
        """Wait until so many waves of each pipeline have arrived, and all have those that are complete."""
        self._counts = counts
        first = min(self.taken)
        for number in range(first, max(counts)):
            for q, count in enumerate(counts):
                if self.taken[q] <= number < count:
                    yield from wait(self._posted[number].came[q])
        for number in range(first, min(counts)):
            yield from wait(self._posted.pop(number).sent)

    def take(self) -> None:
        """Add what has been waited for, and forget the waves that all pipelines have ended."""
        gone = min(self._counts) - min(self.taken)
        self.taken = list(self._counts)
        self._holdings.change(Held(HeldKind.WAVE, self._stage.index), -gone)

    def collect(self, counts: list[int]) -> Iterator[Completion]:
        """Wait for so many waves of each pipeline, and add them."""
        yield from self.await_(counts)
        self.take()
