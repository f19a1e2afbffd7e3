"""Ranks of a benchmark, with a model of no size in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import arms

from penstock import GPTConfig


def on_a_small_model(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    """Do what a rank does, in a process of its own."""
    arms.SHAPE = GPTConfig(layers=4, width=32, heads=2, context=16)
    work(rank, *arguments)


def spawn_small(start: Callable[..., Any], work: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Start ranks by `start`, in place of `torch.multiprocessing.spawn`."""
    start(on_a_small_model, (work, *arguments), nprocs=nprocs)
