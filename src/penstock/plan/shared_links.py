"""Plans simulated again where the devices of a server share one link to others: what is under way there divides it.

While plans are searched for, every device has its part of the link to itself. Here a message has all of it unless
others are under way at the same time. Replicas of a stage stand side by side and do the same at the same time, so one
pipeline has the link over the replicas on a server. Sums count as if they went over it, though replicas on one server
add over its own links, which takes little time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.plan.profile.schema import Profile
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, StageRating
from penstock.schedule.machine.sharing.shared_links import SharedLinks
from penstock.simulate.simulate import simulate_schedule

_MOST_PASSES = 1 << 11  # forwards of a batch of a pipeline; all is played in the order of time
_SPANS = (3, 5)  # batches: what two more of them take


def with_shared_links(plans: Sequence[Plan], profile: Profile, devices: Devices) -> list[Plan]:
    """Return plans that were found by simulation, with the times of shared links, the fastest first."""
    found = [_simulated_again(plan, profile, devices) for plan in plans]
    return sorted(found, key=lambda plan: plan.seconds_per_sample)


def _simulated_again(plan: Plan, profile: Profile, devices: Devices) -> Plan:
    settings = _settings(plan)
    depth, width, inner = settings.stages, settings.width, devices.levels[0].units
    if width * depth <= inner:
        return plan
    passes = len(settings.balance) * settings.microbatches
    if passes > _MOST_PASSES:
        note = f"not simulated with shared links: {passes:,} forwards of a batch are more than {_MOST_PASSES:,}"
        return replace(plan, notes=(*plan.notes, note))
    try:
        proof, costs = run_forecast(profile, settings, devices)
    except ScheduleError as error:
        return replace(plan, notes=(*plan.notes, f"not simulated with shared links: {error}"))
    links = SharedLinks(max(inner // width, 1))
    batches = settings.microbatches * width
    if "offload_optimizer" in plan.settings:  # its updates wait for copies, which the profile does not know
        stages = zip(costs.stages, plan.rating.stages, strict=True)
        costs = replace(costs, stages=tuple(replace(each, step=batches * by.parts["updates"]) for each, by in stages))
    costs = replace(costs, transfer=costs.transfer * min(width, inner) / inner, links=links)
    short, long = (simulate_schedule(proof, costs, batches).bubble.makespan for batches in _SPANS)
    batch = (long - short) / (_SPANS[1] - _SPANS[0])
    seconds, before = batch / batches, plan.rating.seconds
    note = f"with the links of servers shared, one more batch takes {batch:.4g} s"
    ratings = tuple(_later(each, (seconds - before) / plan.chunks) for each in plan.rating.stages)
    return replace(plan, rating=replace(plan.rating, seconds=seconds, stages=ratings), notes=(*plan.notes, note))


def _later(stage: StageRating, seconds: float) -> StageRating:
    """Return what a stage costs if its rank waits longer for each microbatch."""
    return replace(stage, parts={**stage.parts, "bubble": max(stage.parts["bubble"] + seconds, 0.0)})


def _settings(plan: Plan) -> RunSettings:
    """Return the settings of the run of a plan."""
    keys = plan.settings
    balance = tuple(keys["balance"])
    modes = keys["recompute"]
    each = [modes] * len(balance) if isinstance(modes, str) else modes
    sizes = keys["stages"], keys["width"], keys["microbatches"], keys["microbatch_size"]
    again = tuple(mode == "block" for mode in each)
    options, sharding = keys.get("options", {}), keys.get("sharding")
    return RunSettings(keys["method"], *sizes, again, balance, options=options, sharding=sharding)
