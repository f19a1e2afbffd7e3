"""Plans of each kind, as files, are what `penstock train` takes: built and run in this process."""

import math
import re
from dataclasses import replace

import pytest
import torch
import yaml

from penstock.plan.plan_export import plan_file, planning_json
from penstock.plan.planned_timeline import idle_shares, planned_idle_shares, planned_timeline
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.train.config.load import load_config
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import prepare

TINY = (
    "model.layers=6", "model.width=8", "model.heads=2", "model.context=8", "model.vocabulary=300", "threads=1",
)  # fmt: skip


def profile_of(large=0):
    """Eight blocks, as an embedding, six layers and a head are; the first has so many bytes of parameters."""
    block = "backward: 2, backward_input: 1, backward_weight: 1, late: 100, output: 1, stored: 1000, parameters: {}}}\n"
    rows = [f"- {{name: b{n}, forward: 1, {block.format(large if n == 0 else 10)}" for n in range(8)]
    return parse_profile("format: penstock profile 1\nlayers:\n" + "".join(rows), "p")


def too_large_for_one(profile):
    """The same with more parameters than one device has room for."""
    layers = [layer.model_copy(update={"parameters": 3000.0}) for layer in profile.layers]
    return profile.model_copy(update={"layers": layers})


KINDS = {
    "zb-h1": {"method": "zb-h1"},
    "zb-v": {"method": "zb-v"},
    "v-min": {"method": "v-min"},
    "zb-interleaved:chunks=2": {"options": {"chunks": 2}},
    "interleaved:chunks=4": {"options": {"chunks": 4}, "balance": [1] * 8},
    "breadth-first:chunks=2": {"options": {"chunks": 2}},
    "interleaved:chunks=2": {"options": {"chunks": 2}},
}


def run_of(plan, tmp_path, batches=1):
    """Train some batches by the file of a plan."""
    (tmp_path / "plan.yaml").write_text(plan)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    config = load_config(tmp_path / "plan.yaml", [*TINY, f"data={tmp_path / 'text.txt'}", "held_out=0.2"])
    tokens = torch.randint(256, (config.width * config.microbatches * config.microbatch_size, 8))
    reports = list(make_pipeline(prepare(config)).run([(tokens, tokens)] * batches))
    assert len(reports) == batches
    assert all(math.isfinite(report.loss) for report in reports)
    if batches > 3:
        assert reports[-1].loss < reports[0].loss


@pytest.mark.parametrize("method", KINDS)
def test_a_plan_of_each_kind_is_trained(tmp_path, method):
    devices, settings = Devices((DeviceLevel(2, 1.0),)), KINDS[method]
    found = make_plan(PlanRequest(profile_of(), devices, cost="simulated", microbatches=4, methods=(method,)))
    plan = plan_file(found)
    assert settings.items() <= yaml.safe_load(plan).items()
    assert found.plans[0].devices == 2
    run_of(plan, tmp_path)


@pytest.mark.parametrize(("method", "depth", "m"), [("3bw", 2, 1), ("3bw-ahead", 3, 1), ("3bw", 4, 2)])
def test_a_plan_with_three_versions_is_trained(tmp_path, method, depth, m):
    """Of three ranks and one microbatch, and of four and two: too few for 2bw."""
    devices = Devices((DeviceLevel(depth, 1.0),))
    found = make_plan(PlanRequest(profile_of(), devices, cost="simulated", microbatches=m, methods=(method,)))
    plan = plan_file(found)
    assert {"method": method, "stages": depth, "microbatches": m}.items() <= yaml.safe_load(plan).items()
    run_of(plan, tmp_path, batches=5)


