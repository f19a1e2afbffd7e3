"""BaPipe's planner against every cut with either schedule, and against data parallelism, from the formulas."""

import itertools
import math
from random import Random

import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.bapipe import SCHEDULES, BaPipeCost, plan_as_bapipe, plan_for_bapipe_cost
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import LayerOption, Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import PlannedStage
from support.brute_force_plans import small_graph, small_profile


def tried(graph, cuts, bandwidth, m, limit):
    """(slowest period, seconds of messages, seconds of a batch) of a pipeline, for each schedule that fits."""
    places = {number: at for at, number in enumerate(graph.order)}
    ends = [(places[edge.source], places[edge.target], edge.bytes) for edge in graph.edges]
    hops = [sum(size for a, b, size in ends if a < cut <= b) / bandwidth for cut in cuts]
    stages = [[graph.layers[n] for n in graph.order[a:b]] for a, b in itertools.pairwise(cuts)]
    seconds = [sum(layer.seconds for layer in stage) for stage in stages]
    for twice in (1, 2):
        held = [
            sum(2 * x.parameters + min(twice * (len(stages) - at), m) * x.stored for x in stage)
            for at, stage in enumerate(stages)
        ]
        if max(held) > limit:
            continue
        sides = list(itertools.pairwise(hops))
        periods = [t + a + b if twice == 1 else max(t, a, b) for t, (a, b) in zip(seconds, sides, strict=True)]
        yield max(periods), sum(hops), sum(seconds) + 2 * sum(hops) + (m - 1) * max(periods)


def cuts_of(count, depth):
    return ((0, *inner, count) for inner in itertools.combinations(range(1, count), depth - 1))


def best_of(graph, devices, bandwidth, m, limit):
    """The least seconds of a batch of all pipelines and of data parallelism."""
    count, total = len(graph.layers), sum(layer.seconds for layer in graph.layers)
    found = [
        batch
        for depth in range(1, min(devices, count) + 1)
        for cuts in cuts_of(count, depth)
        for _, _, batch in tried(graph, cuts, bandwidth, m, limit)
    ]
    for r in range(1, devices + 1):
        if m % r == 0 and sum(2 * x.parameters + x.stored for x in graph.layers) <= limit:
            ring = 2 * (r - 1) / r * sum(x.parameters for x in graph.layers) / bandwidth
            found.append(m / r * total + ring)
    return min(found, default=math.inf)


@pytest.mark.parametrize("seed", range(2))
def test_bapipe_equals_brute_force(seed):
    """40 graphs of at most 8 layers on at most 4 devices; the published search is slower in some, never faster."""
    random, feasible, slower, overlapped = Random(40 + seed), 0, 0, 0
    for _ in range(40):
        graph, devices, m = small_graph(random, random.randint(1, 8)), random.randint(1, 4), random.choice([1, 2, 4, 8])
        bandwidth, total = float(random.randint(1, 9)), sum(2 * x.parameters + x.stored for x in graph.layers)
        limit = random.choice([math.inf, max(1.0, total * random.uniform(0.3, 1.2))])
        given = Devices((DeviceLevel(devices, bandwidth),), None if limit == math.inf else limit)
        best, published = plan_for_bapipe_cost(graph, given, m), plan_as_bapipe(graph, given, m).plan
        expected = best_of(graph, devices, bandwidth, m, limit)
        assert (best.plan is None) == (expected == math.inf)
        if best.plan is None:
            assert "no plan fits" in best.why
            continue
        feasible += 1
        assert best.plan.rating.seconds == pytest.approx(expected / m, rel=1e-9)
        assert limit == math.inf or max(stage.memory for stage in best.plan.rating.stages) <= limit * (1 + 1e-9)
        overlapped += "schedule 1f1b-so" in best.plan.notes
        if published is not None:
            assert best.plan.rating.seconds <= published.rating.seconds
            slower += best.plan.rating.seconds < published.rating.seconds * (1 - 1e-9)
    assert feasible > 20
    assert slower
    assert overlapped


