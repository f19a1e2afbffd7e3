"""Devices that differ, on the command line: how they are given, and what plans and runs say of them."""

import json
import re

import pytest
import yaml

from penstock.cli.plans.plan_devices import clusters_of, devices_of
from penstock.cli.train import say_places
from penstock.errors import ConfigError
from penstock.plan.objectives import choose, fewer_devices
from penstock.plan.planned_timeline import planned_timeline, what_would_help
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile
from penstock.plan.stages.device_hierarchy import DeviceKind, DeviceLevel, places_in_words
from penstock.train.config.load import load_config

BLOCKS = "".join(
    f"- {{name: b{n}, forward: 1, backward: 2, output: 1, stored: 100, parameters: 8}}\n" for n in range(8)
)
PROFILE = parse_profile(f"format: penstock profile 1\nlayers:\n{BLOCKS}", "p")


def given(devices, bandwidth="1GB", memory=None, speed=None, cluster=None):
    return devices_of(clusters_of(cluster), devices, bandwidth, memory, PROFILE, speed=speed)


def test_kinds_of_devices_are_given_by_their_numbers():
    found = given("2+4", memory="16GiB,8GiB", speed="1,0.5")
    assert found.levels == (DeviceLevel(6, 1e9),)
    assert found.memory == 16 * 2**30
    assert found.kinds == (DeviceKind("A", 2, 1.0, 16 * 2**30), DeviceKind("B", 4, 0.5, 8 * 2**30))
    assert str(found) == "2 A + 4 B"
    found = given("8x2+8x1", bandwidth="10GB,1GB", speed="1,2")
    assert found.levels == (DeviceLevel(8, 1e10), DeviceLevel(3, 1e9))
    assert [(kind.count, kind.memory) for kind in found.kinds] == [(16, None), (8, None)]


def test_kinds_that_are_alike_are_none():
    assert given("2+4", memory="16GiB,16GiB") == given("6", memory="16GiB")
    assert given("2+4", speed="1,1") == given("2+4", speed="1") == given("6")
    assert given("4", speed="0.5").kinds == (DeviceKind("A", 4, 0.5),)


