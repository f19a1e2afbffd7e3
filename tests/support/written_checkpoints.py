"""Checkpoints of tiny snapshots, and who is told of them."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.checkpoint.rank_announcements import LocalPosts, Posts
from penstock.checkpoint.writer import Part, Writer
from penstock.runtime.rank.snapshot import Snapshot


def snapshot(batch: int, index: int = 0, pipeline: int = 0, **tensors: torch.Tensor) -> Snapshot:
    kind = f"fixed.{pipeline}" if pipeline else "weights"
    named = {f"{kind}/{index}.{name}": tensor for name, tensor in tensors.items()}
    values = {f"optimizer/mu/{index}.w": 0.5 + index} if not pipeline else {}
    return Snapshot(batch, pipeline, index, named, values, {"batch": batch, "updates": batch - 1})


class Told:
    def __init__(self) -> None:
        self.found: list[tuple[int, str | None]] = []

    def __call__(self, batch: int, failure: str | None) -> None:
        self.found.append((batch, failure))


def writer(run: Path, own: list[Part], posts: Posts, told: Told, keep: int = 2, timeout: float = 20.0) -> Writer:
    parts = [(0, 0), (1, 0), (0, 1), (1, 1)]
    return Writer(run, parts, own, keep, lambda batch: {"samples": 8 * batch}, posts, timeout, timeout / 4, told)


def write(run: Path, batch: int, keep: int = 2) -> None:
    """A checkpoint of two stages, of which pipeline 1 has only buffers of stage 1."""
    told, posts = Told(), LocalPosts()
    one = writer(run, [(0, 0), (1, 0), (0, 1), (1, 1)], posts, told, keep)
    one.sink(snapshot(batch, 0, w=torch.arange(6.0).reshape(2, 3), half=torch.ones(3, dtype=torch.bfloat16)))
    one.sink(snapshot(batch, 1, w=torch.full((4,), float(batch))))
    one.sink(snapshot(batch, 0, 1))
    one.sink(snapshot(batch, 1, 1, buffer=torch.tensor([7])))
    assert one.finish(batch) is None
    assert told.found == [(batch, None)]
