"""GraphPipe's planner against plans that are tried one by one, with the formulas written out here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.graphpipe import (
    Branches,
    GraphPipeCost,
    Series,
    nested_series,
    plan_as_graphpipe,
    plan_for_graphpipe_cost,
)
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.layer_graph import LayerGraph, layer_graph
from penstock.plan.profile.schema import LayerInput, Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import PlannedStage
from support.published_profiles import answers, published

# A model as lists in lists: a number is a layer, a tuple holds branches, each of which is a list.
CHAIN = [0, 1, 2, 3]
TOWERS = [0, ([1, 2], [3, 4]), 5]
LADDER = [0, ([1], [2, 3]), 4, ([5], [6])]
NESTED = [([0, ([1], [2]), 3], [4]), 5]
SHAPES = {"chain": CHAIN, "towers": TOWERS, "ladder": LADDER, "nested": NESTED}


def edges_of(series: Sequence[Any], before: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The edges of a series that reads of some layers, and the layers that end it."""
    edges, ends = list[tuple[int, int]](), before
    for part in series:
        if isinstance(part, int):
            edges += [(end, part) for end in ends]
            ends = [part]
        else:
            found = [edges_of(branch, ends) for branch in part]
            edges += [edge for more, _ in found for edge in more]
            ends = [end for _, last in found for end in last]
    return edges, ends


def layers_in(part: Any) -> list[int]:
    return [part] if isinstance(part, int) else [layer for inner in part for layer in layers_in(inner)]


def drawn(random: Random, shape: Sequence[Any]) -> tuple[LayerGraph, list[tuple[int, int]]]:
    """A profile of a shape with random numbers, as a graph."""
    edges, _ = edges_of(shape, [])
    layers = [
        ProfiledLayer(
            name=f"l{n}",
            forward=float(random.randint(1, 9)),
            backward=float(random.randint(1, 9)),
            output=float(random.randint(1, 9)),
            stored=float(random.randint(1, 9)),
            parameters=float(random.randint(0, 40)),
            inputs=[LayerInput(layer=f"l{a}") for a, b in edges if b == n],
        )
        for n in sorted(layers_in(list(shape)))
    ]
    return layer_graph(Profile(format="penstock profile 1", layers=layers)), edges


def divisions(series: Sequence[Any]) -> Iterator[list[list[int]]]:
    """Every division of a series: runs of parts are stages, or each branch is divided by itself."""
    if not series:
        yield []
        return
    for end in range(1, len(series) + 1):
        for rest in divisions(series[end:]):
            yield [layers_in(list(series[:end])), *rest]
    if not isinstance(series[0], int):
        for each in itertools.product(*(list(divisions(branch)) for branch in series[0])):
            for rest in divisions(series[1:]):
                yield [*(stage for branch in each for stage in branch), *rest]


def seconds_of(
    graph: LayerGraph, edges: list[tuple[int, int]], stage: list[int], r: int, speed: float, m: int
) -> float:
    layers = [graph.layers[n] for n in stage]
    read = sum(graph.layers[a].output for a, b in edges if b in stage and a not in stage)
    sums = 2 * (r - 1) / r * sum(layer.parameters for layer in layers) / speed / m
    return sum(layer.seconds for layer in layers) / r + 2 * read / (speed * r) + sums


def ways_of(edges: list[tuple[int, int]], stages: list[list[int]], weights: Sequence[float]) -> list[float]:
    """For each stage, the largest sum of weights on a way from it to an end."""
    home = {n: at for at, stage in enumerate(stages) for n in stage}
    after = [{home[b] for a, b in edges if home[a] == at != home[b]} for at in range(len(stages))]

    def way(at: int) -> float:
        return weights[at] + max((way(following) for following in after[at]), default=0.0)

    return [way(at) for at in range(len(stages))]


def tried(graph: LayerGraph, shape: Sequence[Any], devices: Devices, m: int) -> Iterator[tuple[float, float, float]]:
    """For every plan that fits: seconds of the slowest stage, stages on the longest way, seconds of a batch over m."""
    edges, _ = edges_of(shape, [])
    speed = devices.levels[0].bandwidth
    for stages in divisions(shape):
        depths = ways_of(edges, stages, [1.0] * len(stages))
        for replicas in itertools.product(range(1, devices.count + 1), repeat=len(stages)):
            if sum(replicas) > devices.count or not all(
                sum(2 * graph.layers[n].parameters + min(depth, m) * graph.layers[n].stored for n in stage)
                <= (devices.memory or math.inf) * (1 + 1e-9)
                for stage, depth in zip(stages, depths, strict=True)
            ):
                continue
            each = [seconds_of(graph, edges, s, r, speed, m) for s, r in zip(stages, replicas, strict=True)]
            batch = (m - 1) * max(each) + max(ways_of(edges, stages, each))
            yield max(each), max(depths), batch / m


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_graphpipe_is_the_best_of_all_divisions(shape: str) -> None:
    """The slowest stage is as fast as can be; and what the plan is said to take is what the formulas say."""
    random, fitting, apart = Random(f"graphpipe {shape}"), 0, 0
    for _ in range(25):
        graph, _ = drawn(random, SHAPES[shape])
        memory = random.choice([None, 120.0, 200.0, 320.0])
        devices = Devices((DeviceLevel(random.randint(2, 4), random.choice([3.0, 20.0, 1e3])),), memory)
        m = random.choice([1, 3, 8])
        every = list(tried(graph, SHAPES[shape], devices, m))
        plan = plan_as_graphpipe(graph, devices, m).plan
        if not every:
            assert plan is None
            continue
        assert plan is not None
        slowest = min(seconds for seconds, _, _ in every)
        assert plan.rating.slowest_seconds == pytest.approx(slowest, rel=1e-8)
        ends = [(batch, depth) for seconds, depth, batch in every if seconds <= slowest * (1 + 1e-8)]
        stages = [list(stage.layers) for stage in plan.stages]
        depth = max(ways_of(edges_of(SHAPES[shape], [])[0], stages, [1.0] * len(stages)))
        assert depth == min(depth for _, depth in ends), "the shortest way among these"
        assert any(plan.rating.seconds == pytest.approx(batch) for batch, _ in ends)
        best = plan_for_graphpipe_cost(graph, devices, m).plan
        assert best is not None
        assert min(batch for _, _, batch in every) * (1 - 1e-9) <= best.rating.seconds <= plan.rating.seconds
        fitting, apart = fitting + 1, apart + (len(stages) > 1)
    assert fitting >= 12
    assert apart >= 5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_is_found_to_be_a_nested_series(shape: str) -> None:
    graph, _ = drawn(Random(1), SHAPES[shape])

    def written(series: Series) -> list[Any]:
        return [
            part if isinstance(part, int) else tuple(written(branch) for branch in part.series) for part in series.parts
        ]

    assert written(nested_series(graph)) == SHAPES[shape]


