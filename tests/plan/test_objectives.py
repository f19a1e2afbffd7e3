"""Plans for other objectives than throughput: each value against what the planner says, asked one by one."""

import json
import re
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console

from penstock.errors import ConfigError
from penstock.plan.objectives import Target, choose, fewer_devices, trials_table
from penstock.plan.planned_timeline import idle_shares, planned_timeline, what_would_help
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import profile_text
from penstock.plan.profile.schema import Profile, ProfiledLayer
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices


def blocks(count=6, parameters=40.0):
    layers = [
        ProfiledLayer(
            name=f"l{n}", forward=[1.0, 1.8], backward=[2.0, 3.6], output=[1.0, 2.0], stored=[8.0, 16.0],
            parameters=parameters,
        )
        for n in range(count)
    ]  # fmt: skip
    return Profile(format="penstock profile 1", name="tower", microbatch_sizes=[1, 2], layers=layers)


def request_of(count=8, memory=None, bandwidth=50.0, **values):
    devices = Devices((DeviceLevel(count, bandwidth),), memory)
    return PlanRequest(blocks(), devices, samples=16, **values)


def test_the_fewest_devices_are_those_below_which_nothing_fits():
    request = request_of(memory=300.0)
    chosen = choose(request, "devices")
    fits = [n for n in range(1, 9) if make_plan(replace(request, devices=fewer_devices(request.devices, n))).plans]
    assert fits[0] > 1
    assert min(trial.value for trial in chosen.trials if trial.value) == fits[0]
    assert chosen.planning.request.devices.count == fits[0]
    nothing = choose(request_of(memory=1.0), "devices")
    assert [trial.plan for trial in nothing.trials] == [None]


def test_the_lowest_cost_counts_the_devices_in_use():
    request = request_of()
    chosen = choose(request, "cost", price=3.0)
    expected = {}
    for count in (1, 2, 4, 8):
        plan = make_plan(replace(request, devices=fewer_devices(request.devices, count))).plans[0]
        expected[count] = plan.devices * plan.seconds_per_sample * 1e6 / 3600 * 3.0
    assert {trial.devices: pytest.approx(trial.value) for trial in chosen.trials} == expected
    assert chosen.planning.request.devices.count == min(expected, key=expected.get)


def test_time_to_target_weighs_epochs_against_speed():
    """A large batch is faster per sample; where it takes many more epochs, the small one wins."""
    target = Target({8: 10.0, 32: 11.0}, 1000.0)
    chosen = choose(request_of(), "time-to-target", target)
    for trial in chosen.trials:
        devices = fewer_devices(request_of().devices, trial.devices)
        plan = make_plan(replace(request_of(), devices=devices, samples=trial.batch)).plans[0]
        assert trial.value == pytest.approx(plan.seconds_per_sample * target.epochs[trial.batch] * 1000)
    assert chosen.planning.request.samples == 32
    steep = choose(request_of(), "time-to-target", Target({8: 10.0, 32: 100.0}, 1000.0))
    assert steep.planning.request.samples == 8
    flat = [trial.flat for trial in chosen.trials if trial.devices == 8 and trial.batch == 8]
    assert flat[0] is None or flat[0] >= min(t.value for t in chosen.trials if t.devices == 8 and t.batch == 8)


def test_fewer_devices_fill_the_inner_levels_first():
    devices = Devices((DeviceLevel(4, 9.0), DeviceLevel(3, 2.0)), 5.0, 0.1)
    assert fewer_devices(devices, 2).levels == (DeviceLevel(2, 9.0),)
    assert fewer_devices(devices, 8).levels == (DeviceLevel(4, 9.0), DeviceLevel(2, 2.0))
    assert (fewer_devices(devices, 8).memory, fewer_devices(devices, 8).latency) == (5.0, 0.1)
    with pytest.raises(ConfigError, match="do not fill whole units"):
        fewer_devices(devices, 6)
    with pytest.raises(ConfigError, match="at most 12"):
        fewer_devices(devices, 13)


