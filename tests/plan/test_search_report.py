"""What is said of a search beside its plans: what memory excludes, what nearly fits, and what limits plans."""

import re
from dataclasses import replace
from random import Random

import pytest

from penstock.byte_sizes import size_of
from penstock.plan.plan_export import plan_file, planning_json
from penstock.plan.planned_timeline import what_would_help
from penstock.plan.planners.two_bw import Sized
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices

TWO = Devices((DeviceLevel(2, 1e4),))


def blocks(seed):
    """Four blocks whose sizes differ."""
    random = Random(seed)
    rows = [
        f"- {{name: b{n}, forward: 1, backward: 2, output: 10, stored: {random.randint(30, 90)}, "
        f"parameters: {random.randint(10, 60)}, optimizer: {random.randint(0, 90)}}}"
        for n in range(4)
    ]
    return layer_graph(parse_profile("\n".join(["format: penstock profile 1", "layers:", *rows]), "p"))


def planned(graph, memory, methods, **more):
    return simulated_plans({1: Sized(graph, 1, 8)}, replace(TWO, memory=memory, **more), methods=methods)


def memory_of(said):
    return size_of("--memory", re.search(r"fits with (.+?) for each device", said)[1])


@pytest.mark.parametrize("methods", [("1f1b", "gpipe", "eager", "2bw"), ("gpipe",), ("2bw",)])
@pytest.mark.parametrize("seed", range(4))
def test_with_the_memory_that_is_named_a_plan_fits_and_with_less_none(seed, methods):
    graph = blocks(seed)
    found = planned(graph, 20.0, methods)
    assert not found.plans
    enough = memory_of(found.why)
    assert enough > 20.0
    assert planned(graph, enough, methods).plans
    fewer = planned(graph, enough - 2.0, methods)
    assert not fewer.plans
    assert memory_of(fewer.why) == enough


def test_nothing_is_said_where_a_plan_fits():
    found = planned(blocks(0), 1e9, ("gpipe", "1f1b"))
    assert found.plans
    assert not found.why


def test_states_of_the_optimizer_would_go_to_the_host():
    graph = blocks(0)
    layers = tuple(replace(layer, optimizer=1e6) for layer in graph.layers)
    graph = replace(graph, layers=layers)
    said = planned(graph, 20.0, ("1f1b",)).why
    assert "are optimizer, so moving them to the host (--host-bandwidth) may help" in said
    with_host = planned(graph, 20.0, ("1f1b",), host=1e9).why
    assert "so more devices (--devices) may help" in with_host


def test_a_host_without_room_is_no_help():
    """States that have no room there either stay on the devices, or no cuts are known at all."""
    graph = blocks(0)
    without = planned(graph, 20.0, ("1f1b",)).why
    assert planned(graph, 20.0, ("1f1b",), host=1e9, host_memory=1.0).why.split(";")[0] == without.split(";")[0]


def test_smaller_microbatches_may_help_where_activations_take_the_most():
    graph = blocks(0)
    layers = tuple(replace(layer, stored=1e6) for layer in graph.layers)
    sizes = {2: Sized(replace(graph, layers=layers), 2, 8)}
    devices = replace(TWO, memory=20.0)
    said = simulated_plans(sizes, devices, methods=["gpipe"]).why
    assert "so a profile of smaller microbatches (--microbatch-sizes) may help" in said


ROOM = 660.0  # bytes, in which a device may hold one block of 2bw, and not both, even if its state is divided


def tower(count=2, output=12.0, parameters=100.0):
    layers = [
        ProfiledLayer(
            name=f"l{n}", forward=1, backward=2, output=output, parameters=parameters, stored=4.0
        )
        for n in range(count)
    ]  # fmt: skip
    return Profile(format="penstock profile 1", name="tower", layers=layers)


def planning_of(devices, method="2bw", profile=None, m=4):
    return make_plan(PlanRequest(profile or tower(), devices, cost="simulated", microbatches=m, methods=(method,)))


def assert_parts_add_up(plan):
    for rating in plan.rating.stages:
        assert sum(rating.parts.values()) == pytest.approx(plan.rating.seconds / plan.chunks)
        assert min(rating.parts.values()) >= 0


@pytest.mark.parametrize(("bandwidth", "part"), [(1e6, "compute"), (2.0, "links")])
def test_a_slow_link_limits_and_a_fast_one_does_not(bandwidth, part):
    """Two blocks of 3 s on a device each; a message of 12 bytes takes 6 s by the slow link."""
    (plan,) = planning_of(Devices((DeviceLevel(2, bandwidth),), ROOM)).plans
    assert plan.settings["stages"] == 2
    assert {rating.limit for rating in plan.rating.stages} == {part}
    waits = plan.rating.stages[0].parts["links"]
    assert waits == pytest.approx(0.0, abs=1e-4) if part == "compute" else waits > 3.0 - 1e-9
    assert_parts_add_up(plan)


