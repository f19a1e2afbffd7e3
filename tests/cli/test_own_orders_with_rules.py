"""Orders of one's own on the command line, under any version rule and with corrections."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from support.command_line import settings
from support.schedules import make_schedule

ENDLESS = """
def order(stages, microbatches, *, more=0):
    ranks = []
    for rank in range(stages):
        ahead = stages - 1 - rank + more
        ranks.append(" ".join(f"F{k} B{k - ahead}" for k in range(microbatches)))
    return ranks
"""
TINY = (
    "microbatch_size=1", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8",
    "lr_schedule.warm_up=2", "optimizer.lr=0.01", "threads=1", "max_grad_norm=null", "sample_length=0",
)  # fmt: skip


@pytest.fixture
def order(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(ENDLESS)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def run(monkeypatch: Any, capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert isinstance(caught.value.code or 0, int)
    return int(caught.value.code or 0), printed.out, " ".join(printed.err.split())


def test_backwards_of_earlier_batches_make_an_order_without_flushes(order: Path, monkeypatch: Any, capsys: Any) -> None:
    """The text of a function may say B-1, as the text form does; what drains the pipeline follows from it."""
    wanted = str(make_schedule("2bw", 3, 2)).replace("schedule 2bw", "schedule mine")  # B-2 is of two batches before
    asked = ("show", "--file", order, "--rule", "double-buffer", "--stages", 3, "--microbatches", 2, "--text")
    code, out, said = run(monkeypatch, capsys, *asked)
    assert (code, said, out) == (0, "", wanted)
    code, out, said = run(monkeypatch, capsys, "simulate", *asked[1:5], "--stages", 2, "--microbatches", 2, "--json")
    assert (code, json.loads(out)["bubble_in_a_long_run"]) == (0, 0)
    code, _, said = run(monkeypatch, capsys, "show", "--file", order)
    assert code == 2
    assert "rule 'flush' empties the pipeline after each batch, but the order lets batches overlap" in said
    assert "name another rule, such as double-buffer" in said


def test_a_rule_is_for_orders_of_ones_own(order: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "mine.txt").write_text(str(make_schedule("2bw", 2, 2)))
    for asked, telling in (
        (("--file", order, "--rule", "dubble-buffer"), "unknown version rule 'dubble-buffer'"),
        (("--file", order, "--rule", "dubble-buffer"), "Did you mean 'double-buffer'?"),
        (("--file", tmp_path / "mine.txt", "--rule", "stash"), "holds a finished schedule"),
        (("1f1b", "--rule", "stash"), "rule: method '1f1b' has its own, flush"),
        (("--file", order, "--rule", "stash", "--correction", "pipemare"), "needs version rule newest, not 'stash'"),
        (("--file", order, "--rule", "stash", "--correction", "pipemere"), "Did you mean 'pipemare'?"),
        (("--file", order, "--rule", "newest", "--correction", "pipemare:x=1"), "has no option 'x'"),
        (("1f1b", "--correction", "pipemare"), "correction: method '1f1b' has its own"),
    ):
        for command in ("show", "simulate", "train", "verify", "compare"):
            given = [*asked, *(("--out", tmp_path / "out") if command == "compare" else ())]
            code, _, said = run(monkeypatch, capsys, command, *given)
            assert (code, telling in said) == (2, True), (command, said)
    code, _, said = run(monkeypatch, capsys, "train", "--file", order, "--rule", "predicted")
    assert code == 2
    assert "rule 'predicted' reads weights that a correction makes; name it with --correction: spectrain" in said


RULES = [
    ("double-buffer", None),
    ("stash", None),
    ("vertical-sync", None),
    ("newest", None),
    ("newest", "pipemare:reschedule=3"),
    ("predicted", "spectrain"),
    ("predicted-stash", "spectrain-stash"),
    ("predicted-shared", "xpipe"),
    ("predicted-forward", "pipeoptim"),
    ("blended", "i-timeprest"),
]


@pytest.mark.parametrize(("rule", "correction"), RULES)
def test_they_are_verified_under_every_rule(
    rule: str, correction: str | None, order: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Against the equations of the rule and of its correction, with the delays of the order itself."""
    given = [word for change in TINY for word in ("--set", change)]
    own = ["--file", f"{order}:more=1", "--rule", rule, *(("--correction", correction) if correction else ())]
    code, out, said = run(
        monkeypatch, capsys, "verify", *own, *given, "--data", tmp_path / "text.txt", "--microbatches", 3
    )
    assert code == 0, (out, said)
    assert "every number equals the reference's" in out


def test_they_are_compared_under_several_rules(order: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Each is named by what it is; --rule is that of all files which name none."""
    given = ["--stages", 2, "--microbatches", 2, "--batches", 3, "--seeds", 1, "--data", tmp_path / "text.txt"]
    sizes = ("model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "evaluate.samples=8")
    given += [word for size in sizes for word in ("--set", size)]
    asked = ["compare", "1f1b", "2bw", *given, "--out", tmp_path / "out", "--rule", "double-buffer"]
    asked += ["--file", order, "--file", f"{order}:rule=newest:correction=pipemare:decay=0.2", "--json"]
    code, out, said = run(monkeypatch, capsys, *asked)
    assert code == 0, said
    rows = {row["method"]: row for row in json.loads(out)}
    newest = "mine.py:rule=newest:correction=pipemare:decay=0.2"
    assert list(rows) == ["1f1b", "2bw", "mine.py:rule=double-buffer", newest]
    assert rows["2bw"]["loss"] == rows["mine.py:rule=double-buffer"]["loss"]
    assert rows["2bw"]["loss"] != rows[newest]["loss"]
    code, out, said = run(monkeypatch, capsys, *asked)  # from the folder, where the runs have finished
    assert (code, "4 of 4 runs had finished before" in said) == (0, True), said


@pytest.mark.processes
def test_they_are_trained_and_go_on(order: Path, tmp_path: Path, command: Any) -> None:
    """With the same losses as the method of the same order, rule and correction; the file may go."""
    same = settings("sample_length=0", "lr_schedule.decay=none", "lr_schedule.warm_up=0", "microbatches=3")
    rest = ("--data", tmp_path / "text.txt", *same)
    own = ("--file", order, "--rule", "newest", "--correction", "pipemare:reschedule=4")
    cut = command("train", *own, *rest, "--set", f"out={tmp_path / 'cut'}", "--batches", 3)
    assert cut.returncode == 0, cut.stderr
    (folder,) = (tmp_path / "cut").iterdir()
    order.unlink()
    resumed = command("train", "--resume", folder, "--batches", 6)
    assert resumed.returncode == 0, resumed.stderr
    whole = command("train", "pipemare:reschedule=4", *rest, "--set", f"out={tmp_path / 'whole'}", "--batches", 3)
    (other,) = (tmp_path / "whole").iterdir()
    resumed = command("train", "--resume", other, "--batches", 6)
    assert (whole.returncode, resumed.returncode) == (0, 0), resumed.stderr
    found = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (folder, other)
    ]
    losses = [[line["loss"] for line in lines if "batch" in line] for lines in found]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
