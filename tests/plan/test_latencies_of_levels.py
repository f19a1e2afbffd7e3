"""Latencies of levels of devices: from options, profiles and cluster files to the costs of plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.plan.cluster.schema import devices_of_clusters, find_cluster
from penstock.plan.objectives import fewer_devices
from penstock.plan.planned_timeline import planned_timeline, what_would_help
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from support.clusters import TWO_SERVERS

ROWS = "format: penstock profile 1\nlayers:\n" + "".join(
    f"- {{name: b{n}, forward: 1, backward: 2, output: 1, parameters: 1}}\n" for n in range(4)
)
CLUSTER = TWO_SERVERS + "between_latency: {value: 3e-5, source: measured}\n"


def four_blocks() -> Profile:
    rows = [ProfiledLayer(name=f"b{n}", forward=1, backward=2, output=1, parameters=0) for n in range(4)]
    return Profile(format="penstock profile 1", layers=rows)


def servers(near: float | None, far: float | None, latency: float = 0.0) -> Devices:
    return Devices((DeviceLevel(2, 1e9, near), DeviceLevel(2, 1e9, far)), latency=latency)


def test_levels_have_their_own_latency_or_that_of_all() -> None:
    assert servers(None, 2.0, 0.5).latencies == (0.5, 2.0)
    assert servers(0.0, None, 0.5).latencies == (0.0, 0.5)
    assert servers(1.0, 2.0, 0.5).with_latencies([3.0, 4.0]).latencies == (3.0, 4.0)
    assert fewer_devices(servers(1.0, 2.0), 2).latencies == (1.0,)
    with pytest.raises(ConfigError, match="latency must be a number of seconds, not negative, got -1"):
        servers(-1.0, 2.0)


def test_a_run_on_two_servers_takes_the_links_that_its_ranks_lie_on() -> None:
    settings = RunSettings("1f1b", 4, 1, 8, 1, (False,) * 4, (1,) * 4)
    _, costs = run_forecast(four_blocks(), settings, servers(0.25, 2.0))
    assert (costs.latency, costs.decision) == ((0.25, 2.0, 0.25), 4.0)
    of_two = replace(settings, stages=2, width=2, recompute=(False,) * 2, balance=(2, 2))
    _, costs = run_forecast(four_blocks(), of_two, servers(0.25, 2.0))
    assert (costs.latency, costs.decision) == (0.25, 4.0)  # pipelines lie on servers, decisions take all ranks
    _, costs = run_forecast(four_blocks(), replace(of_two, rank_order="tp-dp-pp"), servers(0.25, 2.0))
    assert costs.latency == 2.0
    _, costs = run_forecast(four_blocks(), settings, servers(0.5, 0.5))
    assert (costs.latency, costs.decision) == (0.5, None)


@pytest.mark.parametrize(("width", "expected"), [(1, 0.0), (2, 0.5), (4, 0.5)])
def test_pipelines_of_one_rank_decide_over_a_link_and_a_single_one_by_itself(width: int, expected: float) -> None:
    devices, settings = servers(0.5, 0.5), RunSettings("1f1b", 1, width, 8, 1, (False,), (4,))
    _, costs = run_forecast(four_blocks(), settings, fewer_devices(devices, width))
    assert (costs.longest_latency, costs.decision) == (expected, None)
    asked = PlanRequest(four_blocks(), fewer_devices(devices, width), cost="simulated", samples=8, methods=("1f1b",))
    alone = replace(asked, devices=fewer_devices(servers(0.0, 0.0), width))
    slower, faster = (
        next(plan.rating.seconds for plan in make_plan(each).plans if len(plan.stages) == 1) for each in (asked, alone)
    )
    assert (slower > faster) == (expected > 0)


def test_the_timeline_of_a_plan_shows_each_link() -> None:
    devices = replace(servers(0.25, 2.0), memory=None)
    request = PlanRequest(four_blocks(), devices, cost="simulated", microbatches=5, methods=("gpipe",))
    planning = make_plan(request)
    assert planning.plans[0].settings["stages"] == 4  # five microbatches are no pipelines'
    sent = [each for each in planned_timeline(planning).intervals if each.what == "SEND"]
    least: dict[int, float] = {}
    for each in sent:
        link = min(each.rank, each.peer)
        least[link] = min(least.get(link, 9.0), each.end - each.start)
    assert least == {0: pytest.approx(0.25), 1: pytest.approx(2.0), 2: pytest.approx(0.25)}
    found = {each.change: each.seconds for each in what_would_help(planning)}
    half = make_plan(replace(request, devices=servers(0.125, 1.0))).plans[0].seconds_per_sample
    assert found["links of half the latency"] == half < planning.plans[0].seconds_per_sample - 0.5


def test_latencies_of_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(CLUSTER)
    two = find_cluster(str(tmp_path / "two.yaml"))
    assert two.devices(4).latencies == (0.0, 3e-5)
    (tmp_path / "other.yaml").write_text(
        CLUSTER.replace("name: two", "name: other") + "inside_latency: {value: 1e-6, source: assumed}\n"
    )
    other = find_cluster(str(tmp_path / "other.yaml"))
    assert devices_of_clusters([two, other], [2, 2]).latencies == (1e-6, 3e-5)
    (tmp_path / "wrong.yaml").write_text(CLUSTER.replace("3e-5", "-1"))
    with pytest.raises(ConfigError, match="between_latency"):
        find_cluster(str(tmp_path / "wrong.yaml"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--bandwidth", "1GB", "--latency", "0.5"], [0.5, 0.5]),
        (["--bandwidth", "1GB,1GB", "--latency", "0,2e-5"], [None, 2e-5]),
        (["--bandwidth", "1GB"], [None, None]),
    ],
)
def test_latencies_are_options(command: Any, tmp_path: Path, given: list[str], wanted: list[float | None]) -> None:
    (tmp_path / "p.yaml").write_text(ROWS)
    usual = ["plan", "--profile", str(tmp_path / "p.yaml"), "--devices", "2x2", "--json"]
    found = json.loads(command(*usual, "--microbatches", "8", *given).stdout)
    assert [level.get("latency") for level in found["levels"]] == wanted


def test_measured_links_have_their_own_latencies(command: Any, tmp_path: Path) -> None:
    links = "links: [{bandwidth: 1e9, latency: 1e-6}, {bandwidth: 1e8, latency: 5e-5}]\n"
    (tmp_path / "p.yaml").write_text(ROWS + links)
    usual = ["plan", "--profile", str(tmp_path / "p.yaml"), "--devices", "2x2", "--microbatches", "8", "--json"]
    found = json.loads(command(*usual).stdout)
    assert [level["latency"] for level in found["levels"]] == [1e-6, 5e-5]
    found = json.loads(command(*usual, "--latency", "1e-3").stdout)
    assert [level["latency"] for level in found["levels"]] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("latency", "said"),
    [("1,2,3", "--latency has 3 numbers for 2 levels of devices"), ("-1", "0 or more"), ("1us", "takes seconds")],
)
def test_latencies_that_cannot_be(command: Any, tmp_path: Path, latency: str, said: str) -> None:
    (tmp_path / "p.yaml").write_text(ROWS)
    usual = ["plan", "--profile", str(tmp_path / "p.yaml"), "--devices", "2x2", "--bandwidth", "1GB"]
    run = command(*usual, f"--latency={latency}")
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())
