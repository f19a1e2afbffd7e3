"""Orders of ranks on servers: their links by brute force, and the plans that each of them makes faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

import penstock
from penstock.errors import ConfigError
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import PLANNED
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.cluster.files import find_cluster
from penstock.plan.cluster.rank_links import RankLinks
from penstock.plan.plan_export import plan_file, planning_json
from penstock.plan.planned_timeline import planned_timeline
from penstock.plan.planners.two_bw import Sized
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.layer_graph import LayerGraph, layer_graph
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.simulated.chosen_plan import rank_orders
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.stages.device_hierarchy import DeviceKind, DeviceLevel, Devices
from penstock.schedule.ir.rank_numbers import RANK_ORDERS, RankNumbers
from penstock.train.config.load import load_config

PIPELINES, REPLICAS = RANK_ORDERS
SERVERS = Devices((DeviceLevel(2, 1e6), DeviceLevel(2, 1.0)))
"""Two of two devices."""

KNOWN = KnownSchedules(True)


def profile(output: float, parameters: float, layers: int = 4) -> Profile:
    rows = [
        ProfiledLayer(name=f"l{n}", forward=1, backward=2, output=output, parameters=parameters, frozen=1e3)
        for n in range(layers)
    ]
    return Profile(format="penstock profile 1", layers=rows)


def link(devices: Devices, one: int, other: int) -> tuple[float, float]:
    """Bytes per second between two devices, and latency: of the outermost level at which their coordinates differ."""
    coordinates = [list[int](), list[int]()]
    for level in devices.levels:
        for found, number in zip(coordinates, (one, other), strict=True):
            found.append(number % level.units)
        one, other = one // level.units, other // level.units
    differ = [level for level, a, b in zip(devices.levels, *coordinates, strict=True) if a != b]
    if not differ:
        return math.inf, 0.0
    return differ[-1].bandwidth, devices.latency if differ[-1].latency is None else differ[-1].latency


def device_of(numbers: RankNumbers, pipeline: int, rank: int) -> int:
    """Where a rank lies, found by counting."""
    places = itertools.product(range(numbers.width), range(numbers.depth))
    if numbers.order == REPLICAS:
        places = ((p, r) for r, p in itertools.product(range(numbers.depth), range(numbers.width)))
    return list(places).index((pipeline, rank))


def gather(devices: Devices, places: list[int], nbytes: float) -> float:
    """Seconds of an all-gather, counted step by step."""
    ring, n = list(itertools.pairwise([*places, places[0]])), len(places)
    bandwidths, latencies = zip(*(link(devices, *pair) for pair in ring), strict=True)
    around = sum(max(latencies) + nbytes / n / min(bandwidths) for _ in range(n - 1))
    inner = from_outside(devices, len(devices.levels), places, nbytes)
    return around if devices.collectives == "ring" or inner is None else inner[0]


def from_outside(devices: Devices, levels: int, places: list[int], nbytes: float) -> tuple[float, Any] | None:
    """Seconds of a hierarchical all-gather, from the outermost level on, and its shape; None if units differ."""
    if not levels:
        return 0.0, 1
    size, level = math.prod(each.units for each in devices.levels[: levels - 1]), devices.levels[levels - 1]
    units: dict[int, list[int]] = {}
    for place in places:
        units.setdefault(place // size, []).append(place)
    inside = [from_outside(devices, levels - 1, each, nbytes) for each in units.values()]
    if None in inside or len({shape for _, shape in filter(None, inside)}) > 1:
        return None
    seconds, shape = inside[0] or (0.0, 1)
    shard = nbytes / len(places)
    between = sum(devices.latencies[levels - 1] + shard / level.bandwidth for _ in range(len(units) - 1))
    return between + seconds, (len(units), shape)


def latency_of_neighbours(latency: float | tuple[float, ...], ranks: int) -> tuple[float, ...]:
    return latency if isinstance(latency, tuple) else (latency,) * (ranks - 1)


def random_devices(random: Random) -> Devices:
    levels = [
        DeviceLevel(random.randint(1, 4), 2.0 ** random.randint(0, 9), random.choice([None, 0.0, 0.25, 3.0]))
        for _ in range(random.randint(1, 3))
    ]
    return Devices(tuple(levels), latency=0.5, collectives=random.choice(["ring", "hierarchical"]))


def links_by_hand(
    devices: Devices, numbers: RankNumbers
) -> tuple[Callable[[float], float], dict[tuple[int, int], float], tuple[float, ...]]:
    """Seconds of a gather over replicas, the bandwidth between each two ranks, and the latencies of neighbours."""
    at = {(p, r): device_of(numbers, p, r) for p in range(numbers.width) for r in range(numbers.depth)}
    pairs = itertools.permutations(range(numbers.depth), 2)
    along = {(a, b): min(link(devices, at[p, a], at[p, b])[0] for p in range(numbers.width)) for a, b in pairs}
    latencies = (
        max(link(devices, at[p, r], at[p, r + 1])[1] for p in range(numbers.width)) for r in range(numbers.depth - 1)
    )
    replicas = [[at[p, r] for p in range(numbers.width)] for r in range(numbers.depth)]
    return (lambda nbytes: max(gather(devices, each, nbytes) for each in replicas)), along, tuple(latencies)


@pytest.mark.parametrize("order", RANK_ORDERS)
def test_links_are_those_of_the_devices_that_ranks_lie_on(order: Any) -> None:
    random = Random(29)
    for _ in range(60):
        devices = random_devices(random)
        width = random.randint(1, devices.count)
        numbers = RankNumbers(width, random.randint(1, devices.count // width), order)
        seconds, along, latencies = links_by_hand(devices, numbers)
        found, pairs = RankLinks(devices, numbers), list(along)
        for nbytes in (0.0, 1.0, 1e4):
            assert found.scatter(nbytes) == pytest.approx(seconds(nbytes))
            each = max(found.scatter(nbytes, [[rank]]) for rank in range(numbers.depth))
            assert each == found.scatter(nbytes)
        assert found.along(pairs).tolist() == [along[pair] for pair in pairs]
        assert found.latencies == latencies
        assert latency_of_neighbours(found.latency, numbers.depth) == latencies
        chain = [along[rank, rank + 1] for rank in range(numbers.depth - 1)]
        assert found.slowest(wraps=False) == min(chain, default=math.inf)
        assert found.slowest(wraps=True) == min([*chain, along.get((numbers.depth - 1, 0), math.inf)])


def test_ranks_lie_on_the_next_device_of_their_kind() -> None:
    """Two servers of two fast devices and one of two slow ones; slow ranks in between leave no device empty."""
    kinds = (DeviceKind("fast", 4), DeviceKind("slow", 2, 0.5))
    devices = Devices((DeviceLevel(2, 100.0), DeviceLevel(3, 1.0)), kinds=kinds)
    found = RankLinks(devices, RankNumbers(2, 3), ["fast", "slow", "fast"] * 2)
    assert found.along([(0, 2), (0, 1), (1, 2)]).tolist() == [100.0, 1.0, 1.0]
    assert [found.scatter(200.0, [[rank]]) for rank in range(3)] == [100.0, 1.0, 100.0]


def test_orders_with_slower_links_only_are_not_tried() -> None:
    def tried(levels: tuple[int, int], depth: int, width: int, method: str = "1f1b") -> tuple[str, ...]:
        devices = Devices((DeviceLevel(levels[0], 10.0), DeviceLevel(levels[1], 1.0)))
        sized = Sized(layer_graph(profile(1.0, 1.0, 16)), 1, 64)
        return rank_orders(Candidate(sized, PLANNED[method], depth, width), devices)

    assert tried((4, 4), 4, 4) == RANK_ORDERS  # sums or messages stay on a server
    assert tried((2, 8), 4, 4) == (PIPELINES,)  # sums leave servers of two anyway
    assert tried((4, 2), 2, 4) == RANK_ORDERS
    assert tried((8, 2), 2, 4) == tried((8, 2), 1, 16) == tried((8, 2), 16, 1) == (PIPELINES,)  # no difference
    assert tried((4, 3), 3, 4) == (REPLICAS,)  # each server but the first begins within a pipeline
    assert tried((4, 3), 4, 2, "interleaved:chunks=2") == RANK_ORDERS


def best_of_all(graph: LayerGraph, method: str, devices: Devices, m: int) -> float:
    """The least seconds per microbatch of all depths, widths, cuts and orders."""
    best, count = math.inf, len(graph.layers)
    for depth, width in itertools.product(range(1, min(count, devices.count) + 1), range(1, devices.count + 1)):
        if depth * width > devices.count or m % width or m // width < depth:
            continue
        key = Candidate(Sized(graph, 1, m), PLANNED[method], depth, width).schedule
        costs = []
        for order in RANK_ORDERS:
            seconds, along, latencies = links_by_hand(devices, RankNumbers(width, depth, order))
            farthest = max(link(devices, a, b)[1] for a, b in itertools.product(range(width * depth), repeat=2))
            for inner in itertools.combinations(range(1, count), depth - 1):
                parts = [graph.layers[a:b] for a, b in itertools.pairwise((0, *inner, count))]
                largest = max(sum(layer.parameters for layer in part) for part in parts)
                sent = (graph.layers[cut - 1].output / along[r, r + 1] for r, cut in enumerate(inner))
                forwards = [sum(layer.forward or 0.0 for layer in part) for part in parts]
                stages = tuple(penstock.StageCost(each, 2 * each, 0.0) for each in forwards)
                sums = 2 * seconds(largest)
                costs.append(penstock.Costs(stages, latencies, max(sent, default=0.0), sums, decision=2 * farthest))
        short, long = (KNOWN.span(key, batches)(costs) for batches in (3, 5))
        best = min(best, *((b.makespan - a.makespan) / 2 / m for a, b in zip(short, long, strict=True)))
    return best


@pytest.mark.parametrize(
    ("method", "cases"),
    [
        ("1f1b", 2),
        ("2bw", 2),
        pytest.param("1f1b", 100, marks=pytest.mark.long),
        pytest.param("2bw", 100, marks=pytest.mark.long),
    ],
)
def test_plans_on_servers_are_the_best_of_all_orders(method: str, cases: int) -> None:
    random, orders = Random(method), set[str]()
    for _ in range(cases):
        rows = [
            ProfiledLayer(name=f"l{n}", forward=f, backward=2 * f, output=random.choice([0, 4, 40]), parameters=p)
            for n, (f, p) in enumerate((random.randint(1, 3), random.choice([0, 9, 60])) for _ in range(4))
        ]
        graph = layer_graph(Profile(format="penstock profile 1", layers=rows))
        levels = random.choice([(2, 2), (2, 3), (3, 2), (4, 2)])
        near, far = random.choice([(0.0, 0.0), (0.1, 0.5), (0.0, 2.0), (0.25, 0.25)])
        inner, outer = DeviceLevel(levels[0], 40.0, near), DeviceLevel(levels[1], random.choice([2.0, 8.0]), far)
        devices = Devices((inner, outer), collectives=random.choice(["ring", "hierarchical"]))
        plans = simulated_plans({1: Sized(graph, 1, 12)}, devices, methods=(method,)).plans
        assert plans[0].rating.seconds == pytest.approx(best_of_all(graph, method, devices, 12))
        orders.add(plans[0].settings.get("rank_order", ""))
    assert orders == {"", *RANK_ORDERS} or cases < 100


HEAVY_SUMS, HEAVY_MESSAGES = profile(0.1, 80.0, 2), profile(8.0, 0.1, 2)


@pytest.mark.parametrize(
    ("known", "order", "other"), [(HEAVY_SUMS, REPLICAS, PIPELINES), (HEAVY_MESSAGES, PIPELINES, REPLICAS)]
)
def test_the_faster_order_is_in_the_plan(known: Profile, order: str, other: str, tmp_path: Path) -> None:
    """Two pipelines, as a device holds one of two layers: large sums stay on a server, or large messages do."""
    limited = Devices(SERVERS.levels, memory=1.9e3)
    found = make_plan(PlanRequest(known, limited, cost="simulated", microbatches=16, methods=("2bw",)))
    best = found.plans[0]
    assert (best.settings["stages"], best.settings["width"], best.settings["rank_order"]) == (2, 2, order)
    assert best.notes[-1].startswith(f"rank_order {order}: the ")
    assert f"with {other} one more batch of these stages takes " in best.notes[-1]
    assert float(best.notes[-1].split()[-2]) > best.rating.seconds * 16
    assert planning_json(found)["plans"][0]["settings"]["rank_order"] == order
    assert planned_timeline(found).makespan == pytest.approx(3 * 16 * best.rating.seconds, rel=0.2)
    (tmp_path / "plan.yaml").write_text(plan_file(found))
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["rank_order"] == order
    assert load_config(tmp_path / "plan.yaml", []).rank_order == order


def test_what_makes_no_difference_is_not_said() -> None:
    for devices in (Devices((DeviceLevel(4, 1.0),)), Devices((DeviceLevel(4, 1.0), DeviceLevel(2, 1.0)))):
        plans = simulated_plans({1: Sized(layer_graph(HEAVY_SUMS), 1, 16)}, devices, methods=("1f1b",)).plans
        assert "rank_order" not in plans[0].settings


def test_ranks_that_do_not_fill_servers_lie_on_the_first_ones_which_is_said():
    devices = Devices((DeviceLevel(4, 1e6), DeviceLevel(2, 100.0)))
    links = RankLinks(devices, RankNumbers(1, 6)).along([(2, 3), (3, 4), (4, 5)])
    assert links.tolist() == [1e6, 100.0, 1e6]
    said = {}
    for layers in (6, 4):  # as many stages are the fastest, as 17 microbatches are no pipelines'
        planning = make_plan(
            PlanRequest(profile(1.0, 0.0, layers), devices, cost="simulated", microbatches=17, methods=("1f1b",))
        )
        assert planning.plans[0].devices == layers
        said[layers] = [line for line in plan_file(planning).splitlines() if "do not fill" in line]
    assert said[4] == []
    assert said[6] == [
        "# 6 ranks do not fill servers of 4 devices: the first 4 fill 1 server and the next one has the other 2, as is "
        "predicted; start as many processes on each (docs/launchers.md)"
    ]


def test_devices_that_are_no_whole_nodes_are_refused_with_the_nearest_numbers():
    with pytest.raises(ConfigError, match=r"12 devices are no whole nodes of 8 of h100; take 8 or 16: plans leave out"):
        find_cluster("h100").devices(12)
