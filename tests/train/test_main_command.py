"""The README's main command with few steps, in processes of its own, as a person starts it."""

import json
import os
import subprocess
import sys

import pytest
from launched import die_on_rank_1, raise_on_rank_1

from penstock.train.launch import WorkerError, launch_local

TINY = [
    "batches=3", "microbatches=2", "microbatch_size=2", "model.layers=2", "model.width=32", "model.heads=2",
    "model.context=16", "validation_samples=8", "sample_length=12", "threads=1",
]  # fmt: skip


def settings(*changes):
    return [part for change in (*TINY, *changes) for part in ("--set", change)]


def start(*command, **kwargs):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, env=environment, **kwargs
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def only_folder(out):
    (folder,) = out.iterdir()
    return folder


def check_run(folder, batches, ranks):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines[:-1]] == list(range(batches))
    assert all(line["loss"] > 0 for line in lines[:-1])
    assert lines[-1]["validation_loss"] > 0
    assert lines[-1]["unigram_entropy"] > 0
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(ranks))
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"F0", "B0", "STEP0"}
    assert len(list((folder / "weights").glob("stage-*.safetensors"))) == ranks
    return lines


def test_train_and_sample(tmp_path, text):
    ran = start("-m", "penstock", "train", *settings(f"out={tmp_path / 'runs'}"), "--data", text)
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    check_run(folder, 3, 2)
    for word in ("validation loss", "unigram entropy", "sample", "activations", str(folder)):
        assert word in ran.stdout
    sampled = start("-m", "penstock", "sample", folder, "--prompt", "the ", "--length", "10")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("the ")


def test_the_same_command_under_torchrun_joins_the_job(tmp_path, text):
    """And trains to the same numbers: workers that elastic starts for us or that torchrun starts are the same."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock", "train"]
    ran = start(*torchrun, *settings(f"out={tmp_path / 'a'}"), "--data", text)
    assert ran.returncode == 0, ran.stderr
    ours = start("-m", "penstock", "train", *settings(f"out={tmp_path / 'b'}"), "--data", text)
    assert ours.returncode == 0, ours.stderr
    losses = [[line["loss"] for line in check_run(only_folder(tmp_path / name), 3, 2)[:-1]] for name in ("a", "b")]
    assert losses[0] == losses[1]


def test_another_number_of_processes_than_stages_is_refused(tmp_path, text):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "penstock", "train"]
    ran = start(*torchrun, *settings(f"out={tmp_path / 'a'}"), "--data", text)
    assert ran.returncode != 0
    assert "the job has 1 processes, but stages is 2" in " ".join(ran.stderr.split())


@pytest.mark.parametrize("method", ["1f1b", "stash"])
def test_other_methods_and_depths(tmp_path, text, method):
    changes = settings(f"out={tmp_path / 'runs'}", f"method={method}", "stages=1", "sample_length=0")
    ran = start("-m", "penstock", "train", *changes, "--data", text)
    assert ran.returncode == 0, ran.stderr
    check_run(only_folder(tmp_path / "runs"), 3, 1)


def test_a_worker_that_raises_ends_the_job_with_its_traceback():
    with pytest.raises(WorkerError, match="worker 1 failed") as caught:
        launch_local(2, raise_on_rank_1)
    assert "ValueError: planted failure" in caught.value.trace
    assert "raise_on_rank_1" in caught.value.trace


def test_a_worker_that_dies_ends_the_job():
    with pytest.raises(WorkerError, match="worker 1 failed with exit code 17"):
        launch_local(2, die_on_rank_1)


def test_a_failing_worker_gives_exit_code_1_and_its_traceback(tmp_path, text):
    """A text that disappears between the check and the workers' start stands for anything that only workers see."""
    script = tmp_path / "vanish.py"
    script.write_text(
        "import sys\n"
        "from penstock import cli\n"
        "from penstock.train import launch\n"
        "real = launch.launch_local\n"
        "def vanish(*a):\n"
        f"    import os; os.unlink({str(text)!r}); real(*a)\n"
        "launch.launch_local = vanish\n"
        "if __name__ == '__main__':\n"
        "    cli.main()\n"
    )
    ran = start(script, "train", *settings(f"out={tmp_path / 'runs'}"), "--data", text)
    assert ran.returncode == 1
    assert "DataError: there is no file or folder" in ran.stderr
    assert "error: worker" in ran.stderr
