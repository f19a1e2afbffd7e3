"""How far a run is, before it goes on: no process is needed to say so."""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoint.format import checkpoint_folder, checkpoints, complete, partial_folder as being_written
from penstock.checkpoint.index import write_index
from penstock.cli import main
from penstock.cli.train import _launch
from penstock.errors import CheckpointError, ConfigError, InterruptedRunError, WorkerError
from penstock.guarded_files import fingerprint
from penstock.job.place import JobPlace
from penstock.train.config.load import load_config
from penstock.train.config.written_config import note_changes, write_config
from penstock.train.data.run_samples import RunSamples
from penstock.train.metrics_file import Metrics
from penstock.train.setup.config_rollback import ConfigBefore
from penstock.train.setup.run_folder import check_resume, how_to_go_on, set_aside_run
from support.command_line import run as run_command

WORKER = JobPlace("torchrun", 0, 2, "127.0.0.1", 1)
LOST = {"bytes": 3, "sha256": "0" * 64}


def leave(run: Path, batch: int) -> None:
    """A checkpoint without tensors."""
    place = checkpoint_folder(run, batch)
    being_written(place).mkdir(parents=True)
    complete(place, {"facts": {"batch": batch}, "extra": {}, "files": {}, "tensors": {}})


def test_fewer_batches_than_a_run_has_are_refused(tmp_path: Path) -> None:
    leave(tmp_path, 100)
    leave(tmp_path, 112)
    with pytest.raises(ConfigError, match="has 112 batches already; set batches above that, got 111"):
        check_resume(load_config(None, ["batches=111"]), tmp_path)
    check_resume(load_config(None, ["batches=112"]), tmp_path)  # its end, where that has failed
    check_resume(load_config(None, ["batches=113"]), tmp_path)
    (checkpoint_folder(tmp_path, 112) / "index.json").write_text("{")  # the run goes on from the one before
    check_resume(load_config(None, ["batches=111"]), tmp_path)
    with pytest.raises(ConfigError, match="has 100 batches already"):
        check_resume(load_config(None, ["batches=20"]), tmp_path)


def test_what_has_no_checkpoint_or_no_whole_one_is_told_by_the_run(tmp_path: Path) -> None:
    check_resume(load_config(None, ["batches=1"]), tmp_path)
    leave(tmp_path, 5)
    (checkpoint_folder(tmp_path, 5) / "index.json").unlink()
    check_resume(load_config(None, ["batches=1"]), tmp_path)


@pytest.mark.parametrize("of_a_job", [False, True])
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "there is no folder 'nowhere' to resume a run from; a run names its folder when it ends"),
        ("text.txt", "'text.txt' is a file; give the folder of the run that is to be resumed"),
        ("empty", "'empty' is not the folder of a run of penstock train: it has no config.yaml"),
        ("runs", "it has no config.yaml; the newest run in it is 'runs/2026-02-01-120000-2bw-2x4'"),
    ],
)
def test_what_is_no_run_is_not_resumed(monkeypatch, capsys, tmp_path, folder, message, of_a_job) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.train.job_place", lambda _: WORKER if of_a_job else None)
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    for run in ("2026-01-01-120000-1f1b-2x4", "2026-02-01-120000-2bw-2x4"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").touch()
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "--resume", folder])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert " ".join(printed.err.split()).endswith(message)


