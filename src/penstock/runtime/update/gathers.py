"""Gathers of weights of which every pipeline has updated a shard, while passes of the batches before go on."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from penstock.comm.collective.shard_exchange import ShardExchange
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.recorder import Recorder
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.wait import Wait, wait_for
from penstock.schedule.ir.schedule import Op, Stage
from penstock.stage.stage_runtime import StageRuntime
from penstock.timeline import Waiting


class Gathers:
    """The part of one rank in the gathers of its stages during one span. Versions are counted from the start.

    Args:
        pipeline: which of the parallel pipelines.
        holders: by stage index, the copies of that stage in all parallel pipelines.
        exchange: gathers, and adds.
        recorder: takes down what happens.
        splits_gradients: sums of gradients are sharded, too.
    """

    def __init__(
        self,
        pipeline: int,
        holders: Mapping[int, tuple[Holder, ...]],
        exchange: ShardExchange,
        recorder: Recorder,
        splits_gradients: bool,
    ) -> None:
        self._exchange, self.splits_gradients = exchange, splits_gradients
        self._pipeline, self._holders, self._recorder = pipeline, holders, recorder
        self._begun: dict[Stage, tuple[StageRuntime, int, Ticket]] = {}

    def reduce(self, stage: StageRuntime, batch: int) -> Ticket:
        """Begin to add the gradient of a batch, each shard at the pipeline that owns it."""
        members, me = self._members(stage)
        shards = stage.weights.gradient_shards(batch)
        return self._exchange.scatter(members, me, batch, shards or [()] * len(members))

    def begin(self, stage: StageRuntime, version: int) -> None:
        """Begin to complete a version of which the own shard has been written."""
        assert stage.key not in self._begun, "the version before is complete"
        members, me = self._members(stage)
        shards = stage.weights.version_shards(version)
        ticket = self._exchange.gather(members, me, version, shards or [()] * len(members))
        self._begun[stage.key] = stage, version, ticket

    def wait(self, stage: Stage, what: str) -> Generator[Wait, None, int | None]:
        """Wait until the newest version of a stage is whole; returns which it is if that is news, else None.

        Args:
            stage: which.
            what: comes next, for messages.

        Raises:
            TransportError: a peer is gone, or its shard has not come in time.
        """
        if stage not in self._begun:
            return None
        runtime, version, ticket = self._begun[stage]
        cause = f"the other pipelines: to gather version {version}"
        yield from wait_for(self._recorder, ticket, what, cause, Waiting.CONTROL)
        del self._begun[stage]
        place = stage.index, stage.direction, version - 1
        label = f"{Op.GATHER}{version}"
        self._recorder.add("collective", ticket.made_at, ticket.done_at, Op.GATHER.value, label, *place)
        runtime.weights.complete(version)
        return version

    def _members(self, stage: StageRuntime) -> tuple[Members, Holder]:
        """Return the stages that hold the weights of a stage, which may train nothing, and which of them it is."""
        return self._holders[stage.key.index], Holder(self._pipeline, stage.key)
