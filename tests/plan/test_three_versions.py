"""Plans by 3bw and 3bw-ahead: where a batch has too few microbatches for two versions of the weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import PLANNED, least_microbatches
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.planners.two_bw import Sized
from penstock.plan.planning import Planning, PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Profile
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.planned import Plan
from penstock.schedule.add_options import extend
from penstock.schedule.build import ScheduleRequest
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule


def profile() -> Profile:
    """Six blocks, of which two do not fit on a device; their gradients take long to add up."""
    row = "forward: 1, backward: 2, output: 1, stored: 1000, parameters: 1000000}\n"
    return parse_profile(
        "format: penstock profile 1\nlayers:\n" + "".join(f"- {{name: b{n}, {row}" for n in range(6)), "p"
    )


def planned(
    microbatches: int, methods: tuple[str, ...] | None, memory: float | None = None, bandwidth: float = 1e6
) -> Planning:
    devices = Devices((DeviceLevel(6, bandwidth),), memory)
    return make_plan(PlanRequest(profile(), devices, cost="simulated", microbatches=microbatches, methods=methods))


def by_method(found: Planning) -> dict[str, Plan]:
    return {plan.planner: plan for plan in found.plans}


def said(found: Planning) -> dict[str, str]:
    return {each.what: each.bound for each in found.skipped}


@pytest.mark.parametrize(("microbatches", "wins"), [(6, "2bw"), (4, "3bw"), (3, "3bw")])
def test_it_is_planned_where_two_versions_ask_for_more_microbatches(microbatches: int, wins: str) -> None:
    """With so few, 1f1b leaves ranks idle for half of the time, and 3bw for none of it."""
    found = planned(microbatches, ("1f1b", "2bw", "3bw"), memory=10e6)
    best = found.plans[0]
    assert (best.planner, best.settings["stages"]) == (wins, 6)
    assert best.seconds_per_sample < 0.7 * by_method(found)["1f1b"].seconds_per_sample
    proof = extend(ScheduleRequest(wins, 6, microbatches, sharding="none").schedule, decides=True)
    costs = Costs((StageCost(1.0, 2.0, 0.0),) * 6, latency=0.0, transfer=1e-6)
    short, long = (simulate_schedule(proof, costs, batches).bubble.makespan for batches in (8, 16))
    assert best.seconds_per_sample == pytest.approx((long - short) / 8 / microbatches, rel=1e-3)


@pytest.mark.parametrize("memory", [None, 10e6])
def test_it_is_tried_only_if_it_is_asked_for(memory: float | None) -> None:
    """A delay of two costs far more loss than one of one, which times do not show: the list says how to have it."""
    found = planned(3, None, memory)
    assert not {"3bw", "3bw-ahead"} & by_method(found).keys()
    for name in ("3bw", "3bw-ahead"):
        assert "two updates late" in said(found)[name]
        assert "--methods" in said(found)[name]
    assert not any(what.startswith("3bw, ") for what in said(found))


def test_what_corrects_it_takes_as_long() -> None:
    found = planned(3, ("3bw", "3bw-ahead"), memory=10e6)
    assert [plan.planner for plan in found.plans] == ["3bw"]
    assert "takes as long as 3bw" in said(found)["3bw-ahead"]
    alone = by_method(planned(3, ("2bw", "3bw-ahead"), memory=10e6))["3bw-ahead"]
    assert alone.seconds_per_sample == by_method(found)["3bw"].seconds_per_sample


def test_it_is_tried_with_as_many_microbatches_as_2bw_asks_for() -> None:
    """Sums of gradients are slow here: 3bw hides them behind a batch more, with the same ranks and microbatches."""
    found = by_method(planned(4, ("2bw", "3bw"), bandwidth=3e5))
    keys = ("stages", "width", "microbatches", "balance")
    late, later = found["2bw"], found["3bw"]
    assert [later.settings[key] for key in keys] == [late.settings[key] for key in keys] == [3, 2, 2, [2, 2, 2]]
    assert later.settings["microbatches"] >= least_microbatches(PLANNED["2bw"], 3)
    assert later.seconds_per_sample < 0.7 * late.seconds_per_sample


def test_what_is_no_faster_than_one_update_late_is_left_out() -> None:
    """With the best time so far, as of all methods; that of what is later does not count for what is less so."""
    found = planned(6, ("2bw", "3bw"), memory=10e6)
    assert [plan.planner for plan in found.plans] == ["2bw"]
    assert "the best plan so far" in said(found)["3bw, depth 6, width 1"]
    assert "needs at least 3 microbatches" in said(planned(2, ("3bw",)))["3bw, depth 6, width 1"]
    layered = planned(4, ("3bw", "2bw-layered:chunks=4"), memory=30e6, bandwidth=1e8)
    assert [plan.planner for plan in layered.plans] == ["3bw", "2bw-layered:chunks=4"]


def test_half_as_many_microbatches_as_stages_are_the_fewest() -> None:
    assert [least_microbatches(PLANNED["3bw"], depth) for depth in (1, 2, 3, 4, 5, 8)] == [1, 1, 1, 2, 2, 4]


@pytest.mark.parametrize("depth", range(2, 9))
def test_its_bounds_are_numbers_with_as_few_microbatches_as_can_be(depth: int) -> None:
    """Whole rounds of what is in flight, which two batches may not have: none of them, times infinity, is no number."""
    text = "format: penstock profile 1\nlayers:\n" + "- {name: b, forward: 1, backward: 2, stored: 9}\n" * 8
    for number in range(8):
        text = text.replace("name: b,", f"name: b{number},", 1)
    of = PLANNED["3bw"]
    made = Candidate(Sized(layer_graph(parse_profile(text, "p")), 1, least_microbatches(of, depth)), of, depth, 1)
    devices = Devices((DeviceLevel(8, 1e6),), 40.0)
    trial = CandidateTrial(made, BlockChain(made.sized.graph, 2.0), devices, KnownSchedules())
    with np.errstate(invalid="raise"):
        assert all(math.isfinite(bound) for bound in trial.bounds())


def test_its_state_is_not_divided() -> None:
    """As its schedule would be refused: pipelines in parallel each hold all of it."""
    found = planned(12, ("3bw",), memory=40e6)
    assert {plan.settings.get("sharding", "none") for plan in found.plans} == {"none"}
    assert "three versions" in said(found)["divided state of 3bw"]
    assert not any("sharded" in what for what in said(found))
    assert by_method(found)["3bw"].settings["width"] > 1