def test_methods_can_be_restricted():
    found = make_plan(request_of(4, cost="simulated", methods=("gpipe",)))
    assert {plan.settings["method"] for plan in found.plans} == {"gpipe"}
    with pytest.raises(ConfigError, match="Did you mean 'gpipe'"):
        make_plan(request_of(4, cost="simulated", methods=("gpip",)))
    with pytest.raises(ConfigError, match="methods are tried by cost 'simulated' only"):
        make_plan(request_of(4, methods=("gpipe",)))


@pytest.mark.smoke
def test_the_plan_command_takes_objectives_and_smaller_worlds(command, tmp_path):
    (tmp_path / "tower.yaml").write_text(profile_text(blocks()))
    common = ["--profile", str(tmp_path / "tower.yaml"), "--devices", "4", "--bandwidth", "50"]
    run = command("plan", *common, "--objective", "time-to-target", "--epochs", "8:10,16:11", "--epoch-samples", "100")
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"sample +target +a pipeline", run.stdout)
    out = tmp_path / "plan.yaml"
    simulated = [*common, "--global-batch", "16", "--cost", "simulated", "--out", str(out), "--objective", "cost"]
    run = command("plan", *simulated, "--worlds", "1", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["optimized"] == "cost"
    run = command("plan", *simulated, "--worlds", "2")
    assert run.returncode == 2
    assert "--worlds: 2 devices are more than the 1 of the best plan" in run.stderr


def test_the_table_of_trials_fits_80_columns():
    """With figures of as many digits as there are, and the longest name of a method."""
    layers = [ProfiledLayer(name=f"l{n}", forward=0.00012345, backward=0.00023456, output=1e4) for n in range(6)]
    profile = Profile(format="penstock profile 1", name="tower", layers=layers)
    request = replace(request_of(4, bandwidth=1e9, cost="simulated", methods=("2bw-eager",)), profile=profile)
    chosen = choose(request, "time-to-target", Target({8: 10.0, 16: 11.0}, 123.0))
    shown = {}
    for width in (80, 200):
        console = Console(file=StringIO(), width=width)
        console.print(trials_table(chosen))
        shown[width] = [line.split() for line in console.file.getvalue().splitlines()]
    assert shown[80] == shown[200]
    assert any("2bw-eager" in line for line in shown[80])


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"model": {"preset": "small"}}, 256),
        ({"model": {"preset": "small", "context": 64}}, 64),
        ({"model": {"layers": 2}, "precision": "bf16"}, 128),
        ({"data": "my.txt"}, 128),
        ({}, None),
        ({"model": {"laiers": 2}}, None),
    ],
)
def test_the_lowest_cost_is_also_told_per_token(command, tmp_path, settings, tokens):
    profile = blocks().model_copy(update={"settings": settings})
    (tmp_path / "tower.yaml").write_text(profile_text(profile))
    given = f"--profile {tmp_path / 'tower.yaml'} --devices 2 --bandwidth 50 --global-batch 16 --cost simulated"
    asked = ["plan", *given.split(), "--objective", "cost", "--methods", "gpipe"]
    trials = json.loads(command(*asked, "--json").stdout)["trials"]
    said = " ".join(command(*asked).stdout.split())
    if tokens is None:
        assert "tokens" not in said
        assert all("price_of_million_tokens" not in each for each in trials)
        return
    assert [each["price_of_million_tokens"] * tokens for each in trials] == [each["value"] for each in trials]
    assert f"1,000,000 tokens: {min(each['value'] for each in trials) / tokens:.5g} at best" in said


def test_smaller_worlds_have_the_same_batch(command, tmp_path):
    (tmp_path / "tower.yaml").write_text(profile_text(blocks()))
    out = tmp_path / "plan.yaml"
    given = f"--profile {tmp_path / 'tower.yaml'} --devices 4 --bandwidth 50 --global-batch 16 --cost simulated"
    run = command("plan", *given.split(), "--worlds", "2,1", "--out", str(out))
    assert (run.returncode, run.stderr) == (0, "")
    for name, most in (("plan.yaml", 4), ("plan-2.yaml", 2), ("plan-1.yaml", 1)):
        plan = yaml.safe_load((tmp_path / name).read_text())
        assert plan["stages"] * plan["width"] <= most
        assert plan["width"] * plan["microbatches"] * plan["microbatch_size"] == 16


