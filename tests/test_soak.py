"""Nothing grows with the number of batches: the short form of `make soak`, which counts objects only."""

import os
from pathlib import Path

import pytest
import tools.soak
import torch.distributed as dist
from tools.soak import METHODS, NOISE, SLACK, Usage, growth, soak

from penstock.checkpoint.writer import Writer
from support.pool import Pool


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run_in_pool(group: dist.ProcessGroup, method: str, folder: str) -> list[str]:
    return without_memory(soak(method, 150, group, Path(folder), 10, window=50), 1)


def without_memory(found: list[Usage], ranks: int) -> list[str]:
    """What grows, but for resident memory: so few batches say nothing about that."""
    return growth([usage._replace(resident=0) for usage in found], ranks)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_grows_in_one_process(method: str, tmp_path: Path) -> None:
    assert without_memory(soak(method, 200, None, tmp_path, 10, window=50), 2) == []


@pytest.mark.long
@pytest.mark.processes
def test_nothing_grows_in_two_processes(pool: Pool, tmp_path: Path) -> None:
    assert pool.submit(run_in_pool, "2bw", str(tmp_path), ranks=2, fresh=True) == [[], []]


def test_a_leak_of_an_object_per_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked, sink = [], Writer.sink

    def leaking(self: Writer, snapshot: object) -> None:
        leaked.append([[] for _ in range(9)])
        sink(self, snapshot)

    monkeypatch.setattr(Writer, "sink", leaking)
    (grown,) = without_memory(soak("1f1b", 200, None, tmp_path, 10, window=50), 2)
    assert grown.startswith("objects: ")


@pytest.mark.parametrize(("arguments", "every"), [("", 500), ("--batches 2000", 20), ("--batches 50 --every 4", 4)])
def test_the_first_checkpoint_comes_before_the_first_sample(
    arguments: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the threads and objects that it makes once would be taken for growth in a short run."""
    seen: list[int] = []
    monkeypatch.setattr(tools.soak, "_runs", lambda methods, batches, every, out: seen.append(every) or [False])
    monkeypatch.setattr("sys.argv", ["soak", *arguments.split()])
    assert tools.soak.main() == 0
    assert seen == [every]


@pytest.mark.smoke
def test_what_counts_as_growth() -> None:
    flat = [Usage(100 * i, 10**8, 1000 + i % 2, 50, 3, 9) for i in range(20)]
    assert growth(flat, 2) == []
    for name in ("objects", "threads", "files", "entries"):
        rising = [one._replace(**{name: getattr(one, name) + 3 * i}) for i, one in enumerate(flat)]
        (grown,) = growth(rising, 2)
        assert grown.startswith(f"{name}: ")
    for rate, found in ((SLACK - 1, []), (SLACK + 1, [f"resident memory: {SLACK + 1} bytes per batch and rank"])):
        rising = [
            one._replace(resident=one.resident + 2 * rate * one.batch + NOISE * (i > 12)) for i, one in enumerate(flat)
        ]
        assert [text.partition(", ")[0] for text in growth(rising, 2)] == found
