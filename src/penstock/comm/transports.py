"""Chooses what carries the messages of a pipeline: memory in one process, between processes gloo, or NCCL beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.comm.collective.control_plane import HandedOut, gather_json, hand_out
from penstock.comm.collective.in_pieces import TransferPriority
from penstock.comm.core.rank_grid import RankGrid, RankKey, backends
from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.nccl import LaneGroups, NcclTransport, lane_groups
from penstock.comm.p2p.transport import Channel, LocalTransport, Transport
from penstock.errors import CapabilityError
from penstock.schedule.lowering.lower import in_one_order
from penstock.schedule.lowering.report_places import reports_wait, with_report_places
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.issue_order import issued, one_order
from penstock.schedule.rank_schedule import own_program, part_of_rank

_BATCHES = 5  # of the span whose order is proven: filled, in its steady state, and drained


class Transports(Protocol):
    """Makes the transports of the ranks of this process."""

    def prepare(self, channel: Channel, lowered: Lowered) -> None:
        """Make what all ranks must make together for a schedule; all call this, between runs.

        Args:
            channel: training or evaluation.
            lowered: the schedule; on rank 0 with the programs of all ranks.
        """
        ...

    def placed(self, lowered: Lowered) -> Lowered:
        """Return a schedule with its RECVs where the transport needs them."""
        ...

    def make(self, lowered: Lowered, channel: Channel, priority: TransferPriority) -> Mapping[RankKey, Transport]:
        """Make the transport of every rank of this process, for one span of a schedule.

        Args:
            lowered: the schedule.
            channel: training or evaluation.
            priority: is told of messages, where sums share a link with them.
        """
        ...


def choose_transports(grid: RankGrid, devices: Collection[torch.device]) -> Transports:
    """Return what makes the transports of a pipeline.

    Over NCCL if the group has it and every stage of all ranks is on a GPU; else over gloo, which brings tensors of GPUs
    through the memory of the host. All ranks call this together.

    Args:
        grid: all ranks.
        devices: those that hold the stages of this process.

    Raises:
        CapabilityError: a process has stages on several devices.
        TransportError: a peer is dead.
    """
    if grid.group is None or grid.control is None:
        return LocalTransports(grid)
    if len(devices) > 1:
        raise CapabilityError(
            f"rank {dist.get_rank(grid.group)} has stages on several devices, {', '.join(sorted(map(str, devices)))}; "
            "move its blocks to one, or pass Pipeline(device=...)"
        )
    device = next(iter(devices), torch.device("cpu"))
    if backends(grid.group).get("cuda") == "nccl":
        kinds = gather_json(device.type, "choosing what carries messages", grid.control)
        if set(kinds) == {"cuda"}:
            return NcclTransports(grid, grid.control, device)
    return GlooTransports(grid, device)


class LocalTransports:
    """All ranks in this process; those of a pipeline share one object."""

    def __init__(self, grid: RankGrid) -> None:
        self._grid = grid

    def prepare(self, channel: Channel, lowered: Lowered) -> None:
        """Do nothing."""

    def placed(self, lowered: Lowered) -> Lowered:
        """Return it as it is: any order will do."""
        return lowered

    def make(self, lowered: Lowered, channel: Channel, priority: TransferPriority) -> Mapping[RankKey, Transport]:  # noqa: ARG002
        """Make one for each pipeline."""
        made = {pipeline: LocalTransport() for pipeline in self._grid.pipelines}
        return {key: made[key.pipeline] for key in self._grid.local}


class GlooTransports:
    """Everything travels over gloo.

    Args:
        grid: all ranks.
        device: of this one.
    """

    def __init__(self, grid: RankGrid, device: torch.device) -> None:
        self._grid, self._device = grid, device

    def prepare(self, channel: Channel, lowered: Lowered) -> None:
        """Do nothing: lanes are told apart by tags."""

    def placed(self, lowered: Lowered) -> Lowered:
        """Return it as it is: any order will do."""
        return lowered

    def make(self, lowered: Lowered, channel: Channel, priority: TransferPriority) -> Mapping[RankKey, Transport]:
        """Make that of the only rank of this process."""
        (key,), ranks = self._grid.local, _ranks_here(self._grid)
        settings = self._grid.control, ranks, channel, self._device, priority, self._grid.patience
        return {key: GlooTransport(key.rank, lowered.lanes, lowered.window, *settings)}


class NcclTransports:
    """Tensors of the training travel on a process group for each lane, the rest over gloo.

    So do the tensors of evaluations between batches, which are in no order with those of the training.

    Args:
        grid: all ranks.
        control: a gloo group of them.
        device: of this one.
        backend: of the groups; "gloo" in tests.
    """

    def __init__(self, grid: RankGrid, control: dist.ProcessGroup, device: torch.device, backend: str = "nccl") -> None:
        self._grid, self._control, self._device, self._backend = grid, control, device, backend
        self._groups: dict[Channel, list[LaneGroups]] = {}
        self._placed: tuple[Lowered, Lowered] | None = None  # of the training, and what was made of it

    def prepare(self, channel: Channel, lowered: Lowered) -> None:
        """Make the groups, unless there are such for these lanes; place the RECVs, and prove that there is one order.

        Raises:
            CapabilityError: the pipelines do not span the whole job.
            ScheduleError: there is no order of messages that all ranks can keep; the message names a cycle.
            TransportError: a peer is dead.
        """
        if channel is Channel.EVALUATION:
            return
        present = self._groups.get(channel)
        if present is None or tuple(present[0]) != lowered.lanes:
            device = self._device if self._device.type == "cuda" else None
            numbers = self._grid.numbers
            pipelines = [numbers.of_pipeline(pipeline) for pipeline in range(numbers.width)]
            self._groups[channel] = lane_groups(lowered.lanes, self._control, self._backend, pipelines, device)
        self._placed = lowered, self._in_one_order(lowered)

    def _in_one_order(self, lowered: Lowered) -> Lowered:
        """Place the RECVs on rank 0, which has all programs, and hand each rank its own."""
        made = list[Lowered]()

        def make() -> HandedOut:
            decided = reports_wait(lowered.schedule, self._grid.width)
            made.append(with_report_places(in_one_order(lowered), decided=decided, in_order=True))
            one_order(issued(made[0], _BATCHES))
            return HandedOut(made[0].window, lambda other: part_of_rank(made[0], self._grid.numbers.place(other)[1]))

        window, own = hand_out(make, "ordering messages", self._control)
        return made[0] if made else own_program(replace(lowered, window=window), self._grid.local[0].rank, own)

    def placed(self, lowered: Lowered) -> Lowered:
        """Return what `prepare` has made of a schedule of the training."""
        return self._placed[1] if self._placed is not None and self._placed[0] is lowered else lowered

    def make(self, lowered: Lowered, channel: Channel, priority: TransferPriority) -> Mapping[RankKey, Transport]:
        """Make that of the only rank of this process."""
        (key,), ranks = self._grid.local, _ranks_here(self._grid)
        if channel is Channel.EVALUATION:
            settings = self._control, ranks, channel, self._device, priority, self._grid.patience
            return {key: GlooTransport(key.rank, lowered.lanes, lowered.window, *settings)}
        groups = self._groups[channel][key.pipeline]
        own = self._device, ranks, channel, self._grid.patience
        return {key: NcclTransport(key.rank, groups, lowered.window, self._control, *own)}


def _ranks_here(grid: RankGrid) -> list[int]:
    """The ranks in the process group of this process's pipeline."""
    return grid.numbers.of_pipeline(grid.local[0].pipeline)
