"""A comparison that is interrupted, or given more methods, seeds and rates, trains what is missing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.compare import run
from penstock.compare.config import comparison_config
from penstock.compare.contender_run import Key, TrialResult
from penstock.compare.results import EvaluationRow, Findings, as_csv
from penstock.compare.run import ComparisonRun, grid_of
from penstock.errors import CapabilityError, ConfigError, DataError, WorkerError
from penstock.view.comparison_progress import caption
from support.comparisons import TEXT, TINY, Quiet, compared, configured
from support.own_methods import written


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["checkpoint.every=null", "checkpoint.every=2"])
def test_an_interrupted_comparison_goes_on(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint of the run that was interrupted, if there is one."""
    changes, real = ["methods=1f1b,2bw", "batches=6", checkpoint], run.train_contender
    expected = compared(tmp_path / "at once", *changes)
    begun, counted = list[Key](), list[int]()

    def interrupted(config: Any, task: Any, runs: Path, key: Key, tell: Any) -> TrialResult:
        begun.append(key)

        def count(batch: int, _: float) -> None:
            counted.append(batch)
            if len(counted) == 6 + 5:
                raise KeyboardInterrupt

        return real(config, task, runs, key, count)

    monkeypatch.setattr(run, "train_contender", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "out", *changes)
    again = compared(tmp_path / "out", *changes)
    first, second = grid_of(again.config)
    assert begun == [first, second, second]
    assert len(counted) - 11 < 6 if checkpoint.endswith("2") else counted[11:] == [1, 2, 3, 4, 5, 6]
    assert as_csv(again.rows(), EvaluationRow) == as_csv(expected.rows(), EvaluationRow)


@pytest.mark.long
def test_rates_are_tried_with_some_seeds_alone(tmp_path: Path) -> None:
    changes, observer = ("methods=1f1b,2bw", "batches=3", "seeds=3", "lr=0.3,0.01,0.0001"), Quiet()
    everything = compared(tmp_path / "all", *changes)
    findings = compared(tmp_path / "some", *changes, "tune=1", observer=observer)
    assert observer.seen["finished"] == 2 * (3 + 2)
    chosen = {}
    for prepared in findings.contenders:
        ends = {k.lr: r.scores[-1].loss for k, r in everything.results.items() if k[:2] == (prepared.label, 0)}
        chosen[prepared.label] = min(ends, key=lambda lr: ends[lr])
        assert findings.by_rate(prepared).keys() == {0.3, 0.01, 0.0001}
        assert [(r.key.seed, r.key.lr) for r in findings.at_best_rate(prepared)] == [
            (seed, chosen[prepared.label]) for seed in range(3)
        ]
    assert {k for k in findings.results if k.seed} == {Key(m, seed, lr) for m, lr in chosen.items() for seed in (1, 2)}
    for key, result in findings.results.items():
        assert result.losses == everything.results[key].losses
    again = Quiet()
    compared(tmp_path / "some", *changes, "tune=1", observer=again)
    assert again.seen["began"] == 0


def test_seeds_may_be_added_with_the_best_rate_alone(tmp_path: Path) -> None:
    first = ("methods=1f1b", "batches=2", "lr=0.01,0.1")
    compared(tmp_path, *first, "seeds=1")
    observer = Quiet()
    findings = compared(tmp_path, *first, "seeds=2", "tune=1", observer=observer)
    assert (observer.seen["finished"], len(findings.results)) == (1, 3)


def test_methods_seeds_and_rates_may_be_added(tmp_path: Path) -> None:
    compared(tmp_path, "methods=1f1b", "batches=2")
    observer = Quiet()
    findings = compared(tmp_path, "methods=2bw,1f1b", "batches=2", "seeds=2", "lr=0.01,0.1", observer=observer)
    assert (observer.seen["finished"], len(findings.results)) == (7, 8)


def keys(findings: Findings) -> list[tuple[str, int, float]]:
    return [tuple(key) for key in findings.results]


@pytest.mark.long
def test_what_is_not_named_stays_as_it_is(tmp_path: Path) -> None:
    """Methods come behind those that are there; seeds and rates are for all of them."""
    few = [change for change in TINY if not change.startswith(("seeds=", "optimizer.lr="))] + ["batches=2"]

    def again(*changes: str) -> tuple[Findings, int]:
        observer = Quiet()
        return ComparisonRun(comparison_config([*few, *changes], {}), tmp_path, observer).run(), observer.seen["began"]

    again("methods=2bw,1f1b", "seeds=1", "lr=0.01,0.1")
    found, began = again("methods=stash,pipedream-2bw")
    assert [prepared.label for prepared in found.contenders] == ["2bw", "1f1b", "stash"]
    assert keys(found) == [(m, 0, lr) for lr in (0.01, 0.1) for m in ("2bw", "1f1b", "stash")]
    assert began == 2
    assert [*json.loads((tmp_path / "comparison.json").read_text())["config"]["contenders"]] == ["2bw", "1f1b", "stash"]
    found, began = again()
    assert (keys(found), began) == ([(m, 0, lr) for lr in (0.01, 0.1) for m in ("2bw", "1f1b", "stash")], 0)
    found, began = again("seeds=2", "tune=1", "methods=2bw")
    assert (began, len(found.results)) == (3, 9)
    assert again()[1] == 0  # without the seeds that all rates are tried with, either
    assert again("seeds=1")[0].config.seeds == 2
    found, began = again("optimizer.lr=0.2")
    assert found.config.rates == (0.01, 0.1, 0.2)
    assert {key[0] for key in keys(found) if key[2] == 0.2} == {"2bw", "1f1b", "stash"}
    assert again("tune=null")[0].config.tune is None


