"""Orders of one's own in the configuration of a run, which holds them from then on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.config.written_config import note_changes
from penstock.train.export.weights_folder import load_weights
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.run_folder import make_run_folder
from support.command_line import Command, only_folder, settings

ORDER = """
def order(stages, microbatches, *, ahead=0):
    programs = []
    for rank in range(stages):
        first = min(stages - rank + ahead, microbatches)
        passes = [f"F{k}" for k in range(first)]
        for k in range(microbatches):
            passes += [f"B{k}"] + ([f"F{first + k}"] if first + k < microbatches else [])
        programs.append(passes)
    return programs
"""


@pytest.fixture
def order(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(ORDER)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_a_file_is_read_once(order: Path) -> None:
    """From then on the configuration holds the schedule, under the name of its file, and needs it no more."""
    config = load_config(None, [f"schedule={order}:ahead=1", "stages=3", "microbatches=5"])
    order.unlink()
    assert (config.method, config.stages, config.microbatches, config.options) == (None, 3, 5, {})
    assert config.schedule is not None
    assert config.schedule.startswith(f"# {order}:ahead=1\nschedule mine\nrule flush\nmicrobatches 5\n")
    assert "\nrank 0: F0^t F1^t F2^t F3^t B0^t F4^t B1^t" in config.schedule
    assert validate_config(config.model_dump()) == config
    assert (config.row.name, config.row.rule, config.row.correction) == ("mine", "flush", "none")


@pytest.mark.parametrize("name", ["zb-v", "2bw", "interleaved"])
def test_finished_schedules_bring_their_sizes(name: str, tmp_path: Path) -> None:
    schedule = penstock.make_schedule(name, 2, 6)
    schedule.save(tmp_path / "mine.txt")
    config = load_config(None, [f"schedule={tmp_path / 'mine.txt'}"])
    assert (config.stages, config.microbatches, config.row.rule) == (2, 6, schedule.schedule.rule)
    assert str(schedule) in (config.schedule or "")


def test_a_table_of_torch_is_read_too(tmp_path: Path) -> None:
    penstock.make_schedule("zb-v", 2, 6).save(tmp_path / "mine.csv")
    config = load_config(None, [f"schedule={tmp_path / 'mine.csv'}"])
    assert (config.row.name, config.stages, config.microbatches) == ("mine", 2, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method=1f1b"], "give either a method or a schedule of your own; leave method=1f1b out"),
        (["options={behind: 2}"], "has no option 'behind'; it has ahead"),
        (["correction={decay: 0.1}"], "method 'mine' has no correction"),
        (["undo=in-place"], "undo=in-place: a schedule of your own says so itself"),
        (["stages=7", "microbatches=8"], "the model has 6 blocks, which cannot be cut into 7 stages"),
        (["schedule=nowhere.py"], "there is no Python file 'nowhere.py'"),
        (["schedule=nowhere.txt"], "cannot read a schedule from 'nowhere.txt': No such file or directory"),
        (["schedule=null", "method=null"], "method: give one (penstock methods lists them), or a schedule of your own"),
    ],
)
def test_what_does_not_go_with_an_order_of_ones_own(order: Path, text: Path, changes: list[str], message: str) -> None:
    with pytest.raises(PenstockError) as refused:
        prepare(load_config(None, [f"schedule={order}", f"data={text}", *changes]))
    assert message in str(refused.value)


@pytest.mark.parametrize("rule", ["predicted", "blended"])
def test_a_rule_that_needs_a_correction_is_trained_with_one(rule: str, tmp_path: Path, text: Path) -> None:
    method = {"predicted": "spectrain", "blended": "i-timeprest"}[rule]
    penstock.make_schedule(method, 2, 4).save(tmp_path / "mine.txt")
    with pytest.raises(
        ConfigError, match=f"rule '{rule}' reads weights that a correction makes; name it with --correction: {method}"
    ):
        prepare(load_config(None, [f"schedule={tmp_path / 'mine.txt'}", f"data={text}"]))
    own = f"schedule={tmp_path / 'mine.txt'}:correction={method}"
    prepared = prepare(load_config(None, [own, f"data={text}"]))
    assert prepared.config.corrected_by == prepared.config.row.correction == method
    assert prepared.plan.options.staleness.correction is not None
    again = load_config(None, [own, f"data={text}", "method=1f1b", "schedule=null"])
    assert (again.method, again.corrected_by) == ("1f1b", None)


def test_a_run_folder_holds_what_it_takes_to_go_on(order: Path, tmp_path: Path) -> None:
    """The method or the schedule that is given last counts; what does not fit is refused."""
    config = load_config(None, [f"schedule={order}", "microbatches=4", f"out={tmp_path / 'runs'}"])
    folder = make_run_folder(config)
    assert folder.name.endswith("-mine-2x4")
    assert "\nschedule: |\n  # " in (folder / "config.yaml").read_text()
    order.write_text("raise ValueError('it has changed')\n")
    path = folder / "config.yaml"
    assert load_config(path, []) == config
    assert load_config(path, ["batches=7"]).schedule == config.schedule
    other = load_config(path, ["method=2bw"])
    assert (other.method, other.schedule) == ("2bw", None)
    for change, message in (
        ("stages=3", "is for 2 ranks and 4 microbatches, but stages is 3; set stages to 2, or give a file"),
        ("microbatches=8", "but microbatches is 8; set microbatches to 4, or give a file with another one"),
        (
            "options={ahead: 1}",
            "options: a schedule that has been read takes none; leave it out, or give --file too",
        ),
        (f"schedule={order}", "line 1: ValueError: it has changed"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(path, [change])
    order.write_text(ORDER)
    later = load_config(path, [f"schedule={order}:ahead=1"])
    note_changes(later, folder, 3)
    assert path.read_text().startswith(f"# From batch 3 on: schedule={order}:ahead=1 (before: {order})\n")
    assert load_config(path, []) == later


def test_sizes_of_a_finished_schedule_are_not_ignored(tmp_path: Path) -> None:
    penstock.make_schedule("1f1b", 2, 6).save(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match="is for 2 ranks and 6 microbatches, but stages is 4; set stages to 2"):
        load_config(None, [f"schedule={tmp_path / 'mine.txt'}", "stages=4"])
    with pytest.raises(ConfigError, match="holds a finished schedule; leave 'ahead' out"):
        load_config(None, [f"schedule={tmp_path / 'mine.txt'}", "options={ahead: 4}"])


def test_the_default_is_a_method() -> None:
    assert TrainConfig().row.name == "2bw"
    assert load_config(None, ["method=pipemare:reschedule=100:decay=null"]).correction == {
        "reschedule": 100,
        "decay": None,
    }
    assert load_config(None, ["method=interleaved:chunks=3"]).options == {"chunks": 3}


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "batch" in line]


@pytest.mark.processes
def test_it_is_trained_and_goes_on_without_its_file_bit_for_bit(
    order: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    """As a run of a method that runs its backwards in the same order, to which nothing has happened."""
    same = settings("sample_length=0", "lr_schedule.decay=none", "lr_schedule.warm_up=0", "microbatches=3")
    rest = ("--data", text, *same)
    cut = command("train", "--file", f"{order}:ahead=1", *rest, "--set", f"out={tmp_path / 'cut'}", "--batches", 3)
    assert cut.returncode == 0, cut.stderr
    assert cut.stdout.startswith("mine on 2 stages, 3 batches of 3 microbatches")
    folder = only_folder(tmp_path / "cut")
    order.unlink()
    resumed = command("train", "--resume", folder, "--batches", 6)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from the checkpoint after 3 batches" in resumed.stdout
    whole = command("train", "gpipe", *rest, "--set", f"out={tmp_path / 'whole'}", "--batches", 6)
    assert whole.returncode == 0, whole.stderr
    other = only_folder(tmp_path / "whole")
    assert losses(folder) == losses(other)
    found, wanted = load_weights(folder), load_weights(other)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
