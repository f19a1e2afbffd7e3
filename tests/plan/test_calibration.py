"""A machine's constants are found again from runs that were made with them, and enter predictions and plans."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

import penstock
from penstock.cli.plans.plan_devices import devices_of
from penstock.cli.plans.profile_table import profile_tables
from penstock.errors import ConfigError
from penstock.plan.calibration import MeasuredPasses, calibrated, measured_passes, recalibrated
from penstock.plan.measured_run import RunComparison, compare_with_run, predicted_batch
from penstock.plan.planned_timeline import what_would_help
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import parse_profile, profile_text, read_profile
from penstock.plan.profile.schema import Calibration, Profile, ProfiledLayer, ProfiledLink
from penstock.plan.run_forecast import RunSettings, run_forecast
from penstock.timeline import Interval, Timeline

PLAIN = RunSettings("1f1b", 2, 1, 4, 1, (False, False), (2, 1))
HALVED = replace(PLAIN, method="zb-h1")
SLICED = replace(PLAIN, method="seq1f1b")
MACHINE = Calibration(forward=1.5, backward=1.25, step=2.0, between=0.25, runs=["a"])


def profile_with(calibration=None, work=0.0):
    """Three layers: a forward takes 1, 2 and 3, a backward as long for inputs and 1 for weights, an update 0.5."""
    layers = [
        ProfiledLayer(name=f"l{n}", forward=n, backward=n + 1, backward_input=n, backward_weight=1, step=0.5)
        for n in (1, 2, 3)
    ]
    links = [ProfiledLink(bandwidth=1e9, work=work)]
    cores = 2.0 if work else None
    return Profile(format="penstock profile 1", layers=layers, links=links, cores=cores, calibration=calibration)


def as_measured(settings, machine=MACHINE, work=0.0):
    """What a run on such a machine takes: both stages have forwards of 3, and 4 or 5 backward."""
    halves = "I" in settings.method or settings.method == "zb-h1"
    found = []
    for first, second, step in ((3, 2, 1.0), (3, 1, 0.5)):
        times = {"F": 3 * machine.forward + work, "STEP": step * machine.step}
        if halves:
            times |= {"I": first * machine.backward + work, "W": second * machine.backward}
        else:
            times["B"] = (first + second) * machine.backward + work
        found.append(times)
    return MeasuredPasses(tuple(found), machine.between, batch=10.0)


@pytest.mark.parametrize("work", [0.0, 0.125])
@pytest.mark.parametrize("settings", [PLAIN, HALVED], ids=lambda settings: settings.method)
def test_constants_of_a_machine_are_found_again(settings, work):
    """Work for messages comes on top of passes where ranks have no core left for it."""
    profile = profile_with(work=work)
    found = calibrated(profile, {"a": (settings, as_measured(settings, work=work))})
    assert found.calibration == MACHINE
    assert calibrated(found, {"a": (settings, as_measured(settings, work=work))}) == found  # not on top of another one
    assert found.model_copy(update={"calibration": None}) == profile


def test_runs_count_alike():
    other = MACHINE.model_copy(update={"forward": 2.5, "between": 0.75})
    runs = {"a": (PLAIN, as_measured(PLAIN)), "b": (HALVED, as_measured(HALVED, other))}
    assert calibrated(profile_with(), runs).calibration == Calibration(
        forward=2.0, backward=1.25, step=2.0, between=0.5, runs=["a", "b"]
    )


CROWDED = RunSettings("1f1b", 3, 1, 4, 1, (False,) * 3, (1, 1, 1))
"""Three ranks on two cores."""


def crowded(batch):
    """What such a run took; by the clock its passes count what other ranks did meanwhile, so they tell nothing."""
    return MeasuredPasses(({"F": 99.0, "B": 99.0, "STEP": 99.0},) * 3, 99.0, batch)


def test_ranks_that_share_cores_calibrate_by_their_batches():
    """Every pass takes 1.75 times as long, and so does a batch; passes of other runs are told apart as ever."""
    profile = profile_with(work=1e-9)
    run = CROWDED, crowded(1.75 * predicted_batch(profile, CROWDED))
    found = calibrated(profile, {"a": run}).calibration
    assert [found.forward, found.backward, found.step, found.between] == pytest.approx([1.75] * 3 + [0], rel=1e-3)
    between = Calibration(forward=1.6, backward=1.6, step=1.6, between=0.25)
    seconds = predicted_batch(profile.model_copy(update={"calibration": between}), CROWDED)
    found = calibrated(profile, {"a": (CROWDED, crowded(seconds)), "b": (PLAIN, as_measured(PLAIN))}).calibration
    expected = [(3 * 1.6 + 2 * 1.5) / 5, (3 * 1.6 + 2 * 1.25) / 5, (3 * 1.6 + 2 * 2.0) / 5, 0.25]
    assert [found.forward, found.backward, found.step, found.between] == pytest.approx(expected, rel=1e-3)


def test_ranks_that_share_cores_calibrate_where_links_take_most_of_a_batch():
    profile = profile_with(work=1e-9)
    profile.links = [ProfiledLink(bandwidth=1e9, latency=100.0)]
    slower = profile.model_copy(update={"calibration": Calibration(forward=3.0, backward=3.0, step=3.0)})
    found = calibrated(profile, {"a": (CROWDED, crowded(predicted_batch(slower, CROWDED)))}).calibration
    assert found.forward == pytest.approx(3.0, rel=1e-3)


def test_ranks_that_share_cores_and_only_wait_for_links_do_not_calibrate():
    profile = profile_with(work=1e-9)
    profile.links = [ProfiledLink(bandwidth=1e9, latency=5.0)]
    with pytest.raises(ConfigError, match="run a: no factor on passes and updates makes its batches take the 3 s"):
        calibrated(profile, {"a": (CROWDED, crowded(3.0))})


@pytest.mark.parametrize("settings", [PLAIN, HALVED, SLICED], ids=lambda settings: settings.method)
def test_predictions_are_those_of_the_slower_machine(settings):
    """A profile of layers that take as long, where what lies between passes is a part of every pass of a slice."""
    slower, between = profile_with(), 0.25 * (2 if settings is SLICED else 1)
    for layer in slower.layers:
        layer.forward *= 1.5
        layer.backward_input *= 1.25
        layer.backward_weight *= 1.25
        layer.backward *= 1.25
        layer.step *= 2
    for first in (slower.layers[0], slower.layers[2]):  # of each stage
        first.forward += between
        first.backward_input += between
        first.backward_weight += between
        first.backward += between
    assert predicted_batch(profile_with(MACHINE), settings) == pytest.approx(predicted_batch(slower, settings))


def test_every_stage_has_an_update_of_its_own_once():
    """Besides those of its layers, and as much longer in runs; the rest of the layers is what a run tells."""
    profile = profile_with(MACHINE).model_copy(update={"update": 0.125})
    assert [stage.step for stage in run_forecast(profile, PLAIN)[1].stages] == [2 * 1.0 + 0.25, 1.0 + 0.25]
    said = Console(width=200, record=True)
    said.print(profile_tables(profile, 200))
    assert "The update of a stage takes 125 ms besides those of its layers." in said.export_text()
    taken = [stage.step for stage in run_forecast(profile.model_copy(update={"calibration": None}), PLAIN)[1].stages]
    measured = MeasuredPasses(tuple({"F": 3, "B": 5, "STEP": 3 * step} for step in taken), 0.25, 10.0)
    assert calibrated(profile, {"a": (PLAIN, measured)}).calibration.step == pytest.approx(3)


def test_plans_take_it_into_account():
    """The plan of a single device: everything takes longer by the constants, and a rank pauses after every pass."""
    profile = profile_with(MACHINE)
    devices = devices_of([], "1", None, None, profile)
    assert devices.between == 0.25
    request = PlanRequest(profile, devices, cost="simulated", microbatches=4, methods=("1f1b",))
    (found, *_) = make_plan(request).plans
    seconds = 6 * 1.5 + 9 * 1.25 + 2 * 0.25 + 1.5 * 2 / 4
    assert found.rating.seconds == pytest.approx(seconds)
    profile.update = 0.125
    longer = replace(request, profile=profile, devices=devices_of([], "1", None, None, profile))
    found = make_plan(longer)
    assert found.plans[0].rating.seconds == pytest.approx(seconds + 2 * 0.125 / 4)
    faster = next(each for each in what_would_help(found) if each.change == "devices twice as fast")
    assert faster.seconds == pytest.approx((seconds + 2 * 0.125 / 4) / 2 + 0.25)  # what lies between passes stays


def timeline_of(batches=3):
    """One rank: passes of 2 and 3, after each 0.5 of its own and 1 of waits for a message, updates of 1."""
    found, now = [], 0.0
    for t in range(batches):
        for what, takes in (("F", 2.0), ("B", 3.0), ("STEP", 1.0)):
            takes += t == 0  # the first batch is slower
            found.append(Interval(0, "compute", now, now + takes, what, what, batch=t))
            found.append(Interval(0, "compute", now + takes + 0.25, now + takes + 1.25, "wait", ""))
            now += takes + 1.5
    return Timeline(1, found)


def test_what_is_measured_of_a_run():
    assert measured_passes(timeline_of(5), 1, [0]) == MeasuredPasses(({"F": 2.0, "B": 3.0, "STEP": 1.0},), 0.5, 10.5)
    with pytest.raises(ConfigError, match="fewer than two updates of every stage; train for more batches"):
        measured_passes(timeline_of(1), 1, [0])


def test_runs_that_recompute_do_not_calibrate():
    for changes in ({"recompute": (True, False)}, {"whole": frozenset({1})}):
        with pytest.raises(ConfigError, match="run a: backwards that recompute"):
            calibrated(profile_with(), {"a": (replace(PLAIN, **changes), as_measured(PLAIN))})
    with pytest.raises(ConfigError, match="at least one run"):
        calibrated(profile_with(), {})


def test_layers_that_are_recalibrated_keep_what_lies_between_passes():
    """A run that takes exactly what a calibrated profile predicts: it is not multiplied once more."""
    profile = profile_with(MACHINE)
    measured = as_measured(PLAIN)
    events = [
        Interval(s, "compute", n + 0.0, n + takes, what, what, stage=s)
        for s, stage in enumerate(measured.stages)
        for n, (what, takes) in enumerate([*stage.items(), *[("STEP", stage["STEP"])] * 3])
    ]
    found = compare_with_run(profile, PLAIN, Timeline(2, events))
    assert [stage.error(kind) for stage in found.stages for kind in ("F", "B", "STEP")] == pytest.approx([0] * 6)
    again = recalibrated(profile, PLAIN, found, "run")
    assert again.calibration == Calibration(between=0.25, runs=["a"])
    assert [layer.forward for layer in again.layers] == pytest.approx([1.5, 3.0, 4.5])


def test_layers_of_ranks_that_share_cores_are_recalibrated_by_the_batch():
    """All by one factor, behind an earlier calibration, so that the run is predicted again."""
    profile = profile_with(MACHINE, work=1e-9)
    seconds = 1.2 * predicted_batch(profile, CROWDED)
    took = RunComparison((), (1.0, seconds), ({}, {}))
    again = recalibrated(profile, CROWDED, took, "run")
    assert predicted_batch(again, CROWDED) == pytest.approx(seconds, rel=1e-3)
    assert again.calibration == Calibration(between=0.25, runs=["a"])
    factors = [
        factor
        for new, old in zip(again.layers, profile.layers, strict=True)
        for factor in (new.forward / old.forward / 1.5, new.backward / old.backward / 1.25, new.step / old.step / 2)
    ]
    assert factors == pytest.approx([factors[0]] * 9)
    assert 1.2 < factors[0] < 1.3  # what lies between passes stays, so the rest takes more


def test_profiles_with_a_calibration_are_written_and_shown():
    profile = profile_with(MACHINE)
    assert parse_profile(profile_text(profile), "a.yaml") == profile
    console = Console(width=200)
    with console.capture() as capture:
        console.print(profile_tables(profile, 200))
    assert "In runs (a) forwards take 1.5 times as long, backwards 1.25, updates 2, and 250 ms lie" in capture.get()


def test_the_command_calibrates_with_several_runs(command, tmp_path):
    runs = []
    for number in range(2):
        pipeline = penstock.Pipeline(
            [nn.Linear(4, 4) for _ in range(3)], method="1f1b", stages=2, microbatches=4, partition=[2, 1],
            loss=nn.functional.mse_loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        )  # fmt: skip
        for _ in pipeline.run((torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)):
            pass
        runs.append(tmp_path / f"run {number}")
        pipeline.write_timeline(runs[-1])
        values = {"method": "1f1b", "stages": 2, "microbatches": 4, "microbatch_size": 2, "balance": [2, 1]}
        (runs[-1] / "config.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "profile.yaml").write_text(profile_text(profile_with()))
    given = ["profile", str(tmp_path / "profile.yaml"), *(part for run in runs for part in ("--check", str(run)))]
    answer = command(*given, "--fit", "machine", "--out", str(tmp_path / "better.yaml"))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert all(f"\nrun {number}\n" in answer.stdout for number in range(2))
    better = read_profile(tmp_path / "better.yaml")
    assert better.calibration.runs == ["run 0", "run 1"]
    assert 0 < better.calibration.forward < 0.1  # seconds of a layer are 1, 2 and 3 in the profile
    assert len(json.loads(command(*given, "--json").stdout)["runs"]) == 2
    other = "--out", str(tmp_path / "other.yaml")
    for more, said in (
        (other, "--fit layers or --fit machine says which profile --out FILE is: give both"),
        (("--fit", "machine"), "--fit layers or --fit machine says which profile --out FILE is: give both"),
        (("--fit", "layers", *other), "takes the times of layers from one run; give one, or --fit machine"),
        (("--fit", "stages", *other), "--fit takes layers or machine, got 'stages'"),
        (("--seconds", "1"), "--seconds goes with measuring, not with --check; leave it out"),
    ):
        refused = command(*given, *more)
        assert refused.returncode == 2
        assert said in " ".join(refused.stderr.split())
