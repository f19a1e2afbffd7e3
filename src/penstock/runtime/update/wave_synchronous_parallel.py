"""Meetings of parallel pipelines that may be some waves apart (HetPipe's wave synchronous parallel).

At the end of a wave a stage posts what it has changed, and waits only for what is due of the others, which the lag
says. Stages do so each for itself. The wish to end the run is handed in with every wave, and read as many waves later
as the slowest of all sums: so nobody waits for it longer, and all pipelines end after the same batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from penstock.comm.collective.wave_exchange import Exchange, Posted
from penstock.comm.core.ticket import Wait
from penstock.runtime.update.averaging_rounds import Party, PartyMeetings
from penstock.schedule.ir.schedule import Action, Stage
from penstock.schedule.methods.wave_lags import RECORD
from penstock.stage.stage_runtime import StageRuntime
from penstock.weights.wave_synchronous_updates import WaveWeights


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
