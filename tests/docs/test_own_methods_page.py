"""docs/own-methods.md: what it prints is what the commands print, and what it says to type runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.cli import main
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.corrections import CORRECTIONS
from support.plain_training import MICROBATCHES, PlainTraining, assert_close_weights, make_data, make_model, sgd

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-methods.md"
PYTHON = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SHOWN = re.findall(r"```text\n\$ (penstock [^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
TYPED = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, in which commands run."""
    (tmp_path / "examples").mkdir()
    for name in ("my_order.py", "examples/my_order.py"):
        (tmp_path / name).write_text(PYTHON[0])
    assert PYTHON[0].count("stages - rank - 1 + more") == 1
    (tmp_path / "broken.py").write_text(PYTHON[0].replace("stages - rank - 1 + more", "rank + more"))
    (tmp_path / "endless.py").write_text(PYTHON[2])
    (tmp_path / "slow_start.py").write_text(PYTHON[3])
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out + printed.err


def made_anew(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """The page with what its commands print now."""
    text = PAGE.read_text()
    for command, printed in SHOWN:
        _, now = run(command, monkeypatch, capsys)
        text = text.replace(f"$ {command}\n{printed}```", f"$ {command}\n{now}```")
    return text


def test_it_shows_what_the_commands_print(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert len(SHOWN) == 3
    text = made_anew(monkeypatch, capsys)
    assert text == PAGE.read_text(), text


def test_the_example_is_shown_as_it_is() -> None:
    assert (ROOT / "examples" / "my_order.py").read_text() == PYTHON[0]


def test_the_python_runs(files: Path, capsys: Any) -> None:
    names: dict[str, Any] = {"penstock": penstock, "loss": nn.functional.mse_loss}
    names |= {"optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3)}
    names["blocks"] = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
    exec(compile(PYTHON[0], "my_order.py", "exec"), names)
    exec(compile(PYTHON[1], "own-methods.md", "exec"), names)
    assert capsys.readouterr().out == "(3, 2) (1, 1) 0.2\n"
    fours = [[(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)]]
    assert [report.batch for report in names["pipeline"].run(fours)] == [0]
    assert str(penstock.load_schedule("mine.txt")) == str(names["schedule"])


@pytest.mark.parametrize(("file", "rule", "delay"), [("my_order.py", "flush", 0), ("endless.py", "double-buffer", 1)])
def test_its_orders_train_as_plain_torch_does(files: Path, file: str, rule: str, delay: int) -> None:
    """Once mended: broken, they are refused in Python, too."""
    with pytest.raises(penstock.ScheduleError, match="deadlock: 3 ranks would wait for ever"):
        penstock.load_schedule("broken.py", stages=3, microbatches=4)
    names: dict[str, Any] = {}
    exec(Path(file).read_text(), names)
    schedule = penstock.make_schedule(names["order"], 2, MICROBATCHES, rule=rule)
    pipeline = penstock.Pipeline(
        make_model(), schedule, loss=nn.functional.mse_loss, optimizer=lambda named: sgd([p for _, p in named])
    )
    list(pipeline.run(make_data()))
    plain = PlainTraining(make_model(), delay=delay)
    plain.run(make_data())
    assert_close_weights(pipeline.state_dict(), dict(plain.model.state_dict()))


@pytest.mark.processes
@pytest.mark.parametrize("typed", TYPED)
def test_what_it_says_to_type_runs(typed: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With a small model on a small text."""
    small = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=8"]
    small += ["evaluate.samples=8"] if " compare " in typed else ["sample_length=0", "validation_samples=8"]
    given = " ".join(f"--set {change}" for change in small)
    code, said = run(f"{typed} --data my.txt {given}", monkeypatch, capsys)
    assert code == 0, said


def test_every_rule_and_every_correction_is_named() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    others = {
        "provisional",
        "provisional-in-place",
        "frozen",
        "admitted-newest",
    }  # of certain orders, or of evaluations
    for name in RULES.keys() - others:
        (row,) = (row for row in rows if f"`{name}`" in row.split("|")[1])
        takers = {key for key, spec in CORRECTIONS.items() if name in spec.rules}
        assert takers <= set(re.findall(r"`([\w-]+)`", row.split("|")[3])), name