@pytest.mark.parametrize("of_a_job", [False, True])
def test_the_command_refuses_before_it_starts_workers(monkeypatch, capsys, tmp_path, of_a_job) -> None:
    """Neither as the one who starts them nor as one of torchrun's."""
    leave(tmp_path, 112)
    (tmp_path / "config.yaml").write_text("batches: 112\n")
    started = []
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: started.append("workers"))
    monkeypatch.setattr("penstock.cli.train.job_place", lambda _: WORKER if of_a_job else None)
    monkeypatch.setattr("penstock.cli.train._work", lambda *_: started.append("work"))
    command = ["penstock", "train", "--resume", str(tmp_path), "--set"]
    monkeypatch.setattr(sys, "argv", [*command, "batches=20"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "has 112 batches already; set batches above that, got 20" in " ".join(capsys.readouterr().err.split())
    assert started == []
    monkeypatch.setattr(sys, "argv", [*command, "batches=120"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert (caught.value.code, started) == (0, ["work" if of_a_job else "workers"])


@pytest.mark.parametrize(
    ("failure", "code"), [(InterruptedRunError(signal.SIGINT), 130), (WorkerError("worker 1 failed", ""), 1)]
)
def test_a_run_that_ends_before_its_time_says_how_to_go_on(monkeypatch, capsys, tmp_path, failure, code) -> None:
    """Where it has a checkpoint; in a terminal below the live display, whose last line has no end."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)

    def launch(*_, **__):
        raise failure

    monkeypatch.setattr("penstock.launch.launch.launch_local", launch)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    for batch, said in ((None, "there is no checkpoint in .* yet"), (3, "after 3 batches: penstock train --resume .*")):
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        if batch is not None:
            leave(run, batch)
        (run / "config.yaml").write_text(f"data: {tmp_path / 'text.txt'}\n")
        monkeypatch.setattr(sys, "argv", ["penstock", "train", "--resume", str(run)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == code
        printed = capsys.readouterr()
        assert re.match(r"(There is no checkpoint.*batch 1\.\n)?\n", printed.out, re.DOTALL)
        assert re.search(said, " ".join(printed.err.split()))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of a run of two batches, with metrics but without checkpoints."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    run = tmp_path / "run"
    run.mkdir()
    write_config(load_config(None, [f"data={tmp_path / 'text.txt'}", "model.layers=2", "batches=7"]), run)
    for batch in (0, 1):
        Metrics(run).add(batch=batch, loss=1.0)
    return run


def resume(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Resume up to the start of workers: the exit code, what was printed, and what the worker is to do."""
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *values, **_: given.append(values[2:]))
    code, _, err = run_command(monkeypatch, capsys, "train", "--resume", *arguments)
    return code, " ".join(err.split()), str(given)


def test_a_run_that_has_lost_its_checkpoints_is_not_begun_again_without_a_word(monkeypatch, capsys, trained) -> None:
    code, err, started = resume(monkeypatch, capsys, trained)
    assert (code, started) == (2, "[]")
    assert "has trained 2 batches, but there is no checkpoint in" in err
    assert "(it has never had a checkpoint)" in err
    Metrics(trained).add(checkpoint=2)
    assert "its last checkpoint was of 2 batches" in resume(monkeypatch, capsys, trained)[1]
    assert "begin again with --restart" in err
    code, _, started = resume(monkeypatch, capsys, trained, "--restart", "--set", "checkpoint.every=null")
    assert code == 0
    assert started.endswith("True)]")
    leave(trained, 2)
    assert resume(monkeypatch, capsys, trained)[0] == 0


def test_another_model_is_refused_before_workers_start(monkeypatch, capsys, trained) -> None:
    """In one line; they would all say it, each of its own weights. Heads and context are of no weight."""
    place = checkpoint_folder(trained, 2)
    being_written(place).mkdir(parents=True)
    sizes = {"layers.0.mlp_norm.weight": 128, "layers.1.mlp_norm.weight": 128, "head.norm.weight": 128}
    tensors = {f"weights/{name}": torch.zeros(size) for name, size in sizes.items()}
    tensors["weights/head.out.weight"] = torch.zeros(256, 128)
    save_file(tensors, being_written(place) / "stage-0.safetensors")
    files = {"stage-0.safetensors": fingerprint(being_written(place) / "stage-0.safetensors")}
    homes = dict.fromkeys(tensors, "stage-0.safetensors")
    complete(place, {"facts": {"batch": 2}, "extra": {}, "files": files, "tensors": homes})
    for change, said in (
        ("model.layers=3", "model.layers is 3, but the weights of the run in '[^']*' are of a model with 2; leave"),
        ("model.width=64", "model.width is 64, but the weights .* of a model with 128; leave the change out, or"),
        ("model.vocabulary=300", "model.vocabulary is 300, but the weights .* of a model with 256; leave"),
    ):
        code, err, started = resume(monkeypatch, capsys, trained, "--set", change)
        assert (code, started) == (2, "[]")
        assert re.match(f"error: {said}", err), err
    for change in ("model.heads=2", "model.context=64", "model.vocabulary=256"):
        assert resume(monkeypatch, capsys, trained, "--set", change)[0] == 0


def test_to_begin_again_needs_a_run(monkeypatch, capsys) -> None:
    code, _, err = run_command(monkeypatch, capsys, "train", "--restart")
    assert code == 2
    assert "give the folder with --resume" in err


def test_records_of_before_are_set_aside(trained) -> None:
    leave(trained, 2)
    for number in (1, 2):
        set_aside_run(trained)
        assert (trained / f"restarted-{number}" / "metrics.jsonl").exists()
        assert not (trained / "metrics.jsonl").exists()
        Metrics(trained).add(batch=0)
    assert checkpoints(trained) == []
    assert [path.name for path in checkpoints(trained / "restarted-1")] == ["batch-00000002"]


def test_half_a_configuration_is_not_filled_with_defaults(monkeypatch, capsys, trained) -> None:
    leave(trained, 2)
    path = trained / "config.yaml"
    whole = path.read_text()
    for part in (whole[: len(whole) // 2], whole[: whole.index("optimizer:")], "", whole.replace("  beta1: 0.9\n", "")):
        path.write_text(part)
        code, err, started = resume(monkeypatch, capsys, trained)
        assert (code, started) == (2, "[]")
        assert "config.yaml' is not whole" in err or "is not YAML" in err or "must hold keys" in err
    code, err, started = resume(monkeypatch, capsys, trained, "--config", trained / ".config.yaml")
    assert code == 0, err
    assert "'layers': 2" in started


def test_what_a_person_has_changed_is_named(monkeypatch, capsys, trained) -> None:
    leave(trained, 2)
    path = trained / "config.yaml"
    assert "by hand" not in resume(monkeypatch, capsys, trained)[1]
    path.write_text(path.read_text().replace("lr: 0.003", "lr: 0.3").replace("batches: 7", "batches: 9"))
    code, err, started = resume(monkeypatch, capsys, trained)
    assert code == 0
    assert "config.yaml was changed by hand: batches=9 (before: 7), optimizer.lr=0.3 (before: 0.003)" in err
    assert "'lr': 0.3" in started
    config = load_config(path, [])
    assert note_changes(config, trained, 2)["batches"] == {"before": 7, "now": 9}
    assert "by hand" not in resume(monkeypatch, capsys, trained)[1]
    assert path.read_text().startswith("# From batch 2 on: batches=9 (before: 7), optimizer.lr=0.3 (before: 0.003)")


def test_a_run_of_an_earlier_version_goes_on(monkeypatch, capsys, trained) -> None:
    """It did not know a key, in either file; that is recorded, as a run may do something else under its default."""
    leave(trained, 2)
    path = trained / "config.yaml"
    text = path.read_text().replace("  ns_dtype: null\n", "")
    path.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    first = (trained / ".config.yaml").read_text().splitlines()[0]
    (trained / ".config.yaml").write_text(f"{first.rpartition(' ')[0]} {digest}\n{text}")
    code, err, started = resume(monkeypatch, capsys, trained)
    assert code == 0, err
    assert "by hand" not in err
    assert "'ns_dtype': None" in started
    changes = note_changes(load_config(path, []), trained, 2)
    assert changes == {"optimizer.ns_dtype": {"before": "unknown", "now": None}}
    assert path.read_text().startswith("# From batch 2 on: optimizer.ns_dtype=null (before: unknown)\n")
    assert not note_changes(load_config(path, []), trained, 4)


def test_what_a_configuration_is_compared_with_may_be_damaged(monkeypatch, capsys, trained) -> None:
    leave(trained, 2)
    path = trained / ".config.yaml"
    path.write_text(path.read_text().replace("batches: 7", "batches: 8"))
    code, err, _ = resume(monkeypatch, capsys, trained)
    assert code == 2
    assert ".config.yaml' is damaged" in err
    path.unlink()
    assert resume(monkeypatch, capsys, trained)[0] == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "checkpoints", "weights", "trace.json"])
def test_a_folder_with_links_is_not_resumed(monkeypatch, capsys, trained, name) -> None:
    leave(trained, 2)
    if (trained / name).exists():
        (trained / name).rename(trained.parent / "elsewhere")
    (trained / name).symlink_to(trained.parent / "elsewhere")
    code, err, started = resume(monkeypatch, capsys, trained)
    assert (code, started) == (2, "[]")
    assert f"{name}: it is a symbolic link" in err


def test_a_run_without_any_checkpoint_ends_with_a_code_of_its_own(monkeypatch, capsys, trained) -> None:
    def train(*_, **__) -> None:
        Metrics(trained).add(checkpoint=7, failure="No space left on device")

    leave(trained, 2)
    for kept in ("it can be continued from 2 batches only", "it cannot be continued"):
        monkeypatch.setattr("penstock.launch.launch.launch_local", train)
        code, _, err = run_command(monkeypatch, capsys, "train", "--resume", trained, "--restart")
        assert code == 3
        said = " ".join(err.split())
        assert f"none of its checkpoints could be written (No space left on device): {kept}" in said
        shutil.rmtree(trained / "checkpoints", ignore_errors=True)
    (trained / "metrics.jsonl").unlink()
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: leave(trained, 7))
    assert run_command(monkeypatch, capsys, "train", "--resume", trained, "--restart")[0] == 0


def record_batches(run: Path, batches: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"batch": {batch}, "loss": 1.0}}\n' for batch in range(batches))


def test_how_much_is_trained_again_is_said(tmp_path: Path) -> None:
    """A checkpoint that holds everything does not sound like a loss."""
    leave(tmp_path, 5)
    record_batches(tmp_path, 5)
    assert how_to_go_on(tmp_path) == (
        f"to resume from the checkpoint after 5 batches:\n  penstock train --resume {tmp_path}"
    )
    record_batches(tmp_path, 7)
    assert "after 5 batches (it was 7 batches far, so 2 are trained again):" in how_to_go_on(tmp_path)
    assert str(InterruptedRunError(signal.SIGINT)) == "SIGINT has ended the run at once"


def test_where_no_checkpoint_is_intact_the_run_is_begun_again(monkeypatch, capsys, trained) -> None:
    """Whatever it was resumed with: neither resuming it again nor taking back what was changed would help."""
    said = "worker 0 failed with exit code 1: CheckpointError: none of the 2 checkpoints is intact"

    def launch(*_, **__):
        raise WorkerError(said, "")

    for more in ((), ("--batches", "9")):
        place = checkpoint_folder(trained, 2)
        shutil.rmtree(place.parent, ignore_errors=True)
        leave(trained, 2)
        write_index(place, 1, {"facts": {"batch": 2}, "extra": {}, "tensors": {}, "files": {"f": LOST}})
        monkeypatch.setattr("penstock.launch.launch.launch_local", launch)
        code, _, err = run_command(monkeypatch, capsys, "train", "--resume", trained, *more)
        assert (code, "which sets the damaged ones aside" in err) == (1, True)
        advice = err.strip().splitlines()[-1].split()
        assert advice == ["penstock", "train", "--resume", str(trained), "--restart"]
        monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: leave(trained, 7))
        assert run_command(monkeypatch, capsys, *advice[1:])[0] == 0


