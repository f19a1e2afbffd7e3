"""What planners have in common: knapsacks, prefixes and the dynamic program over cuts, against trying everything."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from penstock.plan.planners.piper import plan_as_piper
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.knapsack import bounds_of_two, greedy_time, least_time
from penstock.plan.stages.layer_row import CutProgram
from penstock.plan.stages.prefixes import all_prefixes, useful_prefixes
from support.brute_force_plans import best_by_piper, small_graph


def instances(count, ways):
    random = Random(5)
    for _ in range(count):
        layers = random.randint(1, 7)
        seconds = [np.array([float(random.randint(0, 9)) for _ in range(ways)]) for _ in range(layers)]
        memory = [np.array([float(random.randint(0, 9)) for _ in range(ways)]) for _ in range(layers)]
        yield seconds, memory, random.uniform(0, 4.5 * layers)


def every_choice(seconds, memory, limit):
    fitting = [
        sum(float(s[w]) for s, w in zip(seconds, ways, strict=True))
        for ways in itertools.product(*(range(len(s)) for s in seconds))
        if sum(float(m[w]) for m, w in zip(memory, ways, strict=True)) <= limit
    ]
    return min(fitting, default=None)


@pytest.mark.parametrize("ways", [2, 3])
def test_least_time_is_that_of_the_best_choice(ways):
    found = [(least_time(*each), greedy_time(*each), every_choice(*each), each) for each in instances(80, ways)]
    assert {best is None for _, _, best, _ in found} == {True, False}
    for exact, greedy, best, (seconds, memory, limit) in found:
        if best is None:
            assert exact is None
            assert greedy is None
            continue
        assert exact.seconds == best
        for choice in (exact, greedy):
            assert sum(m[w] for m, w in zip(memory, choice.ways, strict=True)) <= limit
            assert sum(s[w] for s, w in zip(seconds, choice.ways, strict=True)) == choice.seconds
        assert greedy.seconds >= best


def test_bounds_hold_and_meet_where_layers_are_alike():
    gaps = 0
    for seconds, memory, limit in instances(150, 2):
        inside = np.ones((1, len(seconds)), dtype=bool)
        lower, upper = bounds_of_two(np.array(seconds)[None], np.array(memory)[None], inside, limit)
        best = every_choice(seconds, memory, limit)
        if best is None:
            assert upper[0] == np.inf
        else:
            assert lower[0] <= best * (1 + 1e-12)
            assert best <= upper[0]
            gaps += lower[0] < upper[0]
    assert gaps > 5  # so the bounds are not tested where they are equal only
    seconds, memory = np.tile([3.0, 5.0], (1, 9, 1)), np.tile([10.0, 4.0], (1, 9, 1))
    for limit in range(36, 91, 5):
        lower, upper = bounds_of_two(seconds, memory, np.ones((1, 9), dtype=bool), float(limit))
        assert lower[0] == upper[0]


def test_too_many_points_are_given_up():
    random = Random(1)
    seconds = [np.array([0.0, random.random()]) for _ in range(8)]
    memory = [np.array([random.random(), 0.0]) for _ in range(8)]
    with pytest.raises(OverflowError):
        least_time(seconds, memory, 4.0, most=3)


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


def every_cut(stages, count, units):
    """The least of the slowest stage over all cuts into so many stages that use exactly these units."""
    found = []
    for inner in itertools.combinations(range(1, count), len(stages) - 1):
        for shares in itertools.product(range(1, units + 1), repeat=len(stages)):
            if sum(shares) == units:
                cuts = list(itertools.pairwise((0, *inner, count)))
                found.append(max(stages[n][shares[n]][cuts[n]] for n in range(len(stages))))
    return min(found)


def test_a_cut_program_equals_trying_every_cut():
    """60 rows of at most 7 layers; stages with more units take other times, and what is traced takes the least."""
    random = np.random.default_rng(3)
    for _ in range(60):
        count, depth = int(random.integers(1, 8)), int(random.integers(1, 4))
        depth, units = min(depth, count), int(random.integers(depth, 6))
        shape = (count + 1, count + 1)
        some = np.triu(np.ones(shape, dtype=bool), 1)
        stages = [
            {n: np.where(some, random.integers(0, 9, shape), np.inf) for n in range(1, units + 1)} for _ in range(depth)
        ]
        program = CutProgram(count + 1, (0,))
        for times in stages:
            program.add_stage(lambda used, times=times: [((used[0] + n,), each) for n, each in times.items()])
        assert program.least[units,][-1] == every_cut(stages, count, units)
        cuts, used = program.trace((units,))
        shares = [b - a for (a,), (b,) in itertools.pairwise([(0,), *used])]
        ends = itertools.pairwise(cuts)
        slowest = max(times[share][end] for times, share, end in zip(stages, shares, ends, strict=True))
        assert (cuts[0], cuts[-1], slowest) == (0, count, program.least[units,][-1])