def test_the_timeline_of_a_plan_is_what_was_predicted(command, tmp_path):
    """It takes what the plan says that a batch takes, in the steady state, and names what ranks wait for."""
    found = make_plan(request_of(4, cost="simulated"))
    plan, played = found.plans[0], planned_timeline(found)
    sized = found.sizes[plan.samples]
    assert played.ranks == plan.settings["stages"]
    assert played.makespan >= 3 * plan.rating.seconds * sized.microbatches * (1 - 1e-9) - 1e-9
    assert sum(idle_shares(played).values()) == pytest.approx(played.bubble().bubble)
    (tmp_path / "tower.yaml").write_text(profile_text(blocks()))
    given = f"--profile {tmp_path / 'tower.yaml'} --devices 2 --bandwidth 50 --global-batch 16 --cost simulated"
    run = command("plan", *given.split(), "--timeline", str(tmp_path / "plan.svg"), "--what-if")
    assert (run.returncode, run.stderr) == (0, "")
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")
    assert "Ranks are idle for" in run.stdout
    assert "With devices twice as fast: " in run.stdout
    run = command("plan", *given.replace("simulated", "2bw-paper").split(), "--timeline", str(tmp_path / "plan.svg"))
    assert run.returncode == 2
    assert "--cost simulated" in run.stderr


def test_what_would_help_is_planned_anew():
    """Where nothing but compute takes time, devices twice as fast are twice as fast, and links bring nothing."""
    request = PlanRequest(blocks(parameters=0.0), Devices((DeviceLevel(2, 1e20),)), samples=16, cost="2bw-paper")
    gains = {each.change: each.gain for each in what_would_help(make_plan(request))}
    assert gains["devices twice as fast"] == pytest.approx(2.0)
    assert gains["links of twice the bandwidth"] == pytest.approx(1.0)
    assert gains["twice as many devices"] > 1.2
    tight = replace(request_of(4, memory=700.0), cost="2bw-paper")
    assert "twice the memory" in {each.change for each in what_would_help(make_plan(tight))}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--objective", "speed"], "objective must be 'throughput'"),
        (["--objective", "time-to-target"], "takes --epochs"),
        (["--epochs", "8:10", "--epoch-samples", "5"], "and no other"),
        (["--epochs", "8:10"], "give both"),
        (["--epochs", "8-10", "--epoch-samples", "5", "--objective", "time-to-target"], "as in 256:10"),
        (["--epochs", "8:0", "--epoch-samples", "5", "--objective", "time-to-target"], "epochs must be above 0"),
        (["--objective", "cost", "--price", "0"], "price of a device"),
        (["--price", "3"], "objective cost, and no other, takes --price"),
        (["--straight"], "--straight is a choice of cost 'pipedream', not of '2bw-paper'"),
        (["--worlds", "1"], "give --out, too"),
        (["--worlds", "0", "--out", "plan.yaml"], "--worlds: devices must be a whole number of at least 1, got 0"),
        (["--worlds", "1,3", "--out", "plan.yaml"], "--worlds: devices must be at most 2, got 3"),
    ],
)
def test_what_objectives_refuse(command, tmp_path, given, said):
    (tmp_path / "tower.yaml").write_text(profile_text(blocks()))
    run = command("plan", "--profile", str(tmp_path / "tower.yaml"), "--devices", "2", "--bandwidth", "9", *given)
    assert (run.returncode, run.stdout) == (2, "")  # before anything is searched
    assert said in " ".join(run.stderr.split())


def test_of_equally_fast_methods_the_first_one_is_the_plan():
    """On one device all that flush take the same, but for roundings; gpipe would hold all microbatches."""
    found = make_plan(replace(request_of(1, cost="simulated"), samples=16))
    seconds = [plan.seconds_per_sample for plan in found.plans]
    assert seconds == pytest.approx([seconds[0]] * 5, rel=1e-9)
    assert [plan.planner for plan in found.plans] == ["1f1b", "eager", "gpipe", "2bw", "2bw-eager"]
