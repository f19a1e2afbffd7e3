"""`penstock train` with tensor parallelism: what it reports and writes is that of a run without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.plan.profile.files import read_profile
from penstock.train.config.load import load_config
from penstock.train.prepare.prepare_run import prepare
from support.command_line import Command, only_folder
from support.same_runs import assert_same_reports, assert_same_weights, train, write_text

SHARED = ("tensor_parallel=2",)

pytestmark = pytest.mark.processes

Begun = Callable[..., Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def text(runs: Path) -> Path:
    return write_text(runs)


@pytest.fixture
def begun(runs: Path, text: Path, command: Command) -> Begun:
    """The folder of a run of four batches with some changes, which is trained once for all tests."""

    def find(*changes: str) -> Path:
        out = runs / " ".join(["run", *changes])
        return only_folder(out) if out.exists() else train(command, "1f1b", out, text, "batches=4", *changes)

    return find


def test_reports_and_weights_are_those_of_a_run_without_it(begun: Begun, command: Command) -> None:
    shared, plain = begun(*SHARED), begun()
    assert shared.name.endswith("-1f1b-2x2-tp2")
    assert_same_reports(shared, plain)
    assert_same_weights(shared, plain)
    assert len(list((shared / "weights").glob("*.safetensors"))) == 2
    assert len(list((shared / "timeline").iterdir())) == 2
    assert len(list((shared / "checkpoints" / "batch-00000004").glob("stage-*.safetensors"))) == 4
    sampled = command("sample", shared, "--prompt", "the ", "--length", "4")
    assert sampled.returncode == 0, sampled.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [((), SHARED), *(pytest.param(SHARED, after, marks=pytest.mark.long) for after in ((), SHARED))],
)
def test_a_run_goes_on_with_as_many_tensor_ranks_as_wanted(
    runs: Path, begun: Begun, command: Command, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    def resumed(name: str, begin: tuple[str, ...], *changes: str) -> Path:
        folder = runs / name
        if not folder.exists():  # the one that all are compared with goes on once
            shutil.copytree(begun(*begin), folder)
            more = [part for change in ("batches=8", *changes) for part in ("--set", change)]
            ran = command("train", "--resume", folder, *more)
            assert ran.returncode == 0, ran.stderr
        return folder

    found = resumed(f"{before} to {after}", before, *(after or ("tensor_parallel=1",)))
    assert_same_weights(found, resumed("plain", ()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "1f1b", "--set", "tensor_parallel=3"), "model.heads 4 must be a multiple of tensor_parallel 3"),
        (("train", "zb-h1", "--set", "tensor_parallel=2"), "tensor_parallel=2 is not offered with backwards in two"),
        (("train", "1f1b", "--set", "tensor_parallel=2", "--set", "optimizer.name=muon"), "looks at parameters as a"),
        (("profile", "--rehearse", "2", "--plan", "FILE"), "rank must be at most 1"),
        (("profile", "--set", "tensor_parallel=3"), "model.heads 4 must be a multiple of tensor_parallel 3"),
        (("profile", "--set", "tensor_parallel=2", "--set", "optimizer.name=muon"), "looks at parameters as a whole"),
        (("profile", "--set", "tensor_parallel=2", "--set", "compile=true"), "is not offered with compiled blocks"),
    ],
)
def test_what_is_not_offered_is_refused_before_any_process_starts(
    tmp_path: Path, command: Command, text: Path, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"method: 1f1b\ntensor_parallel: 2\ndata: {text}\n")
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    ran = command(*given, *([] if "FILE" in arguments else ["--set", f"data={text}"]))
    assert ran.returncode == 2
    assert said in " ".join(ran.stderr.split())


@pytest.mark.long
def test_a_run_is_predicted_from_a_profile_of_as_many_processes(
    tmp_path: Path, begun: Begun, command: Command, text: Path
) -> None:
    run, profile = begun(*SHARED), tmp_path / "profile.yaml"
    found = load_config(run / "config.yaml", [])
    model = [f"model.{key}={getattr(found.model, key)}" for key in ("layers", "width", "heads", "context")]
    changes = [part for each in (*model, *SHARED, "threads=1") for part in ("--set", each)]
    measured = command("profile", *changes, "--data", text, "--seconds", "0", "--out", profile)
    assert measured.returncode == 0, measured.stderr
    assert f"Next: penstock profile {profile} --check RUN" in measured.stdout
    known = read_profile(profile)
    assert known.tensor_parallel == 2
    compared = command("profile", profile, "--check", run, "--json")
    assert compared.returncode == 0, compared.stderr
    stages = json.loads(compared.stdout)["stages"]
    assert [stage["predicted"].keys() for stage in stages] == [{"F", "B", "STEP"}] * 2
    refused = command("plan", "--profile", profile, "--devices", "4", "--global-batch", "8")
    assert refused.returncode == 2
    assert "plans with tensor_parallel=2" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(("vocabulary", "said"), [(258, False), (259, True)])
def test_a_vocabulary_that_stays_whole_is_told(text: Path, vocabulary: int, said: bool) -> None:
    config = load_config(None, ["method=1f1b", *SHARED, f"model.vocabulary={vocabulary}", f"data={text}"])
    notes = prepare(config).notes()
    assert [note.split(", so embedding")[0] for note in notes] == [
        "259 tokens are no multiple of tensor_parallel 2"
    ] * said
    assert all("model.vocabulary=260 would divide them" in note for note in notes)
