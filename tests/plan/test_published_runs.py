"""Plans by published costs as configurations of runs: those that a run can be, and why others cannot."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.plan.plan_export import published_run
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.stages.graph_cost import recompute_of
from penstock.plan.stages.planned import Plan, PlannedStage, Rating

OPTION = "options: [{name: plain, seconds: 3}, {name: recompute, seconds: 4}]"
GRAPH = layer_graph(
    parse_profile(
        "format: penstock profile 1\nlayers:\n- {name: in, options: [{name: plain, seconds: 1}]}\n"
        + "".join(f"- {{name: b{n}, {OPTION}}}\n" for n in range(3)),
        "p",
    )
)
"""Of four layers the first one has no option with recompute."""
FIRST = PlannedStage((0, 1), 2, ways=("plain", "recompute"))
SECOND = PlannedStage((2, 3), 2, ways=("plain", "plain"))


def plan_of(*stages):
    return Plan("p", stages, Rating("c", 1.0, ()), samples=3)


def test_a_plan_with_equal_replicas_is_a_run():
    assert published_run("2bw-paper", plan_of(FIRST, SECOND), GRAPH, 8) == {
        "method": "2bw", "stages": 2, "width": 2, "microbatches": 4, "microbatch_size": 3,
        "recompute": ["block", "none"], "balance": [2, 2],
    }  # fmt: skip
    alike = plan_of(*(replace(stage, sharded=True, ways=()) for stage in (FIRST, SECOND)))
    found = published_run("mist", alike, GRAPH, 8)
    assert found == found | {"method": "1f1b", "sharding": "optimizer", "recompute": "none"}
    alone = plan_of(*(replace(stage, replicas=1, sharded=True) for stage in alike.stages))
    assert "sharding" not in published_run("mist", alone, GRAPH, 8)  # among one


def test_replicas_of_dapple_share_each_microbatch():
    plan = replace(plan_of(FIRST, SECOND), samples=4)
    found = published_run("dapple", plan, GRAPH, 7)
    assert (found["width"], found["microbatches"], found["microbatch_size"]) == (2, 7, 2)


@pytest.mark.parametrize(
    ("cost", "stages", "microbatches", "said"),
    [
        ("graphpipe", (FIRST, SECOND), 8, "cost 'graphpipe' is of an order that is no method"),
        ("piper", (FIRST, replace(SECOND, replicas=1)), 8, "different numbers of replicas"),
        ("piper", (FIRST, replace(SECOND, tensor=2)), 8, "it spreads layers over several devices"),
        ("piper", (SECOND, FIRST), 8, "no chain of layers"),
        ("piper", (replace(FIRST, layers=(0, 2)), replace(SECOND, layers=(1, 3))), 8, "no chain of layers"),
        ("piper", (replace(FIRST, in_turns=True), SECOND), 8, "no chain of layers"),
        (
            "mist",
            (FIRST, replace(SECOND, ways=("plain", "recompute"))),
            8,
            "some stage recomputes a part of its layers",
        ),
        ("mist", (FIRST, replace(SECOND, sharded=True)), 8, "only some stages divide their optimizer states"),
        ("dawnpiper", (FIRST, replace(SECOND, ways=("swap", "swap"))), 8, "it swaps activations layer by layer"),
        ("piper", (FIRST, SECOND), 7, "7 microbatches cannot be divided among 2 pipelines"),
        ("dapple", (FIRST, SECOND), 7, "3 samples of a microbatch cannot be divided among 2 pipelines"),
    ],
)
def test_plans_that_are_no_runs(cost, stages, microbatches, said):
    with pytest.raises(ConfigError, match=f"the best plan cannot be run: .*{said}.*; --cost simulated finds plans"):
        published_run(cost, plan_of(*stages), GRAPH, microbatches)


def test_layers_without_a_choice_do_not_count():
    assert [recompute_of(GRAPH, stage) for stage in (FIRST, SECOND)] == ["block", "none"]
    assert recompute_of(GRAPH, replace(SECOND, ways=("recompute", "plain"))) is None
    assert recompute_of(GRAPH, replace(FIRST, ways=())) == "none"
