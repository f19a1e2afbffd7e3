"""Plans for servers whose devices share one link: searched for with a part of it each, rated with all of it shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.plan.cluster.schema import find_cluster
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.plan.shared_links import _around_whole_links, with_shared_links
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.schedule.ir.rank_numbers import RankOrder
from penstock.schedule.machine.shared_machine import SharedLinks
from penstock.simulate.simulate import simulate_schedule

SERVERS = Devices((DeviceLevel(2, 1e9), DeviceLevel(2, 10.0)), memory=6e5, shares_link=True)
"""Two of two devices, each of which has 10 bytes a second of a link of 20, and holds one layer."""


def profile(nbytes: float, parameters: float = 0.0) -> Profile:
    layers = [
        ProfiledLayer(name=f"l{n}", forward=1, backward=2, output=nbytes, parameters=parameters) for n in range(4)
    ]
    return Profile(format="penstock profile 1", layers=layers)


def plans(devices: Devices, known: Profile, methods: tuple[str, ...] = ("1f1b",)):
    return make_plan(PlanRequest(known, devices, cost="simulated", microbatches=8, methods=methods)).plans


HEAVY = profile(20.0, parameters=1e5)


@pytest.mark.slow
def test_a_message_has_the_whole_link_while_no_other_is_under_way() -> None:
    """Outputs of 20 bytes take 2 s by a device's part, and 1 s by all of it: as if every device had it to itself."""
    alone = replace(SERVERS, shares_link=False)
    whole = replace(alone, levels=(SERVERS.levels[0], DeviceLevel(2, 20.0)))
    (found,), (parted,), (fast,) = (plans(each, HEAVY) for each in (SERVERS, alone, whole))
    assert found.settings == parted.settings
    assert (found.settings["stages"], found.settings["width"]) == (4, 1)
    assert found.seconds_per_sample < parted.seconds_per_sample
    assert found.seconds_per_sample == pytest.approx(fast.seconds_per_sample)
    assert found.notes[-1].startswith("with the links of servers shared, one more batch takes")
    assert found.rating.stages[0].parts == pytest.approx(fast.rating.stages[0].parts)
    assert found.rating.stages[0].parts["links"] < parted.rating.stages[0].parts["links"]


def test_a_batch_with_three_versions_on_shared_links_is_that_of_a_long_run() -> None:
    """It repeats every three batches, and later than others; two batches of five took 34.1 s here."""
    times = ((4, 5, 0), (2, 1, 2), (3, 1, 0), (4, 3, 0))
    layers = [ProfiledLayer(name=f"l{n}", forward=f, backward=b, output=2, step=s) for n, (f, b, s) in enumerate(times)]
    known, (plan,) = Profile(format="penstock profile 1", layers=layers), plans(SERVERS, HEAVY)
    plan = replace(plan, planner="3bw", settings=plan.settings | {"method": "3bw", "microbatches": 2})
    (shared,) = with_shared_links([plan], known, SERVERS)
    settings = RunSettings("3bw", 4, 1, 2, 1, (False,) * 4, (1,) * 4)
    proof, costs = run_forecast(known, settings, SERVERS)
    costs = replace(costs, transfer=costs.transfer / 2, links=SharedLinks(2))
    short, long = (simulate_schedule(proof, costs, batches).bubble.makespan for batches in (30, 60))
    assert shared.seconds_per_sample == pytest.approx((long - short) / 30 / 2)


@pytest.mark.parametrize(
    ("order", "transfer", "collective"), [("tp-dp-pp", 2.0, 40 / 1e9), ("tp-pp-dp", 20 / 1e9, 4.0)]
)
def test_sums_or_messages_have_the_link(order: RankOrder, transfer: float, collective: float) -> None:
    """Two pipelines of two stages: outputs leave a server of replicas, gradients one of the ranks of a pipeline."""
    known = profile(20.0, parameters=20.0)
    changes = {"method": "2bw", "stages": 2, "width": 2, "microbatches": 4, "balance": [2, 2]}
    (plan,) = plans(SERVERS, HEAVY)
    plan = replace(plan, settings=plan.settings | changes | {"rank_order": order})
    (shared,) = with_shared_links([plan], known, SERVERS)
    settings = RunSettings("2bw", 2, 2, 4, 1, (False, False), (2, 2), rank_order=order)
    proof, costs = run_forecast(known, settings, SERVERS)
    assert (costs.transfer, costs.collective) == (transfer, collective)
    short, long = (simulate_schedule(proof, costs, n).bubble.makespan for n in (3, 5))
    assert shared.rating.seconds * 8 <= (long - short) / 2


def test_a_sum_has_the_whole_link_while_no_other_is_under_way() -> None:
    """40 bytes take 4 s by a device's part: stage 1 adds while stage 0 still computes, and then that one alone."""
    known = profile(20.0, parameters=20.0)
    changes = {"stages": 2, "width": 2, "microbatches": 4, "balance": [2, 2]}
    (plan,) = plans(SERVERS, HEAVY)
    (found,) = with_shared_links([replace(plan, settings=plan.settings | changes)], known, SERVERS)
    assert found.rating.seconds * 8 == pytest.approx((4 + 1) * (2 + 4) + 4.0 / 2)


def test_plans_within_a_server_remain_as_they_are() -> None:
    inside = replace(SERVERS, levels=(DeviceLevel(4, 10.0), DeviceLevel(1, 10.0)))
    found, before = plans(inside, profile(1.0)), plans(replace(inside, shares_link=False), profile(1.0))
    assert [(plan.settings, plan.rating) for plan in found] == [(plan.settings, plan.rating) for plan in before]


def test_long_plans_are_left_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.plan.shared_links._MOST_PASSES", 16)
    found = plans(SERVERS, HEAVY)
    assert found[0].notes[-1] == "not simulated with shared links: 32 forwards of a batch are more than 16"


def test_clusters_say_whose_devices_share_a_link() -> None:
    assert find_cluster("aws-p3").devices(16).shares_link
    assert not find_cluster("aws-p3").devices(8).shares_link
    assert not find_cluster("azure-nd-h100").devices(16).shares_link


def test_rings_have_whole_links_but_their_latency() -> None:
    """Two servers of four that share a link: a ring has four times the part of a device, and waits as long."""
    inner, outer = DeviceLevel(4, 1e9, 0.1), DeviceLevel(2, 10.0, 2.0)
    rows = [ProfiledLayer(name="b", forward=1, backward=2, output=1, parameters=800)]
    profile = Profile(format="penstock profile 1", layers=rows)
    for sharding in (None, "gradients"):
        settings = RunSettings("1f1b", 1, 8, 2, 1, (False,), (1,), sharding=sharding)
        shared, wide = Devices((inner, outer)), Devices((inner, DeviceLevel(2, 40.0, 2.0)))
        (proof, costs), (_, wanted) = (run_forecast(profile, settings, each) for each in (shared, wide))
        found = _around_whole_links(costs, 7 * 2.0, shared)
        assert found.collective == pytest.approx(wanted.collective)
        assert wanted.collective == pytest.approx(14 * (2.0 + 100 / 40))
        for action in proof.schedule.programs[0].period:
            assert found.duration(action) == pytest.approx(wanted.duration(action))
