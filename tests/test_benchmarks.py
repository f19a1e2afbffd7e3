"""The benchmarks still run: every arm, a few microbatches; no figure is asserted."""

import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from benchmarks.clipping import ARMS
from benchmarks.digits import digits_of
from benchmarks.limits import factors, replay
from benchmarks.machine import command_line
from benchmarks.overhead import PARTS
from benchmarks.profile_engine import print_profile
from benchmarks.quality import CAMPAIGNS, curve, table
from benchmarks.throughput import interval
from benchmarks.tiny import InProcessArm, PlainArm, tiny_data
from torch import multiprocessing

from penstock.compare.prepared_contender import prepare_contender
from penstock.compare.run import text_task
from penstock.launch.fork_server import start_method
from penstock.schedule.build import prove
from support.benchmarked import spawn_small

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch, capsys, request):
    """Run a benchmark on a small model in this process; its ranks are forked from one that has imported everything."""
    start_method()  # the process, as `penstock train` starts it
    forked = partial(multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(multiprocessing, "spawn", partial(spawn_small, forked))
    monkeypatch.chdir(ROOT)
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def call(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        capture.read_global_capture()
        import_module(f"benchmarks.{module}").main()
        return capsys.readouterr().out + capture.read_global_capture().out  # the latter is what ranks print

    return call


@pytest.mark.long
@pytest.mark.slow
def test_throughput_of_every_arm(tmp_path, run):
    printed = run("throughput", "--microbatches", 2, "--count", 2, "--slice", 2, "--rounds", 1, "--out", tmp_path)
    (raw,) = tmp_path.iterdir()
    header, row = map(json.loads, raw.read_text().splitlines())
    assert {"machine", "command"} <= header.keys()
    arms = {"ceiling", "penstock 2bw", "penstock 2bw-eager", "penstock 1f1b", "torch 1f1b", "torch gpipe", "torch zbv"}
    assert row["seconds"].keys() == arms
    assert row["microbatches"] == 2
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert all(f"| {arm} |" in printed for arm in arms)


@pytest.mark.long
@pytest.mark.slow
def test_clipping_against_none(tmp_path, run):
    printed = run("clipping", "--microbatches", 2, "--count", 2, "--slice", 2, "--rounds", 2, "--out", tmp_path)
    (raw,) = tmp_path.iterdir()
    header, *rows = map(json.loads, raw.read_text().splitlines())
    assert {"machine", "command"} <= header.keys()
    assert header["command"] == "python -m benchmarks.clipping --microbatches 2 --count 2 --slice 2 --rounds 2"
    assert [row["round"] for row in rows] == [0, 1]
    for row in rows:
        assert row["seconds"].keys() == {"2bw", "2bw, clip = 1"}
        assert all(seconds > 0 for seconds in row["seconds"].values())
    low, high = sorted(row["seconds"]["2bw"] / row["seconds"]["2bw, clip = 1"] for row in rows)
    assert f"| 2bw, clip = 1 | {(low + high) / 2:.3f} ({low:.3f}, {high:.3f}) |" in printed


def test_one_of_its_arms_clips():
    with patch("benchmarks.arms.Pipeline") as pipeline, patch("benchmarks.arms.dist.new_group"):
        for name, clip in (("2bw", None), ("2bw, clip = 1", 1.0)):
            ARMS[name](2, Mock())
            assert pipeline.call_args.kwargs["max_grad_norm"] == clip


@pytest.mark.long
@pytest.mark.slow
def test_memory_of_an_arm(tmp_path, run):
    """2bw is the arm that must be drained before its process may end."""
    printed = run("memory", "--rounds", 1, "--batches", 1, "--arms", "penstock 2bw", "--out", tmp_path)
    (raw,) = tmp_path.iterdir()
    assert len(raw.read_text().splitlines()) == 2
    assert "penstock 2bw" in printed


@pytest.mark.long
@pytest.mark.slow
def test_schedules_of_every_size(tmp_path):
    """In a process of its own, as a person starts it."""
    command = [sys.executable, "-m", "benchmarks.schedules", "--rounds", "1", "--stages", "4", "--microbatches", "8"]
    ran = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout
    (raw,) = tmp_path.iterdir()
    assert len(raw.read_text().splitlines()) == 3
    assert "| 2bw, 4 x 8 | " in printed


@pytest.mark.long
def test_halves_of_backwards(tmp_path, run):
    printed = run("halves", "--rounds", 2, "--out", tmp_path)
    (raw,) = tmp_path.iterdir()
    header, *rows = map(json.loads, raw.read_text().splitlines())
    assert {"machine", "command"} <= header.keys()
    assert [row["model"] for row in rows] == ["few", "few", "many", "many"]
    assert all(len(row[kind]) == 3 and min(row[kind]) > 0 for row in rows for kind in ("whole", "halves"))
    assert "| few | " in printed


@pytest.mark.long
@pytest.mark.slow
def test_limits(run):
    printed = run("limits", "--microbatches", 2, "--count", 4, "--slice", 2)
    assert all(word in printed for word in ("order", "work", "messages", "in all"))


@pytest.mark.long
@pytest.mark.slow
def test_overhead_of_two_parts(tmp_path, run):
    options = "--part", "a", "b", "--rounds", 1, "--microbatches", 4, "--count", 8, "--slice", 4
    printed = run("overhead", *options, "--out", tmp_path)
    (raw,) = tmp_path.iterdir()
    header, alone, joined = map(json.loads, raw.read_text().splitlines())
    assert {"machine", "command"} <= header.keys()
    for row, methods, other in (alone, PARTS["a"].pairs, "plain"), (joined, PARTS["b"].pairs, "torch"):
        assert (row["m"], row["microbatches"]) == (4, 8)
        assert {name.split()[0] for name in row["seconds"]} == {"penstock", other}
        assert len(row["seconds"]) == 2 * len(methods)
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert all(f"| {method} | " in printed for method in methods)
    ratio = alone["seconds"]["penstock zb-h1"] / alone["seconds"]["plain zb-h1"]
    assert f"| zb-h1 | {ratio:.3f} (" in printed


@pytest.mark.parametrize("method", PARTS["a"].pairs)
def test_the_plain_loop_trains_the_same(method):
    """In two spans, as between two turns."""
    ours, plain = InProcessArm(method, 8, tiny_data()), PlainArm(method, 8, tiny_data())
    for batches in 3, 2:
        ours.run(batches)
        plain.run(batches)
        assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
        assert len(set(ours.losses)) == batches


def test_the_profile_of_the_engine(capsys):
    print_profile("1f1b", 4, batches=2, spans=3, top=1000)
    printed = capsys.readouterr().out
    (linear,) = (line.split() for line in printed.splitlines() if "_nn.linear" in line)
    assert linear[3] == "0.50"  # calls per pass: every other pass is a forward


@pytest.mark.smoke
def test_replay_of_two_ranks():
    """Rank 0 runs F0 F1 B0 B1 and rank 1 F0 B0 F1 B1, both with an update at the end."""
    lowered = prove("1f1b", 2, 2).lowered
    even = [{"F": [1.0, 1.0], "B": [1.0, 1.0], "STEP": [0.5]} for _ in range(2)]
    assert replay(lowered, even) == 6.5
    slow = [even[0] | {"F": [1.0, 3.0]}, even[1] | {"B": [4.0, 1.0]}]  # rank 0 with F1, then rank 1 with B0
    assert replay(lowered, slow) == 9.5
    found = factors(lowered, even, slow, seconds=12.0)
    assert found == {"order": 6.5 / 4.5, "work": 9.5 / 6.5, "messages": 12 / 9.5, "in all": 12 / 4.5}


@pytest.mark.parametrize("out", [["--out", "/somewhere"], ["--out=/somewhere"]])
def test_the_command_can_be_given_again(out, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["orders", "--arms", "penstock zb-v", "torch zbv", *out, "--rounds", "3"])
    assert command_line("orders") == "python -m benchmarks.orders --arms 'penstock zb-v' 'torch zbv' --rounds 3"


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (25, 8)])
def test_the_interval_of_a_median(n, k):
    """As in tables of the sign test: n = 9 has k = 2, n = 12 has 3, n = 25 has 8."""
    median, low, high = interval([float(x) for x in reversed(range(n))])
    assert (median, low, high) == ((n - 1) / 2, k - 1, n - k)