def test_a_paper_s_other_setting_is_told(tmp_path: Path) -> None:
    """All methods have one optimizer, so a method may not be as its paper has it."""
    said = "nag_pp.py:method=nag-pp: its paper has optimizer.beta1=0.99, here it has 0.9"
    nadam = ["methods=1f1b,stash", "optimizer.name=nadam", "optimizer.weight_decay=0.01", "seeds=1", "batches=1"]
    files = [written("nag-pp"), f"{written('nag-pp')}:optimizer.beta1=0.99"]
    found = ComparisonRun(comparison_config([*TINY, *nadam], {}, files), tmp_path, Quiet()).run()
    assert found.other_settings() == [said]
    assert f"{said}." in caption(found)


def test_another_comparison_is_refused_before_its_methods_are_looked_at(tmp_path: Path) -> None:
    """Or the message would be about one that the command does not name."""
    compared(tmp_path, "methods=2bw", "batches=2", "stages=4", "model.layers=4")
    with pytest.raises(ConfigError, match="holds another comparison: microbatches is 4 there and 2 now"):
        compared(tmp_path, "methods=1f1b", "batches=2", "stages=4", "model.layers=4", "microbatches=2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batches=3"], "batches is 2 there and 3 now"),
        (["max_grad_norm=1.0"], "max_grad_norm is not set there and 1.0 now"),
        (["optimizer.beta2=0.9", "model.width=8"], "model.width is 16 there and 8 now; optimizer.beta2 is 0.95 there"),
        (["data=pyproject.toml"], "data is .*LICENSE there and pyproject.toml now"),
    ],
)
def test_another_comparison_is_refused(tmp_path: Path, changes: list[str], message: str) -> None:
    """Before anything is trained, and what is there stays as it is."""
    compared(tmp_path, "methods=1f1b,2bw", "batches=2")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with pytest.raises(ConfigError, match=message):
        ComparisonRun(configured("methods=1f1b,2bw", "batches=2", *changes), tmp_path, Quiet())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="has other files in it but no comparison"):
        compared(tmp_path)
    with pytest.raises(ConfigError, match="cannot write to --out"):
        compared(tmp_path / "thesis.txt/out")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is damaged"), ('{"schema": 1}', "has schema 1"), ("[]", "has schema None")]
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(DataError, match=f"comparison.json' {message}"):
        compared(tmp_path, "methods=1f1b", "batches=2")


def test_a_run_that_has_lost_a_part_of_its_metrics_is_named(tmp_path: Path) -> None:
    compared(tmp_path, "methods=1f1b", "batches=2")
    (path,) = tmp_path.glob("runs/*/metrics.jsonl")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"batch": 0' not in line))
    with pytest.raises(DataError, match=f"{path.parent.name}' lacks some of its losses"):
        compared(tmp_path, "methods=1f1b", "batches=2")


def test_other_text_in_the_same_file_is_refused(tmp_path: Path) -> None:
    text, changes = tmp_path / "text.txt", ("methods=1f1b", "batches=1", f"data={tmp_path / 'text.txt'}")
    text.write_text(TEXT.read_text())
    compared(tmp_path / "out", *changes)
    text.write_text(TEXT.read_text()[1:])
    with pytest.raises(ConfigError, match="data found is .* tokens, .* there and"):
        compared(tmp_path / "out", *changes)


def test_own_files_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT.read_text())
    changes = ["methods=1f1b", "batches=1", f"data={tmp_path}"]
    compared(tmp_path / "out", *changes)
    observer = Quiet()
    compared(tmp_path / "out", *changes, observer=observer)
    assert observer.seen["began"] == 0


@pytest.mark.long
def test_runs_side_by_side(tmp_path: Path) -> None:
    """They have the bits of runs one after the other; the best rate is asked for when all of its runs are there."""
    changes = ("methods=2bw", "batches=3", "seeds=2", "lr=0.3,0.01", "tune=1")
    expected = compared(tmp_path / "one", *changes)
    found = ComparisonRun(configured(*changes), tmp_path / "two", Quiet()).run(jobs=2)
    assert as_csv(found.rows(), EvaluationRow) == as_csv(expected.rows(), EvaluationRow)


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed(_: Any, __: Any, ___: Any, key: Key) -> None:
    raise CapabilityError(f"{key} cannot be trained")


@pytest.mark.long
def test_a_run_beside_others_that_dies_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_train", killed)
    with pytest.raises(WorkerError, match=r"one of 2 runs was killed; if memory was short, use fewer --jobs"):
        ComparisonRun(configured("methods=1f1b,2bw"), tmp_path, Quiet()).run(jobs=2)


@pytest.mark.long
def test_a_run_beside_others_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_train", failed)
    with pytest.raises(CapabilityError, match="seed 0, lr 0.01 cannot be trained"):
        ComparisonRun(configured("methods=1f1b,2bw"), tmp_path, Quiet()).run(jobs=2)


def ends_or_not(_: Any, __: Any, ___: Any, key: Key) -> Key:
    time.sleep(1000 * key.seed)
    return key


@pytest.mark.long
def test_runs_under_way_are_ended_where_nobody_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interrupt of this process alone."""
    monkeypatch.setattr(run, "_train", ends_or_not)
    before = multiprocessing.active_children()
    runs = run.train_side_by_side(configured(), tmp_path, [Key("1f1b", seed, 0.1) for seed in (0, 1)], 2)
    assert next(runs) == Key("1f1b", 0, 0.1)
    runs.close()
    assert multiprocessing.active_children() == before