def test_clusters_together_are_kinds_of_devices():
    """An A100 does 312 operations while an H100 does 989; nodes of both are joined by the slower links."""
    found = given("8+16", bandwidth=None, cluster="h100,a100")
    assert found.levels == (DeviceLevel(8, 3e11), DeviceLevel(3, 2.5e10))
    assert [(kind.name, kind.count, kind.memory) for kind in found.kinds] == [("h100", 8, 8e10), ("a100", 16, 8e10)]
    assert found.kinds[1].speed == pytest.approx(312 / 989.4)
    found = given("8+4", bandwidth=None, cluster="h100,v100", speed="1,0.25", memory="80GB,32GB")
    assert found.levels == (DeviceLevel(12, 6.25e9),)  # nodes of 8 and of 4
    assert found.kinds[1] == DeviceKind("v100", 4, 0.25, 3.2e10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": "2+4", "speed": "1,2,3"}, "--speed has 3 values for 2 kinds of devices"),
        ({"devices": "4", "memory": "1GB,2GB"}, "--memory has 2 values for 1 kind of devices"),
        ({"devices": "4", "speed": "fast"}, "--speed takes numbers above 0"),
        ({"devices": "2+4", "speed": "1,-1"}, "--speed takes numbers above 0"),
        ({"devices": "8x2+4x2", "bandwidth": "1GB"}, "levels that are alike but for the last one"),
        ({"devices": "2+"}, "as in 8x4 or 2\\+2"),
        ({"devices": "0+2", "speed": "1,2"}, "devices of kind A must be"),
        ({"devices": "8", "cluster": "h100,a100", "bandwidth": None}, "names 2 and --devices has numbers for 1"),
        ({"devices": "8+8", "cluster": "h100,h100", "bandwidth": None, "speed": "1,2"}, "with a name each"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_kinds_of_devices_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        given(**options)


def planned():
    devices = given("1+1", memory="2kB,1kB", speed="1,0.5")
    return make_plan(PlanRequest(PROFILE, devices, cost="simulated", microbatches=8, methods=("1f1b",)))


def test_what_does_not_know_that_devices_differ_says_so():
    found = planned()
    with pytest.raises(ConfigError, match="cost 'simulated' of planner 'default' knows, not '2bw-paper'"):
        make_plan(PlanRequest(PROFILE, found.request.devices))
    with pytest.raises(ConfigError, match="objective devices plans for fewer devices"):
        choose(found.request, "devices")
    with pytest.raises(ConfigError, match="which 1 of 2 devices that differ is not known"):
        fewer_devices(found.request.devices, 1)
    assert found.ratings(found.plans[0]) == {}


def test_a_plan_for_unequal_devices_is_drawn_with_their_times():
    """Three batches take as long as the search says, but for fill and drain of the last one."""
    found = planned()
    best, played = found.plans[0], planned_timeline(found)
    batch = best.rating.seconds * 8
    assert played.makespan == pytest.approx(3 * batch, rel=0.05)
    changes = {each.change: each.gain for each in what_would_help(found)}
    assert changes["devices twice as fast"] == pytest.approx(2, rel=0.01)
    assert changes["twice as many devices"] > 1.5


def test_a_plan_for_unequal_devices_says_where_ranks_belong(command, tmp_path):
    (tmp_path / "p.yaml").write_text(f"format: penstock profile 1\nlayers:\n{BLOCKS}")
    devices = ["--devices", "1+2", "--speed", "2,1", "--memory", "3kB,2kB", "--bandwidth", "1GB"]
    out = tmp_path / "plan.yaml"
    usual = ["plan", "--profile", tmp_path / "p.yaml", *devices, "--microbatches", "12", "--cost", "simulated"]
    run = command(*usual, "--methods", "2bw", "--out", out, "--json")
    found = json.loads(run.stdout)
    best = found["plans"][0]
    assert [kind["speed"] for kind in found["kinds"]] == [2.0, 1.0]
    assert [(*each["on"], each["speed"], each["memory_limit"]) for each in best["stages"]] == [
        ("B", 1.0, 2000.0), ("B", 1.0, 2000.0), ("A", 2.0, 3000.0)
    ]  # fmt: skip
    assert best["settings"]["balance"] == [2, 2, 4]
    assert yaml.safe_load(out.read_text())["placement"] == ["B", "B", "A"]
    assert "ranks 0 to 1 on B, rank 2 on A; start processes on hosts in this order" in out.read_text()
    run = command(*usual, "--methods", "2bw")
    text = re.sub(r"\s+", " ", run.stdout)
    assert "model on 1 A + 2 B devices" in text
    assert "of 2.93 KiB" in text
    assert "A: 1 with 2 times the speed of the profile and 2.93 KiB." in text
    assert "ranks 0 to 1 on B, rank 2 on A" in text


@pytest.mark.parametrize(
    ("placement", "depth", "said"),
    [
        ("AB", 2, "differ: rank 0 on A, rank 1 on B; start"),
        ("AABBB", 5, "differ: ranks 0 to 1 on A, ranks 2 to 4 on B; start"),
        ("ABBABB", 3, "differ: of every 3 ranks: rank 0 on A, ranks 1 to 2 on B; start"),
        ("ABAB", 1, "rank 0 on A, rank 1 on B, rank 2 on A, rank 3 on B; start"),
        ("AAA", 1, "differ: ranks 0 to 2 on A; start"),
    ],
)
def test_places_of_ranks_are_said_in_few_words(placement, depth, said):
    assert said in places_in_words(placement, depth)


def test_a_run_says_where_its_ranks_belong(capsys, monkeypatch, tmp_path):
    (tmp_path / "plan.yaml").write_text("method: 1f1b\nstages: 2\nplacement: [fast, slow]\n")
    say_places(load_config(tmp_path / "plan.yaml", []))
    assert "rank 0 on fast, rank 1 on slow; start processes" in re.sub(r"\s+", " ", capsys.readouterr().err)
    with pytest.raises(ConfigError, match="devices of 2 ranks, but this run has 3"):
        say_places(load_config(tmp_path / "plan.yaml", ["stages=3"]))
    for rank, lines in (("0", True), ("1", False)):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value)
        say_places(load_config(tmp_path / "plan.yaml", []))
        assert bool(capsys.readouterr().err) == lines
    say_places(load_config(None, []))
    assert capsys.readouterr().err == ""
