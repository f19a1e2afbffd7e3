"""Which functions the engine's own time goes to, per pass.

    python -m benchmarks.overhead --profile

cProfile makes every Python call dearer, by about as much as a short function takes, and C functions hardly; so shares
tell where to look, and only `benchmarks.overhead` without a profile tells what was gained.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.tiny import InProcessArm, stages_of, tiny_data
from penstock import keep_freed_memory


class Hot(NamedTuple):
    """A function in a profile; times are microseconds per pass.

    Attributes:
        where: file, line and name.
        calls: per pass.
        own: without what it calls.
        whole: with it.
        share: of its own time in that of all functions.
    """

    where: str
    calls: float
    own: float
    whole: float
    share: float


def profile_method(method: str, microbatches: int, batches: int, spans: int) -> list[Hot]:
    """All functions of a span in one process, by their own time; times are medians of several spans.

    Args:
        method: of the pipeline.
        microbatches: m.
        batches: of each span.
        spans: profiled one by one, so that a moment in which the core was taken away does not count.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    arm = InProcessArm(method, microbatches, tiny_data())
    arm.run(2)  # warm up: optimizer state, shapes
    taken: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for _ in range(spans):
        profile = cProfile.Profile()
        profile.enable()
        arm.run(batches)
        profile.disable()
        stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        for function, (_, calls, own, whole, _) in stats.items():
            taken[_place(*function)].append((calls, own, whole))
    passes = 2 * stages_of(method, microbatches) * microbatches * batches
    medians = {where: [median(times) / passes for times in zip(*rows, strict=True)] for where, rows in taken.items()}
    total = sum(own for _, own, _ in medians.values())
    found = [Hot(w, calls, 1e6 * own, 1e6 * whole, own / total) for w, (calls, own, whole) in medians.items()]
    return sorted(found, key=lambda hot: hot.own, reverse=True)


def print_profile(method: str, microbatches: int, batches: int, spans: int, top: int = 40) -> None:
    """The hottest functions, as a table."""
    found = profile_method(method, microbatches, batches, spans)
    calls, own = sum(hot.calls for hot in found), sum(hot.own for hot in found)
    print(f"\n{method}: {own:.1f} us and {calls:.0f} calls per pass under the profiler; the {top} hottest functions\n")
    print(f"{'own us':>8} {'share':>6} {'with all':>9} {'calls':>7}  function")
    for hot in found[:top]:
        print(f"{hot.own:8.2f} {hot.share:6.1%} {hot.whole:9.2f} {hot.calls:7.2f}  {hot.where}")


def _place(file: str, line: int, name: str) -> str:
    """File and line as short as they are clear; functions in C have neither."""
    if line == 0:
        return name
    parts = Path(file).parts
    roots = [i for i, part in enumerate(parts) if part in ("penstock", "torch", "benchmarks")]
    return f"{'/'.join(parts[roots[-1] if roots else -1 :])}:{line} {name}"
