"""The communicators of a rank for one span: in memory within one process, over gloo or NCCL between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.comm.collective.all_reduce import GlooReducer, LocalReducer, Reducer
from penstock.comm.collective.control_reduce import (
    Add,
    ControlReduce,
    GlooControlReduce,
    LocalControlReduce,
    Scalars,
)
from penstock.comm.collective.in_pieces import TransferPriority
from penstock.comm.collective.shard_exchange import GlooShards, LocalShards, ShardExchange, Shards
from penstock.comm.collective.wave_exchange import WAVE_TIMEOUT, Exchange, GlooExchange, LocalExchange
from penstock.comm.core.rank_grid import Holder, Members, RankGrid, RankKey
from penstock.comm.core.tagged_group import Tag
from penstock.comm.core.ticket import Ticket
from penstock.comm.device_mesh import Groups
from penstock.comm.p2p.transport import Channel, Transport
from penstock.comm.transports import Transports
from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.schedule.ir.sharding import Level
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine

_WEIGHT = 0.02  # of parameters that others own; any number that keeps activations finite does


class Communicators(NamedTuple):
    """Everything that one rank communicates with.

    Attributes:
        transport: moves messages between the stages of the pipeline.
        reducer: adds gradients over the stages that hold the same weights.
        ties: adds gradients of parameters that several stages share.
        control: adds the control scalars of all stages that decide on an update together.
        averages: adds weights over parallel pipelines; None where these hold the same weights.
        global_control: adds the control scalars of all pipelines, where each pipeline decides on its own updates; else
            None.
        waves: exchanges updates between parallel pipelines wave by wave; None where they do not.
        shards: adds and gathers what pipelines have sharded; None where they have not.
    """

    transport: Transport
    reducer: Reducer
    ties: Reducer
    control: ControlReduce
    averages: Reducer | None = None
    global_control: ControlReduce | None = None
    waves: Exchange | None = None
    shards: ShardExchange | None = None

    def close(self) -> None:
        """Stop all background threads."""
        for part in self:
            if part is not None:
                part.close()


def holders_of(schedule: Schedule, width: int) -> dict[int, tuple[Holder, ...]]:
    """Map each stage index to the copies of that stage in all parallel pipelines and directions."""
    copies: dict[int, list[Stage]] = {index: [] for index in range(schedule.num_stages)}
    for stage in schedule.stages:
        copies[stage.index].append(stage)
    return {index: tuple(Holder(r, stage) for r in range(width) for stage in here) for index, here in copies.items()}


def connect(
    grid: RankGrid,
    lowered: Lowered,
    add: Add,
    channel: Channel,
    transports: Transports,
    holder_groups: Groups,
    combine: Combine = REDUCE,
) -> Mapping[RankKey, Communicators]:
    """Make the communicators of every rank of this process.

    Args:
        grid: all ranks.
        lowered: the schedule of the span, with its messages.
        add: adds control scalars.
        channel: training or evaluation.
        transports: makes those of the ranks.
        holder_groups: groups of the ranks that hold the same weights; empty where gradients are added in order.
        combine: how parallel pipelines are synchronized; where they have weights of their own, each decides on its own
            updates.
    """
    deciding = [Holder(r, stage) for r in range(grid.width) for stage in lowered.schedule.deciding]
    priority, sharded = TransferPriority(), lowered.schedule.sharding.level is not Level.NONE
    made = transports.make(lowered, channel, priority)
    if grid.group is None:
        if grid.first_only:
            return _connect_alone(made, deciding, add, sharded)
        return _connect_locally(grid, made, deciding, add, combine, LocalShards() if sharded else None)
    ((key, transport),) = made.items()
    reducer = GlooReducer(grid.process, grid.control, holder_groups, priority=priority)
    # Separate, because these sums come in another order.
    ties = GlooReducer(grid.process, grid.control, {}, Tag.TIED_GRADIENTS, priority)
    if not combine.apart:
        control = _control_of_all(grid, deciding, add)
        shards = GlooShards(grid.process, grid.control, priority) if sharded else None
        return {key: Communicators(transport, reducer, ties, control, shards=shards)}
    own = [holder for holder in deciding if holder.pipeline == key.pipeline]
    control = GlooControlReduce(own, grid.process, grid.control, add)
    waves = combine.kind == "wsp"  # pipelines may then be several waves apart, so the thread must not time out
    timeout = WAVE_TIMEOUT if waves else None
    everywhere = GlooControlReduce(deciding, grid.process, grid.control, add, Tag.GLOBAL_CONTROL, timeout)
    averages = None if waves else GlooReducer(grid.process, grid.control, {}, Tag.AVERAGES, priority)
    exchange = GlooExchange(grid.process, grid.control) if waves else None
    return {key: Communicators(transport, reducer, ties, control, averages, everywhere, exchange)}


def _control_of_all(grid: RankGrid, deciding: Sequence[Holder], add: Add) -> ControlReduce:
    """Make the control reduction of all pipelines, over all tensor ranks, which have one norm and one end of a run."""
    if grid.tensor.size == 1:
        return GlooControlReduce(deciding, grid.process, grid.control, add)
    everywhere = [grid.on_tensor_rank(holder, index) for index in range(grid.tensor.size) for holder in deciding]
    return _TensorControlReduce(GlooControlReduce(everywhere, grid.process_of_all, grid.everyone, add), grid)


class _TensorControlReduce:
    """A control reduction over all tensor ranks, whose holders are counted within one.

    Args:
        whole: that of all.
        grid: says which one this is.
    """

    def __init__(self, whole: ControlReduce, grid: RankGrid) -> None:
        self._whole, self._grid = whole, grid

    def contribute(self, holder: Holder, batch: int, scalars: Scalars, ticket: Ticket) -> None:
        """Contribute the scalars of a stage."""
        self._whole.contribute(self._grid.on_tensor_rank(holder), batch, scalars, ticket)

    def close(self) -> None:
        """Stop the background thread."""
        self._whole.close()


def _connect_alone(
    transports: Mapping[RankKey, Transport], deciding: Sequence[Holder], add: Add, sharded: bool
) -> Mapping[RankKey, Communicators]:
    """Make the communicators of one pipeline whose siblings are not there."""
    reducer, shards = _ReducerAlone(), _ShardsAlone() if sharded else None
    own = LocalControlReduce([holder for holder in deciding if holder.pipeline == 0], add)
    return {
        key: Communicators(transport, reducer, LocalReducer(), own, shards=shards)
        for key, transport in transports.items()
    }


def _connect_locally(
    grid: RankGrid,
    transports: Mapping[RankKey, Transport],
    deciding: Sequence[Holder],
    add: Add,
    combine: Combine,
    shards: ShardExchange | None,
) -> Mapping[RankKey, Communicators]:
    """Make the communicators of ranks that are all in this process."""
    everywhere, reducer = LocalControlReduce(deciding, add), LocalReducer()
    if not combine.apart:
        common = reducer, reducer, everywhere
        return {key: Communicators(transports[key], *common, shards=shards) for key in grid.local}
    own = {
        pipeline: LocalControlReduce([h for h in deciding if h.pipeline == pipeline], add)
        for pipeline in grid.pipelines
    }
    averages, waves = (None, LocalExchange()) if combine.kind == "wsp" else (LocalReducer(), None)
    return {
        key: Communicators(transports[key], reducer, reducer, own[key.pipeline], averages, everywhere, waves)
        for key in grid.local
    }


class _ReducerAlone:
    """All-reduces in which nobody else takes part, so the tensors keep what they hold."""

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:  # noqa: ARG002
        """Return a ticket that is done."""
        return _done_alone(f"no sum (batch {batch})")

    def close(self) -> None:
        """Do nothing: there is no background thread."""


class _ShardsAlone:
    """Reduce-scatters and all-gathers in which nobody else takes part."""

    def scatter(self, members: Members, me: Holder, batch: int, shards: Shards) -> Ticket:  # noqa: ARG002
        """Return a ticket that is done; the own shard keeps what it holds."""
        return _done_alone(f"no sum (batch {batch})")

    @torch.no_grad()
    def gather(self, members: Members, me: Holder, version: int, shards: Shards) -> Ticket:
        """Write some weights into the shards of others, and return a ticket that is done."""
        for member, tensors in zip(members, shards, strict=True):
            for tensor in tensors if member != me else ():
                tensor.fill_(_WEIGHT)
        return _done_alone(f"no weights (version {version})")

    def close(self) -> None:
        """Do nothing: there is no background thread."""


def _done_alone(where: str) -> Ticket:
    ticket = Ticket(where)
    ticket.complete()
    return ticket
