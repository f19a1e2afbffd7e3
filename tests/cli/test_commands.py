"""The commands that need no training, as a person runs them."""

import json
import re
import sys
from io import StringIO

import pytest
from rich.console import Console

from penstock.cli import main
from penstock.errors import ConfigError
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.check import check
from penstock.simulate.method_figures import Links, facts_of_methods
from penstock.view.tables import methods_table
from support.command_line import run, start
from support.own_methods import written

FORWARDS = ("pipeoptim",)  # a predicted copy for forwards
POST = ("zb-h2-post", "zb-auto-post")  # a version that is decided on, and one that is not


def test_methods_as_json(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "methods", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows) == list(METHODS)
    assert rows["1f1b"]["bubble"] == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1) at 4 stages, 8 microbatches
    assert rows["gpipe"]["activations"] == [8, 8, 8, 8]
    assert rows["eager"]["activations"] == [7, 5, 3, 1]
    assert rows["2bw"]["weight_copies"] == [2, 2, 2, 2]
    assert rows["2bw"]["delay"] == [1, 1, 1, 1]
    assert rows["2bw"]["bubble"] == 0
    assert rows["stash"]["delay"] == pytest.approx([3 / 8, 2 / 8, 1 / 8, 0])
    assert rows["pipemare"]["correction"] == "pipemare"
    copies = {name: row["weight_copies"] for name, row in rows.items()}
    twice = {
        "2bw",
        "2bw-eager",
        "error-feedback",
        "2bw-ahead",
        "2bw-layered",
        "vertical-sync",
        "chimera",
        "dualpipe",
        "bitpipe",
        *POST,
    }
    assert {name for name, held in copies.items() if held == [2, 2, 2, 2]} == {*twice, "spectrain", *FORWARDS}
    assert copies["xpipe"] == [3, 3, 3, 3]  # (secondary): the weights, and a copy for each kind of pass
    others = {name: held for name, held in copies.items() if held[-1] == 1 and name != "stash"}
    assert all(held == [1, 1, 1, 1] for held in others.values())
    assert {name: row["buffers"] for name, row in rows.items() if row["buffers"]} == {
        "pipemare": 1,  # T2's delta
        "error-feedback": 1,
        "2bw-ahead": 1,  # the weights themselves
        "3bw-ahead": 1,
    }


def test_methods_of_one_schedule_share_its_proof(monkeypatch):
    """Those that differ in their correction only; so all of them are listed in half a second."""
    proven = []
    monkeypatch.setattr("penstock.schedule.build.check", lambda schedule: proven.append(schedule) or check(schedule))
    rows = [METHODS[name] for name in ("newest", "1f1b", "pipemare", "2bw", "gpipe")]
    found = facts_of_methods(rows, 3, 4)
    assert [facts.name for facts in found] == [row.name for row in rows]
    assert [schedule.name for schedule in proven] == ["newest", "1f1b", "2bw", "gpipe"]
    alone = [facts for row in rows for facts in facts_of_methods([row], 3, 4)]
    assert found == alone
    assert found[0].weight_copies == found[2].weight_copies
    assert (found[0].title, found[0].correction) != (found[2].title, found[2].correction)


def test_methods_as_a_table_names_what_is_illegal(monkeypatch, capsys):
    """In its row a number, and under the table, on a line of its own, what it stands for."""
    code, out, _ = run(monkeypatch, capsys, "methods", "--stages", 6, "--microbatches", 1)
    lines = [line.strip() for line in out.splitlines()]
    row = next(line for line in lines if line.startswith("2bw "))
    number = row.rpartition("refused ")[2]
    assert code == 0
    assert lines[0] == "methods at 6 stages and 1 microbatch"
    said = [" ".join(line.split()) for line in lines]
    assert f"{number} 2bw with 6 stages needs at least 5 microbatches per batch, got 1" in said


def test_methods_shortens_nothing_for_who_reads_on(monkeypatch, capsys):
    """Unless COLUMNS says how wide lines may be; 0 is none that it could say."""
    _, out, _ = run(monkeypatch, capsys, "methods", columns=80)
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = run(monkeypatch, capsys, "methods", columns=0)
    row = next(line.split() for line in out.splitlines() if "spectrain-stash" in line)
    assert row[:4] == ["spectrain-stash", "endless-1f1b", "predicted-stash", "spectrain-stash"]
    assert "…" not in out


