"""The scaling analysis for people and for programs: tables, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.checks import finite_or_none
from penstock.plan.cluster.schema import LINKS
from penstock.plan.scale.fastest import AXES, Rated, ScaledTraining, Transfer, by_devices, fastest, offloads, transfers
from penstock.plan.scale.model_shape import critical_batch, family_model

_GIB = 2.0**30
_YEAR = 365.25  # days
BASELINE, IMPROVED = "depth-first", "layered"
"""Names of the two ways to run a batch; the layered one has a modular pipeline and sharded weights."""
KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("data",),
    ("data", "pipeline"),
    ("data", "tensor"),
    ("pipeline", "tensor"),
    AXES,
)
"""The ways to divide a model that are compared."""
_SIZES = 12  # of models on a curve


def scaling_json(scaling: ScalingAnalysis) -> dict[str, Any]:
    """Return everything as plain values: seconds, bytes, operations per byte; what has no bound is null."""
    training = scaling.training
    return {
        "model": {
            "name": training.shape.name,
            "x": scaling.x,
            **{key: getattr(training.shape, key) for key in ("layers", "hidden", "sequence", "heads", "vocabulary")},
            "parameters": training.shape.parameters,
        },
        "cluster": training.cluster.name,
        "critical_batch": training.critical,
        "steps": training.steps,
        "flops": training.flops,
        "thresholds": {link: training.cluster.threshold(link) for link in LINKS},
        "trainings": [_row_json(scaling, row) for row in scaling.rows],
    }


def _row_json(scaling: ScalingAnalysis, row: ScalingRow) -> dict[str, Any]:
    of, rated = row.rated.layouts, row.rated
    return {
        "way": row.way,
        "axes": list(row.axes),
        "fits": row.fits,
        "sharded": of.sharded,
        **{key: int(getattr(of, key)[0]) for key in ("data", "depth", "tensor", "microbatches", "microbatch")},
        "devices": int(of.devices[0]),
        "batch": int(of.batch[0]),
        "efficiency": float(rated.efficiency[0]),
        "seconds": float(rated.seconds[0]),
        "overheads": {name: float(part[0]) for name, part in rated.parts.items()},
        "memory": {name: float(part[0]) for name, part in rated.memory.items()},
        "intensities": {name: finite_or_none(float(each.intensity[0])) for name, each in _traffic(scaling, row)},
    }


def _traffic(scaling: ScalingAnalysis, row: ScalingRow) -> Iterator[tuple[str, Transfer]]:
    """Yield the traffic of a training, and that of offloading."""
    shape, rules, of = scaling.training.shape, scaling.training.rules, row.rated.layouts
    yield from transfers(shape, rules, of).items()
    yield from offloads(shape, rules, of).items()


def scaling_tables(scaling: ScalingAnalysis) -> Group:
    """Return what `penstock scale` prints."""
    training = scaling.training
    shape = training.shape
    lines = [
        f"{shape.name}: {shape.layers} layers, hidden size {shape.hidden}, sequences of {shape.sequence}, "
        f"{shape.parameters:.4g} parameters.",
        f"Critical batch {training.critical:,.0f} sequences, {training.steps:,.0f} steps: {training.flops:.4g} "
        f"operations, {time_of(training.flops / training.cluster.rate)} on one device of {training.cluster.name}; "
        "smaller batches take fewer samples in all, and more steps.",
    ]
    parts: list[RenderableType] = [*map(Text, lines), Text(), _trainings(scaling)]
    for way in (BASELINE, IMPROVED):
        best = scaling.best(way)
        if best is not None:
            parts += [Text(), _intensities(scaling, best)]
    parts += [Text(), _memory(scaling), Text(), _thresholds(scaling)]
    first, second = scaling.best(BASELINE), scaling.best(IMPROVED)
    if first and second:
        ratio = float(first.rated.seconds[0] / second.rated.seconds[0])
        parts += [Text(), Text(f"Depth-first takes {ratio:.3g} times as long as layered, each as fast as it can be.")]
    if not all(row.rated.layouts.sharded for row in scaling.rows):
        parts.append(Text("r: weights are replicated, not sharded."))
    if not all(row.fits for row in scaling.rows):
        held = training.cluster.memory.value / _GIB
        parts.append(Text(f"*: does not fit into {held:.4g} GiB; the fastest if it did."))
    return Group(*parts)


def time_of(seconds: float) -> str:
    """Return a time in years, days or hours."""
    days = seconds / 86400
    if days >= _YEAR:
        return f"{days / _YEAR:.3g} years"
    return f"{days:.3g} days" if days >= 1 else f"{days * 24:.3g} hours"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _trainings(scaling: ScalingAnalysis) -> Table:
    """Return the fastest training of each kind."""
    heads = ("n_b x n_l x n_a", "n_mu x b_mu", "devices", "bubble", "exposed", "shared", "efficiency", "time", "GiB")
    table = _table("the fastest training of each kind", "", *heads)
    for row in scaling.rows:
        of, parts = row.rated.layouts, {name: float(part[0]) for name, part in row.rated.parts.items()}
        bubble, shared = parts.pop("bubble"), parts.pop("shared layers")
        table.add_row(
            f"{row.way}, {row.name}",
            " x ".join(f"{int(each[0])}" for each in (of.data, of.depth, of.tensor)) + ("" if of.sharded else " r"),
            f"{int(of.microbatches[0])} x {int(of.microbatch[0])}",
            f"{int(of.devices[0])}",
            *(f"{each:.3f}" for each in (bubble, sum(parts.values()), shared)),
            f"{float(row.rated.efficiency[0]):.3f}",
            time_of(float(row.rated.seconds[0])),
            f"{float(row.rated.held[0]) / _GIB:.4g}" + ("" if row.fits else "*"),
        )
    return table


def _intensities(scaling: ScalingAnalysis, row: ScalingRow) -> Table:
    """Return the traffic of a training beside what its links bear."""
    title = f"traffic of {row.way}, {row.name}: operations per byte"
    table = _table(title, "", "link", "intensity", "threshold", "")
    inside = row.rated.layouts.devices[0] <= scaling.training.cluster.node
    for name, each in _traffic(scaling, row):
        link = "inside" if inside and each.link == "between" else each.link
        threshold, intensity = scaling.training.cluster.threshold(link), float(each.intensity[0])
        if threshold is None or not np.isfinite(intensity):
            continue
        said = "hidden" if intensity >= threshold * (1 - 1e-12) else "exposed"
        if name == "shared layers":
            said = "never hidden"
        table.add_row(name, link, f"{intensity:,.0f}", f"{threshold:,.0f}", said)
    return table


def _memory(scaling: ScalingAnalysis) -> Table:
    kinds = list(scaling.rows[0].rated.memory) if scaling.rows else []
    table = _table("bytes of a device, GiB", "", *kinds, "together")
    for row in scaling.rows:
        values = [float(part[0]) / _GIB for part in row.rated.memory.values()]
        table.add_row(f"{row.way}, {row.name}", *(f"{value:.4g}" for value in (*values, sum(values))))
    return table


def _thresholds(scaling: ScalingAnalysis) -> Table:
    """Return the links of the cluster with their sources."""
    cluster = scaling.training.cluster
    table = _table(f"links of {cluster.name}: what a byte must be worth", "", "GB/s, in + out", "operations", "source")
    for link in (*LINKS, "memory_bandwidth"):
        each = getattr(cluster, link)
        if each is not None:
            table.add_row(
                link.replace("_bandwidth", ""),
                f"{each.value / 1e9:g}",
                f"{cluster.rate / each.value:,.0f}",
                each.source,
            )
    return table


@dataclass(frozen=True)
class ScalingRow:
    """The fastest training of one kind.

    Attributes:
        way: `BASELINE` or `IMPROVED`.
        axes: along which the model is divided.
        rated: what it takes.
        fits: whether a device holds it.
    """

    way: str
    axes: tuple[str, ...]
    rated: Rated
    fits: bool

    @property
    def name(self) -> str:
        return "+".join(self.axes) or "one device"


@dataclass(frozen=True)
class ScalingAnalysis:
    """What the analysis finds.

    Attributes:
        training: what was asked for.
        x: of the family, or None.
        rows: depth-first before layered.
    """

    training: ScaledTraining
    x: float | None
    rows: tuple[ScalingRow, ...]

    def best(self, way: str) -> ScalingRow | None:
        """Return the fastest training of one way that fits; None if none does."""
        found = [row for row in self.rows if row.way == way and row.fits]
        return min(found, key=lambda row: float(row.rated.seconds[0]), default=None)


def analyse(training: ScaledTraining, x: float | None = None) -> ScalingAnalysis:
    """Return the fastest training of every kind; where none fits, the fastest that does not.

    Args:
        training: what is to be trained.
        x: of the model, if it is one of the family.
    """
    rows = []
    for way in (BASELINE, IMPROVED):
        for axes in KINDS:
            if way == IMPROVED and not {"data", "pipeline"} & set(axes):
                continue  # as depth-first
            fitting, any_ = fastest(training, axes, layered=way == IMPROVED)
            found = fitting or any_
            if found is not None:
                rows.append(ScalingRow(way, axes, found, fitting is not None))
    return ScalingAnalysis(training, x, tuple(rows))


def days_by_devices(scaling: ScalingAnalysis) -> dict[str, list[tuple[float, float]]]:
    """Return the fastest training by the devices that may be used, for both ways: (devices, days)."""
    return {
        way: [(float(count), days) for count, days in by_devices(scaling.training, layered=way == IMPROVED)]
        for way in (BASELINE, IMPROVED)
    }


def days_by_size(
    scaling: ScalingAnalysis, sizes: Sequence[float] | None = None
) -> dict[str, list[tuple[float, float]]]:
    """Return the fastest training of models of the family by their parameters, for both ways: (parameters, days).

    Args:
        scaling: of a model of the family.
        sizes: x of each; spread around that of the scaling if not given.
    """
    assert scaling.x is not None, "only the family has other sizes"
    training, found = scaling.training, dict[str, list[tuple[float, float]]]({BASELINE: [], IMPROVED: []})
    for x in sizes or np.geomspace(max(scaling.x / 5, 8), min(scaling.x * 2, 400), _SIZES):
        x = max(4, round(float(x) / 4) * 4)
        shape = family_model(x, training.rules)
        other = replace(training, shape=shape, critical=critical_batch(shape, training.rules, x))
        for way in (BASELINE, IMPROVED):
            fitting, _ = fastest(other, AXES, layered=way == IMPROVED)
            if fitting is not None:
                found[way].append((shape.parameters, float(fitting.days[0])))
    return found
