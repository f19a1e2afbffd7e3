"""Plans for people: the ranked table, the stages of the best one, and what else there is to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.plan.planning import Planning
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.planned import Plan, Rating
from penstock.schedule.methods.find_method import find_method
from penstock.view.plurals import counted
from penstock.view.tables import UNBOUNDED, human_bytes

_MOST_SKIPPED = 8  # lines
_PARTS = ("compute", "links", "gradient sums", "updates", "bubble")  # of ratings, in this order
_WORDS = ("method", "planner", "limited by", "layers", "recompute")  # columns that are aligned left
_WRAPPED, _LONGEST_WORD = "layers", 30
_LEAST_NEEDED = (
    "s per batch", "replicas", "devices", "stages", "limited by", "recompute", *reversed(_PARTS),
)  # fmt: skip


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
        parts += [Text(f"{note}.") for note in best.notes]
        parts.append(Text(_said_of_limit(best.rating)))
        parts += [Text(said) for said in _said_of_delay(planning)]
        others = {name: rating for name, rating in planning.ratings(best).items() if name != request.cost}
        for name, rating in others.items():
            said = f"does not fit: {rating.fault}" if rating.fault else f"{rating.seconds:.6g} s per microbatch"
            parts.append(Text(f"By the cost function {name}: {said}."))
    parts += [Text(f"{name}: {why}.") for name, why in planning.left_out.items()]
    if planning.skipped:
        parts.append(Text(f"Skipped, {counted(len(planning.skipped), 'class')} of configurations:"))
        parts += [Text(f"  {each.what}: {each.bound}") for each in planning.skipped[:_MOST_SKIPPED]]
        if len(planning.skipped) > _MOST_SKIPPED:
            parts.append(Text(f"  ... and {len(planning.skipped) - _MOST_SKIPPED} more, which --json lists"))
    return Group(*parts)


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
    shares = ", ".join(f"{part} {value / total:.0%}" for part, value in slowest.parts.items() if value)
    return f"Stage {rating.slowest} limits: {shares or 'it takes no time'}."


@dataclass(frozen=True)
class _Columns:
    """A table that is made as wide as a terminal has room for.

    Attributes:
        title: above it.
        cells: by heading, from the top.
    """

    title: str
    cells: Mapping[str, Sequence[str]]

    def fitted(self, width: int) -> Iterator[RenderableType]:
        """Yield the table with the columns that fit, and what was left out; no number is ever cut."""
        shown, left_out = list(self.cells), list[str]()
        for heading in _LEAST_NEEDED:
            if _least_width(self._table(shown)) <= width:
                break
            if heading in shown:
                shown.remove(heading)
                left_out.append(heading)
        yield self._table(shown)
        if left_out:
            yield Text(f"Left out at this width: {', '.join(left_out)} (--json has all).")

    def _least(self, heading: str) -> int:
        """Return the least width of a column: of the one that may be wrapped its longest word, up to a limit."""
        cells = [heading, *self.cells[heading]]
        if heading != _WRAPPED:
            return max(map(len, cells))
        return min(max(len(word) for cell in cells for word in cell.split()), _LONGEST_WORD)

    def _table(self, headings: Sequence[str]) -> Table:
        """Return the table with some columns; all but those of words are aligned right."""
        table = Table(title=self.title, title_justify="left", box=None)
        for heading in headings:
            table.add_column(
                heading,
                justify="left" if heading in _WORDS else "right",
                no_wrap=heading != _WRAPPED,
                min_width=self._least(heading),
            )
        for row in zip(*(self.cells[heading] for heading in headings), strict=True):
            table.add_row(*map(Text, row))
        return table


def _least_width(table: Table) -> int:
    """Return the width that a table needs if the column that may be wrapped is."""
    return Console(width=UNBOUNDED).measure(table).minimum


def _ranked(planning: Planning) -> _Columns:
    """Return the plans, the best one first."""
    request, plans = planning.request, planning.plans
    ratings = [plan.rating for plan in plans]
    batches = [plan.rating.seconds * planning.sizes[plan.samples].microbatches for plan in plans]
    return _Columns(
        f"{request.profile.name} on {request.devices} devices, by the cost function {request.cost}",
        {
            "plan": [str(place) for place in range(1, len(plans) + 1)],
            "method" if plans[0].settings else "planner": [plan.planner for plan in plans],
            "s per sample": [f"{plan.seconds_per_sample:.6g}" for plan in plans],
            "s per batch": [f"{seconds:.6g}" for seconds in batches],
            "devices": [str(plan.devices) for plan in plans],
            "stages": [str(len(plan.stages)) for plan in plans],
            "replicas": [_range_of(sorted({stage.replicas for stage in plan.stages})) for plan in plans],
            "limited by": [f"stage {r.slowest}, {r.stages[r.slowest].limit}" for r in ratings],
        },
    )


def _range_of(numbers: Sequence[int]) -> str:
    """Return sorted numbers by their ends."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _stages(plan: Plan, graph: LayerGraph) -> _Columns:
    """Return the stages of a plan; times are those of a microbatch."""
    shown = [part for part in _PARTS if part in plan.rating.stages[0].parts]
    heads = ("stage", "layers", "devices", "replicas", "recompute", "s", *shown, "memory")
    cells: dict[str, list[str]] = {heading: [] for heading in heads}
    for at, (stage, rating) in enumerate(zip(plan.stages, plan.rating.stages, strict=True)):
        again = sum("recomp" in way for way in stage.ways)
        row = (
            str(at),
            _layer_names(stage.layers, graph),
            str(stage.devices),
            f"{stage.replicas}" + (f" x {stage.tensor}" if stage.tensor > 1 else ""),
            f"{again} of {len(stage.layers)}" if again else "",
            f"{rating.seconds:.5g}",
            *(f"{rating.parts.get(part, 0.0):.4g}" for part in shown),
            "" if rating.memory is None else human_bytes(round(rating.memory)),
        )
        inner = [
            (f"{at}.{place}", _layer_names(each.layers, graph), "", str(each.replicas))
            for place, each in enumerate(stage.inner)
            if len(stage.inner) > 1 or each.replicas > 1
        ]
        for values in (row, *inner):
            for number, heading in enumerate(heads):
                cells[heading].append(values[number] if number < len(values) else "")
    kept = {head: column for head, column in cells.items() if any(column)}
    samples = f", microbatches of {plan.samples} samples" if plan.samples > 1 else ""
    return _Columns(f"stages of plan 1{samples}", kept)


def _layer_names(layers: tuple[int, ...], graph: LayerGraph) -> str:
    """Return the names of layers, of many the first and the last one."""
    names = [graph.layers[number].name for number in layers]
    return " ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)})"
