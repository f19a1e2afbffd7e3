"""Timelines that each rank writes by itself and a reader merges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from penstock import DataError, read_timeline
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool

CASE = Case("1f1b", 2, 2, spans=(3,), skips=())


@pytest.mark.smoke
def test_what_is_read_is_what_was_gathered(tmp_path: Path) -> None:
    pipeline = make_pipeline(CASE)
    list(pipeline.run(make_batches(CASE)))
    pipeline.write_timeline(tmp_path)
    found, wanted = read_timeline(tmp_path), pipeline.timeline()
    assert sorted(found.intervals) == sorted(wanted.intervals)
    assert (found.memory, found.totals) == (wanted.memory, wanted.totals)
    assert (found.ranks, found.since) == (2, 0.0)


def write_alone(group: dist.ProcessGroup, folder: str) -> int:
    pipeline = make_pipeline(CASE, group=group)
    list(pipeline.run(make_batches(CASE)))
    pipeline.write_timeline(folder)
    return len(pipeline.timeline().intervals)


@pytest.mark.processes
def test_every_process_writes_its_own(pool: Pool, tmp_path: Path) -> None:
    counts = pool.submit(write_alone, str(tmp_path), ranks=2)
    found = read_timeline(tmp_path)
    assert len(found.intervals) == counts[0] == counts[1]
    assert {i.rank for i in found.intervals} == {0, 1}


def test_what_other_runs_have_left_is_not_read(tmp_path: Path) -> None:
    """A run that goes on with fewer ranks leaves files of those before."""
    pipeline = make_pipeline(CASE)
    list(pipeline.run(make_batches(CASE)))
    pipeline.write_timeline(tmp_path)
    one = make_pipeline(Case("1f1b", 1, 2, spans=(3,), skips=()))
    list(one.run(make_batches(CASE)))
    one.write_timeline(tmp_path)
    assert {i.rank for i in read_timeline(tmp_path).intervals} == {0}


@pytest.mark.parametrize("how", ["none", "cut", "other"])
def test_damaged_timelines_are_named(tmp_path: Path, how: str) -> None:
    pipeline = make_pipeline(CASE)
    pipeline.write_timeline(tmp_path)
    path = tmp_path / "timeline" / "rank-1.json.gz"
    if how == "none":
        with pytest.raises(DataError, match="there are no timelines in"):
            read_timeline(tmp_path / "elsewhere")
        return
    path.write_bytes(path.read_bytes()[:-9] if how == "cut" else b"{}")
    with pytest.raises(DataError, match=r"rank-1.json.gz' is no timeline of a rank, or is damaged"):
        read_timeline(tmp_path)
