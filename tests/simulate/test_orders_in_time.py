"""Bubble, activations and messages of every order are what the literature's formulas say.

Times are of a rank's whole share: a chunk costs 1/v of them. Bf = I + W is a whole backward. The formulas are those
that were confirmed by other simulators, or stated in a paper or in its code.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.schedule.orders import ORDERS
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from penstock.simulate.simulate import Simulation, simulate_schedule

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (10.0, 12.0, 7.0)]
MEASURED = (18.522, 18.086, 9.337)  # of a model of 1.5 B parameters (arXiv 2401.10241), with a latency of 0.601


def run(
    name: str,
    p: int,
    m: int,
    times: tuple[float, float, float] = (1, 1, 1),
    latency: float = 0.0,
    left: float = 1.0,
    fused: float = 1.0,
    **options: int,
) -> Simulation:
    proof = prove(ORDERS[name], p, m, options=options)
    costs = Costs.uniform(proof.schedule, *times, latency=latency)
    return simulate_schedule(proof, replace(costs, left=left, fused=fused), 1)


def idle(found: Simulation) -> float:
    return found.bubble.makespan - found.bubble.ideal


def peaks(found: Simulation) -> list[float]:
    return found.timeline.peak("activations")


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 7, 2), (4, 9, 3), (5, 9, 2), (8, 16, 2)]
)
def test_chunks_divide_the_bubble(p: int, m: int, v: int, times: tuple[float, float, float]) -> None:
    """(p-1)(F+Bf)/v, interleaved and breadth-first, for any m from p on; 2m(pv-1) messages."""
    for name in ("interleaved", "breadth-first"):
        found = run(name, p, m, times, chunks=v)
        assert idle(found) == pytest.approx((p - 1) * sum(times) / v)
        assert found.bubble.bubble == pytest.approx((p - 1) / (m * v + p - 1))
        assert found.messages == 2 * m * (p * v - 1)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 1, 2), (4, 2, 2), (4, 3, 3), (3, 2, 4)])
def test_with_fewer_microbatches_than_ranks_every_chunk_but_one_waits(p: int, m: int, v: int) -> None:
    """For as long as the p - m microbatches would take that are not there."""
    for name in ("interleaved", "breadth-first"):
        assert idle(run(name, p, m, chunks=v)) == pytest.approx((p - 1) * 3 / v + (v - 1) * (p - m) * 3 / v)


def test_activations_of_chunks() -> None:
    """Interleaved p + (p-1-2r)/v from m = 2p on, breadth-first m; groups hold as many as a group."""
    for p, v in ((2, 2), (4, 2), (4, 4), (3, 3)):
        wanted = [p + (p - 1 - 2 * r) / v for r in range(p)]
        assert peaks(run("interleaved", p, 2 * p, chunks=v)) == pytest.approx(wanted)
        assert peaks(run("breadth-first", p, 2 * p, chunks=v)) == pytest.approx([2 * p] * p)
        assert peaks(run("breadth-first", p, 2 * p, chunks=v, group=p)) == pytest.approx([p] * p)
    assert run("interleaved", 4, 8, (1, 1, 1)).bubble.makespan == 28.5


def loops(name: str, m: int, latency: float = 0.0) -> Simulation:
    """Four ranks with four chunks each; a forward of a chunk takes 1, a backward 3."""
    proof = prove(ORDERS[name], 4, m, options={"chunks": 4})
    return simulate_schedule(proof, Costs((StageCost(1, 1.5, 1.5),) * 16, latency))


def gathered(name: str) -> tuple[int, int]:
    """With two buffers for weights and two for gradients: how often rank 0 gathers a chunk, and reduces one.

    A chunk's buffer is its number on the rank, modulo two; whoever takes one over fetches its weights, or sends what
    was accumulated there away.
    """
    rows = prove(ORDERS[name], 4, 8, options={"chunks": 4}).schedule.programs[0].period
    passes = [(str(a.op), a.stage.index // 4) for a in rows if a.op in (Op.F, Op.B)]
    weights = [chunk for buffer in (0, 1) for chunk, _ in groupby(c for _, c in passes if c % 2 == buffer)]
    gradients = [
        chunk for buffer in (0, 1) for chunk, _ in groupby(c for op, c in passes if op == "B" and c % 2 == buffer)
    ]
    return len(weights), len(gradients)


@pytest.mark.parametrize(
    ("name", "held", "ready", "traffic"),
    [
        ("breadth-first", 32, [1.0, 0.83, 0.66, 0.49], (6, 4)),
        ("interleaved", 19, [1.0, 0.91, 0.83, 0.74], (20, 8)),
    ],
)
def test_breadth_first_and_depth_first_loops(
    name: str, held: int, ready: list[float], traffic: tuple[int, int]
) -> None:
    """m = 8: idle / ideal (p-1)/(mv); chunk passes held on rank 0; when its gradients are complete, as parts of the
    batch, from chunk 0 on; gathers and reductions where two chunks fit (arXiv 2106.02679, 2211.05953)."""
    found = loops(name, 8)
    assert found.bubble.bubble_of_ideal == 3 / 32
    assert 4 * peaks(found)[0] == held
    ends = {i.stage // 4: i.end for i in found.timeline.work(0) if i.what == "B"}
    assert [round(ends[chunk] / found.bubble.makespan, 2) for chunk in range(4)] == ready
    assert gathered(name) == traffic


def test_every_hop_counts_where_as_many_microbatches_as_ranks_go_round() -> None:
    """m = p: an overhead of .1875, and of .305 if a hop takes a quarter of a forward; one microbatch more hides it."""
    assert loops("breadth-first", 4).bubble.bubble_of_ideal == 0.1875
    assert loops("breadth-first", 4, 0.25).bubble.bubble_of_ideal == pytest.approx(0.305, abs=5e-4)
    hops = 2 * 0.25 * 3  # the way there and back, once
    assert idle(loops("breadth-first", 5, 0.25)) == pytest.approx(idle(loops("breadth-first", 5)) + hops)


@pytest.mark.parametrize("times", [*TIMES, (2.0, 3.0, 1.0)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 12), (8, 16)])
def test_zero_bubble(p: int, m: int, times: tuple[float, float, float]) -> None:
    """H1 (p-1)(F+I-W); H2 (p-1)(F+I-2W) within a rank, and F of the first microbatch's way beside it."""
    forward, inputs, weights = times
    h1, h2 = run("zb-h1", p, m, times), run("zb-h2", p, m, times)
    assert idle(h1) == pytest.approx((p - 1) * (forward + inputs - weights))
    within = max((p - 1) * (forward + inputs - 2 * weights), 0)
    if within:
        assert h2.bubble.rank_span - h2.bubble.ideal == pytest.approx(within)
    if times == (1, 1, 1):
        assert h2.bubble.rank_span == h2.bubble.ideal
    assert idle(h2) == pytest.approx(max(within, (p - 1) * forward))
    assert peaks(h1) == [p] * p
    assert peaks(h2) == [2 * p - 1] * p
    assert h1.messages == h2.messages == 2 * m * (p - 1)


