"""Published figures about the delays of asynchronous orders, and about what delays cost in memory and save in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from penstock.schedule.add_options import extended
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.predicted import MemoryOptions, always_there
from penstock.simulate.missing_updates import missing_updates
from penstock.simulate.simulate import simulate_schedule
from support.published_case import Case
from support.published_schedules import played

GPIPE, STASH, PIPEMARE = "arXiv 1811.06965", "arXiv 1806.03377", "arXiv 1910.05124"


def delays() -> Iterator[Case]:
    """Weight copies, delays and utilisation of asynchronous orders."""
    stash = cache(lambda: prove("stash", 8, 1))
    for rank in (0, 7):
        yield Case(
            f"stash, 8 ranks, an update for each microbatch: weight copies of rank {rank}", STASH, 8 - rank,
            lambda r=rank: stash().versions_on(r),
        )  # fmt: skip
    yield Case(
        "stash, 8 ranks: weight copies of all", f"{STASH}, derived", 36,
        lambda: sum(stash().versions_on(rank) for rank in range(8)),
    )  # fmt: skip
    yield Case(
        "stash, 8 ranks, 4 microbatches: mean delay of rank 0, updates", f"{PIPEMARE}, derived", 7 / 4,
        lambda: float(mean_delay("stash", 8, 4)),
        why="(P - i) / N with stages counted from 1, so 7/4 for the first of 8",
    )  # fmt: skip
    yield Case(
        "gpipe, 4 ranks, 16 microbatches: utilisation", f"{GPIPE}, derived", 0.8421,
        lambda: 1 - played("gpipe", 4, 16).bubble.bubble,
    )  # fmt: skip
    yield Case(
        "gpipe, 107 ranks, 8 microbatches: utilisation", PIPEMARE, 0.0702,
        lambda: 1 - played("gpipe", 107, 8).bubble.bubble, long=True,
    )  # fmt: skip
    yield Case(
        "without flushes over GPipe, 107 ranks, 8 microbatches: throughput", PIPEMARE, 14.3,
        lambda: 1 / (1 - played("gpipe", 107, 8).bubble.bubble), long=True,
    )  # fmt: skip
    yield from _of_pipemare()
    for p, updates in ((4, 14), (8, 60)):
        yield Case(
            f"stash, {p} ranks, an update for each microbatch: most updates of all stages between reading and writing",
            "arXiv 2606.03498", updates, lambda p=p: float(updates_of_all_stages(p)),
        )  # fmt: skip
    yield Case(
        "stash, 4 ranks, an update for each microbatch, waves of 4, 4 waves behind: updates of others missing",
        "arXiv 2005.14038, section 5", 22, lambda: float(max(missing_updates(waves(4, 4)) or ())),
    )  # fmt: skip


def waves(in_flight: int, behind: int) -> Schedule:
    """HetPipe's order: waves of as many updates as are in flight, of which others add those of so many waves before."""
    return extended(prove("stash", in_flight, 1).schedule, averages=in_flight, behind=in_flight * behind)


def _of_pipemare() -> Iterator[Case]:
    """What PipeMare's hardware model says."""
    yield Case(
        "newest, 107 ranks, 8 microbatches: mean delay of the first stage's forwards, updates", PIPEMARE, 26.625,
        lambda: float(mean_delay("newest", 107, 8, in_flight=2 * 107)), long=True,
        why="with 214 in flight, as a slot of the paper has a forward and a backward; with 107 it is 13.25",
    )  # fmt: skip
    yield Case(
        "pipemare, Adam, with T2: bytes over those without it", PIPEMARE, 1.25, memory_with_discrepancy_correction
    )
    yield Case(
        "PipeMare Recompute, 107 stages: activations over those of no recomputation", PIPEMARE, 0.097, None,
        why="1 / sqrt(P), an order of growth whose constant the paper does not give", open=True,
    )  # fmt: skip


def mean_delay(method: str, p: int, m: int, **options: int) -> float:
    """The mean delay of the first stage's forwards, in updates."""
    stages: Mapping[Any, Any] = prove(method, p, m, options=options).stages
    return next(facts.delay.forward for stage, facts in stages.items() if stage.index == 0)


def memory_with_discrepancy_correction() -> float:
    """Weights, gradients, Adam's two moments and PipeMare's buffer over the same without that buffer."""
    facts = next(facts for stage, facts in prove("pipemare", 4, 4).stages.items() if stage.index == 0)
    bytes_of = {
        name: 2 + sum(always_there("newest", facts, MemoryOptions(correction=name), again=False))
        for name in ("none", "pipemare")
    }
    return bytes_of["pipemare"] / bytes_of["none"]


def updates_of_all_stages(p: int) -> int:
    """The most updates of any stage from a forward's read of a stage's weights to the update with its gradient.

    Forwards take as long as backwards, there is one update for each microbatch, and the steady state counts.
    """
    proof = prove("stash", p, 1)
    found = simulate_schedule(proof, Costs((StageCost(1.0, 0.5, 0.5),) * p), 8 * p)
    reads, updates = {}, []
    for rank in range(p):
        for interval in found.timeline.work(rank):
            if interval.what == "F":
                reads[rank, interval.microbatch] = interval.start
            elif interval.what == "B":
                updates.append((interval.end, rank, interval.microbatch))
    updates.sort()
    place = {(rank, microbatch): at for at, (_, rank, microbatch) in enumerate(updates)}
    ends = [end for end, _, _ in updates]
    steady = [key for key in place if 3 * p <= key[1] < 5 * p]
    return max(place[key] - bisect_right(ends, reads[key]) for key in steady)
