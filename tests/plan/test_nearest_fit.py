"""What is said where no plan fits: how much memory would do, and what would help."""

import re
from dataclasses import replace
from random import Random

import pytest

from penstock.byte_sizes import size_of
from penstock.plan.planners.two_bw import Sized
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.simulated.nearest_fit import NEAREST
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
    assert "are optimizer, so moving them to the host (--host-bandwidth) would help most" in said
    with_host = said_of(planned(graph, 20.0, ("1f1b",), host=1e9)[1])
    assert "more devices (--devices) would help most" in with_host or "optimizer" not in with_host
