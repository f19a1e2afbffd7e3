"""Plans for people: the ranked table, the stages of the best one, and what else there is to say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.byte_sizes import human_bytes
from penstock.cli.plans.terminal_width_table import FittedTable
from penstock.plan.candidates.planned_methods import method_of
from penstock.plan.candidates.rank_memory import KINDS
from penstock.plan.plan_export import said_of_host, said_of_servers
from penstock.plan.planners.dawnpiper import SWAP
from penstock.plan.planning import Planning
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import places_in_words
from penstock.plan.stages.planned import COMPUTE, PARTS, Excluded, Plan, PlannedStage, StageRating
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.find_method import find_method
from penstock.view.plurals import counted
from penstock.view.tables import UNBOUNDED

_MOST_SKIPPED = 8  # lines
_MOST_NAMES = 4  # in a line
_LEAST_SHARE = 0.005  # of a stage's time, below which a part is not said to limit it
_LEAST_NEEDED = (
    "s per batch", "replicas", "devices", "stages", "limited by", "swap", "recompute", "offload", *reversed(PARTS),
)  # fmt: skip
_MOST = 4  # ranks that a terminal of 80 columns has room for


def planning_tables(planning: Planning, width: int = UNBOUNDED) -> Group:
    """Return what `penstock plan` prints.

    Args:
        planning: what was found.
        width: of the terminal in characters: columns that do not fit are left out as a whole, the least needed ones
            first.
    """
    request, parts = planning.request, list[RenderableType]()
    if planning.plans:
        best = planning.plans[0]
        parts += [*_ranked(planning).fitted(width), Text()]
        parts += [*_stages(best, planning.sizes[best.samples].graph).fitted(width), Text()]
        if (memory := memory_table(best)) is not None:
            parts += [*memory.fitted(width), Text()]
        said_of_devices = *said_of_host(best, request.devices), *said_of_servers(best, request.devices)
        parts += [Text(f"{note}.") for note in (*best.notes, *said_of_devices)]
        parts += [Text(f"{kind}.") for kind in request.devices.kinds]
        if "placement" in best.settings:
            parts.append(Text(f"{places_in_words(best.settings['placement'], best.settings['stages'])}."))
        parts.append(Text(_said_of_limit(best, planning.excluded)))
        parts += [Text(said) for said in _said_of_delay(planning)]
        others = {name: rating for name, rating in planning.ratings(best).items() if name != request.cost}
        for name, rating in others.items():
            said = f"does not fit: {rating.fault}" if rating.fault else f"{rating.seconds:.6g} s per microbatch"
            parts.append(Text(f"By the cost function {name}: {said}."))
    parts += [Text(f"{name}: {why}.") for name, why in planning.left_out.items()]
    if planning.skipped:
        parts.append(Text(f"Skipped, {counted(len(planning.skipped), 'class')} of configurations:"))
        alike = dict[str, list[str]]()  # by their bound, which often is that of several methods
        for each in planning.skipped:
            alike.setdefault(each.bound, []).append(each.what)
        for bound, names in [*alike.items()][:_MOST_SKIPPED]:
            named = "; ".join(names[:_MOST_NAMES]) + f" and {len(names) - _MOST_NAMES} like these" * (
                len(names) > _MOST_NAMES
            )
            parts.append(Padding(Text(f"{named}: {bound}"), (0, 0, 0, 2), expand=False))
        more = sum(map(len, [*alike.values()][_MOST_SKIPPED:]))
        if more:
            parts.append(Text(f"  ... and {more} more, which --json lists"))
    return Group(*parts)


def _said_of_delay(planning: Planning) -> Iterator[str]:
    """Yield what the best plan's method costs beside time: weights that are read late."""
    rules = [_rule(plan) for plan in planning.plans]
    if rules[0] == "flush":
        return
    other = f"plan {rules.index('flush') + 1} is the first without" if "flush" in rules else "no plan here is without"
    late = "late" if RULES[rules[0]].delay < 2 else f"{RULES[rules[0]].delay} updates late"
    yield f"Plan 1 reads weights that are {late}, which costs loss for each sample (docs/which-method.md); {other}."


def _rule(plan: Plan) -> str:
    method = plan.settings.get("method")
    return "flush" if method is None else find_method(str(method)).rule


def _part(rating: StageRating, part: str) -> float:
    """Return the seconds of a part of a stage, without what rounding has left of nothing."""
    seconds = rating.parts.get(part, 0.0)
    return 0.0 if seconds < 1e-9 * rating.seconds else seconds


def _said_of_limit(plan: Plan, excluded: Excluded | None) -> str:
    """Return what limits a plan, given what memory kept from being it."""
    rating = plan.rating
    slowest = rating.stages[rating.slowest]
    total = sum(slowest.parts.values()) or 1.0
    parts = {part: _part(slowest, part) for part in slowest.parts}
    shares = ", ".join(f"{part} {value / total:.0%}" for part, value in parts.items() if value >= _LEAST_SHARE * total)
    said = f"Stage {rating.slowest} limits: {shares if any(parts.values()) else 'it takes no time'}."
    if excluded is not None:
        said += f" So does memory, which excludes {excluded.what}: {excluded.seconds:.5g} s per sample, "
        said += f"{excluded.gain:.3g} times as fast."
    return said


def _limited_by(plan: Plan) -> str:
    """Return the stage that limits a plan, and by what."""
    rating = plan.rating
    return f"stage {rating.slowest}, {rating.stages[rating.slowest].limit}"


