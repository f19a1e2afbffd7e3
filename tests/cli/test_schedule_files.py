"""Schedules from a user's file: functions, text, torch's CSV; and what is said of wrong ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.schedule.build import make_schedule
from penstock.schedule.torch_csv import to_torch_csv

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_order.py"
TWO = "def order(stages, microbatches):\n    return ['F0 F1 B0 B1', '{}']\n"


def run(monkeypatch: Any, capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    code = caught.value.code or 0
    assert isinstance(code, int)
    return code, printed.out, " ".join(printed.err.split())


def test_the_example(monkeypatch: Any, capsys: Any) -> None:
    asked = ("show", "--file", EXAMPLE, "--stages", 3, "--microbatches", 6)
    code, out, _ = run(monkeypatch, capsys, *asked)
    assert code == 0
    assert "rank 2 ······|F0|F1|F2|" in out
    code, out, _ = run(monkeypatch, capsys, *asked, "--text")
    assert code == 0
    assert "rank 2: F0^t F1^t F2^t B0^t F3^t B1^t" in out
    code, out, _ = run(monkeypatch, capsys, "simulate", "--file", EXAMPLE, "--stages", 2, "--set", "options.more=3")
    assert code == 0
    assert "peak activations" in out


def test_our_text_and_torch_s_csv(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    schedule = make_schedule("zb-v", 2, 4)
    (tmp_path / "mine.txt").write_text(str(schedule))
    (tmp_path / "mine.csv").write_text(to_torch_csv(schedule))
    for name in ("mine.txt", "mine.csv"):
        code, out, _ = run(monkeypatch, capsys, "show", "--file", tmp_path / name)
        assert code == 0
        assert "|F0a|F1a|" in out
    code, out, _ = run(monkeypatch, capsys, "show", "--file", tmp_path / "mine.txt", "--text")
    assert out == str(schedule)


CLASSES = """
from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial


@dataclass
class Rank:
    number: int
    passes: list[str] = field(default_factory=list)


def _ahead(stages: int, microbatches: int, *, more: int = 0) -> list[list[str]]:
    ranks = [Rank(number) for number in range(stages)]
    for rank in ranks:
        ahead = min(stages - 1 - rank.number + more, microbatches)
        rank.passes += [f"F{k}" for k in range(ahead)]
        for k in range(microbatches):
            rank.passes += [f"F{ahead + k}", f"B{k}"] if ahead + k < microbatches else [f"B{k}"]
    return [rank.passes for rank in ranks]


