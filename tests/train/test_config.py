"""The configuration: strict, and helpful when it refuses."""

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.methods.compatibility import correction_options
from penstock.schedule.methods.table import METHODS
from penstock.train.config.key_reference import (
    commented_reference,
    described_keys,
    known_keys,
    with_option_keys,
)
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.prepare.prepare_run import prepare
from penstock.verify.verify import verify
from support.offered_methods import OFFERED
from support.own_methods import chosen


def test_the_defaults_are_a_2_stage_2bw_pipeline():
    config = load_config(None, [])
    assert (config.method, config.stages) == ("2bw", 2)


def test_changes_are_read_as_the_field_means_them():
    config = load_config(
        None,
        [
            "method=1f1b",
            "stages=4",
            "optimizer.lr=1e-3",
            "memory_limit=1.5GiB",
            "in_flight_bytes=2e6",
            "lr_schedule.floor=0",
            "balance=[1, 2]",
            "prompt=1",
            "data=null",
        ],
    )
    assert (config.method, config.stages, config.optimizer.lr, config.lr_schedule.floor) == ("1f1b", 4, 1e-3, 0)
    assert (config.memory_limit, config.in_flight_bytes) == (1.5 * 2**30, 2e6)
    assert (config.balance, config.prompt, config.data) == ([1, 2], "1", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["combine.kind=average"],
            "combine=average needs parallel pipelines; set data_parallel",
        ),
        (["combine.kind=bmuf", "combine.pull=0.1"], "pull is an option of elastic, not of bmuf"),
        (["combine.kind=elastic", "combine.pull=0.9", "width=2"], "pull must be at most 1/w = 0.5 with 2 pipelines"),
        (["combine.kind=average", "width=2", "combine.every=7"], "batches is 1000, but with combine.kind=average"),
        (
            ["combine.kind=average", "width=2", "combine.every=4", "evaluate.every=6"],
            "evaluate.every is 6, but with combine.kind=average pipelines meet every 4 batches",
        ),
        (
            ["combine.kind=average", "width=2", "evaluate.every=4", "evaluate.patience=2"],
            "evaluate.patience needs to hear of evaluations",
        ),
        (["combine.kind=average", "width=2", "ema_decay=0.9"], "ema_decay=0.9 and combine=average do not go together"),
        (["combine.kind=average", "width=2", "reduce=fast"], "reduce=fast cannot be used with combine=average"),
        (["combine.kind=average", "width=2", "delays=2", "method=1f1b"], "delays cannot be used with combine=average"),
        (
            ["combine.kind=average", "width=2", "sync.batches=10"],
            "sync.method: parallel pipelines with combine=average cannot",
        ),
        (["combine.kind=average", "width=2", "method=pipemare"], "is not supported with correction 'pipemare'"),
        (["combine.kind=average", "width=2", "method=zb-h2-post"], "use the method without post-validation"),
        (
            ["combine.kind=wsp"],
            "combine=wsp needs parallel pipelines; set data_parallel",
        ),
        (["combine.kind=wsp", "width=2", "combine.lag=2"], "lag must be a whole number of waves from 0 to distance=0"),
        (
            ["combine.kind=wsp", "width=3", "combine.distance=2", "combine.lag=[2, 0]"],
            "lag has 2 numbers for 3 pipelines; give one for each, or one",
        ),
        (["combine.kind=wsp", "width=2", "combine.every=3"], "batches is 1000, but with combine.kind=wsp"),
        (
            ["combine.kind=wsp", "width=2", "combine.lag=record", "model.tied=true"],
            "parameters (tied ones) would diverge",
        ),
        (["combine.kind=wsp", "width=2", "combine.lag=nowhere"], "combine.lag: cannot read 'nowhere': No such file"),
        (["combine.kind=wsp", "width=2", "combine.lag=/dev/null"], "'/dev/null' is not a lags.json written by a run"),
    ],
)
def test_what_does_not_go_with_a_way_to_combine_is_refused_before_the_start(changes, message):
    with pytest.raises(ConfigError) as refused:
        prepare(load_config(None, changes))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], None),
        (["stages=2"], "combine.lag: lag was not recorded at 0/1 (pipeline/stage) of this run"),
        (["combine.every=3"], "lag was recorded where waves ended after 2 batches, but here they have 3"),
        (["batches=12"], "lag was recorded in a run of about 6 batches, but this run has 12"),
    ],
)
def test_lags_of_another_run_are_refused_before_the_start(tmp_path, changes, message):
    path, taken = tmp_path / "lags.json", {"1": [0, 1], "3": [0, 0], "5": [0, 0]}
    path.write_text(json.dumps({"0/0": taken, "1/0": taken}))
    waves = ["combine.kind=wsp", "width=2", "combine.every=2", "combine.distance=1", f"combine.lag={path}"]
    config = load_config(None, ["method=stash", "stages=1", "batches=6", *waves, *changes])
    if message is None:
        prepare(config)
        return
    with pytest.raises(ConfigError) as refused:
        prepare(config)
    assert message in str(refused.value)


