"""Reads from the metrics of a run how far it has come, for resuming it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checks import is_whole
from penstock.guarded_files import open_regular, parse_json

METRICS = "metrics.jsonl"
_LONGEST = 1 << 20  # bytes of a line that is looked at


@dataclass
class Recorded:
    """What the metrics of a run say of its batches and checkpoints.

    Attributes:
        batches: the number of batches trained.
        saved: the number of batches of the last checkpoint that was written; 0 if none was.
        failures: the number of checkpoints that were not written.
        failure: why the last of them was not.
        size: bytes of the file; 0 if there is none.
    """

    batches: int = 0
    saved: int = 0
    failures: int = 0
    failure: str = ""
    size: int = 0


def recorded(folder: Path, start: int = 0) -> Recorded:
    """Read what the metrics of a run say, from a byte on; of lines that are no records, nothing.

    Args:
        folder: of the run.
        start: the first byte, which is that of a line.
    """
    found = Recorded()
    for values, end in records(folder, start):
        found.size = end
        if is_whole(values.get("batch")):
            found.batches = max(found.batches, values["batch"] + 1)
        if is_whole(values.get("checkpoint")):
            failure = values.get("failure")
            found.saved = found.saved if failure else max(found.saved, values["checkpoint"])
            found.failures, found.failure = found.failures + bool(failure), str(failure or found.failure)
    return found


def records(folder: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the metrics of a run from a byte on, each with the place where it ends; for a line that is none, no values.

    Args:
        folder: of the run.
        start: the first byte, which is that of a line.
    """
    with suppress(OSError), open_regular(folder / METRICS) as file:
        file.seek(start)
        while line := file.readline(_LONGEST):
            try:
                values = parse_json(line.decode())
            except ValueError:
                values = None
            yield values if isinstance(values, dict) else {}, file.tell()