@pytest.mark.parametrize("sample", [None, -1, "24", [1], True, 2.5])
def test_a_bad_field_of_what_a_checkpoint_has_besides_is_a_checkpoint_error(sample: object) -> None:
    samples = RunSamples(None, 2, 2, "text")  # type: ignore[arg-type]  # whose windows nobody asks for
    with pytest.raises(CheckpointError, match="after 4 batches in 'run' .*; remove it to go on from the one before"):
        samples.start(4, {"sample": sample, "corpus": "text"}, "run")


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_value_with_which_no_batch_was_trained_is_not_kept(tmp_path: Path, by_hand: bool) -> None:
    """The advice does not repeat what has just failed."""
    write_config(load_config(None, ["timeout=30"]), tmp_path)
    leave(tmp_path, 5)
    record_batches(tmp_path, 5)
    path = tmp_path / "config.yaml"
    if by_hand:
        path.write_text(path.read_text().replace("timeout: 30.0", "timeout: 0.001"))
    texts = path.read_text(), (tmp_path / ".config.yaml").read_text()
    now = load_config(path, [] if by_hand else ["timeout=0.001"])
    before = ConfigBefore(tmp_path, now)
    note_changes(now, tmp_path, 5)  # as the resumed run does
    assert "# From batch 5 on: timeout=0.001" in path.read_text()
    advice = before.advice() or ""
    assert (path.read_text(), (tmp_path / ".config.yaml").read_text()) == texts
    assert advice.startswith("no batch was trained with timeout=0.001 (before: 30.0), ")
    assert advice.endswith(f"  penstock train --resume {tmp_path}" + (" --set timeout=30.0" if by_hand else ""))
    before = ConfigBefore(tmp_path, now)
    note_changes(now, tmp_path, 5)
    record_batches(tmp_path, 6)
    assert before.advice() is None
    assert ConfigBefore(tmp_path, now).advice() is None  # nothing has changed


@pytest.mark.parametrize("restart", [False, True])
def test_resuming_where_there_is_no_checkpoint_yet_is_told(tmp_path, monkeypatch, capsys, restart):
    """Such as after a kill before the first one."""
    settings = load_config(None, ["checkpoint.every=null"])
    write_config(settings, tmp_path)
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: None)
    _launch(settings, tmp_path, restart)
    said = "There is no checkpoint in" in capsys.readouterr().out
    assert said is not restart
