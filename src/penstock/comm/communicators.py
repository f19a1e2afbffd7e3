"""How ranks reach each other for the time of a span: in one process in memory, between processes over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from penstock.comm.collective.all_reduce import GlooReducer, LocalReducer, Reducer
from penstock.comm.collective.control_reduce import Council, GlooCouncil, LocalCouncil
from penstock.comm.collective.wave_exchange import PATIENCE, Exchange, GlooExchange, LocalExchange
from penstock.comm.core.ranks import Holder, Seat, Team
from penstock.comm.mesh import Groups
from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.local import LocalTransport
from penstock.comm.p2p.nccl import LaneGroups, NcclTransport
from penstock.comm.p2p.transport import Channel, Transport
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.methods.combine import REDUCE, Combine
from penstock.schedule.proof.node_spec import NodeSpec

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
    """Of each cut, all nodes of all parallel pipelines that hold it."""
    return {
        cut: tuple(Holder(r, node) for r in range(width) for node in schedule.nodes if node.cut == cut)
        for cut in range(schedule.cuts)
    }


def link(
    team: Team,
    lowered: Lowered,
    specs: Sequence[NodeSpec],
    channel: Channel,
    lane_groups: Sequence[LaneGroups],
    holder_groups: Groups,
    combine: Combine = REDUCE,
) -> Mapping[Seat, Links]:
    """Links for every seat of this process.

    Args:
        team: all seats.
        lowered: the schedule of the span.
        specs: of its nodes.
        channel: which lanes.
        lane_groups: per pipeline, communicators for tensors; empty where they travel over gloo.
        holder_groups: of those that hold the same weights; empty where gradients are added in order.
        combine: how parallel pipelines agree; where they have weights of their own, each decides for itself.
    """
    deciding = [Holder(r, spec.node) for r in range(team.width) for spec in specs if spec.decides]
    if team.group is None:
        return _link_here(team, deciding, combine)
    (seat,) = team.seats
    first = team.worker(Seat(seat.replica, 0))
    transport: Transport
    if lane_groups:
        assert team.control is not None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        groups = lane_groups[seat.replica]
        transport = NcclTransport(seat.rank, groups, lowered.window, team.control, device, first, channel)
    else:
        transport = GlooTransport(seat.rank, lowered.lanes, lowered.window, team.control, first, channel)
    reducer = GlooReducer(team.process, team.control, holder_groups)
    ties = GlooReducer(team.process, team.control, {}, tag=_TIES)  # by themselves, as they keep another order
    if not combine.apart:
        return {seat: Links(transport, reducer, ties, GlooCouncil(deciding, team.process, team.control))}
    own = [holder for holder in deciding if holder.replica == seat.replica]
    council = GlooCouncil(own, team.process, team.control)
    if combine.kind == "wsp":  # nobody waits there for pipelines that are some waves behind
        common = GlooCouncil(deciding, team.process, team.control, tag=_COMMON, patience=PATIENCE)
        waves = GlooExchange(team.process, team.control, tag=_WAVES)
        return {seat: Links(transport, reducer, ties, council, common=common, waves=waves)}
    averages = GlooReducer(team.process, team.control, {}, tag=_AVERAGES)
    common = GlooCouncil(deciding, team.process, team.control, tag=_COMMON)
    return {seat: Links(transport, reducer, ties, council, averages, common)}


def _link_here(team: Team, deciding: Sequence[Holder], combine: Combine) -> Mapping[Seat, Links]:
    """Links between seats that are all in this process."""
    council, reducer = LocalCouncil(deciding), LocalReducer()
    transports = {replica: LocalTransport() for replica in team.replicas}
    if not combine.apart:
        return {seat: Links(transports[seat.replica], reducer, reducer, council) for seat in team.seats}
    own = {replica: LocalCouncil([h for h in deciding if h.replica == replica]) for replica in team.replicas}
    averages, waves = (None, LocalExchange()) if combine.kind == "wsp" else (LocalReducer(), None)
    return {
        seat: Links(transports[seat.replica], reducer, reducer, own[seat.replica], averages, council, waves)
        for seat in team.seats
    }
