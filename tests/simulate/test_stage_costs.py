"""Costs: shares of chunks, slices and units, and costs read from a file."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Action, Kind, Op, Stage, Unit
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost, read_stage_costs
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

NODE = Stage(0, 0, 0)
COSTS = Costs((StageCost(2, 3, 5, 7),), latency=1, collective=11, fused=0.5)


def one(op, unit=Unit(4)):  # noqa: B008 - a unit is a value
    return Action(op, NODE, unit)


@pytest.mark.parametrize(
    ("action", "time"),
    [
        (one(Op.F), 2), (one(Op.R), 2), (one(Op.B), 8), (one(Op.I), 3), (one(Op.W), 5),
        (one(Op.F, Unit(0, 4)), 8), (one(Op.B, Unit(0, 4)), 32),
        (one(Op.F, Unit(0, 1, (1, 4))), 0.5), (one(Op.W, Unit(0, 1, (0, 2))), 2.5),
        (one(Op.F, Unit(0, kind=Kind.EVAL)), 2),
        (one(Op.STEP, Unit(0, kind=Kind.BATCH)), 7),
        (one(Op.REDUCE, Unit(0, kind=Kind.BATCH)), 11), (one(Op.AVERAGE, Unit(0, kind=Kind.BATCH, every=4)), 11),
        (one(Op.GATHER, Unit(0, kind=Kind.BATCH)), 11),
        (one(Op.VALIDATE, Unit(0, kind=Kind.BATCH)), 0), (one(Op.PREDICT), 0), (one(Op.OFFLOAD), 0),
        (Action(Op.FUSED, NODE, Unit(4), parts=(one(Op.F), one(Op.B))), 5),
    ],
)  # fmt: skip
def test_duration(action, time):
    assert COSTS.duration(action) == time


def test_slices_may_have_unequal_shares_of_the_time():
    costs = Costs((StageCost(2, 3, 5),), slices=(0.5, 0.25, 0.25))
    assert [costs.duration(one(Op.F, Unit(0, 1, (j, 3)))) for j in range(3)] == [1, 0.5, 0.5]
    assert costs.duration(one(Op.F)) == 2
    assert "slices=(0.5, 0.25, 0.25)" in repr(costs)
    with pytest.raises(ConfigError, match="the schedule has 2 slices of each sequence, but shares of 3 are given"):
        costs.duration(one(Op.B, Unit(0, 1, (0, 2))))


@pytest.mark.parametrize("slices", [0.5, (0.5, -0.5, 1.0), (0.5, 0.25), [0.5, 0.5], ("a",)])
def test_shares_of_slices_are_checked(slices):
    with pytest.raises(ConfigError, match="slices"):
        Costs((StageCost(2, 3, 5),), slices=slices)


@pytest.mark.parametrize("stages", [1, 1.0, (), (1.0, 2.0), [StageCost(1, 1, 1)], StageCost(1, 1, 1), None])
def test_stages_that_are_no_costs_are_refused(stages):
    """With what to write instead, not when they are first used."""
    with pytest.raises(ConfigError, match=r"stages must be a StageCost for each stage.*Costs\.uniform"):
        Costs(stages)


def test_what_is_no_costs_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"costs must be a Costs.*got 1"):
        simulate_schedule(make_schedule("1f1b", 2, 2), 1)


def test_uniform_costs_are_those_of_a_whole_rank():
    schedule = make_schedule("1f1b", 3, 4)
    costs = Costs.uniform(schedule, 1, 2, 3, latency=4, step=5)
    assert costs == Costs((StageCost(1, 2, 3, 5),) * 3, latency=4)


def test_uniform_costs_of_chunks_are_shares():
    """Two chunks per rank: each costs half. Chimera's two directions are whole stages: each costs all."""
    chunks = parse_schedule(
        "microbatches 1\nnodes 0@0 1@1 2@1 3@0\nrank 0: F0@0 F0@3 B0@3 B0@0\nrank 1: F0@1 F0@2 B0@2 B0@1\n"
    )
    directions = parse_schedule(
        "microbatches 2\nnodes 0@0 1@1 0.1@1 1.1@0\nrank 0: F0@0 F1@1.1 B1@1.1 B0@0\nrank 1: F1@0.1 F0@1 B0@1 B1@0.1\n"
    )
    assert Costs.uniform(chunks, 1, 1, 1).stages[0] == StageCost(0.5, 0.5, 0.5, 0)
    assert Costs.uniform(directions, 1, 1, 1).stages[0] == StageCost(1, 1, 1, 0)