@pytest.mark.parametrize(
    ("planner", "method"),
    [("2bw-paper", "2bw"), ("dapple", "1f1b"), ("mist", "1f1b"), ("dawnpiper", "1f1b"), ("piper", "1f1b")],
)
def test_a_plan_of_a_published_planner_is_trained(tmp_path, planner, method):
    """Sums of gradients take so long that all have one pipeline of two stages."""
    if planner == "mist":
        pytest.importorskip("scipy")
    devices = Devices((DeviceLevel(2, 0.5),), 1e9)
    found = make_plan(PlanRequest(profile_of(10), devices, planner, microbatches=4))
    plan = plan_file(found)
    values = yaml.safe_load(plan)
    assert {"method": method, "stages": 2, "width": 1, "microbatches": 4}.items() <= values.items()
    assert sum(values["balance"]) == 8
    assert f"by cost {planner}, which leaves out what else a run takes" in plan
    run_of(plan, tmp_path)


def test_a_plan_whose_order_is_searched_is_trained(tmp_path):
    """Its sums take so long that it has one pipeline, and its backwards such halves that no other order is as fast."""
    times = {"forward": 2.0, "backward": 4.0, "backward_input": 3.0, "backward_weight": 1.0, "parameters": 1e6}
    profile = profile_of()
    layers = [layer.model_copy(update=times) for layer in profile.layers]
    profile, devices = profile.model_copy(update={"layers": layers}), Devices((DeviceLevel(4, 1e5),))
    methods = "zb-h1", "zb-auto"
    found = make_plan(PlanRequest(profile, devices, cost="simulated", microbatches=8, methods=methods))
    plan = plan_file(found)
    assert yaml.safe_load(plan)["method"] == "zb-auto"
    run_of(plan, tmp_path)


@pytest.mark.parametrize(("method", "limit"), [("1f1b", 5_500.0), ("interleaved:chunks=2", 7_000.0)])
def test_a_plan_that_recomputes_on_some_ranks_is_trained(tmp_path, method, limit):
    devices = Devices((DeviceLevel(2, 1.0),), limit)
    found = make_plan(PlanRequest(profile_of(), devices, cost="simulated", microbatches=4, methods=(method,)))
    plan = plan_file(found)
    assert set(yaml.safe_load(plan)["recompute"]) == {"none", "block"}
    run_of(plan, tmp_path)


def test_a_plan_that_offloads_activations_is_trained(tmp_path):
    """Of the first rank, which has the most microbatches in flight; its copies take no longer than forwards."""
    profile = profile_of()
    layers = [layer.model_copy(update={"movable": 900.0}) for layer in profile.layers]
    profile = profile.model_copy(update={"layers": layers})

    def planned(**changes):
        devices = replace(Devices((DeviceLevel(4, 1.0),), 7_500.0, host=1800.0), **changes)
        return make_plan(PlanRequest(profile, devices, cost="simulated", microbatches=8, methods=("1f1b",)))

    found = planned()
    plan, stage = plan_file(found), found.plans[0].rating.stages[0]
    assert yaml.safe_load(plan)["offload"] == ["activations", "none", "none", "none"]
    run_of(plan, tmp_path)
    assert stage.memory <= 7_500
    assert stage.on_host == 3 * 1800  # of what is in flight all but that of a forward or backward
    said = "# activations in the memory of the host, at most for each device: 5.3 KiB of stage 0; copies .* 1.8 KiB/s"
    assert re.search(said, plan)
    assert {"offloaded": True, "on_host": 5400}.items() <= planning_json(found)["plans"][0]["stages"][0].items()
    assert planned(host_memory=5400.0).plans == found.plans
    (limited,), (alone,) = planned(host_memory=5399.0).plans, planned(host=None).plans
    assert found.plans[0].seconds_per_sample < limited.seconds_per_sample <= alone.seconds_per_sample
    assert all(each.on_host < 5400 for each in limited.rating.stages)


@pytest.mark.parametrize(("method", "level"), [("1f1b", "gradients"), ("2bw", "gradients"), ("zb-v", "optimizer")])
def test_a_plan_that_divides_updates_is_trained(tmp_path, method, level):
    """The optimizer of the first block does not fit a device as a whole."""
    count, limit = (4, 28e6) if method == "zb-v" else (2, 40e6 if method == "2bw" else 28e6)
    devices = Devices((DeviceLevel(count, 1e9),), limit)
    found = make_plan(PlanRequest(profile_of(8_000_000), devices, cost="simulated", microbatches=4, methods=(method,)))
    plan = plan_file(found)
    assert yaml.safe_load(plan)["sharding"] == level
    run_of(plan, tmp_path)


