"""Sums over servers, around a ring and level by level, against formulas written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.plan.cluster.rank_links import RankLinks, around_a_ring, level_by_level
from penstock.plan.cluster.schema import devices_of_clusters, find_cluster
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.plan.stages.device_hierarchy import Collectives, DeviceLevel, Devices
from penstock.schedule.ir.rank_numbers import RankNumbers
from penstock.schedule.ir.schedule import Op
from support.clusters import TWO_SERVERS

FOUR_OF_TWO = (DeviceLevel(2, 100.0, 0.1), DeviceLevel(4, 10.0, 3.0))


def on_servers(collectives: Collectives) -> Devices:
    return Devices(FOUR_OF_TWO, collectives=collectives)


def test_the_formulas() -> None:
    """Eight replicas on four servers of two, 800 bytes."""
    assert around_a_ring(8, 3.0, 10.0).of(800.0) == pytest.approx(7 * (3.0 + 100 / 10))
    found = level_by_level(on_servers("ring"), np.arange(8))
    assert found is not None
    assert found.of(800.0) == pytest.approx((0.1 + 400 / 100) + 3 * (3.0 + 100 / 10))
    three = Devices((*FOUR_OF_TWO, DeviceLevel(2, 1.0, 50.0)))
    found = level_by_level(three, np.arange(16))
    assert found is not None
    assert found.of(800.0) == pytest.approx((0.1 + 4.0) + 3 * (3.0 + 10.0) + (50.0 + 50 / 1))


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        (range(2), 0.1 + 4.0),  # on one server
        (range(0, 8, 2), 3 * (3.0 + 200 / 10)),  # one on each of four
        (range(4), (0.1 + 4.0) + (3.0 + 200 / 10)),  # two on each of two
        (range(3), None),  # two and one
        ([5], 0.0),
    ],
)
def test_where_replicas_lie(places: range | list[int], wanted: float | None) -> None:
    found = level_by_level(on_servers("ring"), np.array(places))
    assert (None if found is None else found.of(800.0)) == (None if wanted is None else pytest.approx(wanted))


def test_level_by_level_never_takes_longer() -> None:
    random, shorter = Random(3), 0
    for _ in range(300):
        levels = tuple(
            DeviceLevel(random.randint(1, 4), 10.0 ** random.randint(0, 3), random.choice([0.0, 1.0, 9.0]))
            for _ in range(3)
        )
        numbers = RankNumbers(random.randint(1, math.prod(level.units for level in levels)), 1)
        ring, inner = (
            RankLinks(Devices(levels), numbers),
            RankLinks(Devices(levels, collectives="hierarchical"), numbers),
        )
        for nbytes in (0.0, 5.0, 1e6):
            assert inner.scatter(nbytes) <= ring.scatter(nbytes) * (1 + 1e-12)
            shorter += inner.scatter(nbytes) < 0.9 * ring.scatter(nbytes)
    assert shorter > 50


def test_runs_sum_and_gather_as_the_cluster_does() -> None:
    rows = [ProfiledLayer(name="b", forward=1, backward=2, output=1, parameters=800)]
    profile = Profile(format="penstock profile 1", layers=rows)
    ways: dict[Collectives, float] = {"ring": 7 * 13.0, "hierarchical": 4.1 + 3 * 13.0}
    for way, gather in ways.items():
        settings = RunSettings("1f1b", 1, 8, 2, 1, (False,), (1,))
        _, costs = run_forecast(profile, settings, on_servers(way))
        assert costs.collective == pytest.approx(2 * gather)
        divided = RunSettings("1f1b", 1, 8, 2, 1, (False,), (1,), sharding="gradients")
        proof, costs = run_forecast(profile, divided, on_servers(way))
        ops = {a.op: costs.duration(a) for a in proof.schedule.programs[0].period if a.op in (Op.GATHER, Op.REDUCE)}
        assert ops == {Op.GATHER: pytest.approx(gather), Op.REDUCE: pytest.approx(gather)}


def test_cluster_files_say_how_sums_go(tmp_path: Path) -> None:
    for name, way in (("a", "hierarchical"), ("b", "ring"), ("c", "hierarchical")):
        (tmp_path / name).with_suffix(".yaml").write_text(
            TWO_SERVERS.replace("name: two", f"name: {name}") + f"collectives: {way}\n"
        )
    a, b, c = (find_cluster(str(tmp_path / f"{name}.yaml")) for name in "abc")
    assert a.devices(4).collectives == "hierarchical"
    assert devices_of_clusters([a, c], [2, 2]).collectives == "hierarchical"
    assert devices_of_clusters([a, b], [2, 2]).collectives == "ring"
    assert find_cluster("h100").devices(16).collectives == "ring"
    (tmp_path / "d.yaml").write_text(TWO_SERVERS + "collectives: tree\n")
    with pytest.raises(ConfigError, match="collectives"):
        find_cluster(str(tmp_path / "d.yaml"))
    with pytest.raises(ConfigError, match="collectives must be 'ring' or 'hierarchical', got 'tree'"):
        Devices(FOUR_OF_TWO, collectives="tree")  # type: ignore[arg-type]
