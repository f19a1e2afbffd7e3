"""The planners find what trying every plan finds: 500 random graphs of at most 8 layers, on at most 4 devices."""

import math
from random import Random

import pytest

from penstock.plan.planners.pipedream import plan_as_pipedream, plan_for_pipedream_cost
from penstock.plan.planners.piper import plan_as_piper
from penstock.plan.planners.two_bw import Sized, plan_as_two_bw, plan_for_two_bw_cost
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from support.brute_force_plans import (
    best_by_piper,
    best_by_two_bw,
    memory_of,
    pipedream_time,
    piper_time,
    small_graph,
    trial_of,
)

CLOSE = 1e-9


def devices_of(count, bandwidth, memory=math.inf):
    return Devices((DeviceLevel(count, bandwidth),), None if memory == math.inf else memory)


def limit_of(random, graph):
    """A memory that some of the plans exceed, or none."""
    total = sum(max(way.memory + 2 * way.memory_per_microbatch for way in layer.ways) for layer in graph.layers)
    return random.choice([math.inf, max(total * random.uniform(0.1, 0.8), 1.0)])


@pytest.mark.parametrize("seed", range(3))
def test_pipedream_equals_brute_force(seed):
    """On one level: 50 graphs with one source, where the published program knows every cut."""
    random = Random(seed)
    for _ in range(50):
        graph = small_graph(random, random.randint(1, 8))
        levels = [(random.randint(1, 4), float(random.randint(1, 30)))]
        found = plan_as_pipedream(graph, devices_of(*levels[0])).plan
        expected = pipedream_time(graph, frozenset(range(len(graph.layers))), levels)
        assert found.rating.seconds == pytest.approx(expected, rel=CLOSE)
        assert found.devices == levels[0][0]


def test_pipedream_on_levels_equals_brute_force():
    """On two levels of two units; a graph with several sources has cuts that only the default planner knows."""
    random = Random(3)
    for case in range(50):
        graph = small_graph(random, random.randint(1, 6), sources=bool(case % 2))
        levels = [(2, float(random.randint(5, 50))), (2, float(random.randint(1, 20)))]
        devices = Devices(tuple(DeviceLevel(*level) for level in levels))
        expected = pipedream_time(graph, frozenset(range(len(graph.layers))), levels)
        published = plan_as_pipedream(graph, devices).plan.rating.seconds
        default = plan_for_pipedream_cost(graph, devices).plan.rating.seconds
        fewer = min(
            pipedream_time(graph, frozenset(range(len(graph.layers))), [(a, levels[0][1]), (b, levels[1][1])])
            for a, b in ((2, 2), (2, 1))
        )
        assert published == pytest.approx(expected, rel=CLOSE) if not case % 2 else published >= expected * (1 - CLOSE)
        assert default <= min(published, fewer) * (1 + CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_piper_equals_brute_force(seed):
    """Data and tensor degrees, ways, memory: 50 graphs; what does not fit is said so."""
    random, feasible = Random(10 + seed), 0
    for _ in range(50):
        graph = small_graph(random, random.randint(1, 5), sources=True, ways=True)
        count, bandwidth, batch = random.randint(1, 4), float(random.randint(1, 30)), random.choice([1, 2, 3, 4, 6, 8])
        memory = limit_of(random, graph)
        search = plan_as_piper(graph, devices_of(count, bandwidth, memory), batch)
        expected = best_by_piper(graph, count, bandwidth, batch, memory)
        if search.plan is None:
            assert expected == math.inf
            assert "no plan" in search.why
            continue
        feasible += 1
        own = piper_time(graph, trial_of(graph, search.plan.stages), bandwidth, batch, memory)
        assert search.plan.rating.seconds == pytest.approx(own, rel=CLOSE)
        held = memory_of(trial_of(graph, search.plan.stages))
        assert [stage.memory for stage in search.plan.rating.stages] == pytest.approx(held)
        assert own == pytest.approx(expected, rel=CLOSE)
        assert search.plan.notes == ()
    assert feasible > 25


@pytest.mark.parametrize("seed", range(2))
def test_best_stages_equal_brute_force(seed):
    """The closed form of 2BW: 50 graphs, of which equal stages are never faster."""
    random, faster = Random(20 + seed), 0
    for _ in range(50):
        graph = small_graph(random, random.randint(2, 8))
        count, bandwidth, batch = random.randint(2, 4), float(random.randint(1, 30)), random.choice([1, 2, 4, 6, 8])
        memory = limit_of(random, graph)
        sizes, devices = {1: Sized(graph, 1, batch)}, devices_of(count, bandwidth, memory)
        best, equal = plan_for_two_bw_cost(sizes, devices).plan, plan_as_two_bw(sizes, devices).plan
        expected = best_by_two_bw(graph, count, bandwidth, batch, memory)
        assert (best is None) == (expected == math.inf)
        if best is not None:
            assert best.rating.seconds == pytest.approx(expected, rel=CLOSE)
        if equal is not None:
            assert best.rating.seconds <= equal.rating.seconds
            faster += best.rating.seconds < equal.rating.seconds
    assert faster > 3
