"""Published planners on published profiles: the objectives that their authors' programs print, and plans that fit."""

import pytest

from penstock.plan.planners.pipedream import Choices
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from support.published_profiles import answers, published

GIB = 2.0**30
NINE_DIGITS = 1 + 1e-8  # Piper's times are printed with nine


def request_of(row, planner):
    levels = zip(row["machines"], row["bandwidth_bytes_per_s"], strict=True)
    devices = Devices(tuple(DeviceLevel(*level) for level in levels))
    profile = published("pipedream", row["profile"])
    return PlanRequest(profile, devices, planner, "pipedream", choices=Choices(row["straight"]))


def test_pipedream_reaches_the_published_objective_on_every_row():
    rows = answers()["pipedream"]
    assert len(rows) == 20
    for row in rows:
        best = make_plan(request_of(row, "pipedream")).plans[0]
        assert best.rating.seconds == pytest.approx(row["seconds_per_stage"], rel=1e-9), row
        layers = sorted(number for stage in best.stages for number in stage.layers)
        left_out = {n for n in range(max(layers) + 1) if n not in layers}
        kinds = [published("pipedream", row["profile"]).layers[number].kind for number in left_out]
        assert all(kind.startswith("__getitem__") for kind in kinds)


def test_the_default_planner_is_never_above_pipedream():
    for row in answers()["pipedream"]:
        if row["profile"] != "gnmt" or row["machines"] == [4, 4]:
            best = make_plan(request_of(row, "default")).plans[0]
            assert best.rating.seconds <= row["seconds_per_stage"] * (1 + 1e-12), row


def bert(row, planner, cost="piper"):
    devices = Devices((DeviceLevel(row["devices"], 25 * GIB),), row["gib"] * GIB)
    return make_plan(PlanRequest(published("piper", "bert32a100"), devices, planner, cost, row["microbatches"]))


def rows_of_piper(*sizes):
    rows = answers()["piper_bert32_25GiBps"]
    found = [row for row in rows if (row["devices"], row["gib"]) in sizes]
    assert len(found) == len(sizes)
    return found


def test_piper_is_never_above_the_published_time():
    """On four of the rows that Piper can plan; `docs/planning.md` has all of them."""
    for row in rows_of_piper((4, 80), (8, 8), (32, 2), (32, 80)):
        best = bert(row, "piper").plans[0]
        assert best.rating.seconds <= row["piper_time_per_sample"] * NINE_DIGITS, row
        assert best.rating.fault == ""


def test_what_piper_finds_infeasible_does_not_fit():
    for row in rows_of_piper((4, 2), (4, 8), (8, 4)):
        found = bert(row, "piper")
        assert found.plans == ()
        assert "all layers need at least 5.70 GiB with" in found.left_out["piper"]


def test_equal_stages_are_never_above_the_published_ones():
    rows = [row for row in answers()["piper_bert32_25GiBps"] if row.get("equal_stages")]
    assert len(rows) == 7
    for row in rows:
        best = bert(row, "2bw-paper").plans[0]
        assert best.rating.seconds <= row["equal_stages"]["time_per_sample"] * NINE_DIGITS, row


def test_the_default_planner_is_never_above_piper_and_equal_stages():
    for row in rows_of_piper((4, 80), (8, 8)):
        found = bert(row, "default")
        assert found.plans[0].rating.seconds <= row["piper_time_per_sample"] * NINE_DIGITS
        assert found.plans[0].rating.seconds <= row["equal_stages"]["time_per_sample"] * NINE_DIGITS
        assert [plan.planner for plan in found.plans] == ["default", "piper", "2bw-paper"]
        closed = bert(row, "default", "2bw-paper")
        assert closed.plans[0].rating.seconds <= closed.plans[-1].rating.seconds


MODELS = [("pipedream", name) for name in ("vgg16", "alexnet", "resnet18", "gnmt")] + [("piper", "bert32a100")]


@pytest.mark.parametrize("planner", ["bapipe", "dawnpiper", "pase"])
def test_published_models_get_plans_or_a_reason(planner):
    answers()  # skips without them
    planned = 0
    for model in MODELS:
        for memory in (None, 8 * 2.0**30):
            devices = Devices((DeviceLevel(2, 1.2e10), DeviceLevel(2, 1.25e9)), memory, host=1.2e10)
            own = make_plan(PlanRequest(published(*model), devices, planner))
            best = make_plan(PlanRequest(published(*model), devices, "default", planner))
            if not own.plans:
                assert "fit" in own.left_out[planner]
                continue
            planned += 1
            assert best.plans[0].rating.seconds <= own.plans[0].rating.seconds
            assert own.plans[0].devices <= 4
            layers = sorted(number for stage in own.plans[0].stages for number in stage.layers)
            assert layers == list(range(len(published(*model).layers)))
    assert planned >= 5
