"""How ranks reach each other for the time of a span: in one process in memory, between processes over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from penstock.comm.collective.all_reduce import GlooReducer, LocalReducer, Reducer
from penstock.comm.collective.control_reduce import Council, GlooCouncil, LocalCouncil
from penstock.comm.collective.wave_exchange import PATIENCE, Exchange, GlooExchange, LocalExchange
from penstock.comm.core.rank_grid import Holder, RankGrid, RankKey
from penstock.comm.mesh import Groups
from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.local import LocalTransport
from penstock.comm.p2p.nccl import LaneGroups, NcclTransport
from penstock.comm.p2p.transport import Channel, Transport
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.combine import REDUCE, Combine
from penstock.schedule.proof.stage_spec import StageSpec

_TIES, _AVERAGES, _COMMON, _WAVES = 10, 11, 12, 13  # tags of messages, on the pipelines' group; other lanes use others


class Links(NamedTuple):
    """Those of one rank.

    Attributes:
        transport: moves messages along the pipeline.
        reducer: adds gradients over those that hold the same weights.
        ties: adds those of parameters that stages share.
        council: where all stages meet that decide together.
        averages: adds weights over parallel pipelines; None where they hold the same.
        common: where the stages of all pipelines meet then, each of which decides with its own council.
        waves: moves what pipelines have changed wave by wave; None where they do not send that.
    """

    transport: Transport
    reducer: Reducer
    ties: Reducer
    council: Council
    averages: Reducer | None = None
    common: Council | None = None
    waves: Exchange | None = None

    def close(self) -> None:
        """Stop whatever runs in the background."""
        self.transport.close()
        self.reducer.close()
        self.ties.close()
        self.council.close()
        if self.averages is not None:
            self.averages.close()
        if self.common is not None:
            self.common.close()
        if self.waves is not None:
            self.waves.close()


def holders_of(schedule: Schedule, width: int) -> dict[int, tuple[Holder, ...]]:
    """By stage index, the copies of that stage in all parallel pipelines."""
    return {
        index: tuple(Holder(r, stage) for r in range(width) for stage in schedule.stages if stage.index == index)
        for index in range(schedule.num_stages)
    }


def link(
    grid: RankGrid,
    lowered: Lowered,
    specs: Sequence[StageSpec],
    channel: Channel,
    lane_groups: Sequence[LaneGroups],
    holder_groups: Groups,
    combine: Combine = REDUCE,
) -> Mapping[RankKey, Links]:
    """Links for every rank of this process.

    Args:
        grid: all ranks.
        lowered: the schedule of the span.
        specs: of its stages.
        channel: which lanes.
        lane_groups: per pipeline, communicators for tensors; empty where they travel over gloo.
        holder_groups: of those that hold the same weights; empty where gradients are added in order.
        combine: how parallel pipelines agree; where they have weights of their own, each decides for itself.
    """
    deciding = [Holder(r, spec.stage) for r in range(grid.width) for spec in specs if spec.decides]
    if grid.group is None:
        return _link_here(grid, deciding, combine)
    (key,) = grid.local
    first = grid.global_rank(RankKey(key.pipeline, 0))
    transport: Transport
    if lane_groups:
        assert grid.control is not None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        groups = lane_groups[key.pipeline]
        transport = NcclTransport(key.rank, groups, lowered.window, grid.control, device, first, channel)
    else:
        transport = GlooTransport(key.rank, lowered.lanes, lowered.window, grid.control, first, channel)
    reducer = GlooReducer(grid.process, grid.control, holder_groups)
    ties = GlooReducer(grid.process, grid.control, {}, tag=_TIES)  # by themselves, as they keep another order
    if not combine.apart:
        return {key: Links(transport, reducer, ties, GlooCouncil(deciding, grid.process, grid.control))}
    own = [holder for holder in deciding if holder.pipeline == key.pipeline]
    council = GlooCouncil(own, grid.process, grid.control)
    if combine.kind == "wsp":  # nobody waits there for pipelines that are some waves behind
        common = GlooCouncil(deciding, grid.process, grid.control, tag=_COMMON, patience=PATIENCE)
        waves = GlooExchange(grid.process, grid.control, tag=_WAVES)
        return {key: Links(transport, reducer, ties, council, common=common, waves=waves)}
    averages = GlooReducer(grid.process, grid.control, {}, tag=_AVERAGES)
    common = GlooCouncil(deciding, grid.process, grid.control, tag=_COMMON)
    return {key: Links(transport, reducer, ties, council, averages, common)}


def _link_here(grid: RankGrid, deciding: Sequence[Holder], combine: Combine) -> Mapping[RankKey, Links]:
    """Links between ranks that are all in this process."""
    council, reducer = LocalCouncil(deciding), LocalReducer()
    transports = {pipeline: LocalTransport() for pipeline in grid.pipelines}
    if not combine.apart:
        return {key: Links(transports[key.pipeline], reducer, reducer, council) for key in grid.local}
    own = {pipeline: LocalCouncil([h for h in deciding if h.pipeline == pipeline]) for pipeline in grid.pipelines}
    averages, waves = (None, LocalExchange()) if combine.kind == "wsp" else (LocalReducer(), None)
    return {
        key: Links(transports[key.pipeline], reducer, reducer, own[key.pipeline], averages, council, waves)
        for key in grid.local
    }
