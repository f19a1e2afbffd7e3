"""The planner after PaSE against every configuration of all layers, with costs counted from what each device holds."""

import itertools
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.pase import LayerConfiguration, PaseCost, least_sum, plan_as_pase
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import LayerOption, Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import PlannedStage
from support.brute_force_plans import small_graph, small_profile


def configurations(devices, m):
    degrees = [n for n in range(1, devices + 1) if devices % n == 0]
    return [(d, t) for d in degrees for t in degrees if d * t <= devices and m % d == 0]


def samples_of(device, data, tensor, grid):
    """The samples of a device, of so many."""
    part = device // tensor
    return set(range(part * grid // data, (part + 1) * grid // data)) if part < data else set()


def missing(before, after, devices):
    """The most that any device lacks of what it needs, forwards and backwards: a share of an edge."""
    grid = before[0] * after[0]
    held, needed = ([samples_of(n, *each, grid) for n in range(devices)] for each in (before, after))
    forwards = max(len(need - have) for have, need in zip(held, needed, strict=True))
    backwards = max(len(have - need) for have, need in zip(held, needed, strict=True))
    return Fraction(forwards + backwards, grid)


def layer_seconds(graph, number, d, t, bandwidth, m):
    """Seconds of a layer; infinite if it has no such way."""
    layer, ring = graph.layers[number], 2 * (d - 1) / d / bandwidth / m
    if any(way.tensor > 1 for way in layer.ways):
        found = [way for way in layer.ways if way.tensor == t]
        way = min(found, key=lambda each: each.seconds, default=None)
        return np.inf if way is None else way.seconds / d + ring * way.parameters
    read = sum(edge.bytes for edge in graph.edges if edge.target == number)
    sums = 2 * (t - 1) / t * (layer.output + read) / d / bandwidth
    return layer.seconds / (d * t) + sums + ring * layer.parameters / t


def least_of_all(graph, devices, bandwidth, m):
    """The least sum of every combination, an axis for each layer."""
    every, count = configurations(devices, m), len(graph.layers)
    total = np.zeros((len(every),) * count)
    for number in range(count):
        shape = [len(every) if n == number else 1 for n in range(count)]
        total = total + np.reshape([layer_seconds(graph, number, *c, bandwidth, m) for c in every], shape)
    share = np.array([[float(missing(a, b, devices)) for b in every] for a in every])
    for source, target, size in graph.edges:
        values = share * size / bandwidth
        shape = [len(every) if n in (source, target) else 1 for n in range(count)]
        total = total + (values if source < target else values.T).reshape(shape)
    return total.min()


@pytest.mark.parametrize("seed", range(2))
def test_pase_equals_brute_force(seed):
    """25 graphs of at most 6 layers on at most 4 devices, and one of 8; some are measured with tensor degrees."""
    random, mixed = Random(90 + seed), 0
    for case in range(26):
        graph = small_graph(random, random.randint(1, 6) if case else 8, sources=True, ways=case % 3 == 2)
        devices, m = random.choice([1, 2, 3, 4]) if case else 4, random.choice([1, 2, 4, 12])
        bandwidth = float(random.choice([1, 5, 30]))
        found = plan_as_pase(graph, Devices((DeviceLevel(devices, bandwidth),)), m).plan
        assert found.rating.seconds == pytest.approx(least_of_all(graph, devices, bandwidth, m), rel=1e-9)
        assert found.devices <= devices
        assert sorted(n for stage in found.stages for n in stage.layers) == list(range(len(graph.layers)))
        mixed += len(found.stages) > 1
        assert (len(found.stages) > 1) == any("Pipeline cannot run them" in note for note in found.notes)
    assert mixed > 5


def test_least_sums_of_any_tables():
    """Graphs that are no models: cliques, loops and single choices, with sizes of their own."""
    random = np.random.default_rng(3)
    for _ in range(40):
        sizes = random.integers(1, 4, size=random.integers(1, 7)).tolist()
        own = [random.random(size) for size in sizes]
        pairs = {
            pair: random.random([sizes[n] for n in pair])
            for pair in itertools.combinations(range(len(sizes)), 2)
            if random.random() < 0.6
        }

        def cost(values, own=own, pairs=pairs):
            return sum(each[v] for each, v in zip(own, values, strict=True)) + sum(
                table[values[a], values[b]] for (a, b), table in pairs.items()
            )

        assert cost(least_sum(own, pairs)) == pytest.approx(min(map(cost, itertools.product(*map(range, sizes)))))


def test_a_long_chain_needs_small_tables(monkeypatch):
    monkeypatch.setattr("penstock.plan.planners.pase.MOST_CELLS", 9)
    ones = np.ones((3, 3)) - np.eye(3)
    own = [np.zeros(3) for _ in range(500)]
    own[250] = np.array([5.0, 5.0, 0.0])
    assert least_sum(own, {(n, n + 1): ones for n in range(499)}) == [2] * 500
    with pytest.raises(OverflowError):
        least_sum(own[:4], dict.fromkeys(itertools.combinations(range(4), 2), ones))


def test_what_is_sent_between_two_configurations():
    """Of 4 devices: half a batch each to a whole on one; other halves; and nothing where only tensor degrees differ."""
    graph, four = small_graph(Random(91), 2), Devices((DeviceLevel(4, 1.0),))
    cost = PaseCost(graph, four, 4)
    places = {each: at for at, each in enumerate(cost.configurations)}

    def sent(before, after):
        return cost.resharding[places[LayerConfiguration(*before)], places[LayerConfiguration(*after)]]

    assert sent((1, 1), (1, 1)) == sent((1, 1), (1, 4)) - 1 == 0  # the other devices lack all of it, forwards
    assert sent((2, 1), (1, 1)) == 0.5 + 0.5
    assert sent((2, 2), (4, 1)) == 0 + 0.25
    assert all(
        sent(a, b) == pytest.approx(float(missing(a, b, 4))) for a in cost.configurations for b in cost.configurations
    )


def test_links_of_levels_and_memory():
    layer = ProfiledLayer(name="a", forward=1.0, backward=3.0, output=8.0, stored=10.0, parameters=6.0)
    graph = layer_graph(Profile(format="penstock profile 1", layers=[layer]))
    cost = PaseCost(graph, Devices((DeviceLevel(2, 4.0), DeviceLevel(2, 1.0)), 22.0), 4)
    assert cost.parts(0, LayerConfiguration(2, 1)) == {"compute": 2.0, "links": 0.0, "gradient sums": 6 / 4 / 4}
    assert cost.parts(0, LayerConfiguration(2, 2)) == {"compute": 1.0, "links": 8 / 2 / 4, "gradient sums": 3 / 1 / 4}
    assert cost.parts(0, LayerConfiguration(1, 4))["links"] == 2 * 3 / 4 * 8 / 1
    assert cost.rate((PlannedStage((0,), 4),)).fault == ""
    assert cost.rate((PlannedStage((0,), 4),)).stages[0].memory == 22
    tight = Devices((DeviceLevel(4, 1e-3),), 11.0)
    assert "all layers together need" in plan_as_pase(graph, tight, 1).why


def test_what_pase_refuses_and_what_it_cannot_rate(monkeypatch):
    three = ProfiledLayer(name="a", options=[LayerOption(tensor=3, seconds=1.0)])
    graph = layer_graph(Profile(format="penstock profile 1", layers=[three]))
    four = Devices((DeviceLevel(4, 1.0),))
    with pytest.raises(ConfigError, match="layer 'a' has options for 3 devices, none of which divides 4"):
        plan_as_pase(graph, four, 4)
    with pytest.raises(ConfigError, match="4096 devices at most, got 8192"):
        plan_as_pase(graph, Devices((DeviceLevel(8192, 1.0),)), 4)
    graph = small_graph(Random(92), 6)
    cost = PaseCost(graph, four, 6)
    pipeline = PlannedStage((0, 1, 2)), PlannedStage((3, 4, 5))
    assert "devices of their own" in cost.rate(pipeline).fault
    assert "degrees of 4 x 1 do not divide" in cost.rate((PlannedStage(tuple(range(6)), 4),)).fault
    monkeypatch.setattr("penstock.plan.planners.pase.MOST_CELLS", 5)
    with pytest.raises(ConfigError, match="too many combinations of 6 configurations"):
        plan_as_pase(graph, four, 4)


def test_pase_is_a_planner_by_name(command, tmp_path):
    """No other cost function rates its plans, and it rates no pipelines."""
    profile, devices = small_profile(Random(1), 8), Devices((DeviceLevel(4, 8.0),))
    found = make_plan(PlanRequest(profile, devices, "pase", microbatches=8))
    assert len(found.plans[0].stages) > 1
    assert found.plans[0].devices <= 4
    assert list(found.ratings(found.plans[0])) == ["pase"]
    default = make_plan(PlanRequest(profile, devices, "default", "pase", 8))
    assert default.plans[0].rating.seconds <= found.plans[0].rating.seconds
    (tmp_path / "p.yaml").write_text(
        "format: penstock profile 1\nlayers: [{name: a, forward: 9, backward: 9, parameters: 1, output: 90},"
        " {name: b, forward: 1, backward: 2, parameters: 90000, output: 1}]\n"
    )
    given = ["plan", "--profile", str(tmp_path / "p.yaml"), "--planner", "pase", "--devices", "4"]
    run = command(*given, "--bandwidth", "50")
    assert (run.returncode, run.stderr) == (0, "")
    assert "in turns on the same devices" in " ".join(run.stdout.split())
