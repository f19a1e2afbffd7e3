"""Of a checkpoint each rank reads the rows that it owns, whatever wrote it, and has the rest from other ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.checkpoint.index import TensorFile
from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.weights.sharded_store import ShardedStore
from support.cases import assert_equal_tensors
from support.pool import Pool
from support.sharded import Parts, joined, parts_of_state

WIDTH = 96


def make(group: dist.ProcessGroup | None, shape: tuple[str, int, int, str], seed: int = 0) -> Pipeline:
    method, depth, width, level = shape
    torch.manual_seed(seed)
    return Pipeline(
        {f"layer{i}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for i in range(4)},
        group=penstock.Group(group, timeout=20.0),
        method=method,
        stages=depth,
        microbatches=4,
        data_parallel=penstock.DataParallel(width, sharding=level),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=1e-2),
        ema_decay=0.5,
    )


def train(pipeline: Pipeline, folder: str) -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(16, WIDTH), torch.randn(16, WIDTH)) for _ in range(3)]
    for _ in pipeline.run(batches):
        pass
    penstock.Checkpoints(pipeline, folder).save()


class Reads:
    """What a rank has read: bytes of tensors that it asked the system for, and the most that were alive at once."""

    def __init__(self) -> None:
        self.bytes, self.most, self._alive = 0, 0, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        preadv, make_tensor = os.preadv, TensorFile._tensor

        def read(file: int, buffers: list[Any], first: int) -> int:
            found = preadv(file, buffers, first)
            self.bytes += found if first > 8 else 0  # else the header
            return found

        def tensor(file: TensorFile, *about: Any) -> Tensor:
            found = make_tensor(file, *about)
            self._alive += found.nbytes
            self.most = max(self.most, self._alive)
            weakref.finalize(found, self._gone, found.nbytes)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", read)
            patch.setattr(TensorFile, "_tensor", tensor)
            yield

    def _gone(self, nbytes: int) -> None:
        self._alive -= nbytes


def own_bytes(pipeline: Pipeline, older: int) -> tuple[int, int]:
    """The bytes that the ranks of this process own: weights, average, older versions, moments; and of one tensor."""
    total = largest = 0
    for state in pipeline._ranks:
        for stage in state.stages.values():
            store = stage.weights.store  # type: ignore[attr-defined]
            views = store.shards.own(store.master.views) if isinstance(store, ShardedStore) else store.master.views
            total += sum(view.nbytes * (4 + older) + 4 for view in views.values())  # and a counter of steps
            largest = max(largest, *(view.nbytes for view in views.values()))
    return total, largest


def load(
    group: dist.ProcessGroup | None, shape: tuple[str, int, int, str], folder: str
) -> tuple[Reads, tuple[int, int], dict[str, Tensor], Parts]:
    pipeline, reads = make(group, shape, seed=9), Reads()
    with reads.counted():
        assert penstock.Checkpoints(pipeline, folder).load() is not None
    state = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    state |= {f"average {name}": tensor.clone() for name, tensor in pipeline.state_dict(averaged=True).items()}
    return reads, own_bytes(pipeline, int(shape[0].startswith("2bw"))), state, parts_of_state(pipeline)


def write_on_ranks(group: dist.ProcessGroup, shape: tuple[str, int, int, str], folder: str) -> None:
    train(make(group, shape), folder)


LAYERED = "2bw-layered:chunks=2"


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        (("1f1b", 2, 2, "full"), [("1f1b", 1, 4, "full"), ("1f1b", 2, 2, "gradients"), ("gpipe", 1, 3, "optimizer")]),
        (("2bw", 2, 2, "gradients"), [("2bw", 1, 4, "optimizer"), ("2bw", 2, 2, "gradients"), (LAYERED, 2, 2, "full")]),
        ((LAYERED, 2, 2, "full"), [("2bw", 1, 4, "gradients"), (LAYERED, 2, 2, "full")]),
        (("2bw", 2, 1, "none"), [("2bw", 1, 4, "gradients"), ("2bw", 4, 1, "none")]),
    ],
    ids=str,
)
def test_a_rank_reads_its_own_share(
    pool: Pool, tmp_path: Path, writer: tuple[str, int, int, str], readers: list[tuple[str, int, int, str]]
) -> None:
    """To the byte, and one tensor at a time; all ranks then have the state that one process reads alone."""
    pool.submit(write_on_ranks, writer, str(tmp_path), ranks=writer[1] * writer[2])
    *_, wanted, alone = load(None, (writer[0].partition("-")[0], 1, 1, "none"), str(tmp_path))
    for reader in readers:
        found = pool.submit(load, reader, str(tmp_path), ranks=reader[1] * reader[2])
        for reads, (share, largest), state, _ in found:
            assert reads.bytes == share, reader
            assert reads.most <= 2 * largest, reader
            assert_equal_tensors(state, {name: wanted[name] for name in state}, str(reader))
        parts = joined([parts for *_, parts in found])
        for name, moments in joined([alone]).items():
            assert_equal_tensors(parts[name], moments, name)


def test_in_one_process_every_row_is_read_once(tmp_path: Path) -> None:
    """However many pipelines there are."""
    train(make(None, ("1f1b", 1, 2, "full")), str(tmp_path))
    sizes = []
    for width in (1, 2, 4):
        reads, *_ = load(None, ("1f1b", 1, width, "full" if width > 1 else "none"), str(tmp_path))
        sizes.append(reads.bytes)
    weights = 4 * (WIDTH + 1) * WIDTH
    assert all(abs(size - 16 * weights) <= 4 * 8 * 4 for size in sizes), sizes  # the rest are counters of steps


def fail_on_one(group: dist.ProcessGroup, shape: tuple[str, int, int, str], folder: str) -> tuple[str, str]:
    pipeline = make(group, shape)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:

            def broken(*_: Any) -> Tensor:
                raise OSError(5, "Input/output error")

            patch.setattr(TensorFile, "rows", broken)
        with pytest.raises(CheckpointError) as raised:
            penstock.Checkpoints(pipeline, folder).load()
    with pytest.raises(PenstockError) as after:
        pipeline.evaluate([])
    return str(raised.value), str(after.value)


def test_what_one_rank_cannot_read_all_hear_of(pool: Pool, tmp_path: Path) -> None:
    """Else the others would wait for its rows until their time is up."""
    train(make(None, ("1f1b", 1, 2, "full")), str(tmp_path))
    other, broken = pool.submit(fail_on_one, ("1f1b", 1, 2, "full"), str(tmp_path), ranks=2, fresh=True)
    assert "cannot read 'weights@" in broken[0]
    assert "Input/output error" in broken[0]
    assert other[0].startswith("rank 1 could not load its part of the checkpoint: cannot read 'weights@")
    assert "broke" in other[1]
    assert "broke" in broken[1]


@pytest.mark.parametrize(("level", "rows"), [("none", WIDTH + 3), ("full", WIDTH + 4), ("full", WIDTH - 4)])
def test_a_model_of_another_shape(tmp_path: Path, level: str, rows: int) -> None:
    """More rows than were saved, or fewer, are noticed by the owner of the last ones."""
    train(make(None, ("1f1b", 1, 2, level)), str(tmp_path))
    torch.manual_seed(0)
    blocks = {f"layer{i}": nn.Sequential(nn.Linear(WIDTH, rows if i == 3 else WIDTH), nn.Tanh()) for i in range(4)}
    for reader, width in (("none", 1), ("gradients", 2), ("gradients", 3)):
        pipeline = Pipeline(
            blocks,
            method="1f1b",
            stages=1,
            microbatches=2,
            data_parallel=penstock.DataParallel(width, sharding=reader),
            loss=nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.Adam(named),
        )
        with pytest.raises(CheckpointError, match=rf"has shape \({WIDTH}, 96\) in the checkpoint|lacks rows {WIDTH}"):
            penstock.Checkpoints(pipeline, tmp_path).load()