def test_published_rates_of_zero_bubble() -> None:
    """p = 8, m = 24; idle / total with the longest span of a rank (arXiv 2401.10241, table of bubble rates)."""
    assert round(run("zb-h1", 8, 24, MEASURED, 0.601).bubble.rank_span_bubble, 4) == 0.1585
    assert round(run("zb-h2", 8, 24, MEASURED, 0.601).bubble.rank_span_bubble, 4) == 0.1083


def test_interleaved_on_the_same_model() -> None:
    """What Megatron's rule takes with three chunks; the table, which counts it in another way, prints 0.1055."""
    assert round(run("interleaved", 8, 24, MEASURED, 0.601, chunks=3).bubble.rank_span_bubble, 4) == 0.1090


@pytest.mark.parametrize("left", [0.25, 0.375, 1.0])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_activations_of_zero_bubble(p: int, left: float) -> None:
    """With M_W = left * M_B after I: H1 (p-r) M_B + r M_W, H2 (2p-2r-1) M_B + 2r M_W (arXiv 2401.10241)."""
    h1, h2 = (peaks(run(name, p, 3 * p, left=left)) for name in ("zb-h1", "zb-h2"))
    assert h1 == [p - r + r * left for r in range(p)]
    assert h2 == [2 * p - 2 * r - 1 + 2 * r * left for r in range(p)]


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (10, 12, 7)])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (4, 1), (4, 3), (4, 4), (8, 8)])
def test_zero_bubble_with_no_more_microbatches_than_ranks(p: int, m: int, times: tuple[int, int, int]) -> None:
    """(m+p-1)(F+I) + W instead of (m+p-1)(F+I+W) (arXiv 2401.10241, app. H)."""
    forward, inputs, weights = times
    wanted = (m + p - 1) * (forward + inputs) + weights
    assert run("1f1b", p, m, times).bubble.makespan == (m + p - 1) * sum(times)
    assert run("zb-h1", p, m, times).bubble.makespan == wanted
    assert run("zb-h2", p, m, times).bubble.rank_span == wanted
    found = run("zb-auto", p, m, times, forward=forward, input=inputs, weight=weights)
    assert found.bubble.rank_span == wanted


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_zb_v(p: int) -> None:
    """No bubble within a rank, (p-1)F/2 in all, p activations on every rank, twice the messages of 1F1B."""
    for m in (2 * p, 3 * p + 1):
        found = run("zb-v", p, m)
        assert found.bubble.rank_span == found.bubble.ideal
        assert idle(found) == (p - 1) / 2
        assert found.bubble.bubble == pytest.approx((p - 1) / (6 * m + p - 1))
        assert peaks(found) == [p] * p
        assert found.messages == 2 * m * 2 * (p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zb_v_below_2p_microbatches(p: int) -> None:
    """As in torch's table, a rank waits for F for each of the 2p - 1 that fill it and are not there."""
    for m in range(p, 2 * p):
        found = run("zb-v", p, m)
        assert found.bubble.rank_span - found.bubble.ideal == 2 * p - 1 - m
        assert idle(found) == max((p - 1) / 2, 2 * p - 1 - m)


@pytest.mark.parametrize("p", [3, 4, 5, 6, 8, 9, 12])
def test_v_half_and_v_min(p: int) -> None:
    """Activations (p+2)//2 and (p+4)//3; bubbles as the published code gives them, but for the few that are named."""
    half = (3 * p - 7) / 2 if p % 2 == 0 else (3 * p - 4) / 2
    least = (4 * p - 7) / 2 if p % 3 == 0 else (4 * p - 5) / 2
    for m in sorted({p // 2 + 1, p, p + 1, 2 * p, 3 * p, 4 * p + 1}):
        more = p % 2 == 0 and m == p + 1
        for name, wanted, held in (("v-half", half + more, (p + 2) // 2), ("v-min", least, (p + 4) // 3)):
            found = run(name, p, m)
            assert idle(found) == wanted
            if m < 2 * p:
                continue
            assert max(peaks(found)) == held
            assert (set(peaks(found)) == {held}) == (name == "v-half" or (p + 1) % 3 > 0)
            assert found.messages == 2 * m * 2 * (p - 1)


def test_v_half_on_two_ranks() -> None:
    assert {idle(run("v-half", 2, m)) for m in range(2, 9)} == {0.5}


def test_v_min_on_five_ranks_holds_less_on_some() -> None:
    assert peaks(run("v-min", 5, 15)) == [2.5, 3, 3, 2, 3]


@pytest.mark.long
def test_unequal_passes_cost_v_min_more_with_every_microbatch() -> None:
    """And V-Half and ZB-V a constant."""
    times = (10.0, 11.0, 8.0)
    names = ("zb-v", "v-half", "v-min")
    whole, half, least = ([idle(run(name, 8, m, times)) for m in (24, 48, 96)] for name in names)
    assert whole[0] == pytest.approx(whole[2])
    assert half[1] == pytest.approx(half[2])
    assert least[0] < least[1] < least[2]


@pytest.mark.parametrize(
    ("stages", "m", "pairs"),
    [
        (2, 4, 1), (4, 4, 1), (4, 8, 1), (4, 16, 1), (6, 6, 1), (8, 16, 1), (4, 8, 2), (8, 8, 2), (8, 24, 2),
        (12, 12, 2), (12, 24, 3), (8, 16, 4),
    ],
)  # fmt: skip
def test_chimera_in_time(stages: int, m: int, pairs: int) -> None:
    """F = Bf: D/f-2 idle slots, (D-2f)/(2fN+D-2f); Bf = 2F: (D-2f)/(3fN/2+D-2f) for N = D, and a further D/f-2 for each
    further unit, which makes 3N + (D/f-2)(N/D+1); between D-D/(2f)+1 and D activations."""
    slots = stages / pairs - 2
    equal, longer = (run("chimera", stages, m, times, pairs=pairs) for times in ((1, 0.5, 0.5), (1, 1, 1)))
    assert idle(equal) == slots
    assert equal.bubble.bubble == pytest.approx((stages - 2 * pairs) / (2 * pairs * m + stages - 2 * pairs))
    assert longer.bubble.makespan == 3 * m + slots * (m / stages + 1)
    if m == stages:
        ratio = (stages - 2 * pairs) / (3 * pairs * m / 2 + stages - 2 * pairs)
        assert longer.bubble.bubble == pytest.approx(ratio)
    assert (min(peaks(equal)), max(peaks(equal))) == (stages - stages / (2 * pairs) + 1, stages)
    assert equal.messages == 2 * m * (stages - 1)


@pytest.mark.parametrize(("stages", "units", "better"), [(4, 3, True), (4, 4, False), (8, 2, True), (8, 3, False)])
def test_chimera_loses_to_1f1b_when_units_follow_each_other(stages: int, units: int, better: bool) -> None:
    """Bf = 2F, units of D microbatches: once (D-2)(N/D+1) is more than 3(D-1)."""
    chimera, plain = (run(name, stages, units * stages).bubble.makespan for name in ("chimera", "1f1b"))
    assert (chimera < plain) is better


@pytest.mark.parametrize(("p", "waves"), [(2, 1), (4, 1), (4, 2), (3, 1), (8, 2)])
def test_hanayo(p: int, waves: int) -> None:
    """F = Bf, m = p: (p-1)/(2Wp+p-1), p - (p-1-r)/(2W) activations; Bf = 2F with one wave: (2p-2)/(5p-2)."""
    found = run("hanayo", p, p, (1, 0.5, 0.5), waves=waves, backward=1)
    assert found.bubble.bubble == pytest.approx((p - 1) / (2 * waves * p + p - 1))
    assert peaks(found) == pytest.approx([p - (p - 1 - r) / (2 * waves) for r in range(p)])
    assert found.messages == 2 * p * 2 * waves * (p - 1)
    if waves == 1:
        assert run("hanayo", p, p).bubble.bubble == pytest.approx((2 * p - 2) / (5 * p - 2))
    assert peaks(run("hanayo", 4, 4)) == [2.5, 3, 4, 4]


def test_dualpipe() -> None:
    """(p/2-1)(F&B + Bf - 3W) where F = W; p + 1 activations. The published example: p = 8, m = 20, T = 66, bubble 6."""
    found = run("dualpipe", 8, 20)
    assert (found.bubble.makespan, idle(found), max(peaks(found))) == (66, 6, 9)
    for p, m in ((2, 4), (4, 8), (4, 12), (6, 12)):
        found = run("dualpipe", p, m)
        assert idle(found) == (p / 2 - 1) * 2
        assert peaks(found) == [p + 1] * p
        assert found.messages == 2 * m * (p - 1)


@pytest.mark.parametrize("fused", [1.0, 0.75])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (6, 12), (8, 20)])
def test_dualpipe_where_pairs_overlap(p: int, m: int, fused: float) -> None:
    """(p/2-1)(F&B + Bf - 3W) on the ranks that run most pairs, also where a pair takes less than its parts."""
    found = run("dualpipe", p, m, fused=fused)
    assert found.bubble.makespan - found.bubble.busy[p // 2] == (p / 2 - 1) * (3 * fused + 2 - 3)
    on_a_v = run("dualpipe-v", p, m, fused=fused)
    assert on_a_v.bubble.makespan - on_a_v.bubble.busy[-1] == (p - 1) * (3 * fused + 2 - 3) / 2


def test_dualpipe_where_weights_take_less_than_a_forward() -> None:
    """W = 0.8 and F&B = 2.7: (p/2-1)(F&B + Bf - 2W - F) = 6.3, where the formula for F = W would say 6.9."""
    bubble = run("dualpipe", 8, 20, (1, 1.2, 0.8), fused=0.9).bubble
    assert [bubble.makespan - busy for busy in bubble.busy[2:6]] == pytest.approx([6.3] * 4)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 13), (8, 16)])
def test_dualpipe_v(p: int, m: int) -> None:
    """(p-1)(F&B + Bf - 3W)/2; p + 1/2 activations."""
    found = run("dualpipe-v", p, m)
    assert idle(found) == (p - 1) * 2 / 2
    assert peaks(found) == [p + 0.5] * p
    assert found.messages == 2 * m * 2 * (p - 1)


@pytest.mark.parametrize(("stages", "m"), [(2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16)])
def test_bitpipe(stages: int, m: int) -> None:
    """F = Bf: (D-2)/(4N+D-2); D = N = 4 with Bf = 2F takes 14."""
    found = run("bitpipe", stages, m, (1, 0.5, 0.5), backward=1)
    assert found.bubble.bubble == pytest.approx((stages - 2) / (4 * m + stages - 2))
    assert max(peaks(found)) == stages
    assert found.messages == 2 * m * 2 * (stages - 1)
    assert run("bitpipe", 4, 4).bubble.makespan == 14
    assert peaks(run("bitpipe", 4, 4, (1, 0.5, 0.5), backward=1)) == [3.5, 4, 4, 3.5]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m", "k"), [(2, 4, 2), (4, 8, 2), (4, 4, 4), (3, 5, 3), (8, 16, 2)])
def test_slices_divide_bubble_and_activations(p: int, m: int, k: int, times: tuple[float, float, float]) -> None:
    """(p-1)(F+Bf)/k and (p-r-1+k)/k; TeraPipe holds the whole batch. k times as many messages carry as much."""
    found, whole = run("seq1f1b", p, m, times, slices=k), run("terapipe", p, m, times, slices=k)
    assert idle(found) == pytest.approx((p - 1) * sum(times) / k)
    assert found.bubble.bubble == pytest.approx((p - 1) / (m * k + p - 1))
    assert peaks(found) == pytest.approx([(p - r - 1 + k) / k for r in range(p)])
    assert idle(whole) == pytest.approx((p - 1) * sum(times) / k)
    assert peaks(whole) == pytest.approx([m] * p)
    assert found.messages == whole.messages == 2 * m * k * (p - 1)
    assert found.volume == whole.volume == 2 * m * (p - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 12), (8, 24)])
