"""The benchmark of predictions: its configurations, what it makes of raw data, and a run of no size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.network.hosts import why_not
from benchmarks.predicted.configurations import ALL_MODELS, LOOPBACK, Configuration, grid, of_row, timed
from benchmarks.predicted.forecasts import planned, predicted
from benchmarks.predicted.report import paced_steps, percentile
from benchmarks.predictions import summarize

from penstock.plan.candidates.planned_methods import USUAL
from penstock.plan.profile.schema import Profile, ProfiledLink

ROOT = Path(__file__).parents[1]
LINK = ProfiledLink(bandwidth=1e9)


@pytest.fixture
def profile() -> Profile:
    """Of the tiny model: every block takes F = 1 and B = 2 at one sample, twice that at two."""
    names = ["embedding", *(f"layers.{i}" for i in range(ALL_MODELS["tiny"].shape.layers)), "head"]
    layers = [{"name": name, "forward": [1.0, 2.0], "backward": [2.0, 4.0], "output": 8.0} for name in names]
    settings = {"max_grad_norm": None}
    return Profile(format="penstock profile 1", microbatch_sizes=[1, 2], settings=settings, layers=layers, cores=2.0)


def forecast(of: Configuration, seconds: float, part: str, replicated: bool = False) -> dict[str, object]:
    return {"part": part, "of": of._asdict(), "predicted": seconds, "replicated": replicated}


def turn(of: Configuration, seconds: float, copy: int = 0) -> dict[str, object]:
    return {"configuration": of._asdict(), "copy": copy, "ranks": [{"step": seconds / 2}, {"step": seconds}]}


def test_configurations_whose_times_are_predicted():
    found = [of for processes in (2, 4) for of in timed(processes)]
    assert len(found) == len(set(found)) >= 24
    assert {of.method for of in found} == set(USUAL)
    assert 2 * sum(of.link == LOOPBACK for of in found) == len(found)
    assert all(sum(of.stages) == of.shape.shape.layers + 2 and len(of.stages) == of.depth for of in found)
    assert all(of_row(json.loads(json.dumps(of._asdict()))) == of for of in found)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_grid_is_exhaustive(processes):
    found = grid(processes)
    assert len(found) == len(set(found)) >= 20
    assert all(of.ranks == processes and of.width * of.m * of.samples == 16 for of in found)
    assert {of.depth for of in found} == {d for d in (1, 2, 4) if d <= processes}


def test_a_batch_is_predicted_from_a_profile(profile):
    """Two stages of three blocks and two microbatches: three times F + B of a stage; two samples take twice that."""
    of = Configuration("tiny", "1f1b", 2, 1, 2, 1)
    assert predicted(of, profile, LINK) == pytest.approx(27.0, rel=1e-6)
    assert predicted(of._replace(samples=2), profile, LINK) == pytest.approx(54.0, rel=1e-6)


def test_the_planner_cuts_a_configuration_and_rates_it(profile):
    """Six blocks of 3 seconds with 2 microbatches: of 2bw in its steady state no stage waits."""
    ((of, seconds),) = planned([Configuration("tiny", "2bw", 2, 1, 2, 1)], profile, LINK)
    assert of.balance == (3, 3)
    assert seconds == pytest.approx(2 * 9.0, rel=1e-6)


def test_errors_and_noise_of_raw_data(capsys):
    """Of rounds the median counts; the control differs from its replica by a tenth, in the medians."""
    exact, off = (Configuration("tiny", "1f1b", 2, 1, 2, 1, link) for link in (LOOPBACK, "100 Mbit/s"))
    rows = [forecast(exact, 1.0, "times", replicated=True), forecast(off, 1.0, "times")]
    rows += [turn(exact, seconds) for seconds in (0.9, 1.0, 4.0)] + [turn(exact, 1.1, copy=1)]
    rows += [turn(off, 0.8)]
    summarize(rows)
    printed = capsys.readouterr().out
    assert (
        "| tiny, 1f1b, 2 x 1, m = 2, 1 samples, loopback | 1000.0 | 1000.0 | 1.000 | 0.900 .. 4.000 | 1.000 |"
        in printed
    )
    assert "errors: median 12.5%, 90th percentile 22.5%, largest 25.0%" in printed
    assert "1 configurations run twice: median 10.0%, 90th percentile 10.0%" in printed


def test_steps_at_the_pace_of_the_profile():
    """A piece of work took 2 then; 4 and 3 in two turns, on the first two ranks."""
    of = Configuration("tiny", "1f1b", 2, 1, 2, 1)
    turns = [turn(of, 1.0) for _ in range(2)]
    for given, pace in zip(turns, (4.0, 3.0), strict=True):
        for rank in given["ranks"]:
            rank["pace"] = pace
    assert paced_steps([{"pace": 2.0, "paces": [2.0]}, *turns], of._asdict()) == pytest.approx([0.5, 2 / 3])
    assert paced_steps(turns, of._asdict()) == [1.0, 1.0]


def test_the_regret_of_a_choice(capsys):
    """The planner takes what is predicted to be fastest, and gets what was measured of it."""
    first, second = (Configuration("tiny", method, 2, 1, 2, 1) for method in ("1f1b", "2bw"))
    rows = [forecast(first, 1.0, "grid 2"), forecast(second, 0.9, "grid 2"), turn(first, 1.0), turn(second, 1.25)]
    summarize(rows)
    printed = capsys.readouterr().out
    assert f"the planner chooses {second}, which reaches 0.800 of the best measured" in printed
    assert f"| **{second}** | 3 3 | 900.0 | 1250.0 | 0.800 |" in printed


def test_a_percentile_is_interpolated():
    assert percentile([3.0], 90) == 3.0
    assert percentile([float(n) for n in range(11)], 90) == pytest.approx(9.0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.processes
def test_predictions_are_written_before_anything_runs(tmp_path):
    """In a process of its own, as a person starts it, because it begins others inside namespaces."""
    if reason := why_not():
        pytest.skip(reason)
    options = ["--tiny", "--rounds", "1", "--batches", "4", "--seconds", "0.001", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.predictions", "times", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    (raw,) = tmp_path.iterdir()
    header, *rows = (json.loads(line) for line in raw.read_text().splitlines())
    assert {"machine", "command"} <= header.keys()
    kinds = [next(kind for kind in ("paces", "profile", "link", "predicted", "copy") if kind in row) for row in rows]
    assert kinds == ["paces", "profile", *["link"] * 2, *["predicted"] * 2, *["copy"] * 3]
    assert all(row["predicted"] > 0 for row in rows if "predicted" in row)
    assert all(rank["step"] > 0 for row in rows if "copy" in row for rank in row["ranks"])
    assert "2 configurations, aims 3 % and 8 %" in ran.stdout
