"""Compares one run with others number by number: what differs, by how much, where most and where first.

The distance of two tensors is given twice: as the largest absolute difference of two elements, and as the relative
difference |a - b| / |b|, where |.| is the Euclidean norm of the whole tensor. Relative differences of single elements
would mean little: Adam divides by the size of a gradient, so an element near zero, where rounding decides, moves its
weight as much as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("losses", "decisions", "gradients", "weights", "optimizer state", "final state")
"""The kinds of numbers that are compared, causes before effects: gradients as given to the optimizers, weights after
each update, and the optimizer state, parameters and buffers at the end."""

Value = Tensor | float
Record = Mapping[str, Mapping[tuple[int, str], Value]]
"""The numbers of a run: kind -> (batch, name) -> value; the batch is the number of batches for values at the end."""


class TensorPlace(NamedTuple):
    """The place and size of one difference between two runs.

    Attributes:
        batch: counted from 0; the number of batches for values at the end.
        name: of the parameter or number that differs.
        absolute: the largest difference of two elements; infinite if one run lacks the number, or it is not finite.
        relative: the relative difference of the whole tensor; infinite if the other run has zeros.
    """

    batch: int
    name: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        if math.isfinite(self.relative):
            return f"{self.name}: relative difference {self.relative:.2g}"
        far = f"{self.absolute:.2g} from zero" if math.isfinite(self.absolute) else "missing or not finite"
        return f"{self.name}: {far}"


@dataclass(frozen=True)
class Difference:
    """The differences of two runs in one kind of numbers.

    Attributes:
        compared: the number of tensors and scalars compared, including those that one of the runs lacks.
        tolerance: the relative difference that is allowed; 0 where all must be equal.
        differing: how many differ by more.
        odd: how many count as equal because both are NaN.
        worst: the largest relative difference; None if everything is equal.
        first: the largest relative difference in the first batch where one exceeds the tolerance; None if none does.
    """

    compared: int
    tolerance: float
    differing: int
    odd: int
    worst: TensorPlace | None
    first: TensorPlace | None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return not self.differing


class Comparison:
    """Compares numbers of one kind with those of another run as they arrive.

    Args:
        wanted: the numbers of the other run, by batch and name.
        tolerance: the relative difference that is allowed.
        pipelines: how many pipelines must produce each number.
        divided: each of them produces its rows only, as torch.chunk divides them.
    """

    def __init__(
        self, wanted: Mapping[tuple[int, str], Value], tolerance: float, pipelines: int = 1, divided: bool = False
    ) -> None:
        self._wanted, self._tolerance = wanted, tolerance
        self._parts = pipelines if divided else 1
        self._missing = {
            (*key, pipeline)
            for key, value in wanted.items()
            for pipeline in range(pipelines)
            if not divided or _has_rows(value, pipelines, pipeline)
        }
        self._compared = self._differing = self._odd = 0
        self._worst: TensorPlace | None = None
        self._first: TensorPlace | None = None

    def see(self, batch: int, name: str, value: Value, pipeline: int = 0) -> None:
        """Compare a number now; its tensor may change afterwards."""
        self._compared += 1
        self._missing.discard((batch, name, pipeline))
        wanted = self._wanted.get((batch, name))
        if self._parts > 1 and isinstance(wanted, Tensor):
            wanted = _rows(wanted, self._parts, pipeline, whole=not torch.as_tensor(value).dim())
        self._odd += wanted is not None and bool(torch.as_tensor(wanted).isnan().any())
        self._note(batch, name, pipeline, *((math.inf, math.inf) if wanted is None else apart(value, wanted)))

    def result(self, complete: bool = True) -> Difference:
        """Return the differences; in a `complete` run, expected numbers that never arrived count as differing."""
        missing = sorted(self._missing) if complete else []
        self._missing.difference_update(missing)
        self._compared += len(missing)
        for key in missing:
            self._note(*key, math.inf, math.inf)
        return Difference(self._compared, self._tolerance, self._differing, self._odd, self._worst, self._first)

    def _note(self, batch: int, name: str, pipeline: int, absolute: float, relative: float) -> None:
        place = TensorPlace(batch, f"{name} of pipeline {pipeline}" if pipeline else name, absolute, relative)
        if relative > (0.0 if self._worst is None else self._worst.relative):
            self._worst = place
        if relative > self._tolerance:
            self._differing += 1
            first = self._first
            if first is None or batch < first.batch or (batch == first.batch and relative > first.relative):
                self._first = place


class Comparisons:
    """Compares numbers of all kinds with those of several other runs as they arrive.

    Args:
        others: the runs, each with its tolerance.
        width: the number of parallel pipelines, each of which produces gradients, weights and optimizer state.
        divided: of these, each produces some rows.
    """

    def __init__(self, others: Sequence[tuple[Record, float]], width: int, divided: bool = False) -> None:
        pipelines = dict.fromkeys(KINDS, 1) | dict.fromkeys(("gradients", "weights", "optimizer state"), width)
        self._kinds = {
            kind: [
                Comparison(record.get(kind, {}), tolerance, pipelines[kind], divided and pipelines[kind] > 1)
                for record, tolerance in others
            ]
            for kind in KINDS
        }

    def see(self, kind: str, batch: int, name: str, value: Value, pipeline: int = 0) -> None:
        """Compare a number now; its tensor may change afterwards."""
        for comparison in self._kinds[kind]:
            comparison.see(batch, name, value, pipeline)

    def results(self, complete: bool) -> dict[str, list[Difference]]:
        """Return, for every kind, the difference from each of the other runs."""
        return {kind: [c.result(complete) for c in comparisons] for kind, comparisons in self._kinds.items()}


def _rows(wanted: Tensor, parts: int, place: int, whole: bool) -> Tensor:
    """Return the rows of a tensor that one of several pipelines has; all of what has no rows, if it has that."""
    if not wanted.dim():
        return wanted if whole else wanted.reshape(1)[:0]
    chunks = wanted.chunk(parts)
    return chunks[place] if place < len(chunks) else wanted[:0]


def _has_rows(value: Value, parts: int, place: int) -> bool:
    """Return whether one of several pipelines has some of a number's rows; of what has none, the first does."""
    rows = isinstance(value, Tensor) and value.dim() > 0
    return _rows(torch.as_tensor(value), parts, place, whole=False).numel() > 0 if rows else not place


def apart(found: Value, wanted: Value) -> tuple[float, float]:
    """Return the absolute and the relative difference; both are 0 between two NaN."""
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (found, wanted))
    if a.shape != b.shape:
        return math.inf, math.inf
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    difference = torch.where(same, 0.0, a - b)
    absolute = float(difference.abs().max())
    relative = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(b))
    if not math.isfinite(absolute):
        return math.inf, math.inf
    return absolute, relative if math.isfinite(relative) else math.inf  # NaN or inf if `wanted` is zero