def test_a_published_cut_is_balanced():
    """On all devices: no cut has a shorter slowest period with either schedule, and closed forms choose."""
    random, depths = Random(50), set()
    for _ in range(40):
        graph, m, bandwidth = small_graph(random, random.randint(2, 8)), random.choice([3, 5, 7]), float(9)
        count, devices = len(graph.layers), random.choice([2, 4])  # which do not divide m: there is no other way
        depth = min(count, devices)
        found = plan_as_bapipe(graph, Devices((DeviceLevel(devices, bandwidth),)), m).plan
        every = [list(tried(graph, cuts, bandwidth, m, math.inf)) for cuts in cuts_of(count, depth)]
        balanced = [min(both[at] for both in every) for at in (0, 1)]
        assert found.rating.seconds == pytest.approx(min(batch for _, _, batch in balanced) / m)
        assert found.devices == depth
        depths.add(depth)
    assert depths == {2, 3, 4}


def test_equal_stages_by_the_closed_forms():
    """N = 4, M = 8, F + B = 3, messages of 0.5 s: 11 x 3, and 2 x 10 x 0.5 or 2 x 3 x 0.5 more."""
    layers = [ProfiledLayer(name=f"l{n}", forward=1.0, backward=2.0, output=5.0, stored=1.0) for n in range(4)]
    graph = layer_graph(Profile(format="penstock profile 1", layers=layers))
    stages = tuple(PlannedStage((n,)) for n in range(4))
    roomy, tight = (BaPipeCost(graph, Devices((DeviceLevel(4, 10.0),), memory), 8) for memory in (8.0, 7.0))
    not_overlapped, overlapped = SCHEDULES
    assert roomy.rate(stages) == roomy.rate_with(stages, overlapped)
    assert tight.rate(stages) == tight.rate_with(stages, not_overlapped)
    assert [cost.rate(stages).seconds * 8 for cost in (roomy, tight)] == [33 + 3, 33 + 10]
    assert [stage.memory for stage in tight.rate(stages).stages] == [4, 3, 2, 1]


def test_many_periods_are_thinned(monkeypatch):
    """Where the bounds are too many to try, the plan is no worse than the published one, and says so."""
    graph = small_graph(Random(51), 40)
    devices = Devices((DeviceLevel(2, 4.0), DeviceLevel(3, 1.0)))
    monkeypatch.setattr("penstock.plan.planners.bapipe._MOST_WORK", 16 * 6 * 41 * 41)
    thinned, published = plan_for_bapipe_cost(graph, devices, 12).plan, plan_as_bapipe(graph, devices, 12).plan
    assert thinned.rating.seconds <= published.rating.seconds
    with pytest.raises(ConfigError, match="too many cuts of 40 layers into 7 stages"):
        plan_for_bapipe_cost(graph, Devices((DeviceLevel(7, 1.0),)), 12)


def test_what_bapipe_refuses_and_what_it_cannot_rate():
    alone = LayerOption(tensor=2, seconds=1.0)
    shared = layer_graph(Profile(format="penstock profile 1", layers=[ProfiledLayer(name="a", options=[alone])]))
    four = Devices((DeviceLevel(4, 1.0),))
    with pytest.raises(ConfigError, match="'bapipe' puts layers on single devices; layer 'a' needs several"):
        plan_as_bapipe(shared, four, 4)
    graph = small_graph(Random(52), 3)
    cost = BaPipeCost(graph, four, 6)
    assert "replicas" in cost.rate((PlannedStage((0, 1), 2), PlannedStage((2,)))).fault
    assert "cannot be divided over 4" in cost.rate((PlannedStage((0, 1, 2), 4),)).fault
    assert "it needs 6 of 4" in cost.rate((PlannedStage((0, 1, 2), 6),)).fault


def test_bapipe_is_a_planner_by_name():
    request = PlanRequest(small_profile(Random(53), 7), Devices((DeviceLevel(4, 5.0),)), "bapipe", microbatches=8)
    found = make_plan(request)
    assert found.request.cost == "bapipe"
    assert found.ratings(found.plans[0])["bapipe"].seconds == pytest.approx(found.plans[0].rating.seconds)
    default = make_plan(PlanRequest(request.profile, request.devices, "default", "bapipe", 8))
    assert default.plans[0].rating.seconds <= found.plans[0].rating.seconds
