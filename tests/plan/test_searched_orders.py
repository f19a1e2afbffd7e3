"""Plans whose order is searched for their times: as fast as its schedule, within memory, not for too many passes."""

from __future__ import annotations

import pytest
import yaml

from penstock.errors import ConfigError
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.candidate_times import searched_for
from penstock.plan.candidates.planned_methods import PLANNED
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.plan_export import plan_file
from penstock.plan.planned_timeline import planned_timeline
from penstock.plan.planners.two_bw import Sized
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Profile
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import Plan
from penstock.schedule.add_options import extend
from penstock.schedule.build import ScheduleRequest
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule

BOTH = ("zb-h1", "zb-h2", "zb-auto")


def profile_of(first: float = 3, second: float = 1, halves: bool = True) -> Profile:
    """Eight blocks whose forwards take 2; their gradients take long to add up, so the best plans have one pipeline."""
    parts = f"backward_input: {first}, backward_weight: {second}, late: 100, " * halves
    row = f"forward: 2, backward: {first + second}, {parts}output: 1, stored: 1000, parameters: 1000000}}\n"
    return parse_profile(
        "format: penstock profile 1\nlayers:\n" + "".join(f"- {{name: b{n}, {row}" for n in range(8)), "p"
    )


def planned(
    profile: Profile, microbatches: int = 8, memory: float | None = None, methods: tuple[str, ...] = BOTH
) -> dict[str, Plan]:
    devices = Devices((DeviceLevel(4, 1e5),), memory, latency=0.25)
    request = PlanRequest(profile, devices, cost="simulated", microbatches=microbatches, methods=methods)
    return {plan.planner: plan for plan in make_plan(request).plans}


def test_it_takes_what_its_own_schedule_takes() -> None:
    """By the simulator, given the options that the plan says; for these times it is faster than the fixed orders."""
    plans = planned(profile_of())
    plan = plans["zb-auto"]
    assert plan.seconds_per_sample < plans["zb-h2"].seconds_per_sample
    settings = plan.settings
    assert (settings["method"], settings["stages"], settings["width"]) == ("zb-auto", 4, 1)
    options = settings["options"]
    assert (options["limit"], options["input"] / options["weight"]) == (8, pytest.approx(3, rel=1e-4))
    assert options["hop"] / options["forward"] == pytest.approx((0.25 + 1e-5) / 4, rel=1e-3)
    request = ScheduleRequest("zb-auto", 4, 8, options=options, sharding="none")
    proof = extend(request.schedule, decides=True)
    costs = Costs((StageCost(4.0, 6.0, 2.0, 0.0),) * 4, latency=0.25, transfer=1e-5)
    short, long = (simulate_schedule(proof, costs, batches).bubble.makespan for batches in (3, 5))
    assert plan.seconds_per_sample == pytest.approx((long - short) / 2 / 8)


def test_a_limit_of_memory_leaves_it_fewer_microbatches() -> None:
    whole = planned(profile_of())["zb-auto"]
    most = max(stage.memory for stage in whole.rating.stages)
    less = planned(profile_of(), memory=most - 1, methods=("zb-h1", "zb-auto"))["zb-auto"]
    assert less.settings["options"] == {**whole.settings["options"], "limit": less.settings["options"]["limit"]}
    assert less.settings["options"]["limit"] == 7
    assert max(stage.memory for stage in less.rating.stages) < most
    assert less.seconds_per_sample > whole.seconds_per_sample


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"microbatches": 256}, "1,024 passes are too many to search an order for them here (512)"),
        ({"methods": ("1f1b", "zb-auto"), "profile": profile_of(halves=False)}, "does not tell the halves"),
        ({"methods": ("2bw", "zb-auto")}, "another plan that flushes, and none has several ranks"),
    ],
)
def test_where_no_order_is_searched_a_plan_says_why(changes: dict[str, object], said: str) -> None:
    arguments = {"profile": profile_of(), "microbatches": 8, "methods": BOTH, **changes}
    devices = Devices((DeviceLevel(4, 1e5),), latency=0.25)
    found = make_plan(PlanRequest(devices=devices, cost="simulated", **arguments))
    assert "zb-auto" not in {plan.planner for plan in found.plans}
    assert any(said in skipped.bound for skipped in found.skipped if skipped.what.startswith("zb-auto"))


def test_the_file_and_the_timeline_of_such_a_plan_are_those_of_its_options() -> None:
    devices = Devices((DeviceLevel(4, 1e5),), latency=0.25)
    found = make_plan(PlanRequest(profile_of(), devices, cost="simulated", microbatches=8, methods=BOTH))
    (plan, *_) = found.plans
    assert plan.planner == "zb-auto"
    assert yaml.safe_load(plan_file(found))["options"] == plan.settings["options"]
    ends = [each.end for each in planned_timeline(found).work(0) if each.what == "STEP"]
    assert ends[-1] - ends[-2] == pytest.approx(8 * plan.seconds_per_sample)


def test_by_itself_it_has_no_plan_to_begin_with() -> None:
    with pytest.raises(ConfigError, match="zb-auto takes depth, width and microbatch size from the best plan of"):
        planned(profile_of(), methods=("zb-auto",))


def test_limits_go_down_by_a_quarter_of_the_ranks_to_as_many() -> None:
    """Of five ranks six are followed by five; what is skipped says which limit it had."""
    profile = profile_of()
    profile = profile.model_copy(update={"layers": [*profile.layers, *profile.layers[:2]]})
    for n, layer in enumerate(profile.layers):
        profile.layers[n] = layer.model_copy(update={"name": f"b{n}"})
    (base, chain, devices), found = searching(profile, 5), dict[int, bool]()
    for of in searched_for(base, chain, devices, KnownSchedules()):
        found[dict(of.method.searched)["limit"]] = f"zb-auto, limit {dict(of.method.searched)['limit']}," in str(of)
    assert found == {10: True, 8: True, 6: True, 5: True}


def searching(profile: Profile, depth: int) -> tuple[Candidate, BlockChain, Devices]:
    graph = layer_graph(profile, None)
    of = Candidate(Sized(graph, 1, 10), PLANNED["zb-h1"], depth, 1)
    return of, BlockChain(graph, 2.0), Devices((DeviceLevel(depth, 1e5),), 1e9)
