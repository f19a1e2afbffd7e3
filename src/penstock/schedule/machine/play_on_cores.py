"""The machine whose ranks share cores: work takes longer while others work, so it is played in the order of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from penstock.schedule.ir.schedule import Action, Op
from penstock.schedule.machine.instructions import Instruction, Lowered
from penstock.schedule.machine.message_lanes import MessageObserver
from penstock.schedule.machine.play import Machine, Observer
from penstock.schedule.machine.shared_cores import CoreTime, SharedCores


class CoreMachine(Machine):
    """Plays whole spans on hosts whose ranks share cores.

    A rank goes on until it works, or has to wait. Of all work, what ends first is played next: whatever its rank does
    then happens later than all that has been played, so nothing that has ended is ever slowed down again.

    Args:
        lowered, duration, latency, observer, on_message, transfer: as of `Machine`; a SEND may take its rank some time
            before it is posted, and is observed if it does.
        shared: who shares the cores of which host.
        receive: time that it takes a rank to receive a message, at the beginning of the action that consumes it.
    """

    def __init__(
        self,
        lowered: Lowered,
        duration: Callable[[Action], float],
        latency: float,
        observer: Observer | None,
        on_message: MessageObserver | None,
        transfer: float,
        shared: SharedCores,
        receive: float,
    ) -> None:
        super().__init__(lowered, duration, latency, observer, on_message, transfer)
        ranks = lowered.schedule.ranks
        self._cores, self._receive = CoreTime(shared, ranks), receive
        self._work: list[tuple[Action, int] | None] = [None] * ranks
        self._codes = [tuple(map(self._with_posts, parts)) for parts in self._codes]
        self._whole = False

    def play_epilogue(self, batches: int) -> None:
        """Play the whole span; until then its periods only wait.

        Raises:
            ScheduleError: some ranks wait for ever.
        """
        self._whole = True
        super().play_epilogue(batches)

    def _go_on(self) -> None:
        """Play everything, if the span is complete."""
        runnable, waiting, woken = deque(range(len(self._queues))), set[int](), set[int]()
        while self._whole:
            while runnable:
                rank = runnable.popleft()
                woken.clear()
                self._advance(rank, woken)
                if self._queues[rank] and self._work[rank] is None:
                    waiting.add(rank)
                again = woken & waiting - {rank}
                waiting -= again
                runnable.extend(again)
            ended = self._cores.next()
            if ended is None:
                return
            self._end(*ended)
            runnable.append(ended.rank)

    def _act(self, rank: int, action: Action, t: int, start: float, received: int) -> bool:
        """Begin an action that consumes messages."""
        self._cores.begin(rank, start, self._duration(action) + received * self._receive)
        self._work[rank] = action, t
        return False

    def _end(self, rank: int, start: float, end: float) -> None:
        """End what a rank is working on."""
        work = self._work[rank]
        assert work is not None
        self._work[rank], self.clock[rank] = None, end
        if self.observer is not None:
            self.observer(rank, *work, start, end)

    def _with_posts(self, part: Sequence[Instruction]) -> list[Instruction]:
        """Let what a SEND takes its rank come before it, as an action of its own."""
        return [each for instruction in part for each in self._posted(instruction)]

    def _posted(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.action.op is Op.SEND and self._duration(instruction.action):
            yield Instruction(instruction.action)
        yield instruction
