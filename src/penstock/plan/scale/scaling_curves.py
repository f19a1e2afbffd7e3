"""The scaling analysis: the fastest training of a model of each kind, and curves over devices and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.plan.scale.fastest import AXES, Rated, ScaledTraining, by_devices, fastest
from penstock.plan.scale.model_shape import critical_batch, family_model

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