@pytest.mark.parametrize("method", ["layered:chunks=4", "2bw-layered:chunks=4"])
def test_a_plan_that_divides_weights_is_trained(tmp_path, method):
    devices = Devices((DeviceLevel(4, 1e9),), 80e6)
    found = make_plan(PlanRequest(profile_of(8_000_000), devices, cost="simulated", microbatches=4, methods=(method,)))
    plan = plan_file(found)
    assert {"sharding": "full", "options": {"chunks": 4}}.items() <= yaml.safe_load(plan).items()
    run_of(plan, tmp_path)


def test_a_plan_with_optimizer_states_on_the_host_is_trained(tmp_path):
    """Those of the first block come and go in pieces, as the device has no room for them."""
    profile = profile_of(80_000_000)
    first = profile.layers[0].model_copy(update={"largest": 1e4})
    profile = profile.model_copy(update={"layers": [first, *profile.layers[1:]]})
    devices = Devices((DeviceLevel(2, 1.0),), 200e6, host=1e9)
    found = make_plan(PlanRequest(profile, devices, cost="simulated", microbatches=4, methods=("1f1b",)))
    plan = plan_file(found)
    assert yaml.safe_load(plan)["offload_optimizer"] == "pieces"
    run_of(plan, tmp_path)
    assert found.plans[0].rating.stages[0].parts["updates"] == pytest.approx(2 * 160e6 / 1e9 / 4, rel=1e-3)


@pytest.mark.parametrize(("cores", "of_stages"), [(None, True), (2.0, True), (1.0, False)])
def test_what_a_plan_predicts_of_its_stages_can_be_told_by_the_clock(cores, of_stages):
    """Passes of ranks that share cores take longer by the clock than they work."""
    devices, profile = Devices((DeviceLevel(2, 1e9),), 60_000.0, cores=cores), too_large_for_one(profile_of())
    found = make_plan(PlanRequest(profile, devices, cost="simulated", microbatches=4, methods=("1f1b",)))
    predicted = yaml.safe_load(plan_file(found))["predicted"]
    assert predicted["batch"] == pytest.approx(4 * found.plans[0].rating.seconds, rel=1e-5)
    assert set(predicted) == ({"batch", "passes", "updates", "idle"} if of_stages else {"batch"})
    if of_stages:
        assert sum(predicted["passes"]) == pytest.approx(4 * 8 * 3)
        updates = sum(predicted["updates"])
        busy = (sum(predicted["passes"]) + updates) / 2 / predicted["batch"]
        assert sum(predicted["idle"].values()) == pytest.approx(1 - busy, abs=1e-3)


def test_idle_time_is_predicted_of_a_long_run_where_it_is_short_enough_to_be_played():
    profile = too_large_for_one(profile_of())
    devices = Devices((DeviceLevel(2, 1e9),), 90_000.0)
    request = PlanRequest(profile, devices, cost="simulated", microbatches=4, methods=("2bw",))
    found = make_plan(request)
    assert found.plans[0].settings["stages"] == 2
    idle, drawn = planned_idle_shares(found), idle_shares(planned_timeline(found))
    assert idle == pytest.approx(idle_shares(planned_timeline(found, 8)))
    assert 0 < idle["fill"] < 0.6 * drawn["fill"]  # there is one, in eight batches instead of three
    assert planned_idle_shares(make_plan(replace(request, microbatches=64))) == {}


def test_plans_by_costs_that_leave_out_the_bubble_predict_nothing():
    found = make_plan(PlanRequest(profile_of(), Devices((DeviceLevel(4, 1.0),)), cost="dawnpiper", microbatches=8))
    written = yaml.safe_load(plan_file(found))
    assert written["stages"] > 1
    assert "predicted" not in written
