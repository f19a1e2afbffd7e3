"""What is asked of a comparison: options are read, and mistakes explained before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.compare.config import comparison_config, comparison_keys
from penstock.compare.contender_run import Key
from penstock.compare.run import ComparisonRun
from penstock.errors import CapabilityError, ConfigError, ScheduleError
from support.comparisons import TEXT, TINY, Quiet, compared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["methods=1f1b,2bv"], "unknown method '2bv'. Did you mean"),
        (
            ["methods=interleaved:chunks=2.5"],
            "interleaved:chunks=2.5: options.chunks: input should be a valid integer",
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
        (["methods=2bw:sync=1.5"], "2bw:sync=1.5: sync.batches: input should be a valid integer"),
        (["methods=1f1b:delays=-1"], "1f1b:delays=-1: .*delay"),
        (["methods=2bw:delays=1"], "2bw:delays=1: delays need version rule 'flush'"),
        (["methods=2bw:seed=1"], "2bw:seed=1: seed: all contenders have the same; leave it out"),
        (["methods=2bw:optimizer.lr=1"], "2bw:optimizer.lr=1: optimizer.lr: rates are tried with all contenders"),
        (
            ["contenders={late: {method: 2bw, delay: 1}}"],
            "late: unknown configuration key 'delay'; did you mean 'delays",
        ),
        (["method=2bw"], "method is not for comparisons, which take methods"),
        (["methods=pipemare", "compile=true"], "pipemare: backwards read other weights than their forward"),
        (["methods=2bw,pipedream-2bw"], "2bw is given twice"),
        (["methods=interleaved:chunks=two"], "a name may be followed by options"),
        (["methods=1f1b:chunks=2"], "1f1b:chunks=2: method 1f1b has no option 'chunks'; it has in_flight"),
        (["methods=interleaved:chunks=8"], "interleaved:chunks=8: the model has 4 blocks"),
        (["methods=2bw", "stages=4", "microbatches=2"], "2bw: .*needs at least 3 microbatches"),
        (["lr=fast"], "lr takes comma-separated numbers"),
        (["batchs=3"], "unknown configuration key 'batchs'; did you mean 'batches'"),
        (["seeds=0"], "seeds: .*greater than or equal to 1"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises((CapabilityError, ConfigError, ScheduleError), match=message):
        compared(tmp_path / "out", *changes)
    assert not (tmp_path / "out").exists()


def test_options_win_over_changes_and_lists_are_read() -> None:
    config = comparison_config(
        ["batches=3", "methods=gpipe", "lr=0.1"], {"batches": 5, "methods": " 1f1b , 2bw", "lr": None}
    )
    assert (config.batches, [*config.contenders], config.rates) == (5, ["1f1b", "2bw"], (0.1,))
    assert comparison_config([], {"lr": "1e-3,3e-3"}).rates == (0.001, 0.003)
    assert [*comparison_config([], {"methods": "Megatron:chunks=4"}).contenders] == ["interleaved:chunks=4"]
    assert Key("interleaved:chunks=4", 2, 0.001).folder == "interleaved+chunks=4-seed-2-lr-0.001"
    assert len({Key(label, 0, 0.1).folder for label in ("a:b", "a+b", "a/b", "a b", "a%2Bb")}) == 5


def test_contenders_change_keys_of_a_run() -> None:
    """In short, after colons, or by name in a file; what they do not change is that of the comparison."""
    named = {"muon": {"method": "interleaved:chunks=2", "optimizer": {"name": "muon"}}}
    config = comparison_config(
        [*TINY, "optimizer.beta1=0.8"],
        {"methods": "2bw:sync=2:optimizer.beta1=0.7,1f1b:width=2:combine.kind=average"},
        values={"contenders": named},
    )
    labels = ["2bw:sync=2:optimizer.beta1=0.7", "1f1b:width=2:combine.kind=average", "muon"]
    assert [*config.contenders] == labels
    late, wide, muon = (config.run(label, 3, 0.5) for label in labels)
    assert (late.sync.batches, late.optimizer.beta1, late.seed, late.optimizer.lr) == (2, 0.7, 3, 0.5)
    assert (wide.width, wide.combine.kind, wide.optimizer.beta1) == (2, "average", 0.8)
    assert (muon.method, muon.options, muon.optimizer.name, muon.optimizer.beta1) == (
        "interleaved",
        {"chunks": 2},
        "muon",
        0.8,
    )


def test_pipelines_that_average_are_compared(tmp_path: Path) -> None:
    found = compared(tmp_path / "out", "methods=1f1b,1f1b:width=2:combine.kind=average:combine.every=2", "batches=4")
    one, two = found.contenders
    assert (one.synchronous, two.synchronous) == (True, False)
    assert [row.samples for row in found.rows() if row.method == two.label] == [16, 32]
    assert [summary.verdict for summary in found.summaries()] == ["baseline", "not resolved"]


def test_keys_are_listed_with_the_defaults_of_comparisons() -> None:
    keys = {key: default for key, default, _ in comparison_keys()}
    assert (keys["stages"], keys["model.layers"], keys["evaluate.every"], keys["seeds"]) == (8, 8, 25, 3)
    assert not {"seed", "method", "out"} & keys.keys()
    assert comparison_config(["model.preset=small"], {}).model.width is None


def test_more_stages_than_blocks_are_said_of_the_contender(tmp_path: Path) -> None:
    config = comparison_config([f"data={TEXT}", "model.layers=2", "methods=1f1b"], {})
    with pytest.raises(ConfigError, match="1f1b: the model has 4 blocks, which cannot be cut into 8 stages"):
        ComparisonRun(config, tmp_path / "out", Quiet())
