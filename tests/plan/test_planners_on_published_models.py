"""BaPipe, DawnPiper and PaSE on the published profiles: a plan that fits, or the reason why there is none."""

import pytest

from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from support.published_profiles import answers, published

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
