"""Schedules from a user's file: functions, text, torch's CSV; and what is said of wrong ones."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.schedule.load import load_function
from penstock.schedule.torch_csv import to_torch_csv
from support.schedules import make_schedule

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
    # A file of two stages and two microbatches, what is said of it (MINE stands for its path), and where.
    (TWO.format("F0 B1 F1 B0"), "MINE: rank 1, B1 needs the forward of microbatch 1 on stage 1, which stands later on"),
    (TWO.format("F0 F0 B0 F1 B1"), "MINE: microbatch 0, stage 1 has 2 forwards per batch instead of 1"),
    (TWO.format("F0 B0 F1"), "MINE: microbatch 1, stage 1 needs one B, or one I and one W, per batch; it has 0 B"),
    (TWO.format("F0 B0 B1"), "MINE: rank 1, B1@1: this rank runs no forward of microbatch 1"),
    (TWO.format("F0 Q0 F1 B1"), "MINE: rank 1: cannot read 'Q0'; an action is OPERATION UNIT"),
    (TWO.format("f0 b0 f1 b1"), "MINE: rank 1: cannot read 'f0'; .* did you mean 'F0'\\?"),
    (TWO.format("F0,B0,F1,B1"), "MINE: rank 1: cannot read 'F0,B0,F1,B1'; .* separate actions by spaces"),
    (TWO.format("F0@0 B0 F1 B1"), "MINE: rank 1: F0@0: no such stage here; stages: 1"),
    (
        TWO.format("F0 B0 F1^t-1 B1"),
        r"MINE: rank 1, F1\^t-1: must read version t, not t-1 \(rule 'flush', found in batch 1\)",
    ),
    (TWO.format("F0 B0 F1 B1 F2 B2"), "MINE: rank 1, F2: a batch has 2 microbatches, numbered from 0 to 1"),
    (TWO.format("F0 B0 F1 B1 F-1 B-1"), "MINE: rank 1, F-1: a batch has 2 microbatches, numbered from 0 to 1"),
    (
        TWO.format("F1 B1 F0 B0").replace("F0 F1 B0", "F0 B0 F1"),
        "MINE: deadlock: 2 ranks would wait for ever rank 0 at B0",
    ),
    (TWO.replace("]", ", 'F0 B0 F1 B1']"), "MINE: asked for 2 stages, it returned the passes of 3 ranks"),
    (
        "def order(stages, microbatches):\n    yield 'F0 B0'\n",
        "MINE: asked for 2 stages, it returned the passes of 1 ranks",
    ),
    ("def order(stages, microbatches):\n    return 1 / 0\n", "MINE, line 2: ZeroDivisionError: division by zero"),
    (
        "def order(stages, microbatches):\n    yield 'F0'\n    1 / 0\n",
        "MINE, line 3: ZeroDivisionError: division by zero",
    ),
    ("import nothing_of_that_name\n", "MINE, line 1: ModuleNotFoundError"),
    ("x = 3\ndef order(stages, microbatches)\n", "MINE, line 2: SyntaxError: expected ':'"),
    ("def a(s, m):\n    pass\ndef b(s, m):\n    pass\n", "it holds 'a' and 'b'; call one of them order"),
    ("x = 3\n", "MINE must hold a function order\\(stages, microbatches\\) that returns an order; it holds none"),
    ("def order(stages):\n    pass\n", r"MINE: the function must take \(stages, microbatches\), but takes \(stages\)"),
    (
        "def order(stages, microbatches):\n    return 3\n",
        "MINE: expected an Order, or a list with the passes of each rank",
    ),
    (
        "def order(stages, microbatches):\n    pass\n",
        "MINE: expected an Order, .*, got None; end the function with return",
    ),
    ("def order(stages, microbatches):\n    return ['F0', None]\n", "MINE: expected the passes of rank 1, got None"),
    (
        "def order(stages, microbatches):\n    return [[('F', 0)]] * 2\n",
        "MINE: expected a pass on rank 0, such as 'F0'",
    ),
]


def test_a_file_is_read_as_it_stands_however_soon_it_is_changed(tmp_path: Path, monkeypatch: Any) -> None:
    """Bytecode beside it would be taken for that of a file as long as it, of the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, found = tmp_path / "mine.py", []
    for number in (1, 2):
        path.write_text(f"def order(stages, microbatches):\n    return {number}\n")
        os.utime(path, (0, 0))
        found.append(load_function(path)(1, 1))
    assert found == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(("text", "telling"), WRONG)
