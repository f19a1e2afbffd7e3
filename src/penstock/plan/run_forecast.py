"""What a run is expected to do, with any method, and what that costs by a profile: its schedule, and times of stages.

Messages take the time of the longest. Corrections of staleness take none beside updates, which a profile has without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.cluster.rank_links import rank_links
from penstock.plan.profile.layer_graph import LayerGraph, layer_graph
from penstock.plan.profile.schema import Profile
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.schedule.add_options import extend
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.rank_numbers import RankNumbers, RankOrder
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.schedule.ir.sharding import REPLICATED
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.machine.shared_machine import SharedCores
from penstock.schedule.methods.compatibility import sharding_of
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.proof.proof import Proof
from penstock.schedule.transforms.batch_ops import what_decides
from penstock.schedule.transforms.recompute import Segments
from penstock.schedule.transforms.unfuse import taken_apart
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.sharding_traffic import Network

_FAST = 1e30  # bytes per second of a link that takes no time
_NO_BYTES = 1e-30  # of a network, which has to carry something


@dataclass(frozen=True)
class RunSettings:
    """How a run was configured.

    Attributes:
        method: a row of the method table.
        stages: ranks of a pipeline.
        width, microbatches, microbatch_size: of the run.
        recompute: of each stage, whether forwards are run again, block by block.
        balance: blocks of each stage.
        whole: stages that are recomputed as a whole, in actions of their own.
        segments: how many of these do so together.
        options: of the order.
        rule: another version rule than the method's.
        window: messages that may be outstanding on a lane; that of the proof if None.
        sharding: what parallel pipelines divide; that of the method if None.
        decides: updates wait for all stages; as the profile was measured if None.
        tensor: processes that share each stage.
        rank_order: of the run.
    """

    method: str
    stages: int
    width: int
    microbatches: int
    microbatch_size: int
    recompute: tuple[bool, ...]
    balance: tuple[int, ...]
    whole: frozenset[int] = frozenset()
    segments: Segments = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None
    window: int | None = None
    sharding: str | None = None
    decides: bool | None = None
    tensor: int = 1
    rank_order: RankOrder = "tp-pp-dp"

    @property
    def numbers(self) -> RankNumbers:
        return RankNumbers(self.width, self.stages, self.rank_order)


def stages_decide(profile: Profile) -> bool:
    """Return whether updates of a profiled run wait for all stages; those of parallel pipelines always do."""
    settings = profile.settings
    clips, fp16 = settings.get("max_grad_norm", 1.0) is not None, settings.get("precision") == "fp16"
    return bool(what_decides(clips, fp16, fp16, 1, None, profile.tensor_parallel))


def run_forecast(profile: Profile, settings: RunSettings, devices: Devices | None = None) -> tuple[Proof, Costs]:
    """Return the proof of what a run does, and what it costs by a profile.

    Args:
        profile: of the model.
        settings: of the run.
        devices: on which it runs; those that were profiled if None.

    Raises:
        ConfigError: the profile is of another model or of blocks that other numbers of processes share, lacks the
            microbatch size or what the method asks of it, or the stages of the method are no chain.
        ScheduleError: there is no such schedule.
    """
    if profile.tensor_parallel != settings.tensor:
        raise ConfigError(
            f"the run has tensor_parallel={settings.tensor}, but the profile was measured with "
            f"{profile.tensor_parallel}, where passes take other times; measure one with penstock profile --set "
            f"tensor_parallel={settings.tensor}"
        )
    size = settings.microbatch_size if profile.microbatch_sizes else None
    graph = layer_graph(profile, size)
    if sum(settings.balance) != len(graph.layers):
        raise ConfigError(
            f"the run has {sum(settings.balance)} blocks, the profile {len(graph.layers)}; take that of its model"
        )
    unknown = next((layer.name for layer in graph.layers if layer.forward is None), None)
    if unknown is not None:
        raise ConfigError(f"layer {unknown!r} of the profile has options only; forward and backward are needed")
    proof = _proof(settings, stages_decide(profile) if settings.decides is None else settings.decides)
    if proof.schedule.num_stages != len(settings.balance):
        raise ConfigError(
            f"{settings.method} has {proof.schedule.num_stages} stages, but the blocks of {len(settings.balance)} are "
            "given"
        )
    return proof, _costs(proof.schedule, graph, settings, devices or profiled_devices(profile, settings))


def profiled_devices(profile: Profile, settings: RunSettings) -> Devices:
    """Return the devices that were profiled, as many as a run takes."""
    link = profile.links[0] if profile.links else None
    level = DeviceLevel(settings.stages * settings.width, link.bandwidth if link else _FAST / 10)
    latency, work = (link.latency, (link.work, link.work_per_byte)) if link else (0.0, (0.0, 0.0))
    between, update = profile.in_runs.between, profile.update_in_runs
    return Devices((level,), None, latency, profile.cores, link_work=work, between=between, update=update)


def _proof(settings: RunSettings, decides: bool) -> Proof:
    """Return the proof of what a run does.

    Raises:
        ConfigError: its stages are no chain.
        ScheduleError: there is no such schedule.
    """
    row = find_method(settings.method)
    if row.divides_head:
        raise ConfigError(f"runs of {row.name!r} cannot be compared with a profile, as their stages are no chain")
    sizes = row.name, settings.stages, settings.microbatches, settings.rule
    request = ScheduleRequest(*sizes, options=settings.options, window=settings.window, sharding="none")
    plain = taken_apart(request.schedule)
    return extend(
        plain,
        decides=decides or settings.width > 1 or RULES[plain.rule].provisional,
        reduces=settings.width > 1,
        recomputes=settings.whole,
        segments=settings.segments,
        sharding=sharding_of(row, settings.sharding),  # behind recomputes, also where the method has it by itself
    )


def _ranks_of_stages(schedule: Schedule) -> list[list[int]]:
    """Return the ranks that hold each stage, by direction."""
    ways = range(schedule.directions)
    return [[schedule.stage_at[stage, way].rank for way in ways] for stage in range(schedule.num_stages)]


def _costs(schedule: Schedule, graph: LayerGraph, settings: RunSettings, devices: Devices) -> Costs:
    """Return the times of stages and messages."""
    chain, cuts = BlockChain(graph, 2.0), np.array([0, *accumulate(settings.balance)])
    halved = bool(schedule.operations & {Op.I, Op.W})
    passes = chain.halved if halved else chain.passes
    if passes is None:
        raise ConfigError(
            f"backwards of {settings.method} come in two halves, which the profile does not tell apart; take one that "
            "penstock profile has measured"
        )
    stages, ranks = schedule.num_stages, _ranks_of_stages(schedule)
    borders = [(s, pair) for s in range(1, stages) for pair in zip(ranks[s - 1], ranks[s], strict=True)]
    borders = [(stage, pair) for stage, pair in borders if len(set(pair)) > 1]
    between, links = sorted({stage for stage, _ in borders}), rank_links(devices, settings.numbers)
    crossing = chain.crossing[cuts[np.array([stage for stage, _ in borders], int)]] / schedule.slices
    transfer, slices = crossing / links.along([pair for _, pair in borders]), schedule.slices
    where = cuts, np.array(settings.recompute), between, devices, settings.stages * settings.width
    forward, first, second = chain.stage_times(passes, *where, slices=slices)
    holders, divided = settings.width * schedule.directions, schedule.sharding != REPLICATED
    parameters = float(chain.parameters[cuts[:-1], cuts[1:]].max())
    steps = np.diff(chain.steps[cuts]) / (holders if divided else 1)
    steps = steps + devices.update * chain.updates[cuts[:-1], cuts[1:]]
    network = None
    if divided:
        carried = max(parameters, _NO_BYTES)
        network = Network.of_scatter(schedule, settings.width, carried, links.scatter(carried, ranks))
    return Costs(
        tuple(StageCost(*map(float, each)) for each in zip(forward, first, second, steps, strict=True)),
        latency=links.latency,
        decision=links.decision,
        transfer=float(transfer.max(initial=0.0)),
        collective=2 * links.scatter(parameters, ranks),
        network=network,
        cores=None if devices.cores is None else SharedCores(devices.cores / settings.width),  # in step
    )
