"""What is said where no plan fits: how much memory would do, and what may help."""

import re
from dataclasses import replace
from random import Random

import pytest

from penstock.byte_sizes import size_of
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.simulated.search_report import NEAREST
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


def said_of(skipped):
    (found,) = [each.bound for each in skipped if each.what == NEAREST]
    return found


def memory_of(said):
    return size_of("--memory", re.search(r"fits with (.+?) for each device", said)[1])


@pytest.mark.parametrize("methods", [("1f1b", "gpipe", "eager", "2bw"), ("gpipe",), ("2bw",)])
@pytest.mark.parametrize("seed", range(4))
def test_with_the_memory_that_is_named_a_plan_fits_and_with_less_none(seed, methods):
    graph = blocks(seed)
    plans, skipped = planned(graph, 20.0, methods)
    assert plans == []
    enough = memory_of(said_of(skipped))
    assert enough > 20.0
    assert planned(graph, enough, methods)[0]
    fewer, still = planned(graph, enough - 2.0, methods)
    assert fewer == []
    assert memory_of(said_of(still)) == enough


def test_nothing_is_said_where_a_plan_fits():
    plans, skipped = planned(blocks(0), 1e9, ("gpipe", "1f1b"))
    assert plans
    assert NEAREST not in {each.what for each in skipped}


def test_states_of_the_optimizer_would_go_to_the_host():
    graph = blocks(0)
    layers = tuple(replace(layer, optimizer=1e6) for layer in graph.layers)
    graph = replace(graph, layers=layers)
    said = said_of(planned(graph, 20.0, ("1f1b",))[1])
    assert "are optimizer, so moving them to the host (--host-bandwidth) may help" in said
    with_host = said_of(planned(graph, 20.0, ("1f1b",), host=1e9)[1])
    assert "so more devices (--devices) may help" in with_host


def test_a_host_without_room_is_no_help():
    """States that have no room there either stay on the devices, or no cuts are known at all."""
    graph = blocks(0)
    without = said_of(planned(graph, 20.0, ("1f1b",))[1])
    assert said_of(planned(graph, 20.0, ("1f1b",), host=1e9, host_memory=1.0)[1]).split(";")[0] == without.split(";")[0]


def test_smaller_microbatches_may_help_where_activations_take_the_most():
    graph = blocks(0)
    layers = tuple(replace(layer, stored=1e6) for layer in graph.layers)
    sizes = {2: Sized(replace(graph, layers=layers), 2, 8)}
    devices = replace(TWO, memory=20.0)
    said = said_of(simulated_plans(sizes, devices, methods=["gpipe"])[1])
    assert "so a profile of smaller microbatches (--microbatch-sizes) may help" in said
