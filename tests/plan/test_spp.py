"""SPP's planner: cuts, orders, the dynamic program and the list schedule, against what trying everything finds."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.plan.planners.spp import (
    SppCost,
    balanced_plans,
    checked_links,
    device_order,
    least_cut,
    link_matrix,
    list_schedule,
    plan_as_spp,
)
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices


def links_of(random, count):
    found = np.zeros((count, count))
    for a, b in itertools.combinations(range(count), 2):
        found[a, b] = found[b, a] = float(random.randint(1, 9))
    return found


def chain_graph(random, count):
    numbers = [
        {
            "name": f"l{n}", "forward": float(random.randint(1, 9)), "backward": float(random.randint(1, 9)),
            "output": float(random.randint(1, 9)), "stored": float(random.randint(1, 9)),
            "parameters": float(random.randint(0, 40)),
        }
        for n in range(count)
    ]  # fmt: skip
    return layer_graph(Profile(format="penstock profile 1", layers=[ProfiledLayer(**x) for x in numbers])), numbers


def test_least_cut_equals_brute_force():
    random = Random(1)
    for _ in range(60):
        count = random.randint(2, 7)
        links = links_of(random, count)
        cut, side = least_cut(links)
        rest = [n for n in range(count) if n not in side]
        assert links[np.ix_(sorted(side), rest)].sum() == pytest.approx(cut)
        cuts = [
            links[np.ix_(chosen, [n for n in range(count) if n not in chosen])].sum()
            for size in range(1, count)
            for chosen in map(list, itertools.combinations(range(count), size))
        ]
        assert cut == pytest.approx(min(cuts))


def test_an_order_keeps_servers_together():
    """Two servers of three devices, whose numbers are mixed."""
    links = np.where(np.arange(6)[:, None] % 2 == np.arange(6)[None, :] % 2, 100.0, 1.0)
    np.fill_diagonal(links, 0.0)
    order = device_order(links)
    assert sorted(order) == list(range(6))
    assert {n % 2 for n in order[:3]} != {n % 2 for n in order[3:]}
    assert len({n % 2 for n in order[:3]}) == 1


def test_links_of_levels():
    links = link_matrix(Devices((DeviceLevel(2, 9.0), DeviceLevel(2, 3.0))))
    assert links.tolist() == [[0, 9, 3, 3], [9, 0, 3, 3], [3, 3, 0, 9], [3, 3, 9, 0]]


@pytest.mark.parametrize("seed", range(2))
def test_spp_equals_brute_force(seed):
    """60 chains of at most 7 layers on at most 4 devices: for each number of stages the slowest part is the least."""
    random = Random(80 + seed)
    for _ in range(60):
        graph, numbers = chain_graph(random, random.randint(1, 7))
        count, m = random.randint(1, 4), random.choice([1, 2, 4])
        links = links_of(random, count)
        devices = Devices((DeviceLevel(count, 1.0),))
        found = list(balanced_plans(SppCost(graph, devices, m, links)))
        best, order = plan_as_spp(graph, devices, m, links).plan, device_order(links)
        ordered = links[np.ix_(order, order)]
        assert [len(plan.stages) for plan in found] == list(range(1, min(count, len(numbers)) + 1))
        for plan in found:
            depth = len(plan.stages)
            cuts = (0, *itertools.accumulate(len(stage.layers) for stage in plan.stages))
            replicas = tuple(stage.replicas for stage in plan.stages)
            assert sum(replicas) == count
            tried = [
                slowest_of(numbers, (0, *inner, len(numbers)), shares, ordered, m)
                for inner in itertools.combinations(range(1, len(numbers)), depth - 1)
                for shares in itertools.product(range(1, count + 1), repeat=depth)
                if sum(shares) == count
            ]
            assert slowest_of(numbers, cuts, replicas, ordered, m) == pytest.approx(min(tried))
        assert best.rating.seconds == min(plan.rating.seconds for plan in found)


def slowest_of(numbers, cuts, replicas, links, m):
    worst, first = 0.0, 0
    for at, ((a, b), r) in enumerate(zip(itertools.pairwise(cuts), replicas, strict=True)):
        own = range(first, first + r)
        ring = 0.0
        if r > 1:
            slow = min(links[x, y] for x in own for y in own if x != y)
            ring = 2 * (r - 1) / r * sum(x["parameters"] for x in numbers[a:b]) / slow
        worst = max(worst, m * sum(x["forward"] + x["backward"] for x in numbers[a:b]) / r + ring)
        if at:
            speed = min(links[x, y] for x in range(first - replicas[at - 1], first) for y in own)
            worst = max(worst, 2 * m * numbers[a - 1]["output"] / speed / r)
        first += r
    return worst


def test_a_list_schedule_by_hand():
    """Equal stages, F = 1 and B = 2: forwards have the longer way to go, so a batch is GPipe's, (m + p - 1) 3."""
    ends, _ = list_schedule([1.0] * 3, [2.0] * 3, [0.0] * 2, 6)
    assert max(ends) == (6 + 2) * 3
    assert list_schedule([1.0], [2.0], [], 4) == ([12.0], [4])
    ends, _ = list_schedule([1.0, 1.0], [2.0, 2.0], [5.0], 1)
    assert ends == [1 + 5 + 1 + 2 + 5 + 2, 1 + 5 + 1 + 2]


