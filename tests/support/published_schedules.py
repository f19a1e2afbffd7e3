"""Published figures about synchronous orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import Simulation, simulate_schedule
from support.published_case import Case

ZERO_BUBBLE, CHIMERA, HANAYO = "arXiv 2401.10241", "arXiv 2107.06925", "arXiv 2308.15762"
V_BLOCKS, MEGATRON, DUALPIPE = "arXiv 2405.15362 and its code", "arXiv 2104.04473", "DualPipe's own code"
BITPIPE, SEQ, BPIPE, VOCABULARY = "arXiv 2410.19367", "arXiv 2406.03488", "BPipe, ICML 2023", "arXiv 2411.05288"
DAPPLE = "arXiv 2007.01045"
MEASURED = (18.522, 18.086, 9.337, 0.601)
"""F, B, W and the latency of a hop of the 1.5 B model of arXiv 2401.10241, in ms."""


@cache
def played(
    method: str,
    p: int,
    m: int,
    times: tuple[float, ...] = (1.0, 1.0, 1.0, 0.0),
    options: tuple[tuple[str, Any], ...] = (),
) -> Simulation:
    """A batch of a method on p ranks: F, B, W of a rank's share, and the latency of a hop."""
    proof = prove(method, p, m, options=dict(options))
    forward, first, second, latency = times
    costs = Costs.uniform(proof.schedule, forward, first, second, latency)
    return simulate_schedule(proof, costs, 1)


def peak(*arguments: Any, rank: int | None = None) -> Callable[[], float]:
    """The most microbatches in flight on a rank, or on any."""

    def found() -> float:
        held = played(*arguments).activations
        return float(max(held) if rank is None else held[rank])

    return found


def unequal(method: str, forwards: tuple[float, ...], m: int) -> float:
    """The makespan of stages whose backwards take twice their forwards."""
    costs = Costs(tuple(StageCost(f, f, f) for f in forwards))
    return simulate_schedule(prove(method, len(forwards), m), costs, 1).bubble.makespan


def longest_span(method: str, options: tuple[tuple[str, Any], ...] = ()) -> float:
    """The longest span of a rank of the 1.5 B model, 8 ranks, 24 microbatches."""
    return played(method, 8, 24, MEASURED, options).bubble.rank_span


def interleaved_as_in_table_4() -> float:
    """The idle part of the longest span, where 8 hops are not counted."""
    forward, first, second, hop = MEASURED
    return 1 - 24 * (forward + first + second) / (longest_span("interleaved", (("chunks", 3),)) - 8 * hop)