def test_campaigns_of_quality():
    for campaign in CAMPAIGNS.values():
        config = campaign.config
        assert (config.stages, config.seeds, len(config.rates)) == (8, 3, 3)
        assert next(iter(config.contenders)) == "1f1b"


@pytest.mark.long
@pytest.mark.parametrize("name", ["text-1-nadam", "digits-1-sgd"])
def test_the_optimizer_of_a_campaign_goes_with_its_methods(name):
    config = CAMPAIGNS[name].config
    task = (digits_of if CAMPAIGNS[name].images else text_task)(config, ROOT)
    synchronous, *others = (prepare_contender(config, label, task).synchronous for label in config.contenders)
    assert synchronous
    assert not any(others)


def test_the_table_of_a_campaign(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    header = "method,lr,runs,diverged,loss,spread,accuracy,difference,difference_spread,verdict,simulated_time,delay"
    rows = "1f1b,0.003,3,0,0.5,0.01,0.9,,,baseline,200,0", "2bw,0.001,3,1,0.6,0.02,0.8,20,3,worse,100,1"
    (folder / "summary.csv").write_text("\n".join([header, *rows, "stash,0.01,3,3,,,,,,diverged,100,0.875"]))
    _, _, *lines = table("digits", tmp_path).splitlines()
    assert lines == [
        "| 1f1b | 0.003 | 0.5000 ± 0.0100 | 90.0% | baseline | 0 | 1.00 |",
        "| 2bw | 0.001 | 0.6000 ± 0.0200 (1 of 3 diverged) | 80.0% | +20.00 ± 3.00, worse | 1 | 0.50 |",
        "| stash | 0.01 | diverged | | diverged | 0.875 | 0.50 |",
    ]


@pytest.mark.parametrize("name", ["text", "text-muon", "text-muon-32", "digits", "digits-1-sgd"])
def test_the_page_has_what_was_measured(name):
    assert table(name) in (ROOT / "docs/which-method.md").read_text()


@pytest.mark.long
@pytest.mark.slow
def test_times_of_messages(run, tmp_path):
    printed = run("messages", "--batches", 1, "--microbatches", 2, "--layers", 1, "--out", tmp_path)
    assert "2bw, loopback, 0 busy processes" in printed
    for part in ("ready", "encode", "post", "way", "held", "needless", "wait", "decode", "use"):
        assert printed.count(f"\n  {part} ") == 2  # of activations and of gradients


@pytest.mark.long
@pytest.mark.slow
def test_error_of_rounded_gradients(run):
    printed = run("boundary_gradients", "--updates", 2, "--seeds", 1, "--stages", 2)
    assert "seed 0: first gradients off by " in printed
    assert "nudged" in printed


def test_the_curve_of_a_campaign_ends_at_the_difference_of_its_table() -> None:
    """Of the published runs; the baseline differs from itself by nothing."""
    rows = [line.split(",") for line in curve("text").splitlines()[1:]]
    ends = {method: float(difference) for method, updates, _, difference in rows if updates == "600"}
    assert {float(difference) for method, _, _, difference in rows if method == "1f1b"} == {0.0}
    assert ends["2bw"] == pytest.approx(30.7, abs=1.0)


@pytest.mark.long
@pytest.mark.slow
def test_resident_memory_of_every_arm(tmp_path, run):
    printed = run("resident", "--size", 16, "--blocks", 8, "--batches", 1, "--rounds", 1, "--out", tmp_path)
    (raw,) = tmp_path.iterdir()
    _, *rows = map(json.loads, raw.read_text().splitlines())
    assert [row["keeps"] for row in rows] == 4 * [True, False]
    assert all(rank["ledger"] > 0 for row in rows for rank in row["ranks"])
    assert "| layered | given back |" in printed
