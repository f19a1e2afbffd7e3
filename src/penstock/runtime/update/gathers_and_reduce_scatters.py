"""Gathers of weights of which every pipeline has a shard, and sums of gradients as shards, while passes go on.

With levels optimizer and gradients a gather completes the version of which an update has written the own rows. With
level full it makes a version whole, for the passes between it and the next RELEASE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from penstock.comm.collective.shard_exchange import ShardExchange
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.ticket import Ticket, Wait, wait_for
from penstock.comm.core.trace_recorder import Recorder
from penstock.schedule.ir.schedule import Op, Stage
from penstock.schedule.ir.sharding import Level
from penstock.stage.stage_runtime import StageRuntime
from penstock.timeline import Waiting

Key = tuple[Stage, int]
"""A stage, and the batch of a gradient."""


class Gathers:
    """The part of one rank in the gathers of its stages during one span. Versions are counted from the start.

    Args:
        pipeline: which of the parallel pipelines.
        holders: by stage index, the copies of that stage in all parallel pipelines.
        exchange: gathers, and adds.
        recorder: takes down what happens.
        level: what is sharded.
        room: places for full-size gradients, where a rank has fewer than gradients; else None.
        freed: called when the memory of a gradient was freed, in whatever thread.

    Attributes:
        full: weights are shards.
    """

    def __init__(
        self,
        pipeline: int,
        holders: Mapping[int, tuple[Holder, ...]],
        exchange: ShardExchange,
        recorder: Recorder,
        level: Level,
        room: GradientPlaces | None = None,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange, self._room, self._freed = exchange, room, freed
        self.full, self.splits_gradients = level is Level.FULL, level.splits_gradients
        self._pipeline, self._holders, self._recorder = pipeline, holders, recorder
        self._begun: dict[tuple[Stage, int], tuple[StageRuntime, Ticket]] = {}  # by stage and version

    @property
    def holds_up_passes(self) -> bool:
        """Whether passes wait for gathers, or backwards for room."""
        return self.full or self._room is not None

    # --- gradients --------------------------------------------------------------------------------------------------

    def reduce(self, stage: StageRuntime, batch: int) -> Ticket:
        """Begin to add the gradient of a batch, each shard at the pipeline that owns it."""
        members, me = self._members(stage)
        shards = stage.weights.gradient_shards(batch)
        added = self._exchange.scatter(members, me, batch, shards or [()] * len(members))
        if self._room is None and not stage.weights.keeps_sums_apart:
            return added
        settled = Ticket(added.where)
        settled.made_at = added.made_at
        added.then(partial(self._settle, stage, batch, added, settled))
        if self._room is not None:
            self._room.reduce((stage.key, batch), settled)
        return settled

    def _settle(self, stage: StageRuntime, batch: int, added: Ticket, settled: Ticket) -> None:
        """Free a gradient whose shard of the sum is there; this may be the thread of the sums."""
        error = added.error
        try:
            if error is None:
                stage.weights.settle_sum(batch)
                self._freed()
        except Exception as raised:  # the executor raises it where it waits
            error = raised
        settled.complete(error=error)

    # --- weights ----------------------------------------------------------------------------------------------------

    def begin(self, stage: StageRuntime, version: int) -> None:
        """Begin to complete a version of which the own shard is there, unless it is whole already."""
        shards = stage.weights.version_shards(version)
        if shards is None or (not shards and (stage.key, version) in self._begun):
            return  # a stage that trains nothing does not know that another GATHER has named the version
        self._join(stage, version, shards)

    def _join(self, stage: StageRuntime, version: int, shards: list[list[Tensor]]) -> None:
        members, me = self._members(stage)
        assert (stage.key, version) not in self._begun, "it is not gathered twice at a time"
        ticket = self._exchange.gather(members, me, version, shards or [()] * len(members))
        self._begun[stage.key, version] = stage, ticket

    def wait(self, stage: Stage, what: object, version: int | None = None) -> Generator[Wait, None, int | None]:
        """Wait until a version of a stage is whole; returns which it is if that is news, else None.

        Args:
            stage: which.
            what: comes next, for messages.
            version: which one; None for those whose gathers have begun.

        Raises:
            TransportError: a peer is gone, or its shard has not come in time.
        """
        found = None
        for begun in [key for key in self._begun if key[0] == stage and version in (None, key[1])]:
            runtime = yield from self._arrive(*begun, what)
            runtime.weights.complete(begun[1])
            found = begun[1]
        return found

    def _arrive(self, stage: Stage, version: int, what: object) -> Generator[Wait, None, StageRuntime]:
        runtime, ticket = self._begun[stage, version]
        cause = f"the other pipelines: to gather version {version}"
        yield from wait_for(self._recorder, ticket, what, cause, Waiting.CONTROL)
        del self._begun[stage, version]
        place = stage.index, stage.direction, version - 1
        label = f"{Op.GATHER}{version}"
        self._recorder.add("collective", ticket.made_at, ticket.done_at, Op.GATHER.value, label, *place)
        return runtime

    # --- passes -----------------------------------------------------------------------------------------------------

    def ready(self, stage: Stage, version: int, batch: int | None) -> bool:
        """Whether a pass of a stage need not wait; if so, a gradient that it begins has a place.

        Args:
            stage: which.
            version: that it reads.
            batch: to whose gradient it adds; None if to none.
        """
        if (stage, version) in self._begun:
            return False
        if self._room is None or batch is None:
            return True
        if self._room.needed((stage, batch)) is not None:
            return False
        self._room.take((stage, batch))
        return True

    def before_pass(self, stage: Stage, version: int, batch: int | None, what: object) -> Iterator[Wait]:
        """Wait for what `ready` asks for."""
        yield from self.wait(stage, what, version)
        if self._room is None or batch is None:
            return
        key: Key = (stage, batch)
        while (ticket := self._room.needed(key)) is not None:
            cause = "the other pipelines: to add up the gradient whose place the next one takes"
            yield from wait_for(self._recorder, ticket, what, cause, Waiting.CONTROL)
        self._room.take(key)

    # --- between batches, and between runs --------------------------------------------------------------------------

    def begin_run(self, stages: Iterable[StageRuntime]) -> None:
        """Begin a span: where weights are rows, nothing else is left of them."""
        for stage in stages:
            stage.begin_run()

    def gather_rest(
        self, stages: Iterable[StageRuntime], version: int, what: str
    ) -> Generator[Wait, None, list[StageRuntime]]:
        """Make a version of all stages whole for an evaluation; returns those where it was not, to be released.

        Args:
            stages: of the rank, in an order that all pipelines have in common.
            version: which.
            what: comes next, for messages.
        """
        all_ = list(stages)
        rest = [stage for stage in all_ if not stage.weights.is_whole(version)]
        for stage in rest:
            self._join(stage, version, stage.weights.evaluation_shards(version) or [])
        for stage in all_:
            yield from self.wait(stage.key, what, version)
        return rest

    def end_run(self, stages: Iterable[StageRuntime], version: int, what: str) -> Iterator[Wait]:
        """End a span: where weights are rows, they are whole until the next one.

        Args:
            stages, what: as of `gather_rest`.
            version: the newest.
        """
        whole = []
        for stage in stages:
            shards = stage.weights.end_run()
            if shards:
                self._join(stage, version, shards)
                whole.append(stage)
        for stage in whole:
            yield from self._arrive(stage.key, version, what)
            stage.weights.completed()

    def _members(self, stage: StageRuntime) -> tuple[Members, Holder]:
        """Return the stages that hold the weights of a stage, which may train nothing, and which of them it is."""
        return self._holders[stage.key.index], Holder(self._pipeline, stage.key)


class GradientPlaces:
    """The places of one rank during one span; the machine model has the same (`schedule.machine.collective_state`).

    Args:
        places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self._begun: set[Key] = set()
        # Of the places that no backward adds to, in the order in which they are taken again: what frees them.
        self._freed: deque[Ticket | None] = deque([None] * places)
        self._parts: dict[Stage, tuple[int, Ticket]] = {}  # the last sum of each stage, and its batch

    def needed(self, key: Key) -> Ticket | None:
        """Return the sum that a backward waits for before it adds to a gradient; None if it need not wait."""
        if key in self._begun:
            return None
        batch, part = self._parts.get(key[0], (-1, None))
        if part is not None and batch == key[1] and not part.done:
            return part  # the next part takes the same memory
        assert self._freed, "the proof of the schedule: a REDUCE of another gradient comes before"
        ticket = self._freed[0]
        return None if ticket is None or ticket.done else ticket

    def take(self, key: Key) -> None:
        """Begin a gradient, unless it has begun; nothing is needed any more."""
        if key not in self._begun:
            ticket = self._freed.popleft()
            assert ticket is None or ticket.done
            self._begun.add(key)

    def reduce(self, key: Key, ticket: Ticket) -> None:
        """Take note of what frees the place of a gradient: the end of its sum."""
        self._begun.discard(key)
        self._freed.append(ticket)
        self._parts[key[0]] = key[1], ticket
