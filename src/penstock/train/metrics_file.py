"""The record of a run: a JSON object per line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.runtime.update.events import Evaluated
from penstock.weights.decision import Decision

METRICS = "metrics.jsonl"


class Metrics:
    """Of one run; a run that goes on from a checkpoint adds to it.

    A line that cannot be written, because the disk is full, is lost; the run is worth more.

    Args:
        folder: of the run.

    Attributes:
        again: updates that were taken back and made again.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self.again = folder / METRICS, 0

    def add(self, **values: Any) -> None:
        """Add a line."""
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps({key: _finite(value) for key, value in values.items()}) + "\n")

    def add_updates(self, decided: Iterable[Decision]) -> None:
        """Updates are made later than losses are known, so they have lines of their own."""
        for d in decided:
            again = {"again": True} if d.again else {}
            self.add(update=d.batch, loss=d.loss, norm=d.norm, skipped=d.skipped, **again)
            self.again += d.again

    def add_evaluations(self, evaluated: Iterable[Evaluated]) -> None:
        """The same of evaluations."""
        for e in evaluated:
            self.add(evaluated=e.version, loss=e.loss, weight=e.weight)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