@pytest.mark.parametrize(("width", "stages", "microbatches"), [(100, 4, 8), (80, 4, 8), (80, 8, 1), (40, 4, 8)])
def test_methods_leaves_out_columns_before_it_shortens(width, stages, microbatches):
    """Every method has one line, with its whole name and its delays, on any terminal."""
    console = Console(width=width, file=StringIO(), force_terminal=True, color_system=None)
    console.print(methods_table(stages, microbatches, width))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    rows = {line.split()[0]: line for line in lines if line and line.split()[0] in METHODS}
    begin = next(number for number, line in enumerate(lines) if line.startswith("sequential "))
    assert [line.split()[0] for line in lines[begin : begin + len(METHODS)]] == list(METHODS) == list(rows)
    assert ("7 .. 0" if microbatches == 1 else "0.375 .. 0") in rows["stash"]
    assert "endless-1f1b" not in rows["stash"]
    assert "Left out at this width: order" in " ".join(lines)


def test_methods_lists_how_parallel_pipelines_agree(monkeypatch, capsys):
    """With what a rank keeps for it, in copies of the weights, and what it takes while they meet."""
    _, out, _ = run(monkeypatch, capsys, "methods", "--stages", 2, "--microbatches", 2)
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()}
    for kind, kept, passing in (("reduce", 0, 0), ("average", 0, 0), ("bmuf", 2, 0), ("elastic", 1, 1)):
        assert [int(word) for word in rows[kind].split() if word.isdigit()] == [kept, passing]


def test_simulate_as_json_has_the_documented_keys(monkeypatch, capsys):
    arguments = [
        "--stages",
        "4",
        "--microbatches",
        "8",
        "--forward",
        "1",
        "--backward-input",
        "1",
        "--backward-weight",
        "1",
        "--json",
    ]
    code, out, _ = run(monkeypatch, capsys, "simulate", "1f1b", *arguments)
    assert code == 0
    assert json.loads(out) == {
        "makespan": 33, "rank_span": 33, "ideal": 24,
        "bubble": pytest.approx(3 / 11), "bubble_of_ideal": 3 / 8, "rank_span_bubble": pytest.approx(3 / 11),
        "peak_activations": [4, 3, 2, 1], "live_versions": [1, 1, 1, 1], "messages": 48, "volume": 48.0, "parked": 0,
        "window": 2, "receive_buffers": [2, 3, 3, 2],
        "delays": {"forward": [0] * 4, "recompute": [None] * 4, "backward": [0] * 4},
        "bubble_in_a_long_run": pytest.approx(3 / 11),
    }  # fmt: skip


def test_every_output_means_the_same_by_bubble(monkeypatch, capsys):
    """Idle / total: 3/11 at 4 stages and 8 microbatches, not 3/8 of the work."""
    _, shown, _ = run(monkeypatch, capsys, "show", "1f1b", "--stages", 4, "--microbatches", 8)
    _, table, _ = run(monkeypatch, capsys, "simulate", "1f1b", "--stages", 4, "--microbatches", 8)
    _, methods, _ = run(monkeypatch, capsys, "methods", "--stages", 4, "--microbatches", 8)
    assert "bubble 0.2727" in shown
    rows = [line.split() for line in (table + methods).splitlines()]
    assert ["bubble", "0.2727"] in [row[:2] for row in rows]
    assert [row[-1] for row in rows if row[:2] == ["all", "ranks"]] == ["27.3"]
    assert [row[-1] for row in rows if row[:1] == ["1f1b"]] == ["0.273"]


def test_simulate_tells_the_bubble_of_a_long_run(monkeypatch, capsys):
    """A batch alone leaves its ranks idle while the pipeline fills and drains; batch upon batch they are not."""
    arguments = ["pipemare", "--stages", 4, "--microbatches", 2]
    _, out, _ = run(monkeypatch, capsys, "simulate", *arguments)
    rows = dict(re.findall(r"^(\S.*?)  +([\d.]+) ", out, re.MULTILINE))
    assert float(rows["bubble"]) == pytest.approx(0.6)  # of 3 (m + p - 1) = 15 units of time each rank works 3 m = 6
    assert float(rows["bubble in a long run"]) == 0
    assert "idle / (ranks x makespan), 1 batch, drained at the end" in out
    _, listed, _ = run(monkeypatch, capsys, "methods", *arguments[1:], "--json")
    methods = {row["name"]: row["bubble"] for row in json.loads(listed)}
    for name in ("gpipe", "pipemare", "timeprest"):
        _, out, _ = run(monkeypatch, capsys, "simulate", name, *arguments[1:], "--json")
        assert json.loads(out)["bubble_in_a_long_run"] == pytest.approx(methods[name])
    _, out, _ = run(monkeypatch, capsys, "simulate", "pipemare", *arguments[1:], "--latency", 0.5, "--json")
    assert json.loads(out)["bubble_in_a_long_run"] > 0.01  # of the times given, not of a table's


