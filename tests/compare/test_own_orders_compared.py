"""Orders of one's own in a comparison: beside methods, by the names of their files, and kept in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from penstock.compare.config import ComparisonConfig, comparison_config
from penstock.compare.run import ComparisonRun
from penstock.errors import ConfigError, ScheduleError
from support.command_line import run

TINY = (
    "stages=2", "microbatches=2", "microbatch_size=1", "batches=3", "seeds=1", "evaluate.samples=4", "model.layers=2",
    "model.width=8", "model.heads=2", "model.context=8", f"data={Path(__file__).parents[2] / 'LICENSE'}",
)  # fmt: skip
ORDER = """
def order(stages, microbatches, *, late=0):
    passes = [f"F{k}" for k in range(microbatches)] + [f"B{k}" for k in range(microbatches)]
    return [passes] * (stages - 1) + [passes if late else ["F0", "B0", "F1", "B1"]]
"""


class Unseen:
    """An observer that sees nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


@pytest.fixture
def order(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(ORDER)
    return path


def configured(*changes: str, methods: str | None = None, files: tuple[object, ...] = ()) -> ComparisonConfig:
    return comparison_config([*TINY, *changes], {"methods": methods}, [str(file) for file in files])


def test_files_come_behind_the_methods_by_their_names(order: Path) -> None:
    config = configured(methods="2bw,1f1b:delays=2", files=(order, f"{order}:late=1", f"{order}:late=1:delays=1"))
    assert [*config.contenders] == ["2bw", "1f1b:delays=2", "mine.py", "mine.py:late=1", "mine.py:late=1:delays=1"]
    runs = [config.run(label, 0, 0.1) for label in config.contenders]
    assert [run.row.rule for run in runs] == ["double-buffer", *["flush"] * 4]
    assert runs[3].schedule == runs[4].schedule != runs[2].schedule
    assert (runs[3].delays, runs[4].delays) == (None, 1)
    assert [*configured(files=(order,)).contenders] == ["mine.py"]


def test_they_are_trained_and_kept(order: Path, tmp_path: Path) -> None:
    """A flushed order gives the results of 1f1b; the folder trains it further without its file, and knows it again."""
    out = tmp_path / "out"
    found = ComparisonRun(configured(methods="1f1b", files=(order,)), out, Unseen()).run()
    losses = {key.method: result.losses for key, result in found.results.items()}
    assert losses["mine.py"] == losses["1f1b"]
    order.unlink()
    more = ComparisonRun(configured("seeds=2"), out, Unseen()).run()
    assert {(key.method, key.seed) for key in more.results} == {
        (m, seed) for m in ("1f1b", "mine.py") for seed in (0, 1)
    }
    kept = json.loads((out / "comparison.json").read_text())["config"]["contenders"]["mine.py"]
    assert "rank 1: F0^t B0^t" in kept["schedule"]
    order.write_text(ORDER.replace("if late", "if not late"))
    with pytest.raises(ConfigError, match="has results of another mine.py: it or its file has changed since. Give"):
        ComparisonRun(configured(files=(order,)), out, Unseen())
    order.write_text(ORDER)
    ComparisonRun(configured(files=(order,)), out, Unseen())


def test_all_methods_have_one_size(tmp_path: Path) -> None:
    penstock.make_schedule("1f1b", 3, 2).save(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match=r"mine.txt: .* is for 3 ranks .* but stages is 2; set stages to 3"):
        configured(files=(tmp_path / "mine.txt",))
    assert [*configured("stages=3", files=(tmp_path / "mine.txt",)).contenders] == ["mine.txt"]


def test_a_configuration_file_may_name_them(order: Path) -> None:
    values = {"methods": ["1f1b"], "contenders": {"own": {"schedule": f"{order}:late=1"}}, "seeds": 5}
    config = comparison_config(TINY, {}, values=values)
    assert [*config.contenders] == ["1f1b", "own"]
    assert config.seeds == 1  # --set goes before the file
    assert config.contenders["own"]["schedule"].startswith(f"# {order}:late=1\nschedule mine\n")


def test_what_is_wrong_with_one_is_said_before_anything_is_trained(order: Path) -> None:
    with pytest.raises(ConfigError, match="order 'mine' has no option|has no option 'later'; it has late"):
        configured(files=(f"{order}:later=1",))
    with pytest.raises(ConfigError, match="there is no Python file 'nowhere.py'"):
        configured(files=("nowhere.py",))
    order.write_text(ORDER.replace('"B0", "F1"', '"F1", "B0^t-1"'))
    with pytest.raises(ScheduleError, match=r"mine.py: rank 1, B0\^t-1: must read version t, as its forward did"):
        configured(files=(order,))


def test_the_command_compares_methods_and_files(order: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    changes = [part for change in TINY for part in ("--set", change)]
    asked = ("compare", "1f1b", "2bw", *changes, "--file", order, "--out", tmp_path / "out")
    code, out, err = run(monkeypatch, capsys, *asked)
    assert code == 0, err
    assert "mine.py, seed 0, lr 0.003: validation loss" in out
    code, out, err = run(monkeypatch, capsys, *asked, "--json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert list(rows) == ["1f1b", "2bw", "mine.py"]
    assert rows["mine.py"]["verdict"] == "equal"
    assert "3 of 3 runs had finished before" in err
    (tmp_path / "mine.yaml").write_text("methods: [2bw]\nlr: [0.1, 0.01]\n")
    code, out, _ = run(
        monkeypatch, capsys, "compare", "--config", tmp_path / "mine.yaml", *changes, "--out", tmp_path / "b", "--json"
    )
    assert (code, [row["method"] for row in json.loads(out)]) == (0, ["2bw"])