order = partial(_ahead, more=1)
"""


def test_classes_and_a_partial_function(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CLASSES)
    asked = ("show", "--text", "--file", path, "--stages", 2, "--microbatches", 3)
    for change, wanted in (
        ((), "F0^t F1^t B0^t F2^t B1^t B2^t"),
        (("--set", "options.more=0"), "F0^t B0^t F1^t B1^t F2^t"),
        (("--set", "options.more=2"), "F0^t F1^t F2^t B0^t B1^t"),
    ):
        code, out, said = run(monkeypatch, capsys, *asked, *change)
        assert (code, said) == (0, "")
        assert f"rank 1: {wanted}" in out
    code, _, said = run(monkeypatch, capsys, *asked, "--set", "options.less=2")
    assert code == 2
    assert "has no option 'less'; it has more" in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import sys\nsys.exit(0)\ndef order(stages, microbatches):\n    return []\n", 2),
        ("def order(stages, microbatches):\n    raise SystemExit(0)\n", 2),
    ],
)
def test_a_file_that_exits_is_an_error(monkeypatch: Any, capsys: Any, tmp_path: Path, text: str, line: int) -> None:
    """Its own exit code, 0 say, is not that of the command; also where the path is relative."""
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "mine.py", "mine.py"):
        code, out, said = run(monkeypatch, capsys, "show", "--file", path, "--stages", 2, "--microbatches", 2)
        assert (code, out) == (2, "")
        assert f"mine.py, line {line}: SystemExit: 0" in said


BAD = [
    (
        "limit=²",
        "options.limit takes a whole number, such as options.limit=4; got '²'",
        "options.limit: input should be a valid integer",
    ),
    (
        "limit=--5",
        "options.limit takes a whole number, such as options.limit=4; got '--5'",
        "options.limit: input should be a valid integer",
    ),
    (
        "limit=",
        "options.limit takes a whole number, such as options.limit=4; got ''",
        "options.limit: input should be a valid integer",
    ),
    ("limit", "options.limit takes a whole number, such as options.limit=4; got ''", "options.limit"),
    ("limit=-5", *["zb-auto: limit must be a whole number of at least 1, got -5"] * 2),
    ("limit=0", *["zb-auto: limit must be a whole number of at least 1, got 0"] * 2),
    ("hop=-1", *["zb-auto: hop must be a whole number of at least 0, got -1"] * 2),
    ("held=250", *["zb-auto: held is a percentage of a microbatch's activations, got 250"] * 2),
]


@pytest.mark.parametrize(("change", "shown", "trained"), BAD)
def test_options_that_are_no_numbers_or_impossible(
    monkeypatch: Any, capsys: Any, tmp_path: Path, change: str, shown: str, trained: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for telling, asked in (
        (shown, ("show", "zb-auto", "--set", f"options.{change}")),
        (shown, ("simulate", "zb-auto", "--set", f"options.{change}")),
        (trained, ("train", "--set", "method=zb-auto", "--set", f"options.{change}")),
    ):
        code, out, said = run(monkeypatch, capsys, *asked)
        assert (code, out) == (2, "")
        assert telling in said
        assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_zero_where_zero_is_the_default(monkeypatch: Any, capsys: Any) -> None:
    asked = ("simulate", "zb-auto", "--stages", 2, "--microbatches", 4, "--json")
    spans = []
    for change in ((), ("--set", "options.hop=0"), ("--set", "options.hop=0", "--set", "options.held=100")):
        code, out, said = run(monkeypatch, capsys, *asked, *change)
        assert (code, said) == (0, "")
        spans.append(json.loads(out)["rank_span"])
    assert spans == [12] * 3


WRONG = [
    (TWO.format("F0 B1 F1 B0"), "needs the forward of microbatch 1 on stage 1, which stands later on the same rank"),
    (TWO.format("F0 F0 B0 F1 B1"), "microbatch 0, stage 1 has 2 forwards per batch instead of 1"),
    (TWO.format("F0 Q0 F1 B1"), "cannot read 'Q0'"),
    ("def order(stages, microbatches):\n    return 1 / 0\n", "mine.py, line 2: ZeroDivisionError: division by zero"),
    ("import nothing_of_that_name\n", "mine.py, line 1: ModuleNotFoundError"),
    (
        "def a(s, m):\n    pass\ndef b(s, m):\n    pass\n",
        "must hold a function order(stages, microbatches) that returns an order; it holds 'a' and 'b'",
    ),
    ("x = 3\n", "it holds none"),
    ("def order(stages, microbatches):\n    return 3\n", "expected an Order, or a list with the passes of each rank"),
]


@pytest.mark.parametrize(("text", "telling"), WRONG)
def test_what_is_wrong_is_named(monkeypatch: Any, capsys: Any, tmp_path: Path, text: str, telling: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    code, _, said = run(monkeypatch, capsys, "show", "--file", path, "--stages", 2, "--microbatches", 2)
    assert code == 2
    assert telling in said
    assert "Traceback" not in said


def test_a_method_or_a_file(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    for arguments in (("show",), ("show", "1f1b", "--file", EXAMPLE), ("simulate",)):
        code, _, said = run(monkeypatch, capsys, *arguments)
        assert code == 2
        assert "give either a METHOD" in said
    code, _, said = run(monkeypatch, capsys, "show", "--file", tmp_path / "none.py")
    assert (code, "there is no Python file" in said) == (2, True)
    code, _, said = run(monkeypatch, capsys, "show", "--file", tmp_path / "none.txt")
    assert (code, "cannot read a schedule from" in said) == (2, True)
