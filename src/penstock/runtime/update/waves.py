"""How parallel pipelines meet that are allowed to be some waves apart (`wsp`): one rank's part.

At the end of a wave a stage posts what it has changed, and waits only for what is due of the others, which the lag
says. Stages do so each for itself. The wish to end the run is handed in with every wave, and read as many waves later
as the slowest of all sums: so nobody waits for it longer, and all pipelines end after the same batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from penstock.comm.collective.wave_exchange import Exchange, Posted
from penstock.comm.core.wait import Wait
from penstock.runtime.update.averaging import Meetings, Party
from penstock.schedule.ir.schedule import Action, Node
from penstock.schedule.methods.wave_lags import RECORD
from penstock.stage.node import NodeRuntime
from penstock.weights.waves import Waves


class WaveCombining(Meetings):
    """Of one rank, for one span, in which waves are counted from 0.

    Args:
        party: who meets.
        exchange: moves what stages have changed.
    """

    def __init__(self, party: Party, exchange: Exchange) -> None:
        super().__init__(party)
        self._exchange = exchange
        self._posted: dict[Node, dict[int, Posted]] = {}  # by wave
        self._counts: dict[Node, list[int]] = {}  # waves of each pipeline that have been waited for
        self._unread: dict[Node, deque[int]] = {}  # batches whose votes are to be read

    def existing(self, average: Action, t: int, microbatches: int, start: int) -> Action | None:
        """An AVERAGE of the period of batch t of a span, if a wave ends then; it names the first wave that is added."""
        unit = average.unit._replace(first=average.unit.first + self.combine.behind)
        return super().existing(average._replace(unit=unit), t, microbatches, start)

    def meet(self, node: NodeRuntime, batch: int, label: str, hold: Callable[[], None]) -> Iterator[Wait]:
        """End a wave, and wait for what is due of the others."""
        what, unread = self._what(node, label), self._unread.setdefault(node.node, deque())
        if isinstance(node.agreement, Waves):
            self._push(node.node, node.agreement)
            hold()
            counts = self._here(node.node, node.agreement, node.agreement.due(batch))
            yield from self._collect(node.node, node.agreement, counts, batch, what)
            if not self.combine.chosen:
                node.agreement.take_down(batch, counts)
        if (node.node, batch) in self._votes:
            unread.append(batch)
            if self._is_due(node.node):
                yield from self._wait_for_vote(node.node, unread[0], what)

    def end(self, node: NodeRuntime, batch: int) -> bool:
        """Add what has come."""
        if isinstance(node.agreement, Waves):
            self._take(node.node, node.agreement)
        unread = self._unread[node.node]
        return batch in unread and self._is_due(node.node) and self._heard(node.node, unread.popleft())

    def drain(self, nodes: Sequence[NodeRuntime], batch: int, hold: Callable[[], None]) -> Generator[Wait, None, bool]:
        """End the wave under way, unless it has just begun, and wait for all there is."""
        for node in nodes:
            if isinstance(node.agreement, Waves) and not self.combine.meets(batch - 1):
                self._push(node.node, node.agreement)
            self._vote(node.node, batch, last=False)
            self._unread.setdefault(node.node, deque()).append(batch)
        hold()
        ends = False
        for node in nodes:
            what = self._what(node, f"draining before batch {batch}")
            if isinstance(node.agreement, Waves):
                yield from self._collect(node.node, node.agreement, node.agreement.all(), batch - 1, what)
                self._take(node.node, node.agreement)
                node.agreement.pull()
            for unread in self._unread.pop(node.node):
                yield from self._wait_for_vote(node.node, unread, what)
                ends |= self._heard(node.node, unread)
        hold()
        return ends

    def _what(self, node: NodeRuntime, label: str) -> str:
        return f"rank {self._recorder.rank}, stage {node.node.name}, {label}"

    def _is_due(self, node: Node) -> bool:
        """Whether the oldest vote is to be read now."""
        return len(self._unread[node]) > self.combine.behind // self.combine.every

    def _push(self, node: Node, waves: Waves) -> None:
        members, me = self._party.members(node)
        wave, number = waves.push(), waves.taken[waves.pipeline] - 1
        self._posted.setdefault(node, {})[number] = self._exchange.post(members, me, number, wave.updates)

    def _here(self, node: Node, waves: Waves, due: list[int]) -> list[int]:
        """Of each pipeline, how many waves are taken: those that are due, or also those that have come."""
        if self.combine.lag != RECORD:
            return due
        posted, counts = self._posted[node], list(due)
        for q in set(range(waves.width)) - {waves.pipeline}:
            while counts[q] in posted and posted[counts[q]].came[q].done:
                counts[q] += 1
        return counts

    def _collect(self, node: Node, waves: Waves, counts: list[int], batch: int, what: str) -> Iterator[Wait]:
        """Wait until so many waves of each pipeline have come, and those that all have by then have left."""
        posted, self._counts[node] = self._posted[node], counts
        for wave in range(waves.complete, max(counts)):
            for q, count in enumerate(counts):
                if waves.taken[q] <= wave < count:
                    cause = f"pipeline {q}: to end wave {wave}"
                    yield from self._wait_for(posted[wave].came[q], node, batch, what, cause)
        for wave in range(waves.complete, min(counts)):
            cause = f"the other pipelines: to end wave {wave}"
            yield from self._wait_for(posted.pop(wave).sent, node, batch, what, cause)

    def _take(self, node: Node, waves: Waves) -> None:
        waves.take(self._counts.pop(node))
