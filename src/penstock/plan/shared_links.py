"""Plans simulated again where the devices of a server share one link to others: what is under way there divides it.

While plans are searched for, every device has its part of the link to itself. Here a message has all of it unless
others are under way at the same time. Replicas of a stage do the same at the same time, so the messages of those that
leave a server together divide it. Of a sum over replicas on several servers one part leaves each. Sums of replicas on
one server count as if they went over the link, too, which takes little time, as they are as fast as its own links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.plan.candidates.planned_methods import steady_spans
from penstock.plan.cluster.rank_links import rank_links
from penstock.plan.profile.schema import Profile
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.plan.simulated.chosen_plan import in_order
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import BUBBLE, LINKS, SUMS, UPDATES, Plan, StageRating
from penstock.schedule.ir.rank_numbers import RANK_ORDERS
from penstock.schedule.machine.shared_machine import SharedLinks
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

_MOST_PASSES = 1 << 11  # forwards of a batch of a pipeline; all is played in the order of time


def with_shared_links(plans: Sequence[Plan], profile: Profile, devices: Devices) -> list[Plan]:
    """Return plans that were found by simulation, with the times of shared links, the fastest first."""
    return sorted(
        (_simulated_again(plan, profile, devices) for plan in plans), key=lambda plan: plan.seconds_per_sample
    )


def _simulated_again(plan: Plan, profile: Profile, devices: Devices) -> Plan:
    """Return a plan with the order of ranks that is faster where links are shared, if it has several."""
    settings = _settings(plan)
    passes, inner = len(settings.balance) * settings.microbatches, devices.levels[0].units
    if settings.width * settings.stages <= inner:
        return plan
    if "offload" in plan.settings:
        note = "not simulated with shared links, as it moves activations to the memory of the host"
        return replace(plan, notes=(*plan.notes, note))
    if passes > _MOST_PASSES:
        note = f"not simulated with shared links: {passes:,} forwards of a batch are more than {_MOST_PASSES:,}"
        return replace(plan, notes=(*plan.notes, note))
    orders = RANK_ORDERS if "rank_order" in plan.settings else (settings.rank_order,)
    try:
        by_order = {order: _batch(plan, profile, replace(settings, rank_order=order), devices) for order in orders}
    except ScheduleError as error:
        return replace(plan, notes=(*plan.notes, f"not simulated with shared links: {error}"))
    order = min(by_order, key=lambda each: (by_order[each], each != settings.rank_order))
    if len(by_order) > 1:
        plan = in_order(plan, order, max(by_order.values()))
    batches = settings.microbatches * settings.width
    seconds, before = by_order[order] / batches, plan.rating.seconds
    note = f"with the links of servers shared, one more batch takes {by_order[order]:.4g} s"
    ratings = tuple(_later(each, (seconds - before) / plan.chunks, settings.stages) for each in plan.rating.stages)
    return replace(plan, rating=replace(plan.rating, seconds=seconds, stages=ratings), notes=(*plan.notes, note))


def _batch(plan: Plan, profile: Profile, settings: RunSettings, devices: Devices) -> float:
    """Return what one more batch of a long run takes.

    Raises:
        ScheduleError: there is no such schedule.
    """
    proof, costs = run_forecast(profile, settings, devices)
    inner, (ranks, leaving) = devices.levels[0], _on_servers(settings, devices.levels[0].units)
    batches = settings.microbatches * settings.width
    if "offload_optimizer" in plan.settings:  # its updates wait for copies, which the profile does not know
        stages = zip(costs.stages, plan.rating.stages, strict=True)
        costs = replace(costs, stages=tuple(replace(each, step=batches * by.parts[UPDATES]) for each, by in stages))
    if ranks < settings.stages:
        costs = replace(costs, transfer=costs.transfer * leaving / inner.units)
    if devices.collectives == "ring" and len({n // inner.units for n in settings.numbers.of_rank(0)}) > 1:
        costs = _around_whole_links(costs, rank_links(devices, settings.numbers).scatter(0.0), devices)
    costs = replace(costs, links=SharedLinks(ranks))
    spans = steady_spans(proof.schedule.rule)
    short, long = (simulate_schedule(proof, costs, each).bubble.makespan for each in spans)
    return (long - short) / (spans[1] - spans[0])


def _around_whole_links(costs: Costs, latency: float, devices: Devices) -> Costs:
    """Return costs where rings over several servers have their links, of which a device has a part.

    Args:
        costs: with rings that have the part of one device.
        latency: seconds of a reduce-scatter of nothing.
        devices: that share the links of their servers.
    """
    inner = devices.levels[0]
    whole = max(min(inner.units, inner.bandwidth / devices.bandwidth), 1.0)  # the link, over a device's part
    collective = 2 * latency + (costs.collective - 2 * latency) / whole
    network = costs.network
    if network is not None:
        gathered = (network.width - 1) / network.width * network.parameters
        network = replace(network, bandwidth=gathered / (latency + (gathered / network.bandwidth - latency) / whole))
    return replace(costs, collective=collective, network=network)


def _on_servers(settings: RunSettings, inner: int) -> tuple[int, int]:
    """Return how many ranks of a pipeline follow each other on a server, and how many messages leave it at once.

    Args:
        settings: of the run, whose pipelines are in step.
        inner: devices of a server.
    """
    of_ranks = [[number // inner for number in settings.numbers.of_pipeline(each)] for each in range(settings.width)]
    leaving = [Counter(row[r] for row in of_ranks if row[r] != row[r + 1]) for r in range(settings.stages - 1)]
    ranks = next((rank for rank, found in enumerate(leaving, 1) if found), settings.stages)
    return ranks, max((count for found in leaving for count in found.values()), default=1)


def _later(stage: StageRating, seconds: float, depth: int) -> StageRating:
    """Return what a stage costs if its rank waits longer for messages and sums.

    How long it waits for nothing else remains the same, so what both take together is known; its parts are taken to
    be as they were.

    Args:
        stage: as it was.
        seconds: for each microbatch, negative if it waits less.
        depth: ranks of a pipeline.
    """
    waits = {name: stage.parts[name] for name in (LINKS, SUMS) if name in stage.parts}
    before = sum(waits.values())
    after = before + seconds
    if before:
        waits = {name: max(after, 0.0) * wait / before for name, wait in waits.items()}
    else:
        waits[LINKS if depth > 1 else SUMS] = max(after, 0.0)
    return replace(stage, parts={**stage.parts, **waits, BUBBLE: max(stage.parts[BUBBLE] + min(after, 0.0), 0.0)})


def _settings(plan: Plan) -> RunSettings:
    keys = plan.settings
    balance = tuple(keys["balance"])
    modes = keys["recompute"]
    each = [modes] * len(balance) if isinstance(modes, str) else modes
    sizes = keys["stages"], keys["width"], keys["microbatches"], keys["microbatch_size"]
    again = tuple(mode == "block" for mode in each)
    options, sharding = keys.get("options", {}), keys.get("sharding")
    order = keys.get("rank_order", RANK_ORDERS[0])
    return RunSettings(keys["method"], *sizes, again, balance, options=options, sharding=sharding, rank_order=order)
