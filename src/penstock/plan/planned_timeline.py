"""The best plan by simulation, played: its timeline, and what its ranks wait for; and what would make it faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.idle_time import Idle, split_time
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.candidate_times import CandidateTimes
from penstock.plan.candidates.planned_methods import activations_of, method_of
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.planning import Planning, PlanRequest, make_plan
from penstock.plan.profile.schema import MOST_DEVICES, Profile, scaled
from penstock.plan.run_forecast import stages_decide
from penstock.plan.simulated.candidate_trial import NAME
from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.ir.rank_numbers import RANK_ORDERS
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline

_DRAWN = 3  # batches
_MOST_DRAWN = 20_000  # passes
_SETTLED = 8  # batches, whose beginning and end count little beside the others
_MOST_COUNTED = 1_000  # passes in them, as these take a second


def planned_timeline(planning: Planning, batches: int = _DRAWN) -> Timeline:
    """Return the timeline of a few batches of the best plan.

    Raises:
        ConfigError: it was not found by simulation, or has too many passes.
    """
    if not planning.plans or planning.request.cost != NAME:
        raise ConfigError("timelines are those of plans that --cost simulated finds")
    plan, request = planning.plans[0], planning.request
    settings, sized = plan.settings, planning.sizes[plan.samples]
    if settings["stages"] * settings["microbatches"] * batches > _MOST_DRAWN:
        raise ConfigError(
            f"a timeline of {settings['stages']} x {settings['microbatches']} passes is too long to be drawn; plan for "
            "a smaller batch"
        )
    method, sharding = method_of(plan.planner, settings), settings.get("sharding", "none")
    away = "offload_optimizer" in settings
    on = tuple(stage.on for stage in plan.stages[: settings["stages"]] if stage.on is not None)
    order = settings.get("rank_order", RANK_ORDERS[0])
    offloads = "offload" in settings
    candidate = Candidate(sized, method, settings["stages"], settings["width"], sharding, away, on, order, offloads)
    activations = activations_of(settings, method.ranks(candidate.depth))
    known = KnownSchedules(stages_decide(request.profile))
    times = CandidateTimes(candidate, BlockChain(sized.graph, 2.0), request.devices, known)
    costs = times.costs(np.array([0, *accumulate(settings["balance"])]), activations)
    return simulate_schedule(known.proof(times.schedule(activations), away), costs, batches).timeline


def planned_idle_shares(planning: Planning) -> dict[str, float]:
    """Return the shares of the best plan's time that its ranks are idle, by cause; empty if it has too many passes.

    Raises:
        ConfigError: it was not found by simulation.
    """
    settings = planning.plans[0].settings
    if settings["stages"] * settings["microbatches"] * _SETTLED > _MOST_COUNTED:
        return {}
    return idle_shares(planned_timeline(planning, _SETTLED))


def idle_shares(timeline: Timeline) -> dict[str, float]:
    """Return the share of the time of all ranks that is idle, by cause; the largest first."""
    split = split_time(timeline)
    total = timeline.ranks * split.makespan or 1.0
    shares = {cause: sum(getattr(idle, cause) for idle in split.idle) / total for cause in Idle._fields}
    return dict(sorted(((c, s) for c, s in shares.items() if s > 0), key=lambda each: -each[1]))


class WhatIf(NamedTuple):
    """A change, and what the best plan would take with it.

    Attributes:
        change: in words.
        seconds: per sample, with a plan made anew; None if none fits.
        gain: by what factor it is faster.
    """

    change: str
    seconds: float | None
    gain: float | None


def what_would_help(planning: Planning) -> list[WhatIf]:
    """Return what twice of each resource would bring, each with a plan of its own; what helps most comes first."""
    request, found = planning.request, list[WhatIf]()
    before = planning.plans[0].seconds_per_sample if planning.plans else None
    for change, other in _changes(request):
        plans = make_plan(other).plans
        seconds = plans[0].seconds_per_sample if plans else None
        found.append(WhatIf(change, seconds, before / seconds if before and seconds else None))
    return sorted(found, key=lambda each: math.inf if each.seconds is None else each.seconds)


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    devices = request.devices
    twice = replace(devices, update=devices.update / 2)
    yield "devices twice as fast", replace(request, profile=_faster(request.profile), devices=twice)
    if devices.count > 1:
        levels = tuple(replace(level, bandwidth=2 * level.bandwidth) for level in devices.levels)
        links = None if request.links is None else 2 * request.links
        yield "links of twice the bandwidth", replace(request, devices=replace(devices, levels=levels), links=links)
    if any(devices.latencies):
        half = devices.with_latencies([each / 2 for each in devices.latencies])
        yield "links of half the latency", replace(request, devices=half)
    if devices.memory is not None:
        yield "twice the memory", replace(request, devices=_with_more_memory(devices))
    offloads = request.cost == "dawnpiper" or (request.cost == NAME and devices.memory is not None)
    if devices.host is not None and offloads and not devices.kinds:
        yield "twice the bandwidth to the host", replace(request, devices=replace(devices, host=2 * devices.host))
    yield from _more_devices(request)
    if devices.cores is not None:
        yield "twice as many cores", replace(request, devices=replace(devices, cores=2 * devices.cores))


def _more_devices(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield a request with twice as many devices, where their links are known and there may be as many."""
    devices = request.devices
    if request.links is not None or 2 * devices.count > MOST_DEVICES:
        return
    last = devices.levels[-1]
    more = (*devices.levels[:-1], replace(last, units=2 * last.units))
    kinds = tuple(replace(kind, count=2 * kind.count) for kind in devices.kinds)
    yield "twice as many devices", replace(request, devices=replace(devices, levels=more, kinds=kinds))


def _with_more_memory(devices: Devices) -> Devices:
    """Return devices that hold twice as much."""
    kinds = tuple(replace(kind, memory=kind.memory and 2 * kind.memory) for kind in devices.kinds)
    return replace(devices, memory=devices.memory and 2 * devices.memory, kinds=kinds)


def _faster(profile: Profile) -> Profile:
    """Return a profile whose work takes half the time."""
    layers = []
    for layer in profile.layers:
        options = [option.model_copy(update={"seconds": scaled(option.seconds, 0.5)}) for option in layer.options]
        layers.append(layer.with_times(0.5, 0.5, (0.5, 0.5), 0.5).model_copy(update={"options": options}))
    return profile.model_copy(update={"layers": layers, "update": profile.update / 2})
