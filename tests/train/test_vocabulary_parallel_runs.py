"""`penstock train vocabulary-1f1b`: what it reports, writes and samples is that of a whole output layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from penstock.train.config.load import load_config
from penstock.train.export.weights_folder import load_weights
from penstock.train.prepare.prepare_run import prepare
from support.command_line import Command, only_folder
from support.same_runs import assert_same_reports, assert_same_weights, reported, train, write_text

STEADY = ("batches=6", "lr_schedule.decay=none", "lr_schedule.warm_up=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of one batch, which several tests begin with."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), id="alone", marks=pytest.mark.long),
        pytest.param(("width=2", "sharding=gradients"), id="sharded"),
        pytest.param(("tensor_parallel=2",), id="shared", marks=pytest.mark.long),
    ],
)
def test_a_divided_output_layer_trains_like_a_whole_one(
    tmp_path: Path, text: Path, command: Command, changes: tuple[str, ...]
) -> None:
    divided = train(command, "vocabulary_1f1b", tmp_path / "a", text, *STEADY, *changes)
    whole = train(command, "1f1b", tmp_path / "b", text, *STEADY, *changes)
    assert_same_reports(divided, whole)
    assert reported(divided, "batch")[-1] == 5
    assert_same_weights(divided, whole)
    samples = [command("sample", each, "--length", "8", "--temperature", "0") for each in (divided, whole)]
    assert samples[0].returncode == 0, samples[0].stderr
    assert samples[0].stdout == samples[1].stdout


@pytest.mark.long
@pytest.mark.processes
def test_a_run_with_a_divided_output_layer_resumes_to_the_same_bits(
    tmp_path: Path, text: Path, command: Command
) -> None:
    whole = train(command, "vocabulary-1f1b", tmp_path / "a", text, *STEADY)
    parted = train(command, "vocabulary-1f1b", tmp_path / "b", text, *STEADY, "batches=3")
    ran = command("train", "--resume", parted, "--set", "batches=6")
    assert ran.returncode == 0, ran.stderr
    for folder in ("", "averaged"):
        found, wanted = (load_weights(each / folder) for each in (parted, whole))
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert reported(parted, "validation_loss")[-1:] == reported(whole, "validation_loss")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("vocabulary-1f1b", "stages=1", "has its output layer in 1 part, but the weights of the run in"),
        ("vocabulary-1f1b", "method=1f1b", "go on with method=vocabulary-1f1b and stages=2, or train in a run of its"),
        ("vocabulary-1f1b", "model.vocabulary=300", "model.vocabulary is 300, but the weights of the run in"),
        ("1f1b", "method=vocabulary-1f1b", "in 2 parts, but the weights of the run in"),
    ],
)
def test_a_run_goes_on_with_as_many_parts_of_the_output_layer(
    tmp_path: Path, runs: Path, text: Path, command: Command, method: str, change: str, said: str
) -> None:
    if not (runs / method).exists():
        train(command, method, runs / method, text, *STEADY, "batches=1", "sample_length=0")
    folder = tmp_path / "run"
    shutil.copytree(only_folder(runs / method), folder)
    ran = command("train", "--resume", folder, "--set", "batches=2", "--set", change)
    assert ran.returncode == 2
    assert said in " ".join(ran.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "METHOD", "--set", "model.tied=true"), "cannot be tied to the embedding; set model.tied=false"),
        (("train", "METHOD", "--stages", "3"), "the model has 2 layers, which cannot be divided among 3 stages"),
        (
            ("train", "METHOD", "--set", "balance=[3]"),
            "balance must hold 2 positive numbers that add up to the 4 blocks",
        ),
        (("train", "METHOD", "--set", "sync.batches=1"), "sync.method: vocabulary-1f1b cannot be followed by 1f1b"),
        (("train", "METHOD", "--set", "recompute=auto", "--set", "memory_limit=1"), "recompute=auto: rank 0 takes at"),
        (("verify", "METHOD", "--set", "boundary_gradients=bf16"), "verify it with boundary_gradients=same"),
        (("profile", "--set", "method=METHOD"), "whose stages are no chain, is not offered for profiles yet, which"),
    ],
)
def test_what_a_divided_output_layer_does_not_go_with_is_refused(
    tmp_path: Path, command: Command, text: Path, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"method: vocabulary-1f1b\nmodel: {{layers: 2}}\ndata: {text}\n")
    words = {"METHOD": "vocabulary-1f1b", "method=METHOD": "method=vocabulary-1f1b"}
    words |= {"FILE": str(file)}
    given = [words.get(argument, argument) for argument in arguments]
    ran = command(*given, *([] if "FILE" in arguments else ["--set", f"data={text}", "--set", "model.layers=2"]))
    assert ran.returncode == 2
    assert said in " ".join(ran.stderr.split())


def test_ranks_have_as_many_layers_as_balance_says(text: Path) -> None:
    config = load_config(None, ["method=vocabulary-1f1b", "model.layers=4", "balance=[4,2]", f"data={text}"])
    parts = prepare(config).plan.parts
    assert [len(part) for part in parts] == [4, 2, 1, 1, 1]
    assert parts[1] == ["layers.3", "head.norm"]