def zero_bubble() -> Iterator[Case]:
    """Rates, activations and times of zero-bubble orders."""
    name = "1.5 B, 8 ranks, 24 microbatches"
    for method, rate in (("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)):
        yield Case(
            f"{method}, {name}: idle part of the longest rank's span", f"{ZERO_BUBBLE}, table 4", rate,
            lambda a=method: played(a, 8, 24, MEASURED).bubble.rank_span_bubble, 1e-3,
        )  # fmt: skip
    yield Case(
        f"1f1b, {name}: longest span, ms", f"{ZERO_BUBBLE}, derived", 1456.75,
        lambda: played("1f1b", 8, 24, MEASURED).bubble.rank_span,
    )  # fmt: skip
    yield Case(
        f"ZB-2p by search, {name}: the same part", f"{ZERO_BUBBLE}, table 4", 0.0433,
        lambda: played("zb-auto", 8, 24, MEASURED, SEARCHED).bubble.rank_span_bubble,
        why="our search, with the memory of a microbatch as in the paper", long=True,
    )  # fmt: skip
    yield Case(
        f"interleaved, 3 chunks, {name}: the same part", f"{ZERO_BUBBLE}, table 4", 0.1055, interleaved_as_in_table_4,
        1e-3,
        why="less 8 of the 46 hops on the longest path, which their program does not count: of a group of 8 it has "
        "only the first microbatch wait for its chunk before; with them it is 0.1090",
    )  # fmt: skip
    yield Case(
        f"ZB-2p over 1F1B, {name}: samples per second", ZERO_BUBBLE, 14.5 / 11.8,
        lambda: longest_span("1f1b") / longest_span("zb-auto", SEARCHED), 0.03,
        why="from the parts above; 11.8 and 14.5 samples were measured on 8 A100", long=True,
    )  # fmt: skip
    for method, most in (("zb-h1", 4), ("zb-h2", 7)):
        for rank in (0, 3):
            yield Case(
                f"{method}, 4 ranks, 8 microbatches: in flight on rank {rank}", f"{ZERO_BUBBLE}, derived", most,
                peak(method, 4, 8, rank=rank),
            )  # fmt: skip
    yield Case(
        "zb-v, 4 ranks, 8 microbatches: bubble", "Primus' form", 1 / 17, lambda: played("zb-v", 4, 8).bubble.bubble
    )
    yield Case("zb-v, 4 ranks, 8 microbatches: in flight, most", ZERO_BUBBLE, 4, peak("zb-v", 4, 8))
    yield Case(
        "zb-v, 4 ranks, 8 microbatches: longest span", ZERO_BUBBLE, 24, lambda: played("zb-v", 4, 8).bubble.rank_span
    )
    for p, half, least in ((4, 3, 2), (8, 5, 4), (16, 9, 6)):
        for method, most in (("v-half", half), ("v-min", least)):
            found = peak(method, p, 2 * p)
            yield Case(f"{method}, {p} ranks: in flight, most", V_BLOCKS, most, found, long=p > 8)
    for method, p, idle in (("v-half", 4, 2.5), ("v-half", 6, 5.5), ("v-half", 8, 8.5), ("v-min", 4, 5.5)):
        yield Case(
            f"{method}, {p} ranks, {2 * p} microbatches: makespan beyond the ideal", V_BLOCKS, idle,
            lambda a=method, b=p: played(a, b, 2 * b).bubble.makespan - 6 * b,
        )  # fmt: skip


SEARCHED = (("forward", 18522), ("input", 18086), ("weight", 9337), ("hop", 601), ("held", 37))
"""The same, in whole numbers, and what is left of activations between the halves of a backward, in %."""


def flushed() -> Iterator[Case]:
    """Times and activations of orders with one pass for a backward."""
    whole = (1.0, 1.0, 1.0, 0.0)
    alike = (1.0, 0.5, 0.5, 0.0)  # a backward as long as a forward
    yield Case(
        "interleaved, 4 ranks x 2, 8 microbatches: idle over ideal", f"{MEGATRON}, sec. 2.2", 0.1875,
        lambda: played("interleaved", 4, 8).bubble.bubble_of_ideal,
    )  # fmt: skip
    yield Case(
        "interleaved, 4 ranks x 2, 8 microbatches: in flight on rank 0", f"{MEGATRON}, derived", 5.5,
        peak("interleaved", 4, 8, rank=0),
    )  # fmt: skip
    for method, expected in (("gpipe", 57), ("1f1b", 53)):
        yield Case(
            f"{method}, stages of 1, 2, 1, 1, backwards twice, 8 microbatches: makespan", "derived", expected,
            lambda a=method: unequal(a, (1.0, 2.0, 1.0, 1.0), 8),
        )  # fmt: skip
    for method, hops in (("1f1b", 3 + 5), ("eager", 3), ("gpipe", 3)):
        yield Case(
            f"{method}, 4 ranks, 8 microbatches, hops of 0.01: makespan", f"{DAPPLE}, derived", 33 + 2 * 0.01 * hops,
            lambda a=method: played(a, 4, 8, (*whole[:3], 0.01)).bubble.makespan, 1e-6,
        )  # fmt: skip
    yield Case("eager, 4 ranks, 8 microbatches: in flight on rank 0", DAPPLE, 7, peak("eager", 4, 8, rank=0))
    for n, times, rate in ((8, alike, 1 / 9), (4, whole, 0.25)):
        yield Case(
            f"chimera, 4 ranks, {n} microbatches, backwards of {2 * times[1]:g}: bubble", f"{CHIMERA}, derived", rate,
            lambda a=n, b=times: played("chimera", 4, a, b).bubble.bubble,
        )  # fmt: skip
    for method, idle in (("chimera", 2), ("1f1b", 6)):
        yield Case(
            f"{method}, 4 ranks, 4 microbatches, backwards of 1: idle slots of a rank", CHIMERA, idle,
            lambda a=method: played(a, 4, 4, alike).bubble.makespan - 8,
        )  # fmt: skip
    for rank, held in ((0, 3), (1, 4)):
        yield Case(f"chimera, 4 ranks: in flight on rank {rank}", CHIMERA, held, peak("chimera", 4, 4, rank=rank))
    for n, makespan in ((4, 16), (8, 30), (16, 58)):
        yield Case(
            f"chimera, 4 ranks, {n} microbatches, backwards of 2: makespan", f"{CHIMERA}, derived", makespan,
            lambda a=n: played("chimera", 4, a, whole).bubble.makespan,
        )  # fmt: skip
    for times, rate in ((alike, 3 / 11), (whole, 1 / 3)):
        made_for = (("backward", round(2 * times[1])),)
        yield Case(
            f"hanayo, 4 ranks, 4 microbatches, backwards of {2 * times[1]:g}: bubble", f"{HANAYO}, derived", rate,
            lambda a=times, b=made_for: played("hanayo", 4, 4, a, b).bubble.bubble,
            why="with the order for such backwards (hanayo:backward=1)" if times is alike else "",
        )  # fmt: skip
    yield from _other_orders(whole, alike)


def _other_orders(whole: tuple[float, ...], alike: tuple[float, ...]) -> Iterator[Case]:
    name = "dualpipe, 8 ranks, 20 microbatches"
    yield Case(f"{name}: makespan", DUALPIPE, 66, lambda: played("dualpipe", 8, 20).bubble.makespan)
    yield Case(f"{name}: idle time", DUALPIPE, 6, lambda: played("dualpipe", 8, 20).bubble.makespan - 60)
    yield Case(f"{name}: in flight, most", DUALPIPE, 9, peak("dualpipe", 8, 20))
    for times, makespan in ((alike, 9), (whole, 14)):
        yield Case(
            f"bitpipe, 4 ranks, 4 microbatches, backwards of {2 * times[1]:g}: makespan",
            f"{BITPIPE}, derived", makespan, lambda a=times: played("bitpipe", 4, 4, a).bubble.makespan,
        )  # fmt: skip
    yield Case("bpipe, 8 ranks, 16 microbatches: in flight, most", BPIPE, 5, peak("bpipe", 8, 16))
    yield Case(
        "seq1f1b, 2 slices, 8 ranks: in flight on rank 0", f"{SEQ}, derived", 4.5, peak("seq1f1b", 8, 16, rank=0)
    )
    yield Case(
        "seq1f1b, 2 slices, 8 ranks, 16 microbatches: bubble", f"{SEQ}, derived", 7 / 39,
        lambda: played("seq1f1b", 8, 16).bubble.bubble,
    )  # fmt: skip
    yield Case(
        "vocabulary-1f1b, 4 ranks, 8 microbatches: in flight of the first layers", f"{VOCABULARY}, algorithm 1", 6,
        first_layers_in_flight,
    )  # fmt: skip
    yield Case(
        "1F1B with a divided head, algorithm 2, 4 ranks: in flight, most", VOCABULARY, 5, None,
        why="algorithm 2, which has one barrier, is not offered", open=True,
    )  # fmt: skip
    yield Case(
        "TeraPipe, 4 ranks, slices of 2, 1, 1: a sequence", "arXiv 2102.07988", 10, sequence_in_unequal_slices,
    )  # fmt: skip


def sequence_in_unequal_slices() -> float:
    """The makespan of a sequence in slices whose forwards and backwards take 2, 1 and 1 on every rank."""
    proof = prove("terapipe", 4, 1, options={"slices": 3})
    costs = Costs((StageCost(4 / 3, 4 / 3, 4 / 3),) * 4, slices=(0.5, 0.25, 0.25))
    return simulate_schedule(proof, costs, 1).bubble.makespan


def first_layers_in_flight() -> float:
    """The most microbatches between forward and backward of the layers of rank 0, beside its share of the head."""
    most = now = 0
    for action in prove("vocabulary-1f1b", 4, 8).schedule.programs[0].passes():
        if action.stage.index == 0:
            now += 1 if action.op is Op.F else -1
            most = max(most, now)
    return most