def test_fill_and_drain_are_no_links():
    """A synchronous batch of two microbatches on two ranks: (2 + 1) x 3 s, of which a rank works 6."""
    (plan,) = planning_of(Devices((DeviceLevel(2, 1e9),), ROOM - 100), "gpipe", m=2).plans
    assert plan.rating.stages[0].parts == pytest.approx(
        {"compute": 3.0, "links": 0.0, "updates": 0.0, "bubble": 1.5}, abs=1e-6
    )
    assert_parts_add_up(plan)


def test_sums_limit_where_replicas_wait_for_them():
    """Each of four replicas runs one of four microbatches, 6 s with both blocks; then the sum of 60 bytes."""
    (plan,) = planning_of(Devices((DeviceLevel(4, 12.0),)), "1f1b", tower(output=1e9, parameters=30.0)).plans
    assert plan.settings["width"] == 4
    assert plan.rating.stages[0].parts["gradient sums"] == pytest.approx(2 * 3 / 4 * 60 / 12 / 4)
    assert plan.rating.stages[0].limit == "gradient sums"
    assert_parts_add_up(plan)


def test_ranks_that_share_a_core_limit_each_other():
    devices = Devices((DeviceLevel(2, 1e9),), ROOM, cores=1.0)
    (plan,) = planning_of(devices).plans
    assert plan.settings["stages"] == 2
    assert plan.rating.stages[0].parts["shared cores"] == pytest.approx(3.0, rel=0.01)
    assert_parts_add_up(plan)


def test_stages_of_a_rank_have_their_share_of_its_waits():
    (plan,) = planning_of(Devices((DeviceLevel(2, 20.0),)), "interleaved:chunks=2", tower(4)).plans
    assert plan.chunks == 2
    of_rank = [plan.rating.stages[0], plan.rating.stages[2]]
    assert sum(sum(rating.parts.values()) for rating in of_rank) == pytest.approx(plan.rating.seconds)
    assert of_rank[0].parts["links"] > 0


@pytest.mark.parametrize(("room", "excludes"), [(ROOM, True), (1e6, False)])
def test_memory_limits_where_it_excludes_a_faster_plan(room, excludes):
    """On a slow link one device alone is faster than two, if it has room for both blocks."""
    planning = planning_of(Devices((DeviceLevel(2, 0.5),), room))
    (plan,) = planning.plans
    said = planning_json(planning)["plans"][0]["limit"]
    if not excludes:
        assert planning.excluded is None
        assert "memory_excludes" not in said
        return
    assert planning.excluded is not None
    assert planning.excluded.what == "2bw, depth 1, width 1"
    assert planning.excluded.seconds == pytest.approx(6.0)
    assert planning.excluded.gain == pytest.approx(plan.seconds_per_sample / 6.0)
    assert said["memory_excludes"] == vars(planning.excluded)


def test_memory_limits_a_plan_that_recomputes():
    """The only candidate itself is faster with room for its activations."""
    profile = tower(1)
    loose = planning_of(Devices((DeviceLevel(1, 1.0),), 1e6), "1f1b", profile)
    heavy = profile.model_copy(update={"layers": [profile.layers[0].model_copy(update={"stored": 40.0, "data": 1.0})]})
    limit = planning_of(Devices((DeviceLevel(1, 1.0),)), "gpipe", heavy).plans[0].rating.stages[0].memory - 1
    tight = planning_of(Devices((DeviceLevel(1, 1.0),), limit), "gpipe", heavy)
    assert tight.plans[0].settings["recompute"] == "block"
    assert tight.excluded is not None
    assert tight.excluded.seconds == pytest.approx(3.0)
    assert loose.excluded is None


def test_kinds_of_memory_add_up_in_json_and_in_the_plan():
    planning = planning_of(Devices((DeviceLevel(2, 1e6),), ROOM))
    for stage in planning_json(planning)["plans"][0]["stages"]:
        assert sum(stage["memory_by_kind"].values()) == stage["memory"]
        assert {"weights and gradients", "optimizer", "activations"} <= set(stage["memory_by_kind"])
    held = planning.plans[0].rating.stages[0].kinds
    assert f"at that moment: weights and gradients {held['weights and gradients']:.0f} B, " in plan_file(planning)


def test_what_helps_most_comes_first():
    """On a slow link that is more bandwidth, or more memory, with which there are no messages."""
    request = planning_of(Devices((DeviceLevel(2, 0.5),), ROOM)).request
    changes = what_would_help(make_plan(request))
    gains = [each.gain for each in changes]
    assert gains == sorted(gains, reverse=True)
    assert changes[0].change == "twice the memory"
    assert changes[0].gain > 2


@pytest.mark.parametrize(("memory", "asked"), [(ROOM, True), (None, False)])
def test_the_bandwidth_to_the_host_may_help_plans_that_may_offload(memory, asked):
    devices = Devices((DeviceLevel(2, 100.0),), memory, host=1.0)
    request = planning_of(devices).request
    changes = {each.change for each in what_would_help(make_plan(request))}
    assert ("twice the bandwidth to the host" in changes) == asked
    without = what_would_help(make_plan(replace(request, devices=replace(devices, host=None))))
    assert "twice the bandwidth to the host" not in {each.change for each in without}
