"""DAPPLE's planner and its cost function, against formulas and plans written out here."""

import itertools
import math
from random import Random

import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.dapple import (
    Block,
    DappleCost,
    DappleSearch,
    latency,
    pivot_of,
    plan_as_dapple,
    plan_for_dapple_cost,
)
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import LayerOption, Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import PlannedStage
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule


def latency_of(blocks, m):
    """The formula of the paper with sums over ranges."""
    q = len(blocks) - 1
    for s in range(len(blocks) - 2, -1, -1):
        between = sum(f + b for f, b, _ in blocks[s + 1 : q])
        if (m - 1) * sum(blocks[s][:2]) > (m - 1) * sum(blocks[q][:2]) + between:
            q = s
    ends = []
    for s, (_, _, sums) in enumerate(blocks):
        later = sum(b for _, b, _ in blocks[s : q + 1]) if s <= q else -sum(b for _, b, _ in blocks[q + 1 : s])
        ends.append(sums + later)
    return sum(f for f, _, _ in blocks[: q + 1]) + (m - 1) * sum(blocks[q][:2]) + max(ends)


def chain_of(random, count):
    """A chain of layers with memory that counts."""
    numbers = [
        {
            "name": f"l{n}",
            "forward": float(random.randint(1, 9)),
            "backward": float(random.randint(1, 9)),
            "output": float(random.randint(1, 9)),
            "stored": float(random.randint(1, 9)),
            "parameters": float(random.randint(0, 40)),
        }
        for n in range(count)
    ]
    layers = [ProfiledLayer(**each) for each in numbers]
    return layer_graph(Profile(format="penstock profile 1", layers=layers)), numbers