def test_simulate_ranks_that_share_cores(monkeypatch, capsys):
    """Four ranks on two cores, and two on each of two hosts."""
    base = ["simulate", "1f1b", "--stages", 4, "--microbatches", 8, "--json"]
    alone, shared, apart = (
        json.loads(run(monkeypatch, capsys, *base, *more)[1]) for more in ([], ["--cores", 2], ["--cores", "2/2"])
    )
    assert shared["makespan"] > 1.4 * alone["makespan"]
    assert shared["bubble_in_a_long_run"] < alone["bubble_in_a_long_run"]
    assert apart == alone
    refused = {"0": "cores must be a number greater than 0", "2/0": "per_host must be", "two": "--cores takes a number"}
    for given, said in refused.items():
        code, _, error = run(monkeypatch, capsys, *base, "--cores", given)
        assert code
        assert said in error


def test_simulate_ranks_that_share_links(monkeypatch, capsys):
    """Messages of ranks of one host do not occupy its link; a rank by itself sends and receives all of its by one."""
    base = ["simulate", "interleaved", "--stages", 4, "--microbatches", 8, "--transfer", 0.5, "--json"]
    lanes, together, alone = (
        json.loads(run(monkeypatch, capsys, *base, *more)[1])["makespan"]
        for more in ([], ["--shared-links", 4], ["--shared-links", 1])
    )
    assert (lanes, together, alone) == (35.5, 35.5, 37.75)
    code, _, error = run(monkeypatch, capsys, *base, "--shared-links", 0)
    assert code
    assert "--shared-links" in error


def test_simulate_several_batches_with_costs_of_their_own(monkeypatch, capsys, tmp_path):
    stages = [{"forward": f, "backward_input": f, "backward_weight": f} for f in (1, 2, 1, 1)]
    (tmp_path / "costs.json").write_text(json.dumps(stages))
    base = ["simulate", "gpipe", "--stages", 4, "--microbatches", 8, "--per-stage", tmp_path / "costs.json", "--json"]
    _, once, _ = run(monkeypatch, capsys, *base)
    _, twice, _ = run(monkeypatch, capsys, *base, "--batches", 2)
    assert json.loads(once)["makespan"] == 57  # sum F + 7 max F + sum B + 7 max B
    assert json.loads(twice)["messages"] == 2 * json.loads(once)["messages"] == 2 * 48


def test_simulate_as_a_table(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "simulate", "2bw", "--stages", 4, "--microbatches", 4, "--latency", 0.5)
    assert code == 0
    assert "live versions" in out
    assert "idle / (ranks x makespan)" in out
    assert "where the time went, % of " in out


def test_simulate_with_latency_and_steps(monkeypatch, capsys):
    """1F1B at m = 1: down and up the pipeline, 2 (p - 1) hops, and the first rank's update at the end."""
    arguments = ["--stages", 3, "--microbatches", 1, "--forward", 1, "--backward-input", 2, "--backward-weight", 3]
    _, out, _ = run(monkeypatch, capsys, "simulate", "1f1b", *arguments, "--latency", 0.5, "--step", 7, "--json")
    assert json.loads(out)["makespan"] == 3 * (1 + 2 + 3) + 4 * 0.5 + 7
    _, out, _ = run(monkeypatch, capsys, "simulate", "1f1b", *arguments, "--latency", "0.25,2", "--step", 7, "--json")
    assert json.loads(out)["makespan"] == 3 * (1 + 2 + 3) + 2 * (0.25 + 2) + 7


