"""Layers whose place costs nothing: fewer prefixes, and no plan that is missed."""

import math
from dataclasses import replace
from random import Random

import pytest

from penstock.plan.planners.piper import plan_as_piper
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.prefixes import all_prefixes, useful_prefixes
from support.brute_force_plans import best_by_piper, small_graph

FREE = "options: [{name: plain, seconds: 0}]"
COSTLY = "options: [{name: plain, seconds: 2, memory: 3, memory_per_microbatch: 1}]"


def with_side_inputs(length, sides):
    """A chain of layers, the last ones of which also read items of a state that takes nothing."""
    rows = [f"- {{name: state, inputs: [], {FREE}}}"]
    for at in range(length):
        reads = [f"n{at - 1}"] if at else []
        if at >= length - sides:
            rows.append(f"- {{name: item{at}, inputs: [state], {FREE}}}")
            reads.append(f"item{at}")
        rows.append(f"- {{name: n{at}, output: 5, inputs: [{', '.join(reads)}], {COSTLY}}}")
    return layer_graph(parse_profile("format: penstock profile 1\nlayers:\n" + "\n".join(rows), "side"))


def test_side_inputs_multiply_nothing():
    """Twenty-four items that may stand anywhere would be 2^24 prefixes."""
    graph = with_side_inputs(30, 24)
    assert all_prefixes(graph, 20_000) is None
    found = plan_as_piper(graph, Devices((DeviceLevel(4, 100.0),)), 8).plan
    assert found.notes == ()
    assert sorted(n for stage in found.stages for n in stage.layers) == list(range(len(graph.layers)))
    assert 15 <= found.rating.seconds < 16.5


@pytest.mark.parametrize(
    ("read", "last", "expected"),
    [
        (100, "seconds: 2", 2 + 2 * 1 / 10),
        (1, "seconds: 9}, {name: plain, tensor: 2, seconds: 4", 4 + 2 * 1 / 10),
    ],
)
def test_a_free_layer_stays_where_its_reader_is_no_better_place(read, last, expected):
    """It reads more than the byte that it hands on, or cannot be spread over as many devices as its reader."""
    text = (
        f"format: penstock profile 1\nlayers:\n- {{name: a, output: {read}, options: [{{name: plain, seconds: 2}}]}}\n"
        f"- {{name: v, output: 1, {FREE}}}\n- {{name: w, options: [{{name: plain, {last}}}]}}\n"
    )
    graph = layer_graph(parse_profile(text, "three"))
    found = plan_as_piper(graph, Devices((DeviceLevel(3, 10.0),)), 5).plan  # data degrees are 1 or 5
    assert found.rating.seconds == pytest.approx(expected)
    assert found.rating.seconds == pytest.approx(best_by_piper(graph, 3, 10.0, 5, math.inf))


def taking_nothing(layer):
    nothing = {"seconds": 0, "parameters": 0, "memory": 0, "memory_per_microbatch": 0}
    return replace(layer, ways=tuple(replace(way, **nothing) for way in layer.ways))


@pytest.mark.parametrize("seed", range(2))
def test_no_better_plan_is_missed(seed):
    """Random graphs in which half of the layers take nothing, against every plan."""
    random, fewer = Random(40 + seed), 0
    for _ in range(25):
        graph = small_graph(random, random.randint(3, 5), sources=True, ways=True)
        layers = tuple(taking_nothing(layer) if random.random() < 0.5 else layer for layer in graph.layers)
        edges = tuple(edge._replace(bytes=edge.bytes * (random.random() < 0.5)) for edge in graph.edges)
        graph = replace(graph, layers=layers, edges=edges)
        free = {n for n, layer in enumerate(layers) if not layer.ways[0].seconds}
        some = useful_prefixes(graph, lambda n, free=free: n in free, 1_000)
        fewer += len(some) < len(all_prefixes(graph, 1_000))
        count, memory = random.randint(2, 4), random.choice([math.inf, random.uniform(20, 120)])
        devices = Devices((DeviceLevel(count, 7.0),), None if memory == math.inf else memory)
        found = plan_as_piper(graph, devices, 4).plan
        expected = best_by_piper(graph, count, 7.0, 4, memory)
        assert (math.inf if found is None else found.rating.seconds) == pytest.approx(expected, rel=1e-9)
    assert fewer > 4