def blocks_of(numbers, cuts, replicas, bandwidths, unit):
    """Stages with messages between them; replicas side by side on units of devices."""
    found, first = [], 0
    for at, ((begin, end), r) in enumerate(zip(itertools.pairwise(cuts), replicas, strict=True)):
        if at:
            before = first - replicas[at - 1]
            speed = bandwidths[before // unit != (first + r - 1) // unit]
            seconds = numbers[begin - 1]["output"] / speed / r
            found.append((seconds, seconds, 0.0))
        speed = bandwidths[first // unit != (first + r - 1) // unit]
        layers = numbers[begin:end]
        sums = 2 * (r - 1) / r * sum(layer["parameters"] for layer in layers) / speed
        found.append((sum(x["forward"] for x in layers) / r, sum(x["backward"] for x in layers) / r, sums))
        first += r
    return found


def plans_of(numbers, devices):
    for stages in range(1, min(len(numbers), devices) + 1):
        for inner in itertools.combinations(range(1, len(numbers)), stages - 1):
            for replicas in itertools.product(range(1, devices + 1), repeat=stages):
                if sum(replicas) <= devices:
                    yield (0, *inner, len(numbers)), replicas


def fits(numbers, cuts, limit, m):
    stages = len(cuts) - 1
    for at, (begin, end) in enumerate(itertools.pairwise(cuts)):
        flight = min(stages - at, m)
        if sum(2 * x["parameters"] + flight * x["stored"] for x in numbers[begin:end]) > limit * (1 + 1e-9):
            return False
    return True


def test_latency_is_the_formula():
    random = Random(1)
    for _ in range(300):
        blocks = [
            Block(random.randint(0, 5), random.randint(0, 5), random.randint(0, 9)) for _ in range(random.randint(1, 7))
        ]
        m = random.randint(1, 9)
        assert latency(blocks, m) == pytest.approx(latency_of(blocks, m))


@pytest.mark.long
def test_latency_bounds_eager_1f1b():
    """Never above what the schedule takes, and equal to it for equal stages."""
    random = Random(2)
    for case in range(60):
        times = [1.0] * 4 if case < 4 else [float(random.randint(1, 4)) for _ in range(4)]
        m = (4, 8, 16, 32)[case % 4]
        schedule = make_schedule("eager", 4, m)
        played = simulate_schedule(schedule, Costs(tuple(StageCost(f, f, f) for f in times))).bubble.makespan
        bound = latency([Block(f, 2 * f) for f in times], m)
        assert bound <= played + 1e-9
        assert case >= 4 or bound == pytest.approx(played)


def test_the_pivot_is_the_slow_stage():
    assert pivot_of([Block(1, 2), Block(3, 6), Block(1, 2)], 8) == 1
    assert pivot_of([Block(1, 2), Block(1, 2)], 8) == 1


@pytest.mark.parametrize("seed", range(3))
def test_dapple_equals_brute_force(seed):
    """100 chains of at most 8 layers on at most 4 devices, with a limit of memory or without, on one level or two."""
    random, feasible, better = Random(40 + seed), 0, 0
    for _ in range(100):
        graph, numbers = chain_of(random, random.randint(1, 8))
        count, m = random.randint(1, 4), random.choice([1, 2, 4, 8])
        speeds = sorted((float(random.randint(1, 9)), float(random.randint(1, 9))), reverse=True)
        two = count == 4 and random.random() < 0.5
        levels = [(2, speeds[0]), (2, speeds[1])] if two else [(count, speeds[1])]
        unit, bandwidths = levels[0][0], (levels[0][1], levels[-1][1])
        limit = random.choice([math.inf, sum(2 * x["parameters"] + 2 * x["stored"] for x in numbers) * 0.6])
        devices = Devices(tuple(DeviceLevel(*level) for level in levels), None if limit == math.inf else limit)
        tried = {
            (cuts, replicas): latency_of(blocks_of(numbers, cuts, replicas, bandwidths, unit), m) / m
            for cuts, replicas in plans_of(numbers, count)
            if fits(numbers, cuts, limit, m)
        }
        best = plan_for_dapple_cost(graph, devices, m).plan
        assert (best is None) == (not tried)
        published = plan_as_dapple(graph, devices, m)
        if best is None:
            assert "no plan fits" in published.why
            continue
        feasible += 1
        assert best.rating.seconds == pytest.approx(min(tried.values()))
        if published.plan is not None:
            assert best.rating.seconds <= published.plan.rating.seconds + 1e-12
            better += best.rating.seconds < published.plan.rating.seconds * (1 - 1e-9)
        slowest = slowest_block(numbers, count, limit, m, levels[-1][1])
        found = dict[int, float]()
        for plan in DappleSearch(graph, devices, m).balanced([count]):
            cuts = (0, *itertools.accumulate(len(stage.layers) for stage in plan.stages))
            replicas = tuple(stage.replicas for stage in plan.stages)
            assert sum(replicas) == count
            assert _slowest(numbers, cuts, replicas, levels[-1][1]) == pytest.approx(slowest[len(replicas)])
            found[len(replicas)] = tried[cuts, replicas]
        assert found.keys() == slowest.keys()
        if published.plan is not None:
            assert published.plan.rating.seconds == pytest.approx(min(found.values()), rel=1e-9)
    assert feasible > 60
    assert better > 5


def slowest_block(numbers, count, limit, m, speed):
    """For each number of stages the least slowest block on all devices."""
    found = {}
    for cuts, replicas in plans_of(numbers, count):
        if sum(replicas) == count and fits(numbers, cuts, limit, m):
            value = _slowest(numbers, cuts, replicas, speed)
            found[len(replicas)] = min(value, found.get(len(replicas), math.inf))
    return found


def _slowest(numbers, cuts, replicas, speed):
    blocks = []
    for at, ((begin, end), r) in enumerate(zip(itertools.pairwise(cuts), replicas, strict=True)):
        if at:
            blocks.append(2 * numbers[begin - 1]["output"] / speed / r)
        blocks.append(sum(x["forward"] + x["backward"] for x in numbers[begin:end]) / r)
    return max(blocks)


def test_uneven_stages_are_said_not_to_run():
    numbers = (3.0, 0.0), (1.0, 1000.0)
    layers = [
        ProfiledLayer(name=f"l{n}", forward=f, backward=f, output=1e-3, parameters=p)
        for n, (f, p) in enumerate(numbers)
    ]
    graph = layer_graph(Profile(format="penstock profile 1", layers=layers))
    plan = plan_as_dapple(graph, Devices((DeviceLevel(4, 1.0),)), 8).plan
    assert [stage.replicas for stage in plan.stages] == [3, 1]
    assert "Pipeline cannot run" in plan.notes[-1]


def test_what_dapple_refuses():
    option = [LayerOption(seconds=1.0)]
    graph = layer_graph(Profile(format="penstock profile 1", layers=[ProfiledLayer(name="a", options=option)]))
    with pytest.raises(ConfigError, match="forward and backward of each layer apart"):
        plan_as_dapple(graph, Devices((DeviceLevel(2, 1.0),)), 8)
    rated = DappleCost(graph, Devices((DeviceLevel(2, 1.0),)), 8).rate((PlannedStage((0,), 1, 2),))
    assert "single devices" in rated.fault
    layers = [ProfiledLayer(name=f"l{n}", forward=1.0, backward=1.0) for n in range(48)]
    many, few = (layer_graph(Profile(format="penstock profile 1", layers=layers[:n])) for n in (48, 12))
    with pytest.raises(ConfigError, match="merge layers"):
        plan_as_dapple(many, Devices((DeviceLevel(1 << 12, 1.0),)), 8)
    none = plan_for_dapple_cost(few, Devices((DeviceLevel(16, 1.0),), 0.5), 8)
    assert none.plan is not None  # parameters of nothing, outputs of nothing


def test_large_dapple_plans_improve_on_the_published_ones(command):
    random = Random(3)
    graph, _ = chain_of(random, 24)
    devices = Devices((DeviceLevel(16, 3.0),))
    published = plan_as_dapple(graph, devices, 32).plan
    best = plan_for_dapple_cost(graph, devices, 32).plan
    assert best.rating.seconds <= published.rating.seconds
    assert "not proven" in " ".join(best.notes)