def test_bpipe(p: int, m: int) -> None:
    """The time of 1F1B with at most ceil((p+2)/2) microbatches on any rank."""
    found = run("bpipe", p, m)
    assert found.bubble.makespan == run("1f1b", p, m).bubble.makespan
    assert max(peaks(found)) <= -(-(p + 2) // 2)
    operations = [a.op for program in prove("bpipe", p, m).schedule.programs for a in program.period]
    assert found.parked == operations.count(Op.OFFLOAD) + operations.count(Op.RETURN)
    assert (found.parked > 0) == (p > 3)
    assert found.messages == run("1f1b", p, m).messages


@pytest.mark.parametrize("latency", [0.0, 0.5, 8.0])
@pytest.mark.parametrize("times", [(1.0, 0.5, 0.5), (1.0, 1.0, 1.0), (1.0, 1.5, 1.5)])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (5, 12), (6, 24), (8, 32)])
def test_bpipe_stops_nobody(p: int, m: int, times: tuple[float, float, float], latency: float) -> None:
    """A partner takes activations in while it computes, so up to 8 ranks need the time of 1F1B, whatever things take.

    When HOLD and FETCH waited, p = 8 needed up to 8.5 % more: with B = F, or where messages take longer than passes.
    """
    found, plain = run("bpipe", p, m, times, latency), run("1f1b", p, m, times, latency)
    assert found.bubble.makespan == pytest.approx(plain.bubble.makespan)


