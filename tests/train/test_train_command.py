"""`penstock train` with few steps: what it trains, writes and prints, and what is said of workers that fail."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import WorkerError
from penstock.launch import launch
from penstock.launch.fork_server import start_method
from penstock.launch.launch import launch_local
from penstock.models.gpt import gpt_blocks, language_loss
from penstock.models.gpt_shape import preset
from penstock.train.config.load import load_config
from penstock.train.data.corpus import load_corpus
from penstock.train.data.window_sampler import Windows, batches
from penstock.train.export.weights_folder import load_weights
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory
from support.command_line import TINY, only_folder, settings, start
from support.own_methods import train_reference
from support.worker_functions import die_on_rank_1, fail_in_training, list_modules, raise_on_rank_1

pytestmark = pytest.mark.processes


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def check_run(folder, batches, ranks):
    everything = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in everything if "update" not in line and "checkpoint" not in line]
    updates = [line for line in everything if "update" in line]
    assert [line["update"] for line in updates] == list(range(batches))
    assert all(line["norm"] > 0 and not line["skipped"] for line in updates)
    assert [line["batch"] for line in lines[:-1]] == list(range(batches))
    assert all(line["loss"] > 0 for line in lines[:-1])
    assert lines[-1]["validation_loss"] > 0
    assert lines[-1]["unigram_entropy"] > 0
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(ranks))
    assert len(list((folder / "timeline").iterdir())) == ranks
    names = {e["name"] for e in events if e["ph"] == "X"}
    for stage in range(ranks):
        assert names >= {f"F0 stage {stage} v0", f"B0 stage {stage} v0", f"STEP0 stage {stage} v1"}
    leave, arrive = (Counter(e["id"] for e in events if e["ph"] == end) for end in ("s", "f"))
    assert leave == arrive  # each message has left once and been taken once
    assert leave.total() == 2 * 2 * batches * (ranks - 1)
    split = lines[-1]["time"]
    assert sum(split.values()) == pytest.approx(1)
    assert 1 - split["work"] == pytest.approx(lines[-1]["bubble"])
    assert lines[-1]["time_by_rank"].keys() == set(map(str, range(ranks)))
    assert len(list((folder / "weights").glob("*.safetensors"))) == ranks
    return lines


def test_train_and_sample(tmp_path, text, command):
    """In processes of its own, as a person starts it; the tests below run the command in this one."""
    ran = start("-m", "penstock", "train", *settings(f"out={tmp_path / 'runs'}"), "--data", text)
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    check_run(folder, 3, 2)
    for word in ("validation loss", "unigram entropy", "sample", "activations", "imbalance", "all ranks", str(folder)):
        assert word in ran.stdout
    sampled = command("sample", folder, "--prompt", "the ", "--length", "10")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("the ")


def learnt_by_the_reference(config):
    """Losses, weights, learning rates and held-out loss of a run, from the reference and plain torch."""
    windows = Windows(load_corpus(config.data), config.model.context, config.held_out, config.seed)
    shape = preset(config.model.preset, layers=2, width=32, heads=2, context=16, vocabulary=256)
    blocks = {name: block.make() for name, block in gpt_blocks(shape, config.seed).items()}
    names = list(blocks)
    per_batch = config.microbatches * config.microbatch_size
    batches = []
    for t in range(config.batches):
        numbers = [t * per_batch + k * config.microbatch_size for k in range(config.microbatches)]
        batches.append([windows.samples(number, config.microbatch_size) for number in numbers])
    rates = [config.optimizer.lr * rate_schedule(config.lr_schedule, config.batches)(t) for t in range(config.batches)]
    result = train_reference(
        [{n: blocks[n] for n in names[:2]}, {n: blocks[n] for n in names[2:]}],
        language_loss,
        batches,
        method=config.method,
        optimizer=optimizer_factory(config.optimizer),
        rate=rate_schedule(config.lr_schedule, config.batches),
        divisor=per_batch * 16,
        clip=config.max_grad_norm,
    )
    assert any(norm > config.max_grad_norm for norm in result.norms)
    for name, block in blocks.items():
        own = {k.removeprefix(f"{name}."): v for k, v in result.versions[-1].items() if k.startswith(f"{name}.")}
        block.load_state_dict(own, strict=False)
    tokens = torch.from_numpy(windows.corpus.tokens.astype("int64"))
    rows = torch.stack([tokens[w * 16 : w * 16 + 17] for w in windows.validation])
    with torch.no_grad():
        x = rows[:, :-1]
        for block in blocks.values():
            x = block(x)
        held_out = torch.nn.functional.cross_entropy(x.flatten(0, 1), rows[:, 1:].flatten())
    return result, rates, float(held_out), windows


def test_it_trains_what_the_reference_trains_and_learns(tmp_path, text, command):
    """Losses, rates and weights are those of the equations; the held-out loss is that of text not trained on."""
    changes = [
        "batches=60", "model.layers=2", "optimizer.lr=0.01", "lr_schedule.warm_up=5", "balance=[2,2]",
        "max_grad_norm=0.5",
        "validation_samples=1000", "sample_length=0", f"out={tmp_path / 'runs'}", f"data={text}",
    ]  # fmt: skip
    ran = command("train", *settings(*changes))
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    *lines, last = check_run(folder, 60, 2)
    result, rates, held_out, windows = learnt_by_the_reference(load_config(folder / "config.yaml", []))
    assert len(windows.validation) % 4 == 0  # so that every held-out sample counts once
    assert [line["loss"] for line in lines] == result.losses
    assert [line["learning_rate"] for line in lines] == rates
    saved = load_weights(folder)
    assert all(torch.equal(saved[name], weights) for name, weights in result.versions[-1].items())
    assert last["validation_loss"] == pytest.approx(held_out, rel=1e-5)
    assert last["validation_loss"] < last["unigram_entropy"] - 0.5
    assert not set(windows.training) & set(windows.validation)
    assert 0 < last["bubble"] < 1
    assert all(0 <= line["bubble"] < 1 for line in lines if line["bubble"] is not None)


@pytest.mark.smoke
def test_a_vocabulary_larger_than_bytes_still_makes_text(tmp_path, text, command):
    changes = settings(
        f"out={tmp_path / 'runs'}", "model.vocabulary=3000", "sample_length=100", "stages=1", "method=1f1b"
    )
    ran = command("train", *changes, "--data", text)
    assert ran.returncode == 0, ran.stderr
    check_run(only_folder(tmp_path / "runs"), 3, 1)
    assert "more text: penstock sample" in ran.stdout


def test_parallel_pipelines_in_low_precision_with_tied_embeddings(tmp_path, text, command):
    """Four processes, with the replicas of a stage in a row; the stages of one pipeline are saved."""
    changes = settings(
        f"out={tmp_path / 'runs'}",
        "width=2",
        "rank_order=tp-dp-pp",
        "reduce=fast",
        "precision=bf16",
        "recompute=stage",
        "model.tied=true",
        "sample_length=5",
    )
    ran = command("train", *changes, "--data", text)
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    assert folder.name.endswith("2bw-2x2x2")
    saved = load_weights(folder)
    assert torch.equal(saved["embedding.weight"], saved["head.out.weight"])
    assert {w.dtype for w in saved.values()} == {torch.float32}
    assert len(list((folder / "weights").glob("*.safetensors"))) == 2


def test_pipelines_that_meet_now_and_then(tmp_path, text, command):
    """A checkpoint between two meetings has all pipelines; in one process they go on from it to the same weights."""
    changes = settings(
        "width=2", "stages=1", "method=1f1b", "batches=4", "combine.kind=average", "combine.every=2",
        "evaluate.every=2", "checkpoint.every=3", "sample_length=0",
    )  # fmt: skip
    ran = command("train", *changes, "--set", f"out={tmp_path / 'runs'}", "--data", text)
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["evaluated"] for line in lines if "evaluated" in line] == [2, 4]
    names = sorted(path.name for path in (folder / "checkpoints" / "batch-00000003").iterdir())
    assert names == ["index.json", "stage-0.1.safetensors", "stage-0.safetensors"]
    shutil.rmtree(folder / "checkpoints" / "batch-00000004")
    prepared = prepare(load_config(folder / "config.yaml", []))
    pipeline = make_pipeline(prepared)
    Checkpoints(pipeline, folder).load()
    list(pipeline.run(list(batches(prepared.windows, 0, 4, prepared.microbatches, 2))[pipeline.batches :]))
    saved = load_weights(folder)
    assert pipeline.batches == 4
    assert all(torch.equal(weight, saved[name]) for name, weight in pipeline.state_dict().items())


def test_waves_as_they_come_are_taken_down(tmp_path, text, command):
    """In one process their record gives the same weights again."""
    changes = settings(
        "width=2", "stages=1", "method=stash", "batches=6", "combine.kind=wsp", "combine.every=2", "combine.distance=1",
        "combine.lag=record", "checkpoint.every=null", "sample_length=0",
    )  # fmt: skip
    ran = command("train", *changes, "--set", f"out={tmp_path / 'runs'}", "--data", text)
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    found = json.loads((folder / "lags.json").read_text())
    assert {place: list(waves) for place, waves in found.items()} == {"0/0": ["1", "3", "5"], "1/0": ["1", "3", "5"]}
    prepared = prepare(load_config(folder / "config.yaml", [f"combine.lag={folder / 'lags.json'}"]))
    pipeline = make_pipeline(prepared)
    list(pipeline.run(list(batches(prepared.windows, 0, 6, prepared.microbatches, 2))))
    saved = load_weights(folder)
    assert all(torch.equal(weight, saved[name]) for name, weight in pipeline.state_dict().items())


def test_models_of_tokens_make_no_text(tmp_path, command):
    np.save(tmp_path / "tokens.npy", np.arange(20_000, dtype=np.int32) % 700)
    changes = settings(f"out={tmp_path / 'runs'}", f"data={tmp_path / 'tokens.npy'}", "stages=1", "method=stash")
    ran = command("train", *changes)
    assert ran.returncode == 0, ran.stderr
    check_run(only_folder(tmp_path / "runs"), 3, 1)
    assert "more text" not in ran.stdout
    sampled = command("sample", only_folder(tmp_path / "runs"))
    assert sampled.returncode == 2
    assert "was trained on an array of tokens" in " ".join(sampled.stderr.split())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are never forked")
def test_workers_are_forked_where_a_socket_can_lie(tmp_path, monkeypatch):
    """They find there what takes seconds to import."""
    assert start_method() == "forkserver"
    launch_local(1, list_modules, str(tmp_path / "modules"))
    found = json.loads((tmp_path / "modules").read_text())
    assert {"torch._dynamo", "penstock.train.loop"} <= set(found["modules"])
    assert set(found["listening"]) == {"127.0.0.1"}
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 80}")
    assert start_method() == "spawn"


def test_the_process_that_workers_are_forked_from_starts_before_torch_is_imported(tmp_path):
    """With what all workers need: it imports nothing more once it runs."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    code = (
        "import sys, penstock.cli.train as t\n"
        "def start(preload): sys.exit(f'{\"torch\" in sys.modules} {preload == t._PRELOAD} {t.__name__ in preload}')\n"
        "t.start_method = start\n"
        f"sys.argv = ['penstock', 'train', '--data', {str(tmp_path / 'text.txt')!r}]\n"
        "from penstock.cli import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.split()[-3:] == ["False", "True", "True"]


