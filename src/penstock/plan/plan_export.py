"""Plans for programs: JSON, and the best one as a configuration of `penstock train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from penstock.byte_sizes import human_bytes
from penstock.checks import finite_or_none
from penstock.errors import ConfigError
from penstock.plan.planned_timeline import planned_idle_shares
from penstock.plan.planning import Planning
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.profile.schema import BY_FORMULAS, Profile
from penstock.plan.stages.device_hierarchy import Devices, places_in_words
from penstock.plan.stages.graph_cost import recompute_of
from penstock.plan.stages.planned import COMPUTE, UPDATES, Plan, PlannedStage, StageRating

PUBLISHED_METHODS: Mapping[str, str] = {
    "2bw-paper": "2bw",
    "dapple": "1f1b",
    "dawnpiper": "1f1b",
    "mist": "1f1b",
    "piper": "1f1b",
}
"""The method of a cost function, by its name; the order of others is none of the method table, or no pipeline."""


def planning_json(planning: Planning) -> dict[str, Any]:
    """Return everything as plain values; times are seconds, sizes bytes, and what does not fit takes null."""
    request = planning.request
    best = planning.plans[0] if planning.plans else None
    return {
        "profile": request.profile.name,
        "planner": request.planner,
        "cost": request.cost,
        "devices": request.devices.count,
        "levels": [
            {"units": level.units, "bandwidth": level.bandwidth, **({"latency": latency} if latency else {})}
            for level, latency in zip(request.devices.levels, request.devices.latencies, strict=True)
        ],
        "memory": request.devices.memory,
        "host_bandwidth": request.devices.host,
        "host_memory": request.devices.host_memory,
        **({"kinds": [vars(kind) for kind in request.devices.kinds]} if request.devices.kinds else {}),
        "objective": None if best is None else best.rating.seconds,
        "seconds_per_sample": None if best is None else best.seconds_per_sample,
        "plans": [_plan_json(planning, plan, rank) for rank, plan in enumerate(planning.plans, 1)],
        "left_out": dict(planning.left_out),
        "skipped": [{"what": each.what, "bound": each.bound} for each in planning.skipped],
    }


def _plan_json(planning: Planning, plan: Plan, rank: int) -> dict[str, Any]:
    sized = planning.sizes[plan.samples]
    slowest = plan.rating.slowest
    return {
        "rank": rank,
        "planner": plan.planner,
        "seconds_per_microbatch": plan.rating.seconds,
        "seconds_per_sample": plan.seconds_per_sample,
        "seconds_per_batch": plan.rating.seconds * sized.microbatches,
        "microbatches": sized.microbatches,
        "samples_per_microbatch": plan.samples,
        "devices": plan.devices,
        "settings": dict(plan.settings),
        "limit": {
            "stage": slowest,
            "part": plan.rating.stages[slowest].limit,
            **({} if rank > 1 or planning.excluded is None else {"memory_excludes": vars(planning.excluded)}),
        },
        "ratings": {name: finite_or_none(rating.seconds) for name, rating in planning.ratings(plan).items()},
        "stages": [
            _stage_json(stage, rating, sized.graph)
            for stage, rating in zip(plan.stages, plan.rating.stages, strict=True)
        ],
        "notes": list(plan.notes),
    }


def _stage_json(stage: PlannedStage, rating: StageRating | None, graph: LayerGraph) -> dict[str, Any]:
    """Return one stage; those inside a unit of a level of devices have no rating of their own."""
    found: dict[str, Any] = {
        "layers": [graph.layers[number].name for number in stage.layers],
        "devices": stage.devices,
        "replicas": stage.replicas,
        "tensor": stage.tensor,
    }
    if stage.ways:
        found["options"] = list(stage.ways)
    if stage.sharded:
        found["sharded"] = True
    if stage.offloaded:
        found["offloaded"] = True
    if stage.in_turns:
        found["in_turns"] = True
    if stage.on is not None:
        found |= {"on": list(stage.on.kinds), "speed": stage.on.speed, "memory_limit": stage.on.memory}
    if rating is not None:
        found |= {
            "seconds": rating.seconds,
            **{f"{part.replace(' ', '_')}_seconds": v for part, v in rating.parts.items()},
        }
        kinds = {"memory_by_kind": dict(rating.kinds)} if rating.kinds else {}
        found |= {"memory": rating.memory, **kinds, **({"on_host": rating.on_host} if rating.on_host else {})}
    if stage.inner:
        found["inner"] = [_stage_json(each, None, graph) for each in stage.inner]
    return found


def said_of_host(plan: Plan, devices: Devices) -> Iterator[str]:
    """Yield what a plan has in the memory of the host, and how fast that is taken to go there."""
    away = {stage: rating.on_host for stage, rating in enumerate(plan.rating.stages) if rating.on_host}
    if away:
        assert devices.host is not None, "it was planned with a bandwidth to the host"
        what = "activations" if "offload" in plan.settings else "optimizer states"
        held = ", ".join(f"{human_bytes(each)} of stage {stage}" for stage, each in away.items())
        yield (
            f"{what} in the memory of the host, at most for each device: {held}; copies are taken to go there at "
            f"{human_bytes(devices.host)}/s, and back as fast"
        )


def said_of_servers(plan: Plan, devices: Devices) -> Iterator[str]:
    """Yield how many ranks of a plan each server has, where they do not fill all servers that they use."""
    each = devices.levels[0].units
    full, rest = divmod(plan.devices, each)
    if len(devices.levels) > 1 and full and rest and plan.settings and not devices.kinds:
        some = f"{full} server{'s' if full > 1 else ''}"
        yield (
            f"{plan.devices} ranks do not fill servers of {each} devices: the first {full * each} fill {some} and the "
            f"next one has the other {rest}, as is predicted; start as many processes on each (docs/launchers.md)"
        )


def run_settings(planning: Planning) -> dict[str, Any]:
    """Return the keys of `penstock train` that run the best plan.

    Raises:
        ConfigError: it cannot be run.
    """
    assert planning.plans, "there is no plan"
    assert planning.request.cost is not None, "a planning has decided on one"
    plan = planning.plans[0]
    sized = planning.sizes[plan.samples]
    return dict(plan.settings) or published_run(planning.request.cost, plan, sized.graph, sized.microbatches)


def _predicted(planning: Planning) -> dict[str, Any]:
    """Return the seconds of a batch of the best plan, and of its stages and of idle time what is known of them.

    Where ranks share cores, passes take longer by the clock than they work, so nothing is said of them. Costs of other
    planners leave out the bubble, so of their plans nothing is predicted.
    """
    plan, cores = planning.plans[0], planning.request.devices.cores
    if not plan.settings:
        return {}
    microbatches = planning.sizes[plan.samples].microbatches

    def of_batch(seconds: float) -> float:
        return float(f"{seconds * microbatches:.6g}")

    found: dict[str, Any] = {"batch": of_batch(plan.rating.seconds)}
    if cores is not None and cores < plan.devices:
        return found
    for key, part in (("passes", COMPUTE), ("updates", UPDATES)):
        if all(part in stage.parts for stage in plan.rating.stages):
            found[key] = [of_batch(stage.parts[part]) for stage in plan.rating.stages]
    if idle := planned_idle_shares(planning):
        found["idle"] = {cause: float(f"{share:.4g}") for cause, share in idle.items()}
    return found


def plan_file(planning: Planning) -> str:
    """Return the best plan as a configuration of `penstock train`, with predictions, most of them in comments.

    Raises:
        ConfigError: it cannot be run.
    """
    settings = run_settings(planning)
    plan, request = planning.plans[0], planning.request
    memory = ", ".join(human_bytes(stage.memory or 0) for stage in plan.rating.stages)
    by = "" if plan.settings else f" by cost {request.cost}, which leaves out what else a run takes"
    said = [
        f"a plan of {request.profile.name} for {request.devices} devices: penstock train --plan FILE",
        f"predicted: {plan.seconds_per_sample:.6g} s per sample{by}; held by a device, stage by stage: {memory}",
        *said_of_model(request.profile),
    ]
    most = max(plan.rating.stages, key=lambda stage: stage.memory or 0)
    if most.kinds:
        kinds = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in most.kinds.items())
        said.insert(2, f"of the device that holds the most, at that moment: {kinds}")
    said += [*said_of_host(plan, request.devices), *said_of_servers(plan, request.devices)]
    if "placement" in plan.settings:
        said.append(f"{places_in_words(plan.settings['placement'], plan.settings['stages'])} (docs/launchers.md)")
        said += [str(kind) for kind in request.devices.kinds]
    predicted = _predicted(planning)
    both = model_settings(request.profile) | settings | ({"predicted": predicted} if predicted else {})
    values = yaml.safe_dump(both, sort_keys=False, default_flow_style=None)
    return "".join(f"# {line}\n" for line in said) + values


# --- plans by published costs -----------------------------------------------------------------------------------------


def published_run(cost: str, plan: Plan, graph: LayerGraph, microbatches: int) -> dict[str, Any]:
    """Return the keys of `penstock train` that run a plan.

    Args:
        cost: the function by which it is the best.
        plan: the plan.
        graph: of its layers, at its microbatch size.
        microbatches: of a batch, in all pipelines.

    Raises:
        ConfigError: no run does what it says; the message tells what.
    """
    stages, width = plan.stages, plan.stages[0].replicas
    parts = cost == "dapple"  # whose replicas share each microbatch
    count, what = (plan.samples, "samples of a microbatch") if parts else (microbatches, "microbatches")
    modes = [recompute_of(graph, stage) for stage in stages]
    faults = {
        f"cost {cost!r} is of an order that is no method of penstock": cost not in PUBLISHED_METHODS,
        "its stages are no chain of layers that follow each other": not _is_chain(stages),
        "its stages have different numbers of replicas": len({stage.replicas for stage in stages}) > 1,
        "it spreads layers over several devices": any(stage.tensor > 1 or stage.inner for stage in stages),
        "it swaps activations layer by layer": any("swap" in way for stage in stages for way in stage.ways),
        "some stage recomputes a part of its layers": None in modes,
        "only some stages divide their optimizer states": len({stage.sharded for stage in stages}) > 1,
        f"{count} {what} cannot be divided among {width} pipelines": count % width > 0,
    }
    for fault, applies in faults.items():
        if applies:
            raise ConfigError(f"the best plan cannot be run: {fault}; --cost simulated finds plans that can")
    found: dict[str, Any] = {"method": PUBLISHED_METHODS[cost], "stages": len(stages), "width": width}
    if stages[0].sharded and width > 1:
        found["sharding"] = "optimizer"
    return found | {
        "microbatches": microbatches if parts else microbatches // width,
        "microbatch_size": plan.samples // width if parts else plan.samples,
        "recompute": modes[0] if len(set(modes)) == 1 else modes,
        "balance": [len(stage.layers) for stage in stages],
    }


def _is_chain(stages: Sequence[PlannedStage]) -> bool:
    """Return whether stages hold runs of layers, one after the other, each on devices of its own."""
    layers = [layer for stage in stages for layer in stage.layers]
    return layers == list(range(len(layers))) and not any(stage.in_turns for stage in stages)


# --- the model --------------------------------------------------------------------------------------------------------


_NAMED = 4  # of frozen blocks


def model_settings(profile: Profile) -> dict[str, Any]:
    """Return the keys of `penstock train` for the model; where it has no such model, its name, which it refuses."""
    trained = {} if profile.freezes else dict(profile.settings)  # penstock train freezes nothing
    return trained or {"model": {"planned": profile.name}}


def said_of_model(profile: Profile) -> list[str]:
    """Return what the file of a plan says of its model, its data and its optimizer."""
    said = [f"profile: {' '.join(profile.source.split())}"] if profile.source else []
    if profile.freezes:
        names = [layer.name for layer in profile.layers if not layer.trained]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return [
            *said,
            "penstock train trains all parameters, but these blocks were planned frozen: "
            f"{', '.join(names[:_NAMED])}{more}",
            "divide the model in Python, with requires_grad_(False) on their parameters",
        ]
    if not profile.settings:
        return [
            *said,
            "penstock train does not know the model: set model.layers, model.width, .. of a GPT with as many blocks as",
            "balance adds up to; or divide blocks of your own in Python; data and optimizer are yours to set, too",
        ]
    if profile.source.startswith(BY_FORMULAS):
        return [*said, "for the model whose shape was planned; data and optimizer are yours to set"]
    return [*said, "for the model, the data and the optimizer that were profiled"]
