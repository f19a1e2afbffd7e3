"""Mist's planner against every cut, every choice of recomputed layers and of sharded states, from the formula."""

import itertools
import math
from random import Random

import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.mist import KnobbedStage, MistCost, StageChoice, batch_seconds, least_batch, plan_as_mist
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import PlannedStage


def profile_of(random, count):
    numbers = [
        {
            "name": f"l{n}",
            "forward": float(random.randint(1, 9)),
            "backward": float(random.randint(1, 9)),
            "output": float(random.randint(1, 4)),
            "stored": float(random.randint(5, 30)),
            "parameters": float(random.randint(0, 20)),
            "optimizer": float(random.randint(0, 40)),
            "step": float(random.randint(0, 9)),
        }
        for n in range(count)
    ]
    return Profile(format="penstock profile 1", layers=[ProfiledLayer(**each) for each in numbers]), numbers


def options_of(numbers, at, first, last, depth, width, count, bandwidth, limit):
    """(T, D) of every choice of a stage that fits, the best ones only."""
    m, layers = count // width, numbers[first:last]
    flight = min(depth - at, m)
    edges = (numbers[first - 1]["output"] if first else 0) + (numbers[last - 1]["output"] if last < len(numbers) else 0)
    ring = 2 * (width - 1) / width * sum(x["parameters"] for x in layers) / bandwidth
    found = []
    for again in itertools.product((False, True), repeat=len(layers)):
        seconds = held = 0.0
        for n, (x, r) in enumerate(zip(layers, again, strict=True), first):
            given = numbers[n - 1]["output"] if n else 0.0
            seconds += x["forward"] + x["backward"] + (x["forward"] if r else 0)
            held += 2 * x["parameters"] + (x["stored"] + flight * given if r else flight * x["stored"])
        for sharded in (False, True):
            part = 1 / width if sharded else 1
            state = part * sum(x["optimizer"] for x in layers)
            extra = ring * (1.5 if sharded else 1) + part * sum(x["step"] for x in layers)
            if held + state <= limit * (1 + 1e-9):
                found.append((seconds + 2 * edges / bandwidth, extra))
    return [o for o in set(found) if not any(p != o and p[0] <= o[0] and p[1] <= o[1] for p in found)]


def best_of(numbers, devices, count, bandwidth, limit):
    """The least seconds of a batch, over N."""
    best = math.inf
    for depth in range(1, min(devices, len(numbers)) + 1):
        for width in range(1, devices // depth + 1):
            if count % width:
                continue
            m = count // width
            for inner in itertools.combinations(range(1, len(numbers)), depth - 1):
                cuts = list(itertools.pairwise((0, *inner, len(numbers))))
                fronts = [
                    options_of(numbers, at, a, b, depth, width, count, bandwidth, limit)
                    for at, (a, b) in enumerate(cuts)
                ]
                for stages in itertools.product(*fronts):
                    steady = [t for t, _ in stages]
                    end = max(d - sum(steady[:at]) for at, (_, d) in enumerate(stages))
                    best = min(best, ((m - 1) * max(steady) + sum(steady) + end) / count)
    return best


@pytest.mark.parametrize("seed", range(3))
def test_mist_equals_brute_force(seed):
    """20 chains of at most 6 layers on at most 4 devices, most of them with little memory."""
    random, feasible, mixed, sharded = Random(60 + seed), 0, 0, 0
    for _ in range(20):
        profile, numbers = profile_of(random, random.randint(1, 6))
        devices, count = random.randint(1, 4), random.choice([2, 4, 8])
        bandwidth = float(random.randint(1, 9))
        total = sum(2 * x["parameters"] + x["optimizer"] + x["stored"] for x in numbers)
        limit = random.choice([math.inf, total * random.uniform(0.3, 1.2), total * random.uniform(0.3, 1.2)])
        given, graph = (
            Devices((DeviceLevel(devices, bandwidth),), None if limit == math.inf else limit),
            layer_graph(profile),
        )
        found = plan_as_mist(graph, given, count)
        expected = best_of(numbers, devices, count, bandwidth, limit)
        assert (found.plan is None) == (expected == math.inf)
        if found.plan is None:
            assert "no plan fits" in found.why
            continue
        feasible += 1
        assert found.plan.rating.seconds == pytest.approx(expected, rel=1e-6)
        assert limit == math.inf or max(s.memory for s in found.plan.rating.stages) <= limit * (1 + 1e-9)
        mixed += any(len(set(stage.ways)) > 1 for stage in found.plan.stages)
        sharded += any(stage.sharded for stage in found.plan.stages)
        kept = [{"recompute" in way for way in stage.ways} for stage in found.plan.stages]
        differ = len({stage.sharded for stage in found.plan.stages}) > 1 or any(len(each) > 1 for each in kept)
        assert differ == any("computed here" in note for note in found.plan.notes)
    assert feasible > 8
    assert mixed or seed
    assert sharded or seed


def test_a_batch_by_hand():
    """Three stages: the first one's sum of gradients is what ends last."""
    stages = [KnobbedStage(2.0, 9.0, 0.0), KnobbedStage(3.0, 1.0, 0.0), KnobbedStage(1.0, 12.0, 0.0)]
    assert batch_seconds(stages, 5) == 4 * 3.0 + 6.0 + 9.0


def test_the_program_finds_no_path_where_there_is_none():
    assert least_batch([StageChoice(0, 0, 1, 1.0, 0.0)], 3, 1, 4) is None
    assert least_batch([StageChoice(0, 0, 2, 1.0, 0.0), StageChoice(1, 1, 3, 1.0, 0.0)], 3, 2, 4) is None


def test_mist_is_a_planner_by_name():
    profile, _ = profile_of(Random(7), 14)
    request = PlanRequest(profile, Devices((DeviceLevel(4, 5.0),), 400.0), planner="mist", microbatches=8)
    found = make_plan(request)
    assert found.request.cost == "mist"
    assert found.plans[0].devices <= 4
    assert found.ratings(found.plans[0])["mist"].seconds == found.plans[0].rating.seconds


def test_what_mist_refuses():
    back = [ProfiledLayer(name="b", inputs=["a"], forward=1.0, backward=1.0), ProfiledLayer(name="a", inputs=[])]
    layers = [back[0], back[1].model_copy(update={"forward": 1.0, "backward": 1.0})]
    graph = layer_graph(Profile(format="penstock profile 1", layers=layers))
    with pytest.raises(ConfigError, match="order the profile"):
        plan_as_mist(graph, Devices((DeviceLevel(2, 1.0),)), 4)
    cost = MistCost(graph, Devices((DeviceLevel(2, 1.0),)), 4)
    assert "not replicated alike" in cost.rate((PlannedStage((0,), 1), PlannedStage((1,), 2))).fault
