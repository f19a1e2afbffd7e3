"""Profiles by formulas: their operations are those of Megatron's formula, and plans can be made of them."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.plan.cluster.files import find_cluster
from penstock.plan.planning import PlanRequest, make_plan
from penstock.plan.profile.files import profile_text, read_profile
from penstock.plan.profile.layer_graph import layer_graph
from penstock.plan.profile.schema import Calibration, Profile, ProfiledLayer
from penstock.plan.scale.analytic_profile import analytic_profile
from penstock.plan.scale.model_shape import ModelShape
from penstock.plan.scale.rules_file import read_rules

SHAPE = ModelShape("gpt", 24, 6144, 2048, 48, vocabulary=51200)


def test_operations_are_those_of_megatrons_formula():
    """96 B s l h^2 (1 + s / 6h + V / 16lh), of which layers do four parts of a forward, and the head three."""
    cluster = find_cluster("h100")
    profile = analytic_profile(SHAPE, cluster, [1, 4])
    for place, size in enumerate((1, 4)):
        forward = {layer.name: layer.forward[place] * cluster.rate for layer in profile.layers}
        layers = sum(value for name, value in forward.items() if name.startswith("layers"))
        assert 4 * layers + 3 * forward["head"] == pytest.approx(size * SHAPE.sequence_flops(read_rules()), rel=1e-9)


def test_bytes_of_an_analytic_profile():
    profile = analytic_profile(SHAPE, find_cluster("a100"), [2])
    layer = profile.layers[1]
    assert layer.parameters == 4 * 12 * 6144**2
    assert (layer.buffer, layer.whole, layer.optimizer) == (2 * 12 * 6144**2, layer.parameters, 2 * layer.parameters)
    assert layer.stored == [2 * 2048 * 6144 * (34 + 5 * 48 * 2048 / 6144)]
    assert profile.layers[0].forward == [pytest.approx(2 * 2048 * 6144 * 2 / 2039e9)]
    assert [link.bandwidth for link in profile.links] == [300e9, 25e9]
    single = analytic_profile(SHAPE, find_cluster("a100").model_copy(update={"precision": "fp32"}), [2])
    assert (single.layers[1].buffer, single.layers[1].whole) == (layer.parameters, None)
    assert single.layers[1].stored == [2 * layer.stored[0]]
    assert len(layer_graph(profile).layers) == 26


def test_backwards_come_in_halves():
    """Products with weights have one for each; attention scores only inputs; the embedding, which is first, none."""
    cluster = find_cluster("h100").model_copy(update={"memory_bandwidth": None})
    embedding, layer, *_, head = analytic_profile(SHAPE, cluster, [1, 4]).layers
    for place, size in enumerate((1, 4)):
        weights, scores = size * 2048 * 24 * 6144**2, size * 4 * 2048**2 * 6144
        assert layer.forward[place] * cluster.rate == pytest.approx(weights + scores)
        assert layer.backward_input[place] * cluster.rate == pytest.approx(weights + 2 * scores)
        assert layer.backward_weight[place] * cluster.rate == pytest.approx(weights)
        assert head.backward_input[place] == head.backward_weight[place] == head.forward[place]
    bound = find_cluster("a100")
    for each in analytic_profile(SHAPE, bound, [1, 4]).layers:
        both = [sum(pair) for pair in zip(each.backward_input, each.backward_weight, strict=True)]
        assert both == pytest.approx(each.backward)
        assert min(each.backward) > 0
    embedding = analytic_profile(SHAPE, bound, [1, 4]).layers[0]
    assert (embedding.backward_input, embedding.backward_weight) == ([0.0, 0.0], embedding.backward)


def test_methods_with_halved_backwards_are_planned():
    profile = analytic_profile(ModelShape("gpt", 6, 1024, 512, 8, vocabulary=1000), find_cluster("a100"), [1])
    request = PlanRequest(profile, find_cluster("a100").devices(2), samples=8, methods=("zb-h1", "zb-v"))
    assert {plan.planner for plan in make_plan(request).plans} == {"zb-h1", "zb-v"}


@pytest.mark.smoke
def test_plans_of_an_analytic_profile(command, tmp_path):
    shape = ["--layers", "14", "--hidden", "1024", "--sequence", "512", "--vocabulary", "1000"]
    file = str(tmp_path / "model.yaml")
    run = command("profile", "--cluster", "a100", *shape, "--microbatch-sizes", "1,2", "--out", file)
    assert (run.returncode, run.stderr) == (0, "")
    assert f"penstock plan --profile {file} --cluster a100 --devices N\n" in run.stdout
    assert "Made for --set model.layers=14 --set model.width=1024" in " ".join(run.stdout.split())
    run = command("plan", "--profile", file, "--devices", "4x2", "--global-batch", "16", "--methods", "1f1b", "--json")
    found = json.loads(run.stdout)
    assert found["cost"] == "simulated"
    assert found["plans"][0]["devices"] <= 8


def test_plans_for_the_devices_of_a_cluster(command, tmp_path):
    shape = ["--layers", "14", "--hidden", "1024", "--sequence", "512", "--vocabulary", "1000"]
    file = str(tmp_path / "model.yaml")
    assert command("profile", "--cluster", "a100", *shape, "--out", file).returncode == 0
    given = ["plan", "--profile", file, "--cluster", "a100", "--cost", "2bw-paper", "--json"]
    found = json.loads(command(*given, "--devices", "16").stdout)
    assert found["levels"] == [{"units": 8, "bandwidth": 300e9}, {"units": 2, "bandwidth": 25e9}]
    assert found["memory"] == 80e9
    assert json.loads(command(*given, "--devices", "4", "--memory", "40GB").stdout)["memory"] == 40e9
    for more, said in (
        (["--devices", "12"], "no whole nodes of 8"),
        (["--devices", "8x2"], "takes whole numbers"),
        (["--devices", "8,2"], "takes one number"),
        (["--devices", "8", "--bandwidth", "1GB"], "leave --bandwidth out"),
    ):
        run = command(*given, *more)
        assert run.returncode == 2
        assert said in " ".join(run.stderr.split())


def test_what_analytic_profiles_lack(command):
    with pytest.raises(ConfigError, match="needs --vocabulary"):
        analytic_profile(ModelShape("gpt", 2, 16, 16, 2), find_cluster("a100"), [1])
    with pytest.raises(ConfigError, match="layers of an analytic profile must be at most 4,998"):
        analytic_profile(ModelShape("gpt", 1 << 24, 16, 16, 2, vocabulary=9), find_cluster("a100"), [1])
    run = command("profile", "--cluster", "a100", "--layers", "3")
    assert run.returncode == 2
    assert "needs --hidden, --sequence, --vocabulary, too" in " ".join(run.stderr.split())
    run = command("profile", "--layers", "3", "--hidden", "16", "--sequence", "8", "--vocabulary", "9")
    assert "needs --cluster, too" in " ".join(run.stderr.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--microbatch-sizes", "0,2"], "--microbatch-sizes must be a whole number of at least 1, got 0"),
        (["--data", "my.txt"], "--data goes with measuring or --rehearse, not with formulas (--cluster); leave it out"),
        (["--seconds", "1"], "--seconds goes with measuring, not"),
        (["--set", "precision=bf16"], "--set goes with measuring or --rehearse, not"),
        (["some.yaml"], "FILE goes with reading a profile or --check, not with formulas"),
        (["--from", "piper"], "--from goes with reading a profile, not"),
    ],
)
def test_what_formulas_have_no_use_for(command, more, said):
    shape = ["--layers", "2", "--hidden", "16", "--sequence", "8", "--vocabulary", "9"]
    run = command("profile", "--cluster", "a100", *shape, *more)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())


def test_the_calibration_of_one_model_goes_into_the_profile_of_another(command, tmp_path):
    machine, of_none, out = tmp_path / "machine.yaml", tmp_path / "plain.yaml", tmp_path / "out.yaml"
    layers = [ProfiledLayer(name="l", forward=1.0, backward=2.0, output=8.0)]
    plain = Profile(format="penstock profile 1", name="other", layers=layers)
    found = Calibration(forward=1.5, backward=1.25, step=2.0, between=1e-4, runs=["a", "b"])
    of_none.write_text(profile_text(plain))
    machine.write_text(profile_text(plain.model_copy(update={"calibration": found})))
    shape = ("--layers", "3", "--hidden", "16", "--sequence", "8", "--vocabulary", "9")
    made = ("profile", "--cluster", "a100", *shape, "--out", out)
    assert command(*made).returncode == 0
    before = read_profile(out)
    run = command(*made, "--calibration", machine)
    assert (run.returncode, run.stderr) == (0, "")
    assert read_profile(out) == before.model_copy(update={"calibration": found})
    assert command("profile", of_none, "--calibration", machine, "--out", out).returncode == 0
    assert read_profile(out).calibration == found
    refused = command(*made, "--calibration", of_none)
    assert refused.returncode == 2
    assert f"has no calibration to take; penstock profile {of_none} --check RUN --check RUN" in refused.stderr
