"""Plans for people and for programs: the ranked table, the stages of the best one, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.checks import finite_or_none
from penstock.plan.planning import Planning
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, StageRating
from penstock.schedule.methods.find_method import find_method

_MOST_SKIPPED = 8  # lines
_PART_NAMES = {"compute": "compute", "links": "links", "sums": "gradient sums", "bubble": "bubble"}


def planning_json(planning: Planning) -> dict[str, Any]:
    """Return everything as plain values; times are seconds, sizes bytes, and what does not fit takes null."""
    request = planning.request
    best = planning.plans[0] if planning.plans else None
    return {
        "profile": request.profile.name,
        "planner": request.planner,
        "cost": request.cost,
        "devices": request.devices.count,
        "levels": [{"units": level.units, "bandwidth": level.bandwidth} for level in request.devices.levels],
        "memory": request.devices.memory,
        "objective": None if best is None else best.rating.seconds,
        "seconds_per_sample": None if best is None else best.seconds_per_sample,
        "plans": [_plan_json(planning, plan, rank) for rank, plan in enumerate(planning.plans, 1)],
        "left_out": dict(planning.left_out),
        "skipped": [{"what": each.what, "bound": each.bound} for each in planning.skipped],
    }


def _plan_json(planning: Planning, plan: Plan, rank: int) -> dict[str, Any]:
    """Return one plan."""
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
        "limit": {"stage": slowest, "part": plan.rating.stages[slowest].limit},
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
    if rating is not None:
        found |= {"seconds": rating.seconds, **{f"{part}_seconds": v for part, v in rating.parts.items()}}
        found |= {"memory": rating.memory}
    if stage.inner:
        found["inner"] = [_stage_json(each, None, graph) for each in stage.inner]
    return found


def planning_tables(planning: Planning) -> Group:
    """Return what `penstock plan` prints."""
    request, parts = planning.request, list[RenderableType]()
    if planning.plans:
        best = planning.plans[0]
        parts += [_ranked(planning), Text(), _stages(best, planning.sizes[best.samples].graph), Text()]
        parts += [Text(f"{note}.") for note in best.notes]
        parts.append(Text(_said_of_limit(best.rating)))
        parts += [Text(said) for said in _said_of_delay(planning)]
        others = {name: rating for name, rating in planning.ratings(best).items() if name != request.cost}
        for name, rating in others.items():
            said = f"does not fit: {rating.fault}" if rating.fault else f"{rating.seconds:.6g} s per microbatch"
            parts.append(Text(f"By the cost function {name}: {said}."))
    parts += [Text(f"{name}: {why}.") for name, why in planning.left_out.items()]
    if planning.skipped:
        parts.append(Text(f"Skipped, {len(planning.skipped)} classes of configurations:"))
        parts += [Text(f"  {each.what}: {each.bound}") for each in planning.skipped[:_MOST_SKIPPED]]
        if len(planning.skipped) > _MOST_SKIPPED:
            parts.append(Text(f"  ... and {len(planning.skipped) - _MOST_SKIPPED} more, which --json lists"))
    return Group(*parts)


def plan_file(planning: Planning) -> str:
    """Return the best plan, by simulation, as a configuration of `penstock train`, with predictions in comments."""
    assert planning.plans, "there is no plan"
    assert planning.plans[0].settings, "other costs than the simulated one find none that can be run"
    plan, request = planning.plans[0], planning.request
    memory = ", ".join(f"{stage.memory or 0:.4g}" for stage in plan.rating.stages)
    said = [
        f"a plan of {request.profile.name} for {request.devices} devices: penstock train --plan FILE",
        f"predicted: {plan.seconds_per_sample:.6g} s per sample; bytes per device, stage by stage: {memory}",
        "model, data and optimizer are yours to set; the model must have as many blocks as balance adds up to",
    ]
    if request.profile.settings:
        said[-1] = "for the model, the data and the optimizer that were profiled"
    both = dict(request.profile.settings) | dict(plan.settings)
    values = yaml.safe_dump(both, sort_keys=False, default_flow_style=None)
    return "".join(f"# {line}\n" for line in said) + values


def _said_of_delay(planning: Planning) -> Iterator[str]:
    """Yield what the best plan's method costs beside time: weights that are read late."""
    flushes = [_flushes(plan) for plan in planning.plans]
    if flushes[0]:
        return
    other = f"plan {flushes.index(True) + 1} is the first without" if True in flushes else "no plan here is without"
    yield f"Plan 1 reads weights that are late, which costs loss for each sample (docs/which-method.md); {other}."


