"""The machine whose ranks share cores and links: what shares takes longer, so it is played in the order of time."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.checks import in_short, is_number
from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Action, Kind, Op, Stage, Unit
from penstock.schedule.machine.collective_state import Joined
from penstock.schedule.machine.instructions import Instruction, Lowered, Route
from penstock.schedule.machine.message_lanes import Latency, MessageObserver
from penstock.schedule.machine.play import Machine, Observer

_PASSES, _TRANSFERS = 0, 1  # kinds of work
Key = tuple[int, int]
"""Of work: its kind, and a number. Of what begins or ends at the same time, the least is first."""
Shared = tuple[str, int]
"""What is shared: its kind, and the host."""
_NEVER = (math.inf, (0, 0))


class Sharing(NamedTuple):
    """What ranks share, and what they do there besides their actions.

    Attributes:
        cores: who shares those of which host; None if everybody has enough.
        links: who shares that of which host; None if each lane has one of its own.
        receive: time of a core that it takes a rank to receive a message, at the beginning of the action that
            consumes it.
        work: time of a core that a collective takes of each of its ranks, beside their actions and before anything is
            under way; its duration includes that. None if it takes none.
    """

    cores: SharedCores | None = None
    links: SharedLinks | None = None
    receive: float = 0.0
    work: Callable[[Action], float] | None = None


@dataclass
class _Transfer:
    """A message or a collective that shares links or cores.

    Attributes:
        lane: on which those before it are done first.
        at: when all ranks have posted it.
        work: of a core of each of the hosts `cores`, before it is under way.
        wire: time for which it is under way, if it shares no link.
        uses: of links.
        done: to be called with its start and end; returns the ranks that may go on.
        start: when it began.
        left: how many hosts are not done with their work.
    """

    lane: object
    at: float
    work: float
    cores: tuple[Shared, ...]
    wire: float
    uses: tuple[Shared, ...]
    done: Callable[[float, float], set[int]]
    start: float = 0.0
    left: int = 0


class SharedMachine(Machine):
    """Plays whole spans on hosts whose ranks share cores and links.

    A rank goes on until it works, or has to wait. Of all work and transfers, what ends first is played next: whatever
    its rank does then happens later than all that has been played, so nothing that has ended is ever slowed down again.

    Args:
        lowered, duration, latency, observer, on_message, transfer: as of `Machine`; a SEND may take its rank some time
            before it is posted, and is observed if it does.
        sharing: what is shared.
    """

    def __init__(
        self,
        lowered: Lowered,
        duration: Callable[[Action], float],
        latency: Latency,
        observer: Observer | None,
        on_message: MessageObserver | None,
        transfer: float,
        sharing: Sharing,
    ) -> None:
        super().__init__(lowered, duration, latency, observer, on_message, transfer)
        ranks = lowered.schedule.ranks
        room: dict[Shared, float] = defaultdict(lambda: math.inf)
        for rank in range(ranks):
            if sharing.cores is not None:
                room["cores", sharing.cores.host_of(rank)] = sharing.cores.cores
            if sharing.links is not None:
                room |= dict.fromkeys(_directions(sharing.links.host_of(rank)), 1.0)
        self._sharing, self._transfer, self._time = sharing, transfer, SharedTime(room)
        if sharing.links is not None and transfer:
            self.messages.carrier = self._carry_message
        if sharing.links is not None or sharing.work is not None:
            self._collectives.carrier = self._carry_collective
        self._work: list[tuple[Action, int] | None] = [None] * ranks
        self._lanes: dict[object, deque[_Transfer]] = defaultdict(deque)
        self._under_way: dict[int, _Transfer] = {}
        self._numbers = 0
        self._issued: dict[tuple[Op, Stage], deque[tuple[Action, int]]] = defaultdict(deque)
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
            ended = self._time.next()
            if ended is None:
                return
            kind, number = ended.key
            if kind == _PASSES:
                self._end(number, ended.start, ended.end)
                runnable.append(number)
            else:
                again = self._go_on_with(number, ended) & waiting
                waiting -= again
                runnable.extend(sorted(again))

    # --- passes -----------------------------------------------------------------------------------------------------

    def _act(self, rank: int, action: Action, t: int, start: float, received: int) -> bool:
        """Begin an action that consumes messages."""
        work = self._duration(action) + received * self._sharing.receive
        self._time.begin((_PASSES, rank), start, work, self._cores_of([rank]))
        self._work[rank] = action, t
        return False

    def _end(self, rank: int, start: float, end: float) -> None:
        """End what a rank is working on."""
        work = self._work[rank]
        assert work is not None
        self._work[rank], self.clock[rank] = None, end
        if self.observer is not None:
            self.observer(rank, *work, start, end)

    def _cores_of(self, ranks: Sequence[int]) -> tuple[Shared, ...]:
        cores = self._sharing.cores
        return tuple([("cores", rank if cores is None else cores.host_of(rank)) for rank in ranks])

    def _with_posts(self, part: Sequence[Instruction]) -> list[Instruction]:
        """Let what a SEND takes its rank come before it, as an action of its own."""
        return [each for instruction in part for each in self._posted(instruction)]

    def _posted(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.action.op is Op.SEND and self._duration(instruction.action):
            yield Instruction(instruction.action)
        yield instruction

    # --- transfers --------------------------------------------------------------------------------------------------

    def _carry_message(self, route: Route, at: float, arrive: Callable[[float], None]) -> bool:
        """Let a message share links; False if it stays on its host."""
        assert self._sharing.links is not None
        ends = route.source.rank, route.target.rank
        source, target = map(self._sharing.links.host_of, ends)
        if source == target:
            return False

        def done(_start: float, end: float) -> set[int]:
            arrive(end)
            return set(ends)

        uses = _directions(source)[:1] + _directions(target)[1:]
        self._carry(_Transfer(route.lane, at, 0.0, (), self._transfer, uses, done))
        return True

    def _carry_collective(
        self, op: Op, group: tuple[Stage, ...], at: float, end: Callable[[float, float], Joined]
    ) -> bool:
        """Let a collective share cores and links; False for a decision, which is a few bytes."""
        if op is Op.DECIDE:
            return False
        ranks = sorted({stage.rank for stage in group})
        action = Action(op, group[0], Unit(0, kind=Kind.BATCH))
        work = 0.0 if self._sharing.work is None else self._sharing.work(action)
        links = self._sharing.links
        hosts = [] if links is None else sorted({links.host_of(rank) for rank in ranks})
        uses = tuple([each for host in hosts for each in _directions(host)])

        def done(start: float, now: float) -> set[int]:
            woken: set[int] = set()
            self._tell(end(start, now), woken)
            return woken

        lane, wire = self._collectives.lane_key(op, group), max(self._duration(action) - work, 0.0)
        self._carry(_Transfer(lane, at, work, self._cores_of(ranks), wire, uses or (("own", ranks[0]),), done))
        return True

    def _carry(self, transfer: _Transfer) -> None:
        """Begin a transfer, when those before it on its lane are done."""
        lane = self._lanes[transfer.lane]
        lane.append(transfer)
        if len(lane) == 1:
            self._begin(transfer, transfer.at)

    def _begin(self, transfer: _Transfer, now: float) -> None:
        transfer.start = max(transfer.at, now)
        if not transfer.work:
            self._put(transfer, transfer.start, transfer.wire, transfer.uses)
            return
        transfer.left = len(transfer.cores)
        for cores in transfer.cores:
            self._put(transfer, transfer.start, transfer.work, (cores,))

    def _put(self, transfer: _Transfer, start: float, work: float, uses: tuple[Shared, ...]) -> None:
        self._numbers += 1
        self._under_way[self._numbers] = transfer
        self._time.begin((_TRANSFERS, self._numbers), start, work, uses)

    def _go_on_with(self, number: int, ended: Ended) -> set[int]:
        """Go on with a transfer of which a part has ended; returns the ranks that may go on."""
        transfer = self._under_way.pop(number)
        if transfer.left:
            transfer.left -= 1
            if not transfer.left:
                self._put(transfer, ended.end, transfer.wire, transfer.uses)
            return set()
        lane = self._lanes[transfer.lane]
        lane.popleft()
        if lane:
            self._begin(lane[0], ended.end)
        return transfer.done(transfer.start, ended.end)

    def _issue(self, rank: int, action: Action, t: int, batch: int, woken: set[int]) -> None:
        """Issue a collective, which blocks nobody."""
        if self._collectives.carrier is None:
            super()._issue(rank, action, t, batch, woken)
            return
        self._issued[action.op, action.stage].append((action, t))
        self._tell(self._collectives.issue(rank, action, batch, self.clock[rank]), woken)

    def _tell(self, joined: Joined, woken: set[int]) -> None:
        """Tell of collectives whose times are known."""
        for op, stage, start, end in joined:
            woken.add(stage.rank)
            issued = self._issued[op, stage].popleft()
            if self.observer is not None:
                self.observer(stage.rank, *issued, start, end)


def _directions(host: int) -> tuple[Shared, Shared]:
    """Return what leaves a host, and what comes to it."""
    return ("out", host), ("in", host)


class Ended(NamedTuple):
    """Work that has ended."""

    key: Key
    start: float
    end: float


@dataclass
class _SharedWork:
    """What is going on.

    Attributes:
        start: when it began.
        since: when `left` was left.
        left: at full speed.
        uses: of what is shared.
        speed: at which it goes on; 0 before it has begun.
    """

    start: float
    since: float
    left: float
    uses: tuple[Shared, ...]
    speed: float = 0.0


class SharedTime:
    """All work, in the order of time.

    What n works use, and what has room for fewer of them at full speed, lets each go at room / n of it. A work that
    uses several goes at the least of these speeds.

    Args:
        room: of each that is shared.
    """

    def __init__(self, room: Mapping[Shared, float]) -> None:
        self._room = room
        self._work: dict[Key, _SharedWork] = {}
        self._users: dict[Shared, set[Key]] = defaultdict(set)
        self._coming: list[tuple[float, Key, float, tuple[Shared, ...]]] = []

    def begin(self, key: Key, start: float, work: float, uses: tuple[Shared, ...]) -> None:
        """Let work begin, no earlier than the last work has ended.

        Args:
            key: no other work has it while this one goes on.
            start: when it begins.
            work: its time at full speed.
            uses: something that is shared, or several.
        """
        heapq.heappush(self._coming, (start, key, work, uses))

    def next(self) -> Ended | None:
        """Return what ends next; None if nothing is left."""
        while True:
            end, first = min(((w.since + w.left / w.speed, key) for key, w in self._work.items()), default=_NEVER)
            if self._coming and self._coming[0][0] < end:  # what ends first makes room for what begins at that time
                start, key, left, uses = heapq.heappop(self._coming)
                if not left:
                    return Ended(key, start, start)
                self._work[key] = _SharedWork(start, start, left, uses)
                for each in uses:
                    self._users[each].add(key)
                self._divide(uses, start)
            elif math.isinf(end):
                return None
            else:
                done = self._work.pop(first)
                for each in done.uses:
                    self._users[each].discard(first)
                self._divide(done.uses, end)
                return Ended(first, done.start, end)

    def _divide(self, shared: tuple[Shared, ...], now: float) -> None:
        """Divide what has been taken or left among those that use it from now on."""
        for key in {key for each in shared for key in self._users[each]}:
            work = self._work[key]
            speed = min([1.0, *(self._room[each] / len(self._users[each]) for each in work.uses)])
            if speed != work.speed:  # so that nothing is rounded while there is room for all
                work.left = max(work.left - (now - work.since) * work.speed, 0.0)
                work.since, work.speed = now, speed


@dataclass(frozen=True)
class SharedLinks:
    """Which ranks share the link of a host.

    A message occupies what leaves its sender's host and what comes to its receiver's. A gather or sum occupies both
    directions of the hosts of all its ranks. While n of them occupy a direction, each has at most 1 / n of its rate.

    Attributes:
        per_host: consecutive ranks on each host; all of them are on one if None. Their messages to each other do not
            occupy the link.
    """

    per_host: int | None = 1

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        if self.per_host is not None and (type(self.per_host) is not int or self.per_host < 1):
            raise ConfigError(f"per_host must be a number of ranks, at least 1, or None; got {in_short(self.per_host)}")

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return 0 if self.per_host is None else rank // self.per_host


@dataclass(frozen=True)
class SharedCores:
    """Which ranks share the cores of a host.

    While n ranks of a host work, each works at cores / n of its speed, or at full speed if that is more.

    Attributes:
        cores: of each host: so many of its ranks can work at full speed. A rank with several threads takes as many
            cores, so with t threads each it is the number of cores over t.
        per_host: consecutive ranks on each host; all of them are on one if None.
    """

    cores: float
    per_host: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of cores."""
        if not is_number(self.cores) or not 0 < self.cores < math.inf:
            raise ConfigError(f"cores must be a number greater than 0, got {in_short(self.cores)}")
        if self.per_host is not None and (type(self.per_host) is not int or self.per_host < 1):
            raise ConfigError(f"per_host must be a number of ranks, at least 1, or None; got {in_short(self.per_host)}")

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return 0 if self.per_host is None else rank // self.per_host

    def suffice(self, ranks: int) -> bool:
        """Return whether every one of so many ranks always works at full speed."""
        return max(Counter(map(self.host_of, range(ranks))).values()) <= self.cores