@pytest.mark.long
def test_where_bpipe_costs_time() -> None:
    """A RETURN stands in the partner's program where it costs no wait if B = 2F and messages take no time.

    p = 16, ranks 0 and 15, at most 9 microbatches. Of 14 in a row rank 0 parks 7. RETURN k stands between F and B of
    microbatch k + 9 on rank 15, and rank 0 runs F k + 16 directly behind B k. So F k + 9 of rank 0 goes down 16
    forwards, the RETURN lets B k run, and F k + 16 follows: 7 microbatches take at least 16 F + B, where 1F1B takes
    7 (F + B). The 7 that are not parked take no less. From B = 1.5 F on that is no more; below, other ranks add to it.
    """
    lowered = {(name, m): prove(ORDERS[name], 16, m).lowered for name in ("bpipe", "1f1b") for m in (64, 78)}

    @cache
    def makespan(name: str, m: int, backward: float) -> float:
        costs = Costs.uniform(lowered[name, m].schedule, 1, backward / 2, backward / 2)
        return play(lowered[name, m], costs, 1)[0].bubble().makespan

    for backward in (1.0, 1.25, 1.5, 2.0):
        fourteen = {name: makespan(name, 78, backward) - makespan(name, 64, backward) for name in ("bpipe", "1f1b")}
        plain, least = 14 * (1 + backward), 16 + backward + 7 * (1 + backward)
        assert fourteen["1f1b"] == plain
        assert max(plain, least) <= fourteen["bpipe"] <= 1.1 * max(plain, least)
        assert (makespan("bpipe", 78, backward) == makespan("1f1b", 78, backward)) == (backward >= 1.5)
