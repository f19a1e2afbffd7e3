"""`penstock verify`, as a person or a job of CI runs it."""

import json

import pytest

from penstock.stage.blocks.module import StageModule
from penstock.stage.trained_stage_weights import TrainedWeights
from support.command_line import run

TINY = [
    "microbatches=2", "microbatch_size=1", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8",
    "threads=1",
]  # fmt: skip


@pytest.fixture
def verify(monkeypatch, capsys, tmp_path):
    """The command in this process on a tiny model; its exit code and what it printed."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)

    def command(*changes, arguments=()):
        settings = [part for change in (*TINY, f"data={tmp_path / 'text.txt'}", *changes) for part in ("--set", change)]
        return run(monkeypatch, capsys, "verify", *settings, *arguments)

    return command


def test_a_synchronous_method(verify):
    code, out, _ = verify("method=1f1b")
    assert code == 0
    assert "1f1b: stages 2, microbatches 2, batches 4" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "compared with differ relative absolute batch" in rows
    assert "gradients 0 of 60" in rows
    assert any(row.startswith("gradients 0 of 60 ") and "e-0" in row for row in rows)  # of plain torch, with the worst
    assert "From plain torch, a relative 1e-05 is allowed." in " ".join(out.split())
    assert out.rstrip().endswith("every number equals the reference's, and plain torch's to 1e-05")


def test_a_method_with_delay(verify):
    code, out, _ = verify("method=2bw", arguments=["--batches", 3])
    assert code == 0
    assert "batches 3" in out
    assert "Plain torch is left out, because 2bw reads delayed weights." in " ".join(out.split())
    assert out.splitlines()[1].split() == ["compared", "with", "differ"]  # no columns for differences without any
    assert "elative" not in out
    assert out.rstrip().endswith("the pipeline trains what 2bw says: every number equals the reference's")


def test_as_json(verify):
    code, out, _ = verify("method=1f1b", "precision=bf16", arguments=["--json"])
    found = json.loads(out)
    assert code == 0
    assert found["agrees"] is True
    assert found["plain_left_out"] == "it is compared in fp32 only, not in bf16"
    assert found["error"] is None
    assert (found["batches"], found["config"]["method"]) == (4, "1f1b")
    assert found["compared"]["weights"] == {
        "reference": {
            "compared": 60, "tolerance": 0.0, "differing": 0, "odd": 0, "worst": None, "first": None, "agrees": True
        },
        "plain": None,
    }  # fmt: skip


def test_with_rounded_gradients_between_stages(verify):
    code, out, _ = verify("method=1f1b", "boundary_gradients=bf16", arguments=["--json"])
    found = json.loads(out)
    assert code == 0
    assert found["agrees"] is True
    assert found["plain_left_out"] == "gradients are rounded to bf16 between stages"


@pytest.fixture
def fault(monkeypatch):
    """The norm share of the last stage is doubled."""
    real = TrainedWeights.gradient_squares

    def squares(self, batch):
        found, times = real(self, batch), 1 + self.store.where.startswith("stage 1 ")
        return found._replace(total=times * found.total, rest=times * found.rest)

    monkeypatch.setattr(TrainedWeights, "gradient_squares", squares)


@pytest.mark.usefixtures("fault")
def test_what_is_wrong_is_said_and_gives_exit_code_1(verify):
    code, out, err = verify("method=1f1b", "max_grad_norm=0.1")
    assert code == 1
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert sum(row.startswith("decisions 4 of 12 ") for row in rows) == 2
    assert rows.count("decisions norm") == 2
    assert "the pipeline does not train what 1f1b says: it differs first in batch 0, in decisions (norm: " in out
    assert err == ""
    code, out, _ = verify("method=1f1b", "max_grad_norm=0.1", arguments=["--json"])
    found = json.loads(out)
    assert code == 1
    assert found["agrees"] is False
    assert found["compared"]["decisions"]["reference"]["first"]["name"] == "norm"
    assert found["compared"]["gradients"]["plain"]["agrees"] is False


def test_a_pipeline_that_raises_gives_exit_code_1_and_a_traceback(verify, monkeypatch):
    def evaluate(self, *_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(StageModule, "evaluate_loss", evaluate)
    code, out, err = verify("method=1f1b", arguments=["--json"])
    assert code == 1
    assert "in evaluate" in err
    found = json.loads(out)
    assert found["error"] == "ZeroDivisionError: planted"
    place = "raised by F0 of stage 1 on rank 1, the forward of microbatch 0 of batch 0"
    assert f"ended with ZeroDivisionError, {place}: planted" in found["verdict"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("metod=2bw", "unknown configuration key 'metod'; did you mean 'method'?"),
        ("balance=[1]", "must hold 2 positive numbers"),
        ("data=nowhere", "there is no file or folder 'nowhere'"),
    ],
)
def test_mistakes_are_no_failures(verify, change, message):
    code, out, err = verify(change)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.split())


def test_its_data(monkeypatch, capsys, tmp_path):
    settings = [part for change in TINY for part in ("--set", change)]
    (tmp_path / "text.txt").write_text("a stitch in time saves nine; " * 30)
    code, out, _ = run(monkeypatch, capsys, "verify", *settings, "--data", tmp_path / "text.txt", "--batches", 2)
    assert code == 0
    assert "batches 2" in out
    _, _, said = run(monkeypatch, capsys, "verify", *settings, "--data", tmp_path / "none.txt")
    assert "none.txt" in said
