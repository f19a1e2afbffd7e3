"""DawnPiper's planner against every cut and every choice of what each layer keeps, from the formulas."""

import functools
import itertools
import math
from dataclasses import replace
from random import Random

import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.dawnpiper import DawnPiperCost, plan_as_dawnpiper, plan_for_dawnpiper_cost
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import LayerOption, Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import PlannedStage
from support.brute_force_plans import small_graph


def choices_of(graph, host):
    """(seconds, bytes that are always there, bytes per microbatch) of each layer, kept, recomputed and swapped."""
    found = []
    for number in graph.order:
        layer, given = graph.layers[number], sum(edge.bytes for edge in graph.edges if edge.target == number)
        forward, backward, held = layer.forward, layer.seconds - layer.forward, 2 * layer.parameters
        each = [(layer.seconds, held, layer.stored)]
        if given < layer.stored:
            each.append((layer.seconds + forward, held + layer.stored, given))
        if host and layer.stored:
            late = max(0, layer.stored / host - forward) + max(0, layer.stored / host - backward)
            each.append((layer.seconds + late, held + layer.stored, 0))
        found.append(each)
    return found


class Tried:
    """Every stage of a graph, with every choice."""

    def __init__(self, graph, bandwidth, m, limit, host):
        self.graph, self.m, self.limit, self.choices = graph, m, limit, choices_of(graph, host)
        places = {number: at for at, number in enumerate(graph.order)}
        ends = [(places[edge.source], places[edge.target], edge.bytes) for edge in graph.edges]
        count = len(graph.layers)
        self.hops = [sum(size for a, b, size in ends if a < cut <= b) / bandwidth for cut in range(count + 1)]

    @functools.cache  # noqa: B019 - as long as a test
    def seconds(self, first, last, left):
        """The fastest choice of a stage that fits, or the messages beside it if they take longer."""
        flight = min(left, self.m)
        found = math.inf
        for chosen in itertools.product(*self.choices[first:last]):
            if sum(always + flight * each for _, always, each in chosen) <= self.limit * (1 + 1e-12):
                found = min(found, sum(seconds for seconds, _, _ in chosen))
        return max(found, self.hops[first], self.hops[last])

    def slowest(self, cuts):
        stages = list(itertools.pairwise(cuts))
        return max(self.seconds(a, b, len(stages) - at) for at, (a, b) in enumerate(stages))

    def best(self, devices):
        count = len(self.graph.layers)
        return min(
            self.slowest((0, *inner, count))
            for depth in range(1, min(devices, count) + 1)
            for inner in itertools.combinations(range(1, count), depth - 1)
        )

    def halved(self, first, last, stages, behind):
        """The best of the cuts between the one that balances compute and the one that balances memory."""
        if stages == 1:
            return self.seconds(first, last, behind + 1)
        left = math.ceil(stages / 2)
        right = stages - left
        flights = [min(self.m, sum(range(a + 1, a + n + 1)) / n) for a, n in ((behind + right, left), (behind, right))]
        ends = []
        for amount in (
            lambda choice, flight: choice[0][0],
            lambda choice, flight: choice[0][1] + flight * choice[0][2],
        ):
            unequal = {
                cut: abs(
                    sum(amount(x, flights[0]) for x in self.choices[first:cut]) / left
                    - sum(amount(x, flights[1]) for x in self.choices[cut:last]) / right
                )
                for cut in range(first + left, last - right + 1)
            }
            ends.append(min(unequal, key=lambda cut: (round(unequal[cut], 9), cut)))
        return min(
            max(self.halved(first, cut, left, behind + right), self.halved(cut, last, right, behind))
            for cut in range(min(ends), max(ends) + 1)
        )


@pytest.mark.parametrize("seed", range(2))
def test_dawnpiper_equals_brute_force(seed):
    """40 graphs of at most 8 layers on at most 4 devices, most of them with little memory; and as published."""
    random, feasible, slower, ways = Random(70 + seed), 0, 0, set()
    for _ in range(40):
        graph, devices, m = small_graph(random, random.randint(2, 8)), random.randint(1, 4), random.choice([1, 2, 4, 8])
        bandwidth, host = float(random.randint(1, 9)), random.choice([None, 2.0, 8.0])
        total = sum(2 * x.parameters + x.stored for x in graph.layers)
        limit = random.choice([math.inf, *(max(total, 1.0) * random.uniform(0.2, 1.0) for _ in range(3))])
        given = Devices((DeviceLevel(devices, bandwidth),), None if limit == math.inf else limit, host=host)
        trial = Tried(graph, bandwidth, m, limit, host)
        best, published = plan_for_dawnpiper_cost(graph, given, m), plan_as_dawnpiper(graph, given, m)
        halved = trial.halved(0, len(graph.layers), min(devices, len(graph.layers)), 0)
        assert (published.plan is None) == (halved == math.inf)
        if published.plan is not None:
            assert published.plan.rating.seconds == pytest.approx(halved, rel=1e-9)
        expected = trial.best(devices)
        assert (best.plan is None) == (expected == math.inf)
        if best.plan is None:
            assert "no plan fits" in best.why
            continue
        feasible += 1
        assert best.plan.rating.seconds == pytest.approx(expected, rel=1e-9)
        assert limit == math.inf or max(stage.memory for stage in best.plan.rating.stages) <= limit * (1 + 1e-9)
        slower += published.plan is None or published.plan.rating.seconds > expected * (1 + 1e-9)
        ways |= {name for stage in best.plan.stages for name in stage.ways}
    assert feasible > 15
    assert not seed or slower
    assert not seed or ways == {"plain", "recompute", "swap"}