def test_list_schedules_are_bounded():
    """No shorter than the busiest stage or the longest way, and no pass overlaps another one of its stage."""
    random = Random(4)
    for _ in range(100):
        p, m = random.randint(1, 4), random.randint(1, 6)
        forward, backward = ([float(random.randint(1, 5)) for _ in range(p)] for _ in range(2))
        hops = [float(random.randint(0, 3)) for _ in range(p - 1)]
        ends, in_flight = list_schedule(forward, backward, hops, m)
        way = sum(forward) + sum(backward) + 2 * sum(hops)
        busiest = max(m * (f + b) for f, b in zip(forward, backward, strict=True))
        assert max(way, busiest) <= max(ends) <= m * way + 1e-9
        assert all(1 <= held <= m for held in in_flight)


def test_memory_counts_what_the_order_holds():
    graph, numbers = chain_graph(Random(5), 4)
    links, two = links_of(Random(5), 2), Devices((DeviceLevel(2, 1.0),))
    best = plan_as_spp(graph, two, 4, links).plan
    most = max(stage.memory for stage in best.rating.stages)
    assert plan_as_spp(graph, replace(two, memory=most), 4, links).plan is not None
    nothing = plan_as_spp(graph, replace(two, memory=1.0), 4, links)
    assert nothing.plan is None
    assert "no plan fits: stage 0 needs" in nothing.why
    assert math.isfinite(best.rating.seconds)
    assert len(numbers) == 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "list of 1 to 128 rows"),
        ([[0, 1]], "must be square"),
        ([[0, 1], [2, 0]], "must be symmetric"),
        ([[0, -1], [-1, 0]], "from 0 to 1 must be above 0"),
    ],
)
def test_links_that_are_none(rows, said):
    with pytest.raises(ConfigError, match=said):
        checked_links(rows)


def test_spp_is_a_planner_by_name(command, tmp_path):
    (tmp_path / "p.yaml").write_text(
        "format: penstock profile 1\nlayers: [{name: a, forward: 1, backward: 2, output: 3},"
        " {name: b, forward: 1, backward: 2}]\n"
    )
    (tmp_path / "links.yaml").write_text("links: [[0, 9e0, 1], [9.0e0, 0, 1], [1, 1, 0]]\n")
    given = ["plan", "--profile", str(tmp_path / "p.yaml"), "--planner", "spp", "--microbatches", "4"]
    run = command(*given, "--devices", "2x2", "--bandwidth", "9,3")
    assert (run.returncode, run.stderr) == (0, "")
    run = command(*given, "--devices", "3", "--link-matrix", str(tmp_path / "links.yaml"))
    assert (run.returncode, run.stderr) == (0, "")
    assert "devices in the order" in run.stdout
    run = command(*given, "--devices", "4", "--link-matrix", str(tmp_path / "links.yaml"))
    assert run.returncode == 2
    assert "3 devices" in run.stderr
