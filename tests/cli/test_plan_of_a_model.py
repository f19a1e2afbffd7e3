"""`penstock plan --model`: plans of a model that is named or described; `penstock train` trains it and no other."""

import json
import math

import pytest
import torch
import yaml

from penstock.cli.plans.plan_devices import device_counts, price_of
from penstock.cli.plans.profile_of_model import model_named, profile_by_formulas
from penstock.errors import ConfigError
from penstock.plan.cluster.files import find_cluster
from penstock.plan.scale.model_shape import ModelShape
from penstock.train.config.load import load_config
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.model_shape import check_enough_blocks
from support.command_line import run

SHAPE = "layers=4,hidden=48,sequence=8,vocabulary=300,heads=3"
SMALL = ("--cluster", "a100", "--devices", "2", "--global-batch", "8", "--methods", "1f1b")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    return file


def planned(command, folder, *options):
    """The file of a plan."""
    file = folder / "plan.yaml"
    run = command("plan", *options, "--out", file)
    assert (run.returncode, run.stderr) == (0, "")
    return file, run.stdout


@pytest.mark.smoke
def test_the_model_that_was_planned_is_trained(command, tmp_path, text):
    """Not the default one, which has as many blocks."""
    file, said = planned(command, tmp_path, "--model", SHAPE, *SMALL)
    assert f"Next: penstock train --plan {file}" in said
    values = yaml.safe_load(file.read_text())
    assert values["model"] == {"layers": 4, "width": 48, "heads": 3, "context": 8, "vocabulary": 300}
    assert values["precision"] == "bf16"
    config = load_config(file, [f"data={text}", "held_out=0.2", "threads=1"])
    pipeline = make_pipeline(prepare(config))
    shapes = {name: tuple(value.shape) for name, value in pipeline.full_state_dict().items()}
    assert shapes["embedding.weight"] == shapes["head.out.weight"] == (300, 48)
    assert shapes["layers.3.query_key_value.weight"] == (144, 48)
    assert "layers.4.query_key_value.weight" not in shapes
    tokens = torch.randint(300, (config.width * config.microbatches * config.microbatch_size, 8))
    assert all(math.isfinite(report.loss) for report in pipeline.run([(tokens, tokens)]))


def test_a_text_with_other_tokens_than_the_plan_is_refused(command, tmp_path, text):
    file, _ = planned(command, tmp_path, "--model", SHAPE.replace("300", "100"), *SMALL)
    with pytest.raises(ConfigError, match=r"model.vocabulary is 100, but .* holds tokens up to 255"):
        prepare(load_config(file, [f"data={text}", "held_out=0.2"]))


def test_presets_are_planned_with_their_whole_shape(command):
    run = command("plan", "--model", "tiny", *SMALL, "--json")
    found = json.loads(run.stdout)
    assert (found["profile"], found["cost"]) == ("tiny", "simulated")
    assert sorted({plan["samples_per_microbatch"] for plan in found["plans"]} | {1, 2, 4}) == [1, 2, 4]
    settings = profile_by_formulas(model_named("124m"), find_cluster("v100"), [1]).settings
    model = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 51200}
    assert settings == {"model": model, "precision": "fp16"}


def test_microbatch_sizes_of_a_model_are_those_that_are_given(command):
    run = command("plan", "--model", "tiny", *SMALL, "--microbatch-sizes", "8", "--json")
    assert {plan["samples_per_microbatch"] for plan in json.loads(run.stdout)["plans"]} == {8}