def _ranked(planning: Planning) -> FittedTable:
    """Return the plans, the best one first."""
    request, plans = planning.request, planning.plans
    many = "" if request.devices.count == 1 else "s"
    away, limits = [", ".join(_offloaded(plan)) for plan in plans], [*map(_limited_by, plans)]
    batches = [plan.rating.seconds * planning.sizes[plan.samples].microbatches for plan in plans]
    return FittedTable(
        f"{request.profile.name} on {request.devices} device{many}, by the cost function {request.cost}",
        {
            "plan": [str(place) for place in range(1, len(plans) + 1)],
            "method" if plans[0].settings else "planner": [plan.planner for plan in plans],
            "s per sample": [f"{plan.seconds_per_sample:.6g}" for plan in plans],
            "s per batch": [f"{seconds:.6g}" for seconds in batches],
            "devices": [str(plan.devices) for plan in plans],
            "stages": [str(len(plan.stages)) for plan in plans],
            "replicas": [_range_of(sorted({stage.replicas for stage in plan.stages})) for plan in plans],
            "limited by": [limits[0] + "; memory" * (planning.excluded is not None), *limits[1:]],
            **({"offload": away} if any(away) else {}),
        },
        least_needed=_LEAST_NEEDED,
    )


def _offloaded(plan: Plan) -> Iterator[str]:
    """Yield what is in the memory of the host."""
    if "offload" in plan.settings:
        yield "activations"
    if "offload_optimizer" in plan.settings:
        yield "optimizer"


def _range_of(numbers: Sequence[int]) -> str:
    """Return sorted numbers by their ends."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _stages(plan: Plan, graph: LayerGraph) -> FittedTable:
    """Return the stages of a plan; times are those of a microbatch.

    A rating that is compute alone is left out, and so are parts that take no time of any stage.
    """
    shown = [part for part in PARTS if part == COMPUTE or any(_part(each, part) for each in plan.rating.stages)]
    heads = ("stage", "layers", "devices", "on", "replicas", "recompute", "swap", "offload", "rating", *shown, "memory")
    cells: dict[str, list[str]] = {heading: [] for heading in heads}
    for at, (stage, rating) in enumerate(zip(plan.stages, plan.rating.stages, strict=True)):
        again, swapped = (sum(word in way for way in stage.ways) for word in ("recomp", SWAP))
        row = (
            str(at),
            _layer_names(stage.layers, graph),
            str(stage.devices),
            "" if stage.on is None else str(stage.on),
            f"{stage.replicas}" + (f" x {stage.tensor}" if stage.tensor > 1 else ""),
            f"{again} of {len(stage.layers)}" if again else "",
            f"{swapped} of {len(stage.layers)}" if swapped else "",
            "activations" if stage.offloaded else "",
            f"{rating.seconds:.5g}",
            *(f"{_part(rating, part):.4g}" for part in shown),
            _held(stage, rating),
        )
        inner = [
            (f"{at}.{place}", _layer_names(each.layers, graph), "", "", str(each.replicas))
            for place, each in enumerate(stage.inner)
            if len(stage.inner) > 1 or each.replicas > 1
        ]
        for values in (row, *inner):
            for number, heading in enumerate(heads):
                cells[heading].append(values[number] if number < len(values) else "")
    rated = any(rating.seconds != rating.parts.get(COMPUTE) for rating in plan.rating.stages)
    kept = {head: column for head, column in cells.items() if any(column) and (rated or head != "rating")}
    title = f"stages of plan 1, in s for each microbatch of {counted(plan.samples, 'sample')}"
    title += "; rating: what the cost function compares" * rated
    return FittedTable(title, kept, least_needed=_LEAST_NEEDED)


def _held(stage: PlannedStage, rating: StageRating) -> str:
    """Return the bytes that a device of a stage holds, where devices differ, beside those that it has.

    By PipeDream's formula some stages, with weights as they are, hold nothing, which nobody should take at its word.
    """
    if not rating.memory:
        return "" if rating.memory is None else "not counted"
    most = None if stage.on is None else stage.on.memory
    return human_bytes(round(rating.memory)) + (f" of {human_bytes(most, 2)}" if most is not None else "")


def _layer_names(layers: tuple[int, ...], graph: LayerGraph) -> str:
    """Return the names of layers, of many the first and the last one."""
    names = [graph.layers[number].name for number in layers]
    return " ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)})"


def memory_table(plan: Plan) -> FittedTable | None:
    """Return the bytes by kind, a column for each rank; of many those with the most and the least.

    None where the cost function knows no kinds.
    """
    if not all(rating.kinds for rating in plan.rating.stages):
        return None
    ranks = method_of(plan.planner, plan.settings).ranks(plan.settings["stages"])
    held = dict(zip(ranks, plan.rating.stages, strict=True))  # stages of a rank have the same, that of the rank
    order = sorted(held, key=lambda rank: -(held[rank].memory or 0.0))
    shown = sorted(held) if len(held) <= _MOST else [order[0], order[-1]]
    kinds = [kind for kind in KINDS if any(held[rank].kinds.get(kind) for rank in shown)]
    which = "" if len(shown) == len(held) else ", of the ranks with the most and the least"
    unit = "stage" if plan.chunks == 1 else "rank"
    columns = {
        f"{unit} {rank}": [
            *(human_bytes(round(held[rank].kinds.get(kind, 0.0)), 2) for kind in kinds),
            human_bytes(round(held[rank].memory or 0.0), 2),
        ]
        for rank in shown
    }
    title = f"memory of a device at its peak by kind, which add up{which}"
    return FittedTable(title, {"kind": [*kinds, "all together"], **columns})
