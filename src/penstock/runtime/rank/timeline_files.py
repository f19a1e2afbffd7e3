"""Timelines on disk: every rank writes a file of its own, and whoever reads them merges them."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from penstock.comm.core.trace_recorder import Recorder, merge_recordings
from penstock.errors import DataError
from penstock.guarded_files import make_own_folder, write_whole
from penstock.timeline import Timeline

FOLDER = "timeline"
"""The subfolder of a run."""


def write_recording(run: Path, recorder: Recorder, ranks: int) -> None:
    """Write what a rank has recorded into the folder of a run, in place of what is there.

    Args:
        run: the run's folder.
        recorder: of the rank.
        ranks: that the run has.

    Raises:
        OSError: it cannot be written; what was there is gone all the same.
    """
    path = _file(run, recorder.rank)
    make_own_folder(path.parent)
    path.unlink(missing_ok=True)  # another run's would be taken for this one's
    recording = json.dumps({"ranks": ranks, **recorder.recording()})
    write_whole(path, gzip.compress(recording.encode(), compresslevel=1))


def read_timeline(run: Path | str) -> Timeline:
    """Merge what the ranks of a run have written, from the time since which each of them has kept everything.

    Args:
        run: the folder of a run of `penstock train`, or that given to `Pipeline.write_timeline`.

    Returns:
        The timeline; a rank whose file is not there has nothing in it.

    Raises:
        DataError: there are no timelines, or one is damaged.
    """
    found = [_read(path) for path in sorted(Path(run, FOLDER).glob("rank-*.json.gz"))]
    if not found:
        raise DataError(f"there are no timelines in {str(Path(run, FOLDER))!r}; runs write them when they end")
    ranks = next((part["ranks"] for part in found if part["rank"] == 0), found[0]["ranks"])
    return merge_recordings([part for part in found if part["rank"] < ranks], ranks)


def _file(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank}.json.gz"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        if not {"rank", "ranks", "since", "intervals", "memory", "totals"} <= found.keys():
            raise ValueError("parts are missing")
    except (OSError, EOFError, ValueError, AttributeError, zlib.error) as error:
        raise DataError(f"{str(path)!r} is no timeline of a rank, or is damaged: {error}") from None
    return found