def test_verify_does_not_compare_pipelines_that_meet_now_and_then():
    with pytest.raises(ConfigError, match=r"combine\.kind=average.*; leave combine out"):
        verify(load_config(None, ["combine.kind=average", "width=2"]), 1)


def test_a_file_and_changes_on_top(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("method: gpipe\noptimizer: {lr: 1e-4}\nmodel:\n  layers: 3\n")
    config = load_config(path, ["model.width=64"])
    assert (config.method, config.optimizer.lr, config.model.layers, config.model.width) == ("gpipe", 1e-4, 3, 64)


def test_what_is_written_into_a_run_folder_can_be_read_back(tmp_path):
    config = load_config(None, ["method=gpipe", "model.layers=3"])
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path, []) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metod": "2bw"}, "unknown configuration key 'metod'; did you mean 'method'?"),
        ({"model": {"layer": 3}}, "unknown configuration key 'model.layer'; did you mean 'model.layers'?"),
        ({"lr": 0.1}, "unknown configuration key 'lr'; did you mean 'optimizer.lr'?"),
        ({"eval": {"every": 3}}, "unknown configuration key 'eval.every'; did you mean 'evaluate.every'?"),
        ({"evaluate": {"evry": 3}}, "unknown configuration key 'evaluate.evry'; did you mean 'evaluate.every'?"),
        ({"eval": 3}, "unknown configuration key 'eval'; did you mean 'evaluate'?"),
        (
            {"every": 3},
            "unknown configuration key 'every'; did you mean 'checkpoint.every', 'evaluate.every' or 'combine.every'?",
        ),
        ({"chunks": 3}, "unknown configuration key 'chunks'; did you mean 'options.chunks'?"),
        ({"decay": 3}, "unknown configuration key 'decay'; did you mean 'lr_schedule.decay' or 'correction.decay'?"),
        ({"optimizer": {"learning_rate": 1}}, "unknown configuration key 'optimizer.learning_rate'"),
        ({"xyzzy": 1}, "unknown configuration key 'xyzzy'"),
        ({"stages": "two"}, "stages: input should be a valid integer, got 'two'"),
        ({"stages": True}, "stages: input should be a valid integer, got True"),
        ({"fallback": {"when": "spike"}}, "fallback.when: input should be a list, as in fallback.when=[spike], got"),
        ({"stages": 2.5}, "stages: input should be a valid integer, got 2.5"),
        ({"stages": 0}, "stages: input should be greater than or equal to 1, got 0"),
        ({"optimizer": {"name": "adamx"}}, "optimizer.name: input should be 'adamw', 'adam', 'nadam', 'sgd', 'muon'"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: input should be a valid number"),
        ({"memory_limit": "5x"}, "memory_limit: input should be a size in bytes, such as 2e9 or 16GiB, or null, got"),
        ({"max_grad_norm": "none"}, "max_grad_norm: input should be a valid number or null, got 'none'"),
        ({"max_grad_norm": 0}, "max_grad_norm: input should be greater than 0 or null, got 0"),
        ({"evaluate": {"every": "never"}}, "evaluate.every: input should be a valid integer or null, got 'never'"),
        ({"optimizer": {"lr": "none"}}, "optimizer.lr: input should be a valid number, got 'none'"),
        ({"balance": [1, "x"]}, "balance.1: input should be a valid integer, got 'x'"),
        ({"combine": {"lag": [1.5]}}, "combine.lag.list[int].0: input should be a valid integer, got 1.5"),
        ({"correction": {"decay": "x"}}, "correction.decay: input should be a valid number, got 'x'"),
        ({"model": 5}, "model: expected a section with keys, such as model.preset, got 5"),
        ({"delays": 2.5}, "delays: input should be a number, a list of numbers, {block: number, ...} or a profile"),
        ({"delays": {"head": "3"}}, "delays: input should be a number, a list of numbers, {block: number, ...} or"),
    ],
)
def test_what_is_wrong_is_said_with_the_key(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_config(values)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        validate_config({"metod": 1, "stages": 0, "optimizer": {"lr": -1}, "eval": {"every": 3, "sample": 8}})
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "unknown configuration key 'eval.sample'; did you mean 'evaluate.samples'?" in lines


@pytest.mark.parametrize("key", ["method", "sync.method", "fallback.method"])
def test_a_method_that_there_is_not_is_named_with_its_key(key):
    phases = ["sync.batches=3", "fallback.at=5"]
    with pytest.raises(
        ConfigError, match=r"unknown method '1f2b'. Did you mean '1f1b', '2bw' or 'seq1f1b'\?"
    ) as refused:
        prepare(load_config(None, [*phases, f"{key}=1f2b"]))
    assert str(refused.value).startswith(f"{key}: " if key != "method" else "unknown method")


@pytest.mark.parametrize("change", ["method", "=3", "stages.x=1"])
def test_malformed_changes_are_refused(change):
    with pytest.raises(ConfigError, match="--set|stages"):
        load_config(None, [change])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "nowhere.yaml", [])
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "bad.yaml", [])
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        load_config(tmp_path / "list.yaml", [])


