"""What actions cost, in any unit of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.checks import in_short
from penstock.errors import ConfigError
from penstock.guarded_files import parse_json, read_given
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.ir.limits import MOST_COST
from penstock.schedule.ir.schedule import Action, Op, Schedule
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.message_lanes import Latency, MessageObserver, latency_between
from penstock.schedule.machine.play import Machine, Observer
from penstock.schedule.machine.shared_machine import SharedCores, SharedLinks, SharedMachine, Sharing
from penstock.simulate.sharding_traffic import Network


@dataclass(frozen=True, repr=False)
class StageCost(ShortRepr):
    """How long the passes of one microbatch take on one stage, in any unit.

    Attributes:
        forward: a forward, also one that is run again (F, R, REDO).
        backward_input: the half of a backward that computes the gradient of the input (I).
        backward_weight: the half that computes those of the weights (W); a whole backward (B) takes the sum of both.
        step: an optimizer update.
        copy: to move its activations to the host's memory or back; None for that of `Costs`.
    """

    forward: float
    backward_input: float
    backward_weight: float
    step: float = 0.0
    copy: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _check_times(self)


@dataclass(frozen=True, repr=False)
class Costs:
    """How long actions take, for `ProvenSchedule.simulate`; `Costs.uniform` gives every rank the same times.

    Attributes:
        stages: the times of each stage.
        latency: time from posting a message to its arrival; it occupies no rank. Links that differ have one each: a
            tuple, first that of ranks 0 and 1, then that of ranks 1 and 2, and so on. Between others the longest of the
            links from one to the other counts.
        transfer: time that a message occupies its lane, its bytes over the bandwidth, before its latency begins; the
            next message of the lane follows it. It occupies no rank.
        network: what gathers and sums of a sharded schedule cost; None for `collective`.
        collective: time of a sum, average or gather over several ranks (REDUCE, TIE, AVERAGE, GATHER).
        copy: time to move the activations of a microbatch on one stage to the host's memory or back (OFFLOAD,
            FETCH), their bytes over the bandwidth, where `stages` do not say. It occupies a lane of its own, not the
            rank.
        swap: time to move the optimizer state of a stage to the host's memory or back (SWAPIN, SWAPOUT), on that lane.
        fused: time of a fused action as a fraction of the sum of its parts.
        decision: time of a decision of all stages, a few bytes to one rank and back; None for twice the longest
            latency.
        left: the fraction of a microbatch's activations that is kept between the two halves of its backward (I and W);
            above 1 if gradients take more.
        send, receive: time that a message takes its sender before it is posted, and its receiver at the beginning of
            the action that consumes it.
        cores: which ranks share the cores of a host (`penstock.SharedCores`); None if each has its own. While there are
            not enough, all takes longer but `latency`, `transfer`, copies, and collectives without the work of
            `network`.
        links: which ranks share the link of a host (`penstock.SharedLinks`), so that `transfer`, gathers and sums take
            longer while several are under way; None if each lane has one of its own.
        slices: the share of each slice of a sequence in the time of a microbatch; empty if all take the same.
    """

    stages: tuple[StageCost, ...]
    latency: Latency = 0.0
    transfer: float = 0.0
    collective: float = 0.0
    fused: float = 1.0
    left: float = 1.0
    network: Network | None = None
    copy: float = 0.0
    swap: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    cores: SharedCores | None = None
    links: SharedLinks | None = None
    slices: tuple[float, ...] = ()
    decision: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _check_stages(self.stages)
        _check_times(self)
        _check_slices(self.slices)

    def __repr__(self) -> str:
        """Return the times; of stages that are all alike those of one."""
        alike = len(set(self.stages)) == 1
        stages = f"{len(self.stages)} x {self.stages[0]!r}" if alike else f"{len(self.stages)} stages"
        more = dict.fromkeys(("transfer", "collective", "copy", "swap", "send", "receive"), 0.0)
        more |= {"fused": 1.0, "left": 1.0}
        latency = f", latency={_short(self.latency)}" if self.longest_latency else ""
        sliced = f", slices={self.slices}" if self.slices else ""
        others = "".join(f", {key}={getattr(self, key):g}" for key, v in more.items() if getattr(self, key) != v)
        shared = "".join(f", {each}" for each in (self.cores, self.links) if each is not None)
        return f"<Costs of {stages}{latency}{others}{sliced}{shared}>"

    @classmethod
    def uniform(
        cls,
        schedule: Schedule,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        latency: Latency = 0.0,
        step: float = 0.0,
    ) -> Costs:
        """Give every rank's whole share the same times; a rank with v stages of a pipeline spends 1/v on each.

        Raises:
            ConfigError: copies of a stage lie on ranks with different numbers of stages, so that it has no one time.
        """
        shares = [
            {schedule.chunks[n] for n in schedule.stages if n.index == index} for index in range(schedule.num_stages)
        ]
        unclear = [index for index, found in enumerate(shares) if len(found) > 1]
        if unclear:
            raise ConfigError(
                f"the ranks that hold stage {unclear[0]} hold different numbers of stages, so that it has no one time; "
                "give every stage its own"
            )
        times = (forward, backward_input, backward_weight, step)
        return cls(tuple(StageCost(*(time / v for time in times)) for (v,) in shares), latency)

    def latencies(self, ranks: int) -> tuple[float, ...]:
        """Return the latencies of the links between neighbouring ranks."""
        return tuple(latency_between(self.latency, rank, rank + 1) for rank in range(ranks - 1))

    @property
    def longest_latency(self) -> float:
        """That of the slowest link."""
        return max(self.latency, default=0.0) if isinstance(self.latency, tuple) else self.latency

    def slow_down(self, ranks: int) -> bool:
        """Return whether ranks slow each other down, or messages take them time: that is played, not compiled."""
        if self.send or self.receive or self.links is not None:
            return True
        return self.cores is not None and not (self._work_of_transfers is None and self.cores.suffice(ranks))

    def machine(self, lowered: Lowered, observer: Observer, on_message: MessageObserver | None = None) -> Machine:
        """Return a machine that plays a schedule with these times."""
        usual = lowered, self.duration, self.latency, observer, on_message, self.transfer
        if not self.slow_down(lowered.schedule.ranks):
            return Machine(*usual)
        return SharedMachine(*usual, Sharing(self.cores, self.links, self.receive, self._work_of_transfers))

    @property
    def _work_of_transfers(self) -> Callable[[Action], float] | None:
        return self.network.work_for if self.network is not None and self.network.work else None

    def duration(self, action: Action) -> float:
        """Return the time that an action occupies its lane."""
        if action.parts:
            return self.fused * sum(self.duration(p) for p in action.parts)
        cost, unit = self.stages[action.stage.index], action.unit
        amount = unit.count * self._share(unit.slice)
        match action.op:
            case Op.F | Op.R | Op.REDO:
                return cost.forward * amount
            case Op.B:
                return (cost.backward_input + cost.backward_weight) * amount
            case Op.I:
                return cost.backward_input * amount
            case Op.W:
                return cost.backward_weight * amount
            case Op.STEP:
                return cost.step
            case Op.REDUCE | Op.GATHER if self.network is not None:
                return self.network.time(action) + self.network.work_for(action)
            case Op.REDUCE | Op.TIE | Op.AVERAGE | Op.GATHER:
                return self.collective
            case Op.OFFLOAD | Op.FETCH if action.peer is None:
                return (self.copy if cost.copy is None else cost.copy) * amount
            case Op.SWAPIN | Op.SWAPOUT:
                return self.swap
            case Op.SEND:
                return self.send
            case Op.DECIDE:
                return 2 * self.longest_latency if self.decision is None else self.decision
            case _:
                return 0.0

    def _share(self, piece: tuple[int, int] | None) -> float:
        """Return the share of a slice in the time of a microbatch.

        Raises:
            ConfigError: there are others than those that shares are given of.
        """
        if piece is None:
            return 1.0
        if not self.slices:
            return 1.0 / piece[1]
        if len(self.slices) != piece[1]:
            raise ConfigError(
                f"slices: the schedule has {piece[1]} slices of each sequence, but shares of {len(self.slices)} are "
                "given"
            )
        return self.slices[piece[0]]


def _check_times(costs: StageCost | Costs) -> None:
    for name, value in vars(costs).items():
        if name in ("stages", "network", "cores", "links", "slices"):
            continue
        if value is None and name == ("copy" if isinstance(costs, StageCost) else "decision"):
            continue
        if isinstance(value, tuple) and name == "latency":
            if not all(map(_is_time, value)):
                raise ConfigError(f"latency must have numbers from 0 to {MOST_COST:g} for links; got {in_short(value)}")
        elif not _is_time(value):
            raise ConfigError(f"{name} must be a number from 0 to {MOST_COST:g}; got {in_short(value)}")


def _is_time(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= MOST_COST


def _short(latency: Latency) -> str:
    return in_short(latency, 60) if isinstance(latency, tuple) else f"{latency:g}"


def check_links(latency: Latency, ranks: int) -> None:
    """Refuse latencies of links that are not those of a chain of ranks.

    Raises:
        ConfigError: there are more or fewer links.
    """
    if isinstance(latency, tuple) and len(latency) != ranks - 1:
        raise ConfigError(
            f"latency: {ranks} ranks have {ranks - 1} links between neighbours, latencies of {len(latency)} are given"
        )


def _check_stages(stages: object) -> None:
    if not isinstance(stages, tuple) or not stages or not all(isinstance(cost, StageCost) for cost in stages):
        raise ConfigError(
            f"stages must be a StageCost for each stage, such as (StageCost(1, 1, 1),) * 4; got {in_short(stages)}. "
            "For the same times on every rank: Costs.uniform(plan.schedule, forward=1.0)"
        )


def _check_slices(slices: object) -> None:
    if not isinstance(slices, tuple) or not all(isinstance(share, int | float) and share >= 0 for share in slices):
        raise ConfigError(
            f"slices must be shares of the time of a microbatch, such as (0.5, 0.25, 0.25); got {slices!r}"
        )
    if slices and not math.isclose(sum(slices), 1.0):
        raise ConfigError(f"slices: the shares of all slices must add up to 1, not to {sum(slices):g}")


def of_every_rank(costs: Costs, ranks: int) -> Costs:
    """Return costs of a stage on every rank; those of one stage are taken for all."""
    return replace(costs, stages=costs.stages * ranks) if len(costs.stages) == 1 else costs


def read_stage_costs(path: Path, num_stages: int | None, latency: Latency = 0.0, transfer: float = 0.0) -> Costs:
    """Read costs from JSON: a list with, for each stage, forward, backward_input, backward_weight[, step[, copy]].

    Args:
        path: the file.
        num_stages: how many stages it must describe; None for any number.
        latency, transfer: of `Costs`.

    Raises:
        ConfigError: the file is missing, not of this form, or has another number of stages.
    """
    try:
        rows = parse_json(read_given(path))
    except OSError as error:
        raise ConfigError(f"cannot read the per-stage costs in {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list) or (num_stages is not None and len(rows) != num_stages):
        found = f"{len(rows)} entries" if isinstance(rows, list) else type(rows).__name__
        count = "" if num_stages is None else f"{num_stages} "
        raise ConfigError(f"{path} must hold a list with one entry for each of the {count}stages; it holds {found}")
    stages = []
    for number, row in enumerate(rows):
        try:
            stages.append(StageCost(**row))
        except (TypeError, ConfigError):
            raise ConfigError(
                f"{path}, stage {number}: expected forward, backward_input, backward_weight and optionally step and "
                f"copy, all from 0 to {MOST_COST:g}; got {in_short(row)}"
            ) from None
    return Costs(tuple(stages), latency, transfer)
