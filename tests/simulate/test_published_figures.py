"""Numbers printed in papers, or derived from their formulas by hand, that the simulator must reproduce."""

from pathlib import Path

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.order import NO_OPTIONS
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

GOLDEN = Path(__file__).parents[1] / "golden"


def run(method, stages, microbatches, batches=1, options=NO_OPTIONS, **costs):
    schedule = make_schedule(method, stages, microbatches, options=options)
    return simulate_schedule(schedule, Costs.uniform(schedule, **costs), batches)


@pytest.mark.parametrize(
    ("method", "stages", "makespan", "stash"),
    [("gpipe", 4, 21, 4), ("1f1b", 4, 21, 4), ("gpipe", 2, 15, 4), ("1f1b", 2, 15, 2)],
)
def test_figures_1a_and_3_of_the_2bw_paper(method, stages, makespan, stash):
    """Four microbatches, forwards of 1, backwards of 2."""
    result = run(method, stages, 4)
    assert result.bubble.makespan == makespan
    assert result.activations[0] == stash


def test_1f1b_with_latency_of_the_zero_bubble_paper():
    """Table of the 1.5B model: p = 8, m = 24, rate 0.2431 of the longest rank's span."""
    result = run("1f1b", 8, 24, forward=18.522, backward_input=18.086, backward_weight=9.337, latency=0.601)
    assert result.bubble.rank_span == pytest.approx(31 * 45.945 + 2 * 0.601 * 27)
    assert result.bubble.ideal == pytest.approx(24 * 45.945)
    assert round(result.bubble.rank_span_bubble, 4) == 0.2431


@pytest.mark.parametrize(("method", "makespan"), [("gpipe", 57), ("1f1b", 53)])
def test_unequal_stages(method, makespan):
    """F = 1, 2, 1, 1 and B = 2F: GPipe waits for the slow stage at both ends, 1F1B only once."""
    costs = Costs(tuple(StageCost(f, f, f) for f in (1, 2, 1, 1)))
    assert simulate_schedule(make_schedule(method, 4, 8), costs).bubble.makespan == makespan


def test_two_figures_called_bubble():
    """p = 4, m = 8: Megatron prints (p-1)/m of the ideal, the others (p-1)/(m+p-1) of the total."""
    bubble = run("1f1b", 4, 8).bubble
    assert bubble.bubble == pytest.approx(3 / 11)
    assert bubble.bubble_of_ideal == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("method", "stages", "microbatches", "figure", "wanted"),
    [
        ("1f1b", 8, 16, "makespan", 69),
        ("interleaved", 4, 8, "makespan", 28.5),
        ("interleaved", 4, 8, "bubble_of_ideal", 0.1875),
        ("interleaved", 4, 8, "bubble", 3 / 19),
        ("zb-h2", 4, 8, "rank_span", 24),
        ("zb-h2", 4, 8, "makespan", 27),
        ("zb-v", 4, 8, "rank_span", 24),
        ("zb-v", 4, 8, "makespan", 25.5),
        ("zb-v", 4, 8, "bubble", 1 / 17),
        ("chimera", 4, 4, "makespan", 16),
        ("chimera", 4, 4, "bubble", 0.25),
        ("hanayo", 4, 4, "bubble", 1 / 3),
        ("dualpipe", 8, 20, "makespan", 66),
        ("bitpipe", 4, 4, "makespan", 14),
    ],
)
def test_a_backward_takes_twice_as_long_as_a_forward(method, stages, microbatches, figure, wanted):
    assert getattr(run(method, stages, microbatches).bubble, figure) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("method", "stages", "microbatches", "options", "makespan", "bubble"),
    [
        ("chimera", 4, 4, {}, 10, 0.2),
        ("chimera", 4, 8, {}, 18, 1 / 9),
        ("hanayo", 4, 4, {"backward": 1}, 11, 3 / 11),
        ("bitpipe", 4, 4, {"backward": 1}, 9, 1 / 9),
    ],
)
def test_a_backward_takes_as_long_as_a_forward(method, stages, microbatches, options, makespan, bubble):
    found = run(method, stages, microbatches, options=options, backward_input=0.5, backward_weight=0.5).bubble
    assert (found.makespan, found.bubble) == (makespan, pytest.approx(bubble))


@pytest.mark.parametrize(("method", "slots"), [("chimera", 2), ("gpipe", 6), ("1f1b", 6)])
def test_idle_slots_of_four_ranks(method, slots):
    """Of length F = B: D - 2 on every rank of Chimera, 2 (D - 1) where one pipeline fills and drains."""
    bubble = run(method, 4, 4, backward_input=0.5, backward_weight=0.5).bubble
    assert [bubble.makespan - busy for busy in bubble.busy] == [slots] * 4


