"""What is asked of a comparison: options are read, and mistakes explained before anything is trained."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from penstock.compare.contender import parse_contender
from penstock.compare.grid import Key
from penstock.compare.tasks import make_task

from penstock.compare.config import comparison_config
from penstock.compare.run import ComparisonRun
from penstock.errors import CapabilityError, ConfigError, ScheduleError
from support.comparisons import TEXT, Quiet, compared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["methods=1f1b,2bv"], "unknown method '2bv'. Did you mean"),
        (
            ["methods=interleaved:chunks=2.5"],
            "interleaved:chunks=2.5: chunks is an option of an order, so it must be a whole number",
        ),
        (
            ["methods=pipemare:chunks=2"],
            "pipemare:chunks=2: method pipemare has no option 'chunks'; it has in_flight, reschedule, decay",
        ),
        (
            ["methods=pipemare:rescedule=4"],
            "method pipemare has no option 'rescedule'; it has in_flight, reschedule, decay. Did you mean 'reschedule'",
        ),
        (["methods=interleaved:chunk=2.5"], "method interleaved has no option 'chunk'; .* Did you mean 'chunks'"),
        (["methods=i-timeprest:beta=null"], "i-timeprest:beta=null: .*beta takes a number from 0 to 1; got null"),
        (["methods=2bw:sync=1.5"], "sync is the number of batches"),
        (["methods=1f1b:delays=-1"], "delays is the number of updates that weights are late by"),
        (["methods=2bw:delays=1"], "2bw:delays=1: delays need version rule 'flush'"),
        (["methods=1f1b:delays=1:sync=2"], "delays and sync cannot be combined; leave one of them out"),
        (["methods=2bw:sync=6"], "2bw:sync=6: sync: 1f1b would train the first 6 batches"),
        (["methods=zb-h1:sync=2"], "zb-h1:sync=2: sync: the method has no delay"),
        (
            ["methods=wpipe:sync=2", "model.layers=4"],
            "1f1b cannot be followed by wpipe: they differ in stages",
        ),
        (["methods=nag-pp", "optimizer.name=sgd"], "nag-pp: .*NAdam"),
        (["methods=pipemare", "compile=true"], "pipemare: backwards read other weights than their forward"),
        (["methods=2bw,pipedream-2bw"], "2bw is given twice"),
        (["methods=interleaved:chunks=two"], "a name may be followed by options"),
        (["methods=1f1b:chunks=2"], "1f1b:chunks=2: method 1f1b has no option 'chunks'; it has in_flight"),
        (["methods=interleaved:chunks=8"], "interleaved:chunks=8: the model has 4 blocks"),
        (["methods=2bw", "stages=4", "microbatches=2"], "2bw: .*needs at least 3 microbatches"),
        (["task=speech"], "unknown task 'speech'"),
        (["task=digits"], "belongs to task text"),
        (["lr=fast"], "lr takes comma-separated numbers"),
        (["batchs=3"], "unknown configuration key 'batchs'; did you mean 'batches'"),
        (["model.tied=true"], "unknown configuration key 'model.tied'"),
        (["seeds=0"], "seeds: .*greater than or equal to 1"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises((CapabilityError, ConfigError, ScheduleError), match=message):
        compared(tmp_path / "out", *changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "said"), [(None, "8 is the default of comparisons: .*--stages 4"), (8, "use fewer")])
def test_a_default_that_is_too_much_is_called_one(tmp_path: Path, given: int | None, said: str) -> None:
    """Of a number of stages that was asked for nothing is said of a default."""
    config = comparison_config([f"data={TEXT}", "model.layers=2"], {"methods": "1f1b,2bw", "stages": given})
    with pytest.raises(ConfigError, match=f"1f1b: the model has 4 blocks, which cannot be cut into 8 stages; {said}"):
        ComparisonRun(config, tmp_path / "out", Quiet()).run()


def test_options_win_over_changes_and_lists_are_read() -> None:
    config = comparison_config(
        ["batches=3", "methods=gpipe", "lr=0.1"], {"batches": 5, "methods": " 1f1b , 2bw", "lr": None}
    )
    assert (config.batches, config.methods, config.rates) == (5, ["1f1b", "2bw"], (0.1,))
    assert comparison_config([], {"lr": "1e-3,3e-3"}).rates == (0.001, 0.003)
    assert parse_contender("Megatron:chunks=4").label == "interleaved:chunks=4"
    assert Key("interleaved:chunks=4", 2, 0.001).file == "interleaved+chunks=4-seed-2-lr-0.001.json"


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[digits\]'"):
        make_task(comparison_config([], {"task": "digits"}))