def test_a_worker_that_raises_ends_the_job_with_its_traceback():
    before = set(Path(tempfile.gettempdir()).iterdir())
    with pytest.raises(WorkerError, match="worker 1 failed") as caught:
        launch_local(2, raise_on_rank_1)
    left = {path.name for path in set(Path(tempfile.gettempdir()).iterdir()) - before}
    assert not {name for name in left if name.startswith(("penstock-", "pytorch-errorfile-"))}
    assert "ValueError: planted failure" in caught.value.trace
    assert "raise_on_rank_1" in caught.value.trace


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_that_raises_in_training_ends_the_job(tmp_path, text, rank):
    """Within seconds, although the other rank waits for messages; once, and with the right traceback."""
    values = load_config(None, [*TINY, "batches=1000", f"data={text}"]).model_dump()
    (tmp_path / "run").mkdir()
    begun = time.monotonic()
    message = rf"worker {rank} failed with exit code 1: ValueError: planted"
    with pytest.raises(WorkerError, match=message) as caught:
        launch_local(2, fail_in_training, values, str(tmp_path / "run"), rank, "raises")
    assert time.monotonic() - begun < 40  # starting takes most of it; the time-out is 300
    assert re.search(rf"raised by F4 of stage {rank} on rank {rank}", caught.value.trace)
    assert len(list((tmp_path / "run").glob("start-*"))) == 2  # nobody was started again


