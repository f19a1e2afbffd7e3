"""By which method each batch is trained: what follows from the configuration and from divergence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.runtime.update.divergence import Trouble
from penstock.train.config.load import load_config, validate_config
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.phase_plan import FALLBACK, MAIN, SYNC, Course
from penstock.verify.verify import verify

LAG = 7  # of 2 stages and 2 microbatches


def course(**sections: Any) -> Course:
    return Course(validate_config({"microbatches": 2, **sections}))


def phases(found: Course, count: int) -> str:
    return "".join({MAIN: "m", SYNC: "s", FALLBACK: "f"}[found.phase(t)] for t in range(count))


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({}, "mmmmmmmm"),
        ({"sync": {"batches": 3}}, "sssmmmmm"),
        ({"fallback": {"at": 5}}, "mmmmmfff"),
        ({"fallback": {"at": 0, "batches": 2}}, "ffmmmmmm"),
        ({"sync": {"batches": 2}, "fallback": {"at": 4, "batches": 3}}, "ssmmfffm"),
        ({"sync": {"batches": 6}, "fallback": {"at": 4}}, "ssssssff"),
    ],
)
def test_phases_that_are_planned(sections: dict[str, Any], wanted: str) -> None:
    found = course(**sections)
    assert phases(found, 8) == wanted
    for t in range(8):
        begin, end = found.begin(t), found.end(t)
        assert begin <= t < end
        until = min(end, 8)
        assert {wanted[i] for i in range(begin, int(until))} == {wanted[t]}
        assert begin == 0 or wanted[begin - 1] != wanted[t]
        assert end >= 8 or wanted[int(end)] != wanted[t]
        assert end < 8 or end == math.inf or found.phase(int(end)) != found.phase(t)


@pytest.mark.parametrize(("in_flight", "more"), [(2, 0), (10, 4), ((9, 1), 3), ("auto", 2)])
def test_trouble_is_heard_of_later_with_more_in_flight(in_flight: Any, more: int) -> None:
    found = course(fallback={"when": ["spike"]}, options={"in_flight": in_flight})
    assert found.end(3, Trouble(10, "why")) == 10 + LAG + more


def test_trouble_ends_the_main_phase_when_all_have_heard_of_it() -> None:
    found = course(sync={"batches": 3}, fallback={"when": ["spike"], "batches": 4})
    trouble = Trouble(10, "why")
    assert found.end(3) == math.inf
    assert found.end(3, trouble) == 10 + LAG
    assert found.end(1, trouble) == 3  # none is told of before the main phase
    found.fall(17, 17, "why")
    assert phases(found, 25) == "sss" + 14 * "m" + 4 * "f" + 4 * "m"
    assert found.end(17) == 21
    assert found.begin(21) == 21


def test_a_run_that_has_gone_back_does_not_go_round_in_a_circle() -> None:
    """The other method trains on beyond where the run has been, however few batches it is to train."""
    found = course(fallback={"when": ["spike"], "batches": 1})
    found.fall(4, 17, "why")
    assert phases(found, 20) == 4 * "m" + 14 * "f" + 2 * "m"


def test_a_checkpoint_keeps_what_happened_before_it() -> None:
    found, other = (
        course(fallback={"when": ["spike"], "batches": 3}),
        course(fallback={"when": ["spike"], "batches": 3}),
    )
    found.fall(8, 8, "first")
    found.fall(20, 20, "second")
    assert found.state(8) == []
    assert found.state(20) == [[8, 11, "first"]]
    other.load(found.state(21))
    assert phases(other, 30) == phases(found, 30)
    assert other.why(22) == "second"


TINY = ["microbatches=2", "model.layers=2", "model.width=32", "model.heads=2", "model.context=16"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["sync.batches=3", "sync.method=stash"], "sync.method must be synchronous"),
        (["fallback.at=3", "fallback.method=2bw"], "fallback.method must be synchronous"),
        (["sync.batches=3", "sync.method=zb-v"], "sync.method: .* differ in stages"),
        (["fallback.at=3", "fallback.method=chimera"], "fallback.method: .* differ in stages|directions"),
        (["fallback.at=3", "fallback.method=seq1f1b"], "fallback.method: .*slices"),
        (
            ["fallback.when=[spike]", "max_grad_norm=null"],
            "a divergence is noticed where all",
        ),
        (
            ["fallback.at=3", "method=1f1b", "delays=1"],
            "fallback.method: a pipeline with delays of its own",
        ),
        (["fallback.when=[nan]"], "fallback.when.0: input should be 'spike' or 'nonfinite'"),
        (["sync.batches=3", "sync.method=newest"], "must be synchronous"),
        (["fallback.spike=1"], "fallback.spike: input should be greater than 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(changes: list[str], says: str) -> None:
    with pytest.raises((ConfigError, ScheduleError), match=says):
        prepare(load_config(None, [*TINY, *changes]))


def test_methods_that_are_not_asked_for_are_not_checked(tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "mine.yaml"
    text.write_text("a quick brown fox " * 300)
    file.write_text("sync: {method: zb-v}\nfallback: {method: stash}")
    assert not prepare(load_config(file, [*TINY, f"data={text}"])).others


@pytest.mark.parametrize(
    ("change", "switch"),
    [
        ("sync.method=gpipe", "sync.batches"),
        ("fallback.batches=3", "fallback.at or fallback.when"),
        ("fallback.restore=always", "fallback.at or fallback.when"),
        ("evaluate.patience=2", "evaluate.every"),
    ],
)
def test_changes_of_what_is_switched_off_are_refused(tmp_path: Path, change: str, switch: str) -> None:
    """A file may have them, and a change may switch off what it has."""
    key, file = change.partition("=")[0], tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=f"{key} has no effect without {switch}"):
        load_config(None, [change])
    file.write_text(
        "sync: {batches: 3, method: gpipe}\nevaluate: {every: 2, samples: 4}\nfallback: {at: 0, batches: 2}"
    )
    load_config(file, [change])
    load_config(file, ["sync.batches=0", "evaluate.every=null", "fallback.at=null"])


def test_a_verification_is_of_one_method() -> None:
    for change in ("sync.batches=3", "fallback.at=3", "fallback.when=[spike]"):
        with pytest.raises(ConfigError, match="verify each method separately"):
            verify(load_config(None, [*TINY, change]), 2)
