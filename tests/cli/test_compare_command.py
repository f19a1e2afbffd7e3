"""`penstock compare`, as a person runs it."""

import csv

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.compare import run as run_module
from support.command_line import run

TINY = [
    "compare", "--stages", 2, "--microbatches", 2, "--batches", 2, "--seeds", 2,
    *(part for change in ("microbatch_size=1", "model.layers=2", "model.width=8", "model.heads=2", "model.context=8",
                          "evaluate.samples=4", f"data={__file__}") for part in ("--set", change)),
]  # fmt: skip


def compare(*arguments):
    return CliRunner().invoke(make_app(), [str(part) for part in (*TINY, *arguments)], env={"COLUMNS": "160"})


@pytest.mark.slow
def test_the_command_from_beginning_to_end_and_again(tmp_path):
    out = tmp_path / "out"
    first = compare("--out", out)
    assert first.exit_code == 0, first.output
    lines = first.output.splitlines()
    assert lines[0].startswith("GPT 2 x 8")
    finished = [line for line in lines if ": validation loss " in line]
    assert [line.split(":")[0] for line in finished] == [
        f"{method}, seed {seed}, lr 0.003" for seed in (0, 1) for method in ("1f1b", "2bw")
    ]
    assert "2 stages, 2 microbatches, 2 batches of 16 tokens" in first.output
    assert any(line.split()[0] == "1f1b" and "baseline" in line for line in lines if line.strip())
    assert lines[-1] == str(out / "comparison.html")
    names = {"comparison.html", "comparison.json", "results.csv", "summary.csv", "runs"}
    assert {path.name for path in out.iterdir()} == names
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["updates"] for row in rows] == ["2"] * 4
    tables = {name: (out / name).read_bytes() for name in names - {"runs"}}

    again = compare("--out", out)
    assert again.exit_code == 0
    assert "4 of 4 runs had finished before" in again.output
    assert ": validation loss " not in again.output
    assert {name: (out / name).read_bytes() for name in tables} == tables


def test_ctrl_c_says_how_to_go_on_and_leaves_what_there_is(tmp_path, monkeypatch):
    real, begun = run_module.train_contender, []

    def interrupted(*arguments):
        begun.append(arguments)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(run_module, "train_contender", interrupted)
    result = compare("--out", tmp_path)
    assert result.exit_code == 130
    assert "the same command continues with the runs that have not finished" in result.output
    with (tmp_path / "results.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} == {"1f1b"}
    assert compare("--out", tmp_path).exit_code == 0
    assert len(list((tmp_path / "runs").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the folder for the results"),
        (["1f1b,newes", "--out", "x"], "unknown method 'newes'. Did you mean 'newest'"),
        (["--lr", "fast", "--out", "x"], "lr takes comma-separated numbers"),
        (["--set", "clip", "--out", "x"], "--set takes key=value"),
    ],
)
def test_mistakes_end_with_code_2(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *TINY, *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_another_comparison_in_the_folder_is_refused(monkeypatch, capsys, tmp_path):
    assert compare("--out", tmp_path / "out").exit_code == 0
    code, _, err = run(monkeypatch, capsys, *TINY, "--microbatches", 4, "--out", tmp_path / "out")
    assert code == 2
    assert "holds another comparison: microbatches is 2 there and 4 now." in " ".join(err.split())


def test_keys_are_listed(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "compare", "--keys")
    assert code == 0
    assert "evaluate.every" in out
    assert "keys of --set" in out


def test_delays_are_told_as_in_the_table_of_methods(monkeypatch, capsys, tmp_path):
    """Of every rank, (d - 1 - s) / m under a stash; in the same words."""
    compared = compare("stash", "--seeds", 1, "--batches", 1, "--out", tmp_path / "out").output
    listed = run(monkeypatch, capsys, "methods", "--stages", 2, "--microbatches", 2)[1]
    rows = [
        next(line for line in text.splitlines() if line.strip().startswith("stash ")) for text in (compared, listed)
    ]
    assert rows[0].rstrip().endswith("  0.5 0")
    assert "  0.5 0  " in rows[1]
    for text in (compared, listed):
        words = " ".join(text.split())
        assert (
            "Delay: updates between the weights that forwards read and the weights updated, mean over a batch" in words
        )
        assert "Per rank where the ranks differ; a .. b: from the first to the last" in words
