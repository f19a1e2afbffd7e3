"""The metrics file of a run: one JSON object per line; a line that was cut when a process died is no JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.checks import finite_or_none
from penstock.guarded_files import append_line
from penstock.runtime.update.run_events import Evaluated
from penstock.train.setup.recorded_progress import METRICS
from penstock.weights.decision import Decision


class Metrics:
    """Writes the metrics of one run; a resumed run appends to them.

    A line that cannot be written, because the disk is full, is lost, which is told once: the run matters more.

    Args:
        folder: of the run.
        tell: called with what was lost.

    Attributes:
        again: the number of updates that were undone and redone.
    """

    def __init__(self, folder: Path, tell: Callable[[str], object] = lambda _: None) -> None:
        self._path, self._tell, self._told, self.again = folder / METRICS, tell, False, 0

    def add(self, **values: Any) -> None:
        """Add a line."""
        try:
            append_line(self._path, json.dumps({key: finite_or_none(value) for key, value in values.items()}))
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"lines of {METRICS} are lost: {error.strerror or error}")

    def add_updates(self, decided: Iterable[Decision]) -> None:
        """Add a line per update; these are separate, as updates are made later than losses are known."""
        for d in decided:
            again = {"again": True} if d.again else {}
            self.add(update=d.batch, loss=d.loss, norm=d.norm, skipped=d.skipped, **again)
            self.again += d.again

    def add_evaluations(self, evaluated: Iterable[Evaluated]) -> None:
        """Add a line per evaluation."""
        for e in evaluated:
            self.add(evaluated=e.version, loss=e.loss, weight=e.weight)
