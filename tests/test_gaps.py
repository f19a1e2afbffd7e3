"""The gap to synchronous training, from the files of runs."""

import json

import pytest
from benchmarks.gaps import gaps_of, losses_of, picture, table


@pytest.fixture
def folder(tmp_path):
    """Two seeds of 1f1b; of 2bw both, 1 and 3 percent above at the end, of `pipemare:sync=4` one, 1 percent below."""
    for name, losses in {
        "1f1b-seed-0": (4.0, 2.0), "1f1b-seed-1": (4.0, 1.0), "2bw-seed-0": (5.0, 1.96), "2bw-seed-1": (4.0, 1.06),
        "pipemare+sync=4-seed-1": (4.0, 0.99), "pipemare+sync=4-seed-2": (4.0, 0.99),
    }.items():  # fmt: skip
        scores = [{"updates": 500 + 500 * n, "loss": loss} for n, loss in enumerate(losses)]
        (tmp_path / f"{name}-lr-0.003.json").write_text(json.dumps({"scores": scores}))
    return tmp_path


def test_runs_are_compared_with_the_synchronous_one_of_their_seed(folder):
    gaps = gaps_of(losses_of(folder))
    assert list(gaps) == ["pipemare:sync=4", "2bw"]  # the nearest at the end first; a seed without 1f1b is left out
    assert gaps["2bw"] == {500: pytest.approx([25.0, 0.0]), 1000: pytest.approx([-2.0, 6.0])}
    assert gaps["pipemare:sync=4"] == {500: pytest.approx([0.0]), 1000: pytest.approx([-1.0])}


def test_the_table_has_means_and_the_spread_at_the_end(folder):
    lines = table(gaps_of(losses_of(folder)), (500, 1000, 2000)).splitlines()
    assert lines[0] == "| method | seeds | 500 | 1,000 | 2,000 |"
    assert lines[2:] == ["| `pipemare:sync=4` | 1 | +0.0 | -1.0 |  |", "| `2bw` | 2 | +12.5 | +2.0 ± 5.7 |  |"]


def test_the_picture_has_a_curve_for_each_method(folder):
    drawn = picture(gaps_of(losses_of(folder)))
    assert drawn.count("<polyline") == 2
    assert drawn.count("<polygon") == 1  # between the seeds of 2bw
    assert all(text in drawn for text in ("xmlns=", "2bw (2)", "pipemare:sync=4 (1)", "2 at 1000"))
