"""Runs that a machine cannot hold are refused before anything is made."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, WorkerError
from penstock.models.gpt_shape import preset
from penstock.train.config.load import load_config
from penstock.train.setup import machine_memory
from penstock.train.setup.machine_memory import check_machine_memory, check_workers, ways_to_take_less
from support.command_line import run


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 GiB."""
    monkeypatch.setattr(machine_memory, "_physical_memory", lambda: 16 << 30)


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ([], None),
        (["width=2"], "weights and gradients 16.5 GiB, the logits of a microbatch 0.0 GiB, processes 0.2 GiB"),
        (["microbatch_size=200000"], "weights and gradients 8.3 GiB, the logits of a microbatch 12.2 GiB"),
        (["stages=200"], "processes 9.8 GiB"),
    ],
)
def test_the_least_that_a_run_takes(changes: list[str], parts: str | None) -> None:
    model = preset("1.3b", vocabulary=256, context=64, layers=22)
    assert 1.05e9 < model.parameters < 1.15e9
    config = load_config(None, ["method=1f1b", *changes])
    if parts is None:
        check_machine_memory(config, model)
        return
    with pytest.raises(ConfigError, match=r"takes at least 1\d\.\d GiB|takes at least 2\d\.\d GiB") as refused:
        check_machine_memory(config, model)
    assert parts in str(refused.value)
    assert "but this machine has 16.0 GiB; use a smaller model" in str(refused.value)


def test_a_machine_that_does_not_say_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "_physical_memory", lambda: None)
    check_machine_memory(load_config(None, []), preset("3.8b", vocabulary=256))


def test_more_processes_than_a_machine_starts() -> None:
    check_workers(load_config(None, ["stages=60", "width=2"]))
    with pytest.raises(
        ConfigError, match="61 stages in each of 2 pipelines are 122 processes, but one machine starts 120"
    ):
        check_workers(load_config(None, ["stages=61", "width=2"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("width=1000", "2 stages in each of 1000 pipelines are 2000 processes"),
        ("model.width=1000000", "the run takes at least"),
        ("microbatch_size=1000000", "the logits of a microbatch"),
        ("stages=100", "the model has 6 blocks, which cannot be cut into 100 stages"),
    ],
)
def test_the_command_refuses_them_at_once(change: str, message: str, monkeypatch, capsys, tmp_path) -> None:
    """Before a block is made or a schedule proven; of a job of torchrun each machine holds a part only."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("blocks were made, or a schedule proven")

    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    monkeypatch.setattr("penstock.schedule.build.check", made)
    monkeypatch.setattr("penstock.schedule.add_options.check", made)
    if message != "the model has 6 blocks, which cannot be cut into 100 stages":
        monkeypatch.setattr("penstock.models.gpt_variant.gpt_blocks", made)
    code, out, err = run(monkeypatch, capsys, "train", "--data", tmp_path / "text.txt", "--set", change)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["stages=4", "width=2", "microbatch_size=8"],
            [
                "keep_freed_memory=false: up to half as much as the memory ledger says lies free otherwise",
                "recompute=block: of a microbatch in flight each layer keeps its input alone, 4.0 MiB",
                "microbatch_size=4 with twice as many microbatches: activations halve, and so do the logits of one, "
                "512.0 KiB",
                "sharding=gradients: each of the 2 pipelines keeps its part of optimizer states, 2.1 GiB of a stage",
                "stages=5 or more: each has fewer layers",
            ],
        ),
        (
            ["keep_freed_memory=false", "recompute=block", "microbatch_size=1", "options={in_flight: 3}"],
            [
                "options.in_flight, which is 3: a smaller number, or none",
                "sharding=gradients with width=2 or more: parallel pipelines divide optimizer states, 4.1 GiB of a "
                "stage",
                "stages=3 or more: each has fewer layers",
            ],
        ),
        (
            ["method=spectrain", "keep_freed_memory=false", "microbatch_size=1"],  # no recompute, no sharding
            ["stages=3 or more: each has fewer layers"],
        ),
    ],
)
def test_what_makes_a_run_take_less(changes: list[str], said: list[str]) -> None:
    model = preset("1.3b", vocabulary=256, context=64, layers=22)
    assert ways_to_take_less(load_config(None, ["method=1f1b", *changes]), model) == said


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("exit code -9: Signal 9 (SIGKILL) received by PID 5", True),
        ("exit code 1: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes", True),
        ("exit code 1: ValueError: no", False),
    ],
)
def test_a_worker_that_found_no_memory_is_told_what_takes_less(
    failure: str, told: bool, monkeypatch, capsys, tmp_path
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise WorkerError(f"worker 0 failed with {failure}", "")

    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    monkeypatch.setattr("penstock.launch.launch.launch_local", fails)
    given = ("--data", tmp_path / "text.txt", "--set", f"out={tmp_path / 'runs'}", "--set", "recompute=block")
    code, _, err = run(monkeypatch, capsys, "train", *given)
    assert code == 1
    assert ("if there was no memory left" in err and "\n  microbatch_size=" in err) == told
    assert "recompute=block:" not in err