@pytest.mark.parametrize(("hidden", "heads"), [(2048, 16), (48, 1), (300, 2), (258, 1), (640, 5), (1542, 3), (7, 1)])
def test_heads_are_as_many_as_a_gpt_can_have(hidden, heads):
    """300 / 2 = 150 in pairs; 258 has no two heads of pairs, and an odd size not one."""
    shape = model_named(f"layers=2,hidden={hidden},sequence=8,vocabulary=9")
    assert shape.heads == heads
    assert bool(profile_by_formulas(shape, find_cluster("a100"), [1]).settings) == (hidden != 7)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (SHAPE.replace("heads=3", "heads=5"), "model.width 48 must be a multiple of twice model.heads"),
        (SHAPE.replace("sequence=8", "sequence=1"), "context"),
    ],
)
def test_a_model_that_train_does_not_have_is_not_replaced_by_another(command, tmp_path, shape, why):
    file, said = planned(command, tmp_path, "--model", shape, *SMALL)
    assert "For blocks of your own: Pipeline(" in said
    assert "penstock train" not in said
    assert f"# profile: analytic: a100, {312e12:.4g} operations per second in bf16; not a GPT" in file.read_text()
    assert why in file.read_text()
    config = load_config(file, [])
    with pytest.raises(ConfigError, match=r"the plan is for the model '4 x 48', which penstock train does not have"):
        check_enough_blocks(config)
    check_enough_blocks(load_config(file, ["model.planned=null"]))
    check_enough_blocks(load_config(file, ["model.width=64", "model.layers=4"]))
    with pytest.raises(ConfigError, match="set model.layers and model.width"):
        check_enough_blocks(load_config(file, ["model.width=64"]))  # the rest would be the preset's