def _flushes(plan: Plan) -> bool:
    method = plan.settings.get("method")
    return method is None or find_method(str(method)).rule == "flush"


def _said_of_limit(rating: Rating) -> str:
    """Return what limits a plan."""
    slowest = rating.stages[rating.slowest]
    total = sum(slowest.parts.values()) or 1.0
    shares = ", ".join(f"{_PART_NAMES[part]} {value / total:.0%}" for part, value in slowest.parts.items() if value)
    return f"Stage {rating.slowest} limits: {shares or 'it takes no time'}."


def _table(title: str, headings: Sequence[str]) -> Table:
    """Return an empty table; all columns but those of words are aligned right."""
    table = Table(title=title, title_justify="left", box=None)
    for heading in headings:
        words = heading in ("plan", "limited by", "layers", "recompute")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "layers")
    return table


def _ranked(planning: Planning) -> Table:
    """Return the plans, the best one first."""
    request = planning.request
    table = _table(
        f"{request.profile.name} on {request.devices} devices, by the cost function {request.cost}",
        ("", "plan", "s per sample", "s per batch", "devices", "stages", "replicas", "limited by"),
    )
    for rank, plan in enumerate(planning.plans, 1):
        slowest = plan.rating.slowest
        replicas = {stage.replicas for stage in plan.stages}
        table.add_row(
            str(rank),
            plan.planner,
            f"{plan.seconds_per_sample:.6g}",
            f"{plan.rating.seconds * planning.sizes[plan.samples].microbatches:.6g}",
            str(plan.devices),
            str(len(plan.stages)),
            str(min(replicas)) if len(replicas) == 1 else f"{min(replicas)} to {max(replicas)}",
            f"stage {slowest}, {_PART_NAMES[plan.rating.stages[slowest].limit]}",
        )
    return table


def _stages(plan: Plan, graph: LayerGraph) -> Table:
    """Return the stages of a plan; times are those of a microbatch."""
    shown = {part: name for part, name in _PART_NAMES.items() if part in plan.rating.stages[0].parts}
    heads = ("stage", "layers", "devices", "replicas", "recompute", "s", *shown.values(), "memory")
    samples = f", microbatches of {plan.samples} samples" if plan.samples > 1 else ""
    table = _table(f"stages of plan 1{samples}", heads)
    for at, (stage, rating) in enumerate(zip(plan.stages, plan.rating.stages, strict=True)):
        again = sum("recomp" in way for way in stage.ways)
        each = f"{stage.replicas}" + (f" x {stage.tensor}" if stage.tensor > 1 else "")
        table.add_row(
            str(at),
            _layer_names(stage.layers, graph),
            str(stage.devices),
            each,
            f"{again} of {len(stage.layers)}" if again else "",
            f"{rating.seconds:.5g}",
            *(f"{rating.parts.get(part, 0.0):.4g}" for part in shown),
            "" if rating.memory is None else f"{rating.memory / 2**30:.3g} GiB",
        )
        for place, inner in enumerate(stage.inner):
            if len(stage.inner) > 1 or inner.replicas > 1:
                table.add_row(f"{at}.{place}", _layer_names(inner.layers, graph), "", str(inner.replicas))
    return table


def _layer_names(layers: tuple[int, ...], graph: LayerGraph) -> str:
    """Return the names of layers, of many the first and the last one."""
    names = [graph.layers[number].name for number in layers]
    return " ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)})"