def test_every_configuration_key_can_be_listed(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "train", "--keys")
    assert code == 0
    assert "correction.beta" in out
    for words in ("method", "2bw", "optimizer.lr", "peak learning rate", "timeout"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "2bx"], "unknown method '2bx'. Did you mean '2bw'"),
        (["simulate", "2bw", "--stages", "4", "--microbatches", "2"], "needs at least 3 microbatches per batch, got 2"),
        (
            ["simulate", "1f1b", "--stages", "2", "--microbatches", "2", "--per-stage", "no.json"],
            "cannot read the per-stage",
        ),
        (
            ["simulate", "1f1b", "--stages", "2", "--microbatches", "2", "--latency", "inf"],
            "--latency takes times from 0 to 1e+15, as in 0.1 or 0.1,0.5,0.1, got 'inf'",
        ),
        (
            ["simulate", "1f1b", "--stages", "4", "--microbatches", "4", "--latency", "1,2"],
            "4 ranks have 3 links between neighbours, latencies of 2 are given",
        ),
        (["show", "forward-only"], "It is the order of evaluations: any method with order forward-only"),
        (["show", "1f1b", "--file", "order.txt"], "give either a METHOD"),
        (["show", "--file", "order.txt", "--order", "gpipe"], "a --file holds the order; leave --order out"),
        (["show", "--file", "order.txt", "--stages", "3"], "order.txt holds a finished schedule; leave 'stages' out"),
        (
            ["simulate", "--file", "order.csv", "--set", "options.x=3"],
            "order.csv holds a finished schedule; leave 'x' out",
        ),
        (["show", "1f1b", "--order", "gpip"], "unknown order 'gpip'"),
        (["show", "2bw", "--set", "options.chunks=4"], "method 2bw has no option 'chunks'; it has in_flight"),
        (
            ["simulate", "2bw:in_flight=5", "--in-flight", "4"],
            "in_flight is given twice, in 2bw:in_flight=5 and by itself, as 4; leave one of them out",
        ),
        (
            ["train", "2bw:in_flight=5", "--in-flight", "4"],
            "in_flight is given twice, in 2bw:in_flight=5 and by itself",
        ),
        (
            ["train", "2bw-ahead:motion=1", "--set", "correction.motion=0"],
            "motion is given twice, in 2bw-ahead:motion=1",
        ),
        (
            ["show", "2bw", "--order", "1f1b", "--set", "options.chunks=4"],
            "order 1f1b has no option 'chunks'; it has in_flight",
        ),
        (["compare", "--out", "c", "--lr", "1e-3,-1"], "lr.1: input should be greater than 0, got -1.0"),
        (["compare", "--out", "c", "--lr", "0"], "lr.0: input should be greater than 0, got 0.0"),
        (["show", "1f1b", "--svg", "no/such/folder/x.svg"], "cannot write the drawing to 'no/such/folder/x.svg'"),
        (["sample", "nowhere"], "no saved weights in 'nowhere'"),
        (["train", "--set", "metod=2bw"], "unknown configuration key 'metod'; did you mean 'method'?"),
        (
            ["train", "--set", "correction=reschedule"],
            "expected a section with keys, such as correction.reschedule",
        ),
        (["train", "--set", "options={chunks:3}"], "options.chunks:3: write a space after the colon, as in chunks: 3"),
        (["train", "--set", "stages=two"], "stages: input should be a valid integer"),
        (
            ["train", "--file", written("spike"), "--set", "optimizer.name=adam"],
            "spike compensation replaces the momentum of SGD",
        ),
        (["train", "--set", "method=pipemare", "--set", "correction={decya: 0.1}"], "has no option 'decya'"),
        (
            ["train", "--set", "method=2bw", "--set", "correction={reschedule: 500}"],
            "method '2bw' has no correction, so correction.reschedule does not apply; methods that have it: pipemare",
        ),
        (
            ["train", "--set", "method=spectrain", "--set", "correction={decya: 0.1}"],
            "method 'spectrain' has a correction without options, so correction.decya does not apply; methods that "
            "have it: none",
        ),
        (["train", "--set", "stages=6"], "2bw with 6 stages needs at least 5 microbatches"),
        (["train", "--set", "method=dualpipe", "--set", "microbatches=2"], "at least twice as large; got 2 and 2"),
        (["train", "--set", "stages=7", "--set", "method=1f1b"], "cannot be cut into 7 stages"),
        (["train", "--set", "balance=[6]"], "must hold 2 positive numbers that add up to the model's 6 blocks"),
        (["train", "--set", "model.heads=5"], "must be a multiple of twice model.heads"),
        (["train", "--data", "nowhere"], "there is no file or folder 'nowhere'"),
        (["train", "--config", "nowhere.yaml"], "cannot read the configuration 'nowhere.yaml'"),
        (["train", "--set", "model.vocabulary=10"], "holds tokens up to 255"),
        (["train", "--set", "prompt="], "prompt must not be empty"),
    ],
)
def test_mistakes_end_with_a_message_and_no_traceback(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()  # nothing has been started


def test_text_too_short(monkeypatch, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    code, _, err = run(monkeypatch, capsys, "train", "--data", tmp_path / "short.txt", "--set", f"out={tmp_path}")
    assert code == 2
    assert "has 9 tokens; with model.context 128 at least 257 are needed" in " ".join(err.split())


def test_help_reads_well(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0
    for command in ("methods", "show", "simulate", "train", "verify", "sample"):
        assert command in out
    code, out, _ = run(monkeypatch, capsys, "simulate", "--help")
    for option in ("--backward-input", "--backward-weight", "--latency", "--per-stage", "--batches", "--json"):
        assert option in out


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_method_is_named_as_in_show(command, monkeypatch, tmp_path):
    """Arguments go before `--set`, and that before a configuration file."""
    from penstock.train.config import load

    seen, real = [], load.load_config

    def stop(path, changes, **options):
        seen.append(real(path, changes, **options))
        raise ConfigError("enough")

    monkeypatch.setattr(load, "load_config", stop)
    config = tmp_path / "mine.yaml"
    config.write_text("method: gpipe\nstages: 3\n")
    for arguments in (
        ["1f1b", "--stages", 3, "--microbatches", 5],
        ["PipeDream-Flush", "--microbatches", 5, "--set", "microbatches=7"],
        ["--config", config, "--stages", 4],
        ["--config", config, "2bw"],
        ["--set", "method=stash"],
    ):
        monkeypatch.setattr(sys, "argv", ["penstock", command, *map(str, arguments)])
        with pytest.raises(SystemExit):
            main()
    found = [(settings.method, settings.stages, settings.microbatches) for settings in seen]
    default = real(None, [])
    assert found == [
        ("1f1b", 3, 5),
        ("1f1b", default.stages, 5),
        ("gpipe", 4, default.microbatches),
        ("2bw", 3, default.microbatches),
        ("stash", default.stages, default.microbatches),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["2bv"], "unknown method '2bv'. Did you mean '2bw'"),
        (["mine.yaml"], "unknown method 'mine.yaml'. A configuration goes after --config."),
        (["mine.py"], "unknown method 'mine.py'. An order of your own goes after --file"),
        (["1f1b", "--stages", "0"], "invalid value for '--stages'"),
        (["1f1b", "--file", "mine.py"], "give either a METHOD (penstock methods lists them) or --file"),
        (["interleaved:chunk=4"], "has no option 'chunk'; it has chunks, group, in_flight. Did you mean 'chunks'?"),
        (["interleaved:chunks"], "a name may be followed by options with numbers"),
    ],
)
def test_what_is_no_method_and_no_file(arguments, said, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "train", *arguments)
    assert code == 2
    assert said in " ".join(err.split())


def test_commands_without_training_start_without_torch():
    """Which takes seconds to import; pydantic is typer's, and schedules that are arrays need numpy."""
    commands = (["methods", "--json"], ["show", "2bw"], ["simulate", "2bw"], ["show", "zb-v", "--stages", "2"])
    code = f"""
import sys
from penstock.cli import main
for command in {commands!r}:
    sys.argv = ["penstock", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
    loaded = [name for name in ("torch", "scipy") if name in sys.modules]
    assert not loaded, (command, loaded)
"""
    ran = start("-c", code)
    assert ran.returncode == 0, ran.stderr


def test_links_show_what_microbatches_in_flight_cost_and_save():
    rows = ("2bw", "1f1b", "interleaved", "stash")
    found = {
        which: {f.name: f for f in facts_of_methods([find_method(r) for r in rows], 4, 8, links)}
        for which, links in {"far": Links(0.75), "auto": Links(0.75, "auto"), "near": Links()}.items()
    }
    assert found["far"]["2bw"].bubble == pytest.approx(3 / 11)
    assert found["auto"]["2bw"].bubble == found["near"]["2bw"].bubble == 0
    assert found["auto"]["2bw"].activations == [7, 5, 3, 1]
    assert found["auto"]["interleaved"].bubble < found["far"]["interleaved"].bubble
    assert found["auto"]["1f1b"].bubble < found["far"]["1f1b"].bubble
    assert found["auto"]["stash"] == found["far"]["stash"]  # whose delay would grow


def test_python_m_penstock_imports_nothing_from_the_working_folder(tmp_path):
    for name in ("lazy_loader", "random", "rich", "torch", "typer", "yaml"):
        (tmp_path / f"{name}.py").write_text("open(__file__ + '-has-run', 'w')\nraise ImportError('planted')\n")
    process = start("-m", "penstock", "config", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert not list(tmp_path.glob("*-has-run"))