def test_every_field_is_described():
    for key in known_keys():
        section, _, inner = key.partition(".")
        field = TrainConfig.model_fields[section]
        if inner:
            field = field.annotation.model_fields[inner]
        assert field.description, key


def test_the_commented_reference_is_a_configuration_that_changes_nothing(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(commented_reference())
    assert load_config(path, []) == TrainConfig()
    lines = path.read_text().splitlines()
    for key, _, meaning in described_keys():
        place = next(
            i
            for i, line in enumerate(lines)
            if line.strip().startswith(f"{key.rpartition('.')[2]}:") and lines[i - 1].strip() == f"# {meaning}"
        )
        assert lines[place].startswith("  ") == ("." in key)


@pytest.mark.parametrize("method", OFFERED)
def test_every_method_starts_by_its_name_alone(method: str) -> None:
    text = Path(__file__).parents[2] / "LICENSE"
    prepare(load_config(None, [f"method={method}", f"data={text}", "model.context=16"]))


def test_a_method_s_settings_are_those_that_are_not_given() -> None:
    own = chosen("nag-pp")
    nag = load_config(None, [own])
    assert (nag.optimizer.name, nag.optimizer.beta1) == ("nadam", 0.99)  # the paper's
    assert load_config(None, [own, "optimizer.name=nadam"]).optimizer.beta1 == 0.99
    assert load_config(None, [own, "optimizer.beta1=0.9"]).optimizer.beta1 == 0.9
    other = load_config(None, [chosen("spike"), "optimizer.name=adamw"]).optimizer
    assert (other.name, other.nesterov) == ("adamw", True)  # refused later: it is not what the method needs
    assert load_config(None, [chosen("wpipe")]).max_grad_norm is None
    assert load_config(None, [chosen("wpipe"), "max_grad_norm=2"]).max_grad_norm == 2
    assert load_config(None, ["method=2bw"]) == load_config(None, [])


def test_every_choice_is_named_with_its_key():
    """What the message names that refuses another one."""
    meanings = {key: meaning for key, _, meaning in described_keys()}
    for key, wrong in (
        ("precision", "x"),
        ("reduce", "x"),
        ("undo", "x"),
        ("lr_schedule.decay", "x"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [f"{key}={wrong}"])
        choices = re.findall(r"'(\S+?)'", str(refused.value).rpartition(", got")[0])
        assert choices
        assert meanings[key].startswith(f"{', '.join(choices[:-1])} or {choices[-1]}: ")
    with pytest.raises(ConfigError, match="none or activations, or a list of these"):
        load_config(None, ["offload=x"])
    assert load_config(None, ["offload=[none, activations]"]).offload == ["none", "activations"]
    assert meanings["optimizer.name"].count("sgd") == 1  # where a description names them, they are not named again


def test_options_of_methods_are_listed_under_their_sections():
    """With the methods that take them, and their defaults there."""
    rows = with_option_keys(described_keys())
    names = [key for key, _, _ in rows]
    assert names[names.index("correction") + 1] == "correction.reschedule"
    assert [row for row in rows if row[0] in known_keys()] == described_keys()
    found = {key: (default, meaning.removeprefix("of ")) for key, default, meaning in rows}
    for method in METHODS.values():
        for option, default in correction_options(method, {}).items():
            said, meaning = found[f"correction.{option}"]
            assert said == default
            assert method.name in re.split(", |: ", meaning)
    assert found["options.chunks"] == (
        2,
        "interleaved, depth-first-full, breadth-first, layered, 2bw-layered, zb-interleaved (docs/orders.md)",
    )
    assert found["options.ahead"][0] == 2
    assert "\n#   correction.beta: of i-timeprest: the share " in commented_reference()


def test_the_window_of_every_method_of_a_run() -> None:
    """It reaches the proofs by which transports are made, with all that a run adds to the schedules."""
    text = f"data={Path(__file__).parents[2] / 'LICENSE'}"
    small = ["stages=2", "model.layers=2", "model.context=8", text, "sync.batches=2", "fallback.at=9"]
    for key, window in (([], 2), (["window=5"], 5)):
        prepared = prepare(load_config(None, [*small, "recompute=stage", *key]))
        plans = [prepared.plan_of(phase) for phase in ("sync", "main", "fallback")]
        assert [plan.schedule.name for plan in plans] == ["1f1b", "2bw", "1f1b"]
        assert [plan.proof.lowered.window for plan in plans] == [window] * 3


def test_a_window_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match="window: input should be greater than or equal to 1 or null, got 0"):
        load_config(None, ["window=0"])
    text = f"data={Path(__file__).parents[2] / 'LICENSE'}"
    changes = ["method=breadth-first", "microbatches=4", "model.layers=2", "model.context=8", "window=1", text]
    with pytest.raises(ScheduleError) as refused:
        prepare(load_config(None, changes))
    first, *_, last = str(refused.value).splitlines()
    assert first == "breadth-first cannot run with a window of 1: deadlock: 2 ranks would wait for ever"
    assert last == "It is proven with a window of 2; set it to 2 or more"