def test_layers_that_nothing_divides_follow_each_other() -> None:
    """Two branches with an edge from one to the other."""
    reads = {0: [], 1: [0], 2: [0], 3: [1], 4: [1, 2], 5: [3, 4]}
    layers = [
        ProfiledLayer(
            name=f"l{n}", forward=1.0, backward=1.0, output=1.0, inputs=[LayerInput(layer=f"l{a}") for a in r]
        )
        for n, r in reads.items()
    ]
    graph = layer_graph(Profile(format="penstock profile 1", layers=layers))
    assert nested_series(graph).parts == (0, 1, 2, 3, 4, 5)


def test_branches_side_by_side_keep_less() -> None:
    """Two towers of two stages each: a way of four stages with the ends, where a chain has six."""
    reads = {"in": [], "a0": ["in"], "a1": ["a0"], "b0": ["in"], "b1": ["b0"], "out": ["a1", "b1"]}
    sizes: dict[str, Any] = {"forward": 1.0, "backward": 2.0, "output": 0.1, "stored": 8.0, "parameters": 80.0}
    layers = [
        ProfiledLayer(name=name, inputs=[LayerInput(layer=each) for each in inputs], **sizes)
        for name, inputs in reads.items()
    ]
    graph = layer_graph(Profile(format="penstock profile 1", layers=layers))
    devices = Devices((DeviceLevel(6, 10.0),), 160.0 + 4 * 8.0)
    plan = plan_as_graphpipe(graph, devices, 32).plan
    assert plan is not None
    assert len(plan.stages) == 6
    assert max(stage.memory or 0.0 for stage in plan.rating.stages) == 160.0 + 4 * 8.0
    assert "computed here" in plan.notes[0]
    tighter = Devices((DeviceLevel(6, 10.0),), 160.0 + 4 * 8.0 - 1)
    assert plan_as_graphpipe(graph, tighter, 32).plan is None


def test_what_the_cost_refuses() -> None:
    graph, _ = drawn(Random(3), TOWERS)
    cost = GraphPipeCost(graph, Devices((DeviceLevel(2, 1.0),)), 4)
    circle = (PlannedStage((0, 5)), PlannedStage((1, 2, 3, 4)))
    assert cost.rate(circle).fault == "its stages read each other in a cycle"
    three = (PlannedStage((0,), 2), PlannedStage((1, 2, 3, 4, 5)))
    assert cost.rate(three).fault == "it needs 3 of 2 devices"
    layers = [ProfiledLayer(name=f"l{n}", forward=1.0, backward=1.0, output=1.0) for n in range(1001)]
    large = layer_graph(Profile(format="penstock profile 1", layers=layers))
    with pytest.raises(ConfigError, match="at most 1000 layers, and the profile has 1001"):
        plan_as_graphpipe(large, Devices((DeviceLevel(2, 1.0),)), 4)


def test_graphpipe_by_name() -> None:
    """And the default planner is never above it by its cost."""
    layers = [ProfiledLayer(name=f"l{n}", forward=1.0 + n, backward=2.0, output=3.0, parameters=9.0) for n in range(6)]
    profile = Profile(format="penstock profile 1", layers=layers)
    devices = Devices((DeviceLevel(4, 2.0),))
    own = make_plan(PlanRequest(profile, devices, "graphpipe", microbatches=8))
    best = make_plan(PlanRequest(profile, devices, "default", "graphpipe", microbatches=8))
    assert own.plans[0].planner == "graphpipe"
    assert best.plans[0].rating.seconds <= own.plans[0].rating.seconds


@pytest.mark.parametrize("name", ["resnet18", "gnmt", "alexnet", "vgg16"])
def test_graphpipe_divides_published_models(name: str) -> None:
    """Every layer once, no cycle, and never above the model on one device."""
    answers()  # skips where they are not
    graph, devices = layer_graph(published("pipedream", name)), Devices((DeviceLevel(8, 1e9),))
    plan = plan_as_graphpipe(graph, devices, 32).plan
    assert plan is not None
    assert sorted(n for stage in plan.stages for n in stage.layers) == list(range(len(graph.layers)))
    assert plan.rating.slowest_seconds < graph.seconds
    assert math.isfinite(GraphPipeCost(graph, devices, 32).rate(plan.stages).seconds)


def test_a_branch_is_a_part() -> None:
    assert sorted(Branches((Series((1, 2)), Series((3,)))).layers) == [1, 2, 3]