def test_a_worker_that_is_killed_in_training_is_named(tmp_path, text):
    """Not the peers that it has let down, although they end at once, with a report, and have lower ranks.

    On a busy machine elastic may notice one of these first, and then does not say how worker 2 ended.
    """
    values = load_config(None, [*TINY, "batches=1000", "stages=3", f"data={text}"]).model_dump()
    (tmp_path / "run").mkdir()
    with pytest.raises(
        WorkerError, match=r"worker 2 (failed with exit code -9: .*SIGKILL|is stalled or dead: it reported nothing)"
    ):
        launch_local(3, fail_in_training, values, str(tmp_path / "run"), 2, "killed")


def test_a_worker_that_dies_ends_the_job():
    with pytest.raises(WorkerError, match="worker 1 failed with exit code 17"):
        launch_local(2, die_on_rank_1)


def test_a_failing_worker_gives_exit_code_1_and_its_traceback(tmp_path, text, monkeypatch, command):
    """A text that disappears between the check and the workers' start stands for anything that only workers see."""

    def vanish(*arguments, **settings):
        text.unlink()
        launch_local(*arguments, **settings)

    monkeypatch.setattr(launch, "launch_local", vanish)
    ran = command("train", *settings(f"out={tmp_path / 'runs'}"), "--data", text)
    assert ran.returncode == 1
    assert "DataError: there is no file or folder" in ran.stderr
    assert "error: worker" in ran.stderr