def test_another_mlp_is_not_that_of_the_gpt():
    found = profile_by_formulas(ModelShape("wide", 2, 16, 8, 2, 3.0, 9), find_cluster("a100"), [1])
    assert (found.settings, found.source.endswith("it has another MLP")) == ({}, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "plan needs --profile FILE and --devices N and --bandwidth B"),
        ([], "or by formulas, without a profile: penstock plan --model 1.3b --cluster h100"),
        (["--model", "tiny", "--profile", "p.yaml"], "--profile and --model both say what is planned for"),
        (["--model", "tiny", "--devices", "2"], "--model needs --cluster"),
        (["--model", "tiny", "--cluster", "a100"], "The cluster a100 does not say (`nodes` in its file): give"),
        (["--model", "tyny", *SMALL], "takes 'tiny', 'small', '124m', '355m', '1.3b', '2.2b' or '3.8b', or a shape"),
        (["--model", "tyny", *SMALL], "Did you mean 'tiny'?"),
        (["--model", "layers=2,hidden=8", *SMALL], "--model needs sequence, vocabulary, too"),
        (["--model", "layers=2,width=8", *SMALL], "got 'width'"),
        (["--model", "layers=2,layers=8", *SMALL], "gives layers twice"),
        (["--model", "layers=2,hidden=x", *SMALL], "--model: hidden takes whole numbers"),
        (["--model", "layers=2,tiny", *SMALL], "got 'tiny'"),
        (["--model", SHAPE.replace("layers=4", "layers=9999999"), *SMALL], "must be at most 4,998"),
        (["--model", "tiny", *SMALL, "--microbatch-sizes", "3"], "no profiled microbatch size (3) divides a batch"),
        (["--model", "tiny", *SMALL, "--microbatch-sizes", "0"], "--microbatch-sizes must be a whole number"),
        (["--microbatch-sizes", "1"], "--microbatch-sizes is for --model"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(command, options, said):
    run = command("plan", *options)
    assert run.returncode == 2
    assert said in " ".join(run.stderr.split())


def test_clusters_may_say_how_many_devices_there_are_and_what_they_cost(command, tmp_path):
    """Of two clusters both have to."""
    a100 = find_cluster("a100")
    some = a100.model_copy(update={"name": "some", "node": 2, "nodes": 2})
    assert device_counts(None, [some, some]) == "4+4"
    assert device_counts("8", [a100]) == "8"
    with pytest.raises(ConfigError, match="The cluster a100 does not say"):
        device_counts(None, [some, a100])
    file = tmp_path / "mine.yaml"
    values = some.model_dump(exclude_none=True) | {"price": {"value": 2.5, "source": "assumed"}}
    file.write_text(yaml.safe_dump(values))
    given = ("--model", "tiny", "--cluster", file, "--global-batch", "8", "--methods", "1f1b", "--json")
    assert json.loads(command("plan", *given).stdout)["devices"] == 4
    of_file, of_option = (
        json.loads(command("plan", *given, "--objective", "cost", *more).stdout) for more in ((), ("--price", "5"))
    )
    assert of_option["trials"][0]["value"] == pytest.approx(2 * of_file["trials"][0]["value"])
    best = of_file["plans"][0]
    values = [trial["value"] for trial in of_file["trials"]]
    assert min(values) == pytest.approx(best["devices"] * best["seconds_per_sample"] * 1e6 / 3600 * 2.5)


def test_prices_of_clusters_are_one_or_asked_for():
    cheap, dear = (
        find_cluster("a100").model_copy(
            update={"price": find_cluster("a100").flops.model_copy(update={"value": value})}
        )
        for value in (1.0, 2.0)
    )
    assert price_of(None, [cheap, cheap], "cost") == 1.0
    assert price_of(3.0, [cheap, dear], "cost") == 3.0
    assert price_of(None, [cheap, dear], "throughput") is None
    assert price_of(None, [], "cost") is None
    with pytest.raises(ConfigError, match="different prices"):
        price_of(None, [cheap, dear], "cost")


@pytest.mark.parametrize(
    "arguments",
    [
        "plan --profile missing.yaml", "plan --model huge", "plan --model tiny --microbatch-sizes x",
        "plan --model tiny --out missing/plan.yaml", "plan --model tiny --timeline missing/plan.svg",
        "plan --model tiny --link-matrix missing.yaml --planner spp", "plan --model tiny --epochs x --epoch-samples 9",
        "plan --model tiny --memory x", "plan --model tiny --host-memory x",
        "plan --model tiny --cluster this-machine,missing", "plan --model tiny --cluster this-machine,a100 --devices 1",
        "plan --model tiny --speed x", "plan --model tiny --speed 1,2", "plan --model tiny --latency x",
        "plan --model tiny --latency 1e-6,1e-6,1e-6", "plan --model tiny --bandwidth 1GB",
        "plan --model tiny --price 2", "plan --profile known.yaml --link-matrix links.yaml --planner spp",
        "plan --model tiny --objective cost --price -1", "plan --model tiny --objective x",
        "plan --model tiny --objective time-to-target", "plan --model tiny --planner x", "plan --model tiny --cost x",
        "plan --model tiny --methods x", "plan --model tiny --devices x", "plan --model tiny --devices 10000000",
        "plan --model tiny --microbatch-sizes 2 --global-batch 7", "plan --model tiny --worlds 1",
        "plan --model tiny --global-batch 8 --microbatches 4", "plan --model tiny --straight --cost simulated",
        "scale --x 8 --steps 0", "scale --x 8 --critical-batch 0", "scale --x 8 --plots /dev/null/plots",
        "scale --x 8 --rules missing.yaml", "scale", "scale --x 8 --memory x",
        "profile --layers 2", "profile --layers 2 --hidden 8 --sequence 8 --vocabulary 8 --out missing/profile.yaml",
        "profile --layers 2 --hidden 8 --sequence 8 --vocabulary 8 --calibration missing.yaml",
    ],
)  # fmt: skip
def test_nothing_is_measured_before_what_is_cheap_was_checked(monkeypatch, capsys, tmp_path, arguments):
    def measured():
        raise AssertionError("the machine was measured")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.yaml").write_text("links: [[0.0, 1e9, 1e9], [1e9, 0.0, 1e9], [1e9, 1e9, 0.0]]")
    model = "profile --cluster h100 --layers 2 --hidden 8 --sequence 8 --vocabulary 8 --out known.yaml"
    if "known" in arguments:
        assert run(monkeypatch, capsys, *model.split())[0] == 0
    monkeypatch.setattr("penstock.measure.this_machine.this_machine", measured)
    where = [] if "--cluster" in arguments else ["--cluster", "this-machine"]
    code, _, err = run(monkeypatch, capsys, *arguments.split(), *where)
    assert (code, err[:7]) == (2, "error: ")