def test_what_a_swap_costs():
    """8 bytes at 2 bytes/s take 4 s: a forward of 3 s hides all but 1 s, a backward of 5 s all; whole passes, 8 - 6."""
    apart = ProfiledLayer(name="a", forward=3.0, backward=5.0, stored=8.0, parameters=1.0)
    whole = ProfiledLayer(name="b", options=[LayerOption(seconds=6.0, memory=2.0, memory_per_microbatch=8.0)])
    graph = layer_graph(Profile(format="penstock profile 1", layers=[apart, whole]))
    one = Devices((DeviceLevel(1, 1.0),))
    swaps = [ways[-1] for ways in DawnPiperCost(graph, replace(one, host=2.0), 1).memory_ways]
    assert [(way.name, way.seconds, way.memory, way.memory_per_microbatch) for way in swaps] == [
        ("swap", 9.0, 10.0, 0.0), ("swap", 8.0, 10.0, 0.0),
    ]  # fmt: skip
    assert all(way.name != "swap" for ways in DawnPiperCost(graph, one, 1).memory_ways for way in ways)


def test_what_dawnpiper_refuses_and_what_it_cannot_rate(monkeypatch):
    graph, four = small_graph(Random(71), 6), Devices((DeviceLevel(4, 1.0),), 500.0)
    cost, total = DawnPiperCost(graph, four, 4), sum(2 * x.parameters + x.stored for x in graph.layers)
    assert "not on one device each" in cost.rate((PlannedStage(tuple(range(6)), 2),)).fault
    with pytest.raises(ConfigError, match="has no option 'swop'"):
        cost.rate((PlannedStage(tuple(range(6)), ways=("swop",) * 6),))
    monkeypatch.setattr("penstock.plan.planners.dawnpiper._MOST_HALVES", 1)
    with pytest.raises(ConfigError, match="would halve 6 layers in too many ways"):
        plan_as_dawnpiper(graph, four, 4)
    assert plan_for_dawnpiper_cost(graph, four, 4).plan is not None
    monkeypatch.setattr("penstock.plan.planners.dawnpiper._MOST_STARTS", 23)
    with pytest.raises(ConfigError, match="too many stages of 6 layers on 4 devices"):
        plan_for_dawnpiper_cost(graph, four, 4)
    monkeypatch.setattr("penstock.plan.planners.dawnpiper._MOST_HALVES", 100)
    (note, *_) = plan_for_dawnpiper_cost(graph, four, 4).plan.notes
    assert note == "all cuts are too many to try: the plan of the published search"
    monkeypatch.setattr("penstock.plan.planners.dawnpiper._MOST_STEPS", 1)
    with pytest.raises(ConfigError, match="too many stages of 6 layers; merge layers, or plan for more memory"):
        plan_as_dawnpiper(graph, replace(four, memory=total / 2, host=9.0), 4)


def test_choices_of_many_layers_are_a_heuristic(monkeypatch):
    """Where the front has too many points, the plan fits and says so."""
    monkeypatch.setattr("penstock.plan.planners.dawnpiper._MOST_POINTS", 2)
    graph = small_graph(Random(74), 8)
    tight = Devices((DeviceLevel(2, 5.0),), 0.6 * sum(2 * x.parameters + x.stored for x in graph.layers), host=3.0)
    plan = plan_for_dawnpiper_cost(graph, tight, 4).plan
    assert max(stage.memory for stage in plan.rating.stages) <= tight.memory
    assert "what each layer keeps was found by a heuristic" in plan.notes


def test_dawnpiper_is_a_planner_by_name(command, tmp_path):
    """Ranked plans with what is swapped; other cost functions, which know no swaps, are left out."""
    layers = [ProfiledLayer(name=f"l{n}", forward=1.0, backward=2.0, output=1.0, stored=9.0) for n in range(4)]
    profile = Profile(format="penstock profile 1", layers=layers)
    devices = Devices((DeviceLevel(2, 9.0),), 20.0, host=9.0)
    found = make_plan(PlanRequest(profile, devices, "dawnpiper", microbatches=8))
    assert any("swap" in stage.ways for stage in found.plans[0].stages)
    assert found.ratings(found.plans[0])["dawnpiper"].seconds == found.plans[0].rating.seconds
    assert "mist" not in found.ratings(found.plans[0])
    default = make_plan(PlanRequest(profile, devices, "default", "dawnpiper", 8))
    assert default.plans[0].rating.seconds <= found.plans[0].rating.seconds
    (tmp_path / "p.yaml").write_text(
        "format: penstock profile 1\nlayers: [{name: a, forward: 1, backward: 2, stored: 9},"
        " {name: b, forward: 1, backward: 2, stored: 9}]\n"
    )
    given = ["plan", "--profile", str(tmp_path / "p.yaml"), "--planner", "dawnpiper", "--devices", "2"]
    run = command(*given, "--bandwidth", "9", "--memory", "10", "--host-bandwidth", "9")
    assert (run.returncode, run.stderr) == (0, "")
    assert "swap" in run.stdout
    assert "1 of 1" in run.stdout