def test_what_is_wrong_is_named_by_every_command(
    monkeypatch: Any, capsys: Any, tmp_path: Path, text: str, telling: str
) -> None:
    """In the same words, of the file, before anything is trained."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    rest = ("--file", path, "--stages", 2, "--microbatches", 2)
    found = {
        " ".join(asked): run(monkeypatch, capsys, *asked, *rest)
        for asked in (("show",), ("simulate",), ("train",), ("verify",), ("compare", "--out", "results"))
    }
    assert {asked: (code, out) for asked, (code, out, _) in found.items()} == dict.fromkeys(found, (2, ""))
    (said,) = {said for _, _, said in found.values()}
    assert re.search(telling.replace("MINE", re.escape(str(path))), said), said
    assert "Traceback" not in said
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


TEXT = "schedule mine\nmicrobatches 2\nnodes 0@0 1@1\nrank 0: {}\nrank 1: F0 B0 F1 B1\n"


@pytest.mark.parametrize(
    ("name", "text", "telling"),
    [
        ("mine.txt", TEXT.format("F0 F1^t-1 B0 B1"), r"MINE: rank 0, F1\^t-1: must read version t, not t-1"),
        ("mine.txt", TEXT.format("F0 F1 B0 B1").replace("nodes", "ranks"), "MINE:3: unknown line 'ranks'; lines begin"),
        ("mine.txt", TEXT.format("F0 F1 B0"), "MINE: microbatch 1, stage 0 needs one B"),
        ("mine.txt", "\0\1\2", "cannot read a schedule from 'MINE': it is not text"),
        ("mine.csv", "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "MINE: microbatch 1, stage 0 needs one B"),
        ("mine.csv", "\0\1\2", "cannot read a schedule from 'MINE': it is not text"),
    ],
)
def test_what_is_wrong_with_a_finished_schedule_is_named(
    monkeypatch: Any, capsys: Any, tmp_path: Path, name: str, text: str, telling: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    for asked in (("show",), ("train",), ("verify",), ("compare", "--out", "results")):
        code, out, said = run(monkeypatch, capsys, *asked, "--file", path)
        assert (code, out) == (2, "")
        assert re.search(telling.replace("MINE", re.escape(str(path))), said), said


def test_a_generator_yields_the_passes_of_each_rank(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def order(stages, microbatches):\n    yield 'F0 F1 B0 B1'\n    yield 'F0 B0 F1 B1'\n")
    code, out, _ = run(monkeypatch, capsys, "show", "--file", path, "--stages", 2, "--microbatches", 2, "--text")
    assert code == 0
    assert "schedule mine\n" in out  # called like its file
    assert "rank 1: F0^t B0^t F1^t B1^t" in out


def test_options_stand_behind_the_name(monkeypatch: Any, capsys: Any) -> None:
    """Of a method and of a file, and do the same as --set."""
    for by_name, by_set in (
        (("zb-auto:limit=3",), ("zb-auto", "--set", "options.limit=3")),
        (("--file", f"{EXAMPLE}:more=1"), ("--file", EXAMPLE, "--set", "options.more=1")),
        (("zb-auto:limit=3", "--order", "zb-h1"), None),
    ):
        found = [run(monkeypatch, capsys, "show", *asked, "--stages", 3) for asked in (by_name, by_set) if asked]
        if by_set is None:
            assert found[0][0] == 2
            assert "has no option 'limit'" in found[0][2]
        else:
            assert found[0][0] == 0, found[0]
            assert found[0] == found[1]


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_set_takes_the_keys_of_train(command: str, monkeypatch: Any, capsys: Any) -> None:
    for change, near in (("chunks=4", "options.chunks=4"), ("option.chunk=4", "options.chunks=4"), ("x", "options.")):
        code, out, said = run(monkeypatch, capsys, command, "interleaved", "--set", change)
        assert (code, out) == (2, "")
        assert f"takes options of the order, such as {near}" in said


def test_a_method_or_a_file(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    for arguments in (("show",), ("show", "1f1b", "--file", EXAMPLE), ("simulate",)):
        code, _, said = run(monkeypatch, capsys, *arguments)
        assert code == 2
        assert "give either a METHOD" in said
    code, _, said = run(monkeypatch, capsys, "show", "--file", tmp_path / "none.py")
    assert (code, "there is no Python file" in said) == (2, True)
    code, _, said = run(monkeypatch, capsys, "show", "--file", tmp_path / "none.txt")
    assert (code, "cannot read a schedule from" in said) == (2, True)


def test_a_text_without_a_name_is_called_like_its_file(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("microbatches 2\nnodes 0@0\nrank 0: F0 B0 F1 B1\n")
    code, out, _ = run(monkeypatch, capsys, "show", "--file", tmp_path / "mine.txt")
    assert code == 0
    assert out.startswith("mine: 1 stage, 2 microbatches")