def test_uniform_costs_of_uneven_placements_are_shares_of_each_rank():
    """Rank 0 holds two stages and rank 1 one: both are busy for as long."""
    schedule = parse_schedule(
        "microbatches 1\nnodes 0@0 1@0 2@1\nrank 0: F0@0^t F0@1^t B0@1^t B0@0^t STEP[t]@0 STEP[t]@1\n"
        "rank 1: F0^t B0^t STEP[t]\n"
    )
    assert simulate_schedule(schedule, Costs.uniform(schedule)).bubble.busy == (3, 3)


def test_a_cut_on_ranks_of_different_shares_has_no_uniform_cost():
    stages = "nodes 0@0 1@0 0.1@1 1.1@2"
    rows = "rank 0: F0@0 F0@1 B0@1 B0@0\nrank 1: F1@0.1 B1@0.1\nrank 2: F1@1.1 B1@1.1\n"
    with pytest.raises(ConfigError, match="stage 0 hold different numbers of stages"):
        Costs.uniform(parse_schedule(f"microbatches 2\n{stages}\n{rows}"))


# --- from a file -----------------------------------------------------------------------------------------------------

ROWS = [
    {"forward": 1, "backward_input": 1.5, "backward_weight": 0},
    {"forward": 2, "backward_input": 1, "backward_weight": 1, "step": 3},
]


def written(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_costs_from_a_file(tmp_path):
    costs = read_stage_costs(written(tmp_path, ROWS), 2, latency=0.25)
    assert costs == Costs((StageCost(1, 1.5, 0), StageCost(2, 1, 1, 3)), latency=0.25)


@pytest.mark.parametrize(
    ("content", "telling"),
    [
        (ROWS[:1], "each of the 2 stages; it holds 1 entries"),
        ({"stages": ROWS}, "each of the 2 stages; it holds dict"),
        ("forward: 1", "is not JSON"),
        ([ROWS[0], {"forward": 1}], "stage 1: expected forward, backward_input, backward_weight"),
        ([ROWS[0], {**ROWS[1], "forward": -1}], "stage 1: expected"),
        ([ROWS[0], {**ROWS[1], "forward": "1"}], "stage 1: expected"),
        ([ROWS[0], {**ROWS[1], "forward": True}], "stage 1: expected"),
        ([ROWS[0], {**ROWS[1], "forwards": 1}], "stage 1: expected"),
        ([[1, 2, 3], ROWS[1]], "stage 0: expected"),
        ([ROWS[0], {**ROWS[1], "forward": float("nan")}], "stage 1: expected"),
        ([ROWS[0], {**ROWS[1], "forward": float("inf")}], "stage 1: expected"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, content, telling):
    with pytest.raises(ConfigError) as caught:
        read_stage_costs(written(tmp_path, content), 2)
    assert telling in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the per-stage costs"):
        read_stage_costs(tmp_path / "none.json", 2)


@pytest.mark.parametrize("batches", [0, -1])
def test_a_span_has_at_least_one_batch(batches):
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ConfigError, match=f"batches must be at least 1, got {batches}"):
        simulate_schedule(schedule, Costs.uniform(schedule), batches)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ConfigError, match="the costs describe 1 stages, the schedule has 2"):
        simulate_schedule(make_schedule("1f1b", 2, 2), COSTS)


def test_a_rank_without_a_stage_is_idle():
    text = "microbatches 1\nnodes 0@0 1@2\nrank 0: F0^t B0^t STEP[t]\nrank 1:\nrank 2: F0^t B0^t STEP[t]\n"
    schedule = parse_schedule(text)
    assert simulate_schedule(schedule, Costs.uniform(schedule)).bubble.busy == (3, 0, 3)


def test_figures_have_the_names_of_the_printed_ones():
    schedule = make_schedule("2bw", 2, 2)
    figures = simulate_schedule(schedule, Costs.uniform(schedule), batches=2).figures()
    assert figures == {
        "makespan": 15, "rank_span": 15, "ideal": 12, "bubble": pytest.approx(0.2), "bubble_of_ideal": 0.25,
        "rank_span_bubble": pytest.approx(0.2), "peak_activations": [2, 1], "live_versions": [2, 2], "messages": 8,
        "volume": 8.0, "parked": 0, "window": 2, "receive_buffers": [2.0, 2.0],
        "delays": {"forward": [1, 1], "recompute": [None, None], "backward": [1, 1]},
    }  # fmt: skip
    json.dumps(figures)