@pytest.mark.parametrize(("stages", "half", "least"), [(4, 3, 2), (8, 5, 4), (16, 9, 6)])
def test_activations_of_controllable_memory(stages, half, least):
    """A half and a third of 1F1B's, with what rounding adds."""
    for method, wanted in (("v-half", half), ("v-min", least), ("1f1b", stages)):
        assert max(prove(method, stages, 2 * stages).activations) == wanted


def test_terapipe_with_slices_of_different_lengths():
    """The sum of all, and (K - 1) times the longest: 2, 1 and 1 on four ranks take 4 + 3 * 2, each times F + B = 3.

    A unit of two microbatches stands for the slice that takes twice as long.
    """
    rows = "\n".join(f"rank {rank}: F0..1 F2 F3 B3 B2 B0..1" for rank in range(4))
    schedule = parse_schedule(f"microbatches 4\nnodes 0@0 1@1 2@2 3@3\n{rows}")
    assert simulate_schedule(schedule, Costs.uniform(schedule)).bubble.makespan == 10 * 3


# Makespan of one batch with F = B_input = B_weight = 1: ideal 3m, and the bubble by the formula of its paper.
ORDERS = {
    "chimera": 16,  # D = N = 4 and B = 2F
    "interleaved": 3 * 4 + 3 / 2,  # (p-1)(F+B)/v
    "breadth_first": 3 * 2 + 3 / 2,  # (p-1)(F+B)/v
    "zb_h1": 3 * 4 + 2 * (1 + 1 - 1),  # (p-1)(F+B-W)
    "zb_v": 3 * 4 + 1 / 2,  # (p-1)F/2
    "dualpipe_v": 3 * 4 + (3 + 2 - 3) / 2,  # (p-1)(F&B + B - 3W)/2 with F&B = 3
    "seq1f1b": 3 * 2 + 3 / 2,  # (p-1)(F+B)/k
    "offload": 3 * (4 + 1),  # GPipe
    "two_branches": 3 * (3 + 1),  # two hops of 1F1B, the towers side by side
    "frozen_front": 1 + 3 * (3 + 1),  # one forward, then 1F1B over two ranks
    "local_losses": 1 + 3 * 2,  # one forward later, no bubble
    "evaluation": 2 + 1,  # m + p - 1
    "periodic_averaging": 3 * (2 + 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_makespan_of_hand_written_orders(name):
    schedule = parse_schedule((GOLDEN / f"{name}.txt").read_text())
    assert simulate_schedule(schedule, Costs.uniform(schedule)).bubble.makespan == ORDERS[name]


@pytest.mark.parametrize("times", [(1, 1, 1), (10, 12, 7), (2, 3, 1)])
def test_zero_bubble_h1_for_unequal_passes(times):
    """(p-1)(F+B-W), both as span and as makespan."""
    f, b, w = times
    schedule = parse_schedule((GOLDEN / "zb_h1.txt").read_text())
    bubble = simulate_schedule(schedule, Costs.uniform(schedule, f, b, w)).bubble
    assert bubble.makespan == bubble.rank_span == 4 * (f + b + w) + 2 * (f + b - w)


def test_zero_bubble_v_has_none_by_its_own_measure():
    schedule = parse_schedule((GOLDEN / "zb_v.txt").read_text())
    bubble = simulate_schedule(schedule, Costs.uniform(schedule)).bubble
    assert bubble.rank_span_bubble == 0
    assert bubble.bubble == pytest.approx(1 / 25)  # (p-1)/(6m+p-1) as makespan


def test_dualpipe_v_gains_where_fused_passes_overlap():
    """With half of the time of a pair, F&B = 1.5 of 3, one batch of 4 on two ranks saves its three pairs per rank."""
    schedule = parse_schedule((GOLDEN / "dualpipe_v.txt").read_text())
    stages = Costs.uniform(schedule).stages
    plain, fused = (simulate_schedule(schedule, Costs(stages, fused=share)) for share in (1.0, 0.5))
    assert plain.bubble.busy == (12, 12)
    assert fused.bubble.busy == (12 - 3 * 0.75, 12 - 3 * 0.75)


def test_the_last_rank_of_evaluation_finishes_with_the_makespan():
    schedule = parse_schedule((GOLDEN / "evaluation.txt").read_text())
    result = simulate_schedule(schedule, Costs.uniform(schedule), batches=3)
    assert result.bubble.makespan == 3 * 2 + 1
    assert result.messages == 3 * 2
