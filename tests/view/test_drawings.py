"""Timelines as text, SVG and trace."""

import json
import re
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.text import Text

from penstock.idle_time import split_time
from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Interval, Timeline
from penstock.train.config.load import load_config
from penstock.train.observer import Progress, RunSummary, Switched
from penstock.train.setup.prepare import prepare
from penstock.view.perfetto import trace_events, write_trace
from penstock.view.progress import TerminalObserver, human_bytes
from penstock.view.svg import timeline_svg
from penstock.view.tables import bytes_table, time_table
from penstock.view.text import draw_timeline, superscript, wrap_schedule


def simulated(method="2bw", stages=3, microbatches=3, batches=3, times=(1.0, 1.0, 1.0)):
    proof = prove(method, stages, microbatches)
    return simulate_schedule(proof, Costs.uniform(proof.schedule, *times), batches).timeline


def test_a_drawn_timeline():
    """1F1B on two ranks with F = 1 and B = 2, drawn by hand; four columns are one unit of time."""
    drawing = draw_timeline(simulated("1f1b", 2, 2, 1), width=80).plain
    assert drawing.splitlines()[:2] == [
        "rank 0 |F0⁰|F1⁰|·······|B0⁰    |···|B1⁰    ┃",
        "rank 1 ····|F0⁰|B0⁰    |F1⁰|B1⁰    ┃········",
    ]


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.25, 1.25), (1.0, 0.55, 0.62), (0.7, 0.9, 1.13)])
def test_every_pass_is_drawn_with_its_version(times):
    drawing = draw_timeline(simulated(times=times), width=10_000).plain
    rows = [line for line in drawing.splitlines() if line.startswith("rank")]
    assert len(rows) == 3
    for row in rows:
        for k in range(9):
            version = superscript(max(k // 3 - 1, 0))  # 2BW: batch t reads version max(t - 1, 0)
            assert f"F{k}{version}" in row
            assert f"B{k}{version}" in row
        assert row.count("┃") in (2, 3)  # the last two updates of a drain may stand at one moment


@pytest.mark.parametrize("width", [40, 79, 200])
def test_drawings_are_wrapped_to_the_width(width):
    drawing = draw_timeline(simulated(), width=width).plain
    assert max(len(line) for line in drawing.splitlines()) <= width
    assert drawing.count("rank 0") >= (2 if width < 200 else 1)


def test_no_time_sticks_out_of_a_block():
    """Times of three digits right before the edge: at many widths some label begins in the last two columns."""
    timeline = simulated("1f1b", 2, 40, 1)
    for width in range(40, 60):
        lines = draw_timeline(timeline, width=width).plain.splitlines()
        assert max(map(len, lines)) <= width
        assert {"0", "100"} <= {word for line in lines if line.startswith("time") for word in line.split()}


@pytest.mark.parametrize("width", [28, 80, 100])
def test_a_schedule_is_wrapped_between_its_actions(width):
    text = str(prove("timeprest", 4, 8).schedule)
    lines = wrap_schedule(text, width).splitlines()
    assert max(map(len, lines)) <= width
    assert [word for line in lines for word in line.split()] == text.split()  # no action is broken
    begun = [line for line in lines if not line.startswith("  ")]
    assert [line.split()[:2] for line in begun] == [line.split()[:2] for line in text.splitlines()]
    assert {len(line) - len(line.lstrip()) for line in lines} == {28: {0, 8, 9}, 80: {0, 8}, 100: {0}}[width]


def test_nothing_and_very_uneven_timelines_can_be_drawn():
    assert "nothing ran" in draw_timeline(Timeline(2)).plain
    uneven = Timeline(1, [Interval(0, "compute", 0, 1e-6, "F", "F0"), Interval(0, "compute", 1e-6, 100, "B", "B0")])
    assert "B0" in draw_timeline(uneven, 100).plain


def test_an_svg_has_a_box_per_action():
    timeline = simulated()
    root = ElementTree.fromstring(timeline_svg(timeline, "2BW <3 stages>"))
    boxes = [e for e in root.iter() if e.tag.endswith("title")]
    assert len(boxes) == sum(i.what != "STEP" for i in timeline.work())
    assert "2BW <3 stages>" in [e.text for e in root.iter()]
    assert {e.text.split(",")[0] for e in boxes} >= {"F0", "B8"}


def test_a_trace_names_ranks_lanes_stages_and_versions(tmp_path):
    timeline = simulated()
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == json.loads(json.dumps(trace_events(timeline)))
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"rank 0", "rank 2", "compute"} <= names
    passes = [e for e in events if e["ph"] == "X"]
    assert len(passes) == len(timeline.intervals)
    first = next(e for e in passes if e["name"] == "F6 stage 1 v1" and e["pid"] == 1)
    assert first["args"] == {"stage": 1, "batch": 2, "microbatch": 6, "version": 1}
    update = next(e for e in passes if e["name"] == "STEP1 stage 0 v2")
    assert update["args"] == {"stage": 0, "batch": 1, "version": 2}
    assert {e["name"] for e in events if e["ph"] == "C"} == {"activations"}


def test_messages_under_way_together_have_rows_of_their_own():
    """A row of a trace cannot show slices that overlap."""
    spans = {"activation 0": (0, 4), "activation 1": (1, 3), "activation 2": (3, 5), "activation 3": (4, 6)}
    intervals = [Interval(0, "activation 0>1", *span, "SEND", label) for label, span in spans.items()]
    events = trace_events(Timeline(1, intervals[::-1]))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"} == {
        "activation 0": "activation 0>1",
        "activation 1": "activation 0>1 (2)",
        "activation 2": "activation 0>1 (2)",
        "activation 3": "activation 0>1",
    }


def test_arrows_lead_from_messages_to_the_passes_that_take_them():
    """Of the same microbatch, payload and span, at the rank the message goes to; waits say for what."""

    def sent(rank, peer, label, span=0):
        lane = f"{label.split()[0]} {rank}>{peer}"
        return Interval(rank, lane, 1, 2, "SEND", label, microbatch=0, span=span, peer=peer)

    def did(rank, what, span=0):
        return Interval(rank, "compute", 2, 3, what, f"{what}0", rank, 0, 0, 0, microbatch=0, span=span)

    messages = [sent(0, 1, "activation 0"), sent(1, 0, "gradient 0"), sent(0, 1, "activation 0", 1)]
    passes = [did(rank, what, span) for rank in (0, 1) for what in "FBR" for span in (0, 1)]
    wait = Interval(1, "compute", 0, 2, "wait", "wait for rank 0: activation 0", cause="rank 0: activation 0", peer=0)
    events = [e for e in trace_events(Timeline(2, [*passes, *messages, wait])) if e["ph"] == "X"]
    arrows = {e["bind_id"]: [e["pid"], e["name"]] for e in events if e.get("flow_out")}
    for e in events:
        if e.get("flow_in"):
            arrows[e["bind_id"]] += [e["pid"], e["name"]]
    assert sorted(arrows.values()) == [
        [0, "activation 0", 1, "F0 stage 1 v0"], [0, "activation 0", 1, "F0 stage 1 v0"],
        [1, "gradient 0", 0, "B0 stage 0 v0"],
    ]  # fmt: skip
    assert [e["args"] for e in events if e["cat"] == "wait"] == [{"waits for": "rank 0: activation 0"}]
    assert [e["args"] for e in events if e["cat"] == "SEND"] == [{"microbatch": 0}] * 3


def test_a_table_of_where_the_time_went():
    """1F1B on two ranks with F = 1 and B = 2: rank 0 fills for 2 and drains for 1 of 9, rank 1 the other way."""
    console = Console(file=StringIO(), width=80)
    console.print(time_table(split_time(simulated("1f1b", 2, 2, 1)), unit=""))
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["where", "the", "time", "went,", "%", "of", "9"]
    assert lines[1].split() == [
        "work", "fill", "drain", "imbalance", "communication", "data", "control", "engine", "idle",
    ]  # fmt: skip
    assert [line.split() for line in lines[2:5]] == [
        ["rank", "0", "66.7", "22.2", "11.1", "0.0", "0.0", "0.0", "0.0", "0.0", "33.3"],
        ["rank", "1", "66.7", "11.1", "22.2", "0.0", "0.0", "0.0", "0.0", "0.0", "33.3"],
        ["all", "ranks", "66.7", "16.7", "16.7", "0.0", "0.0", "0.0", "0.0", "0.0", "33.3"],
    ]


def test_a_table_of_the_end_of_a_long_run_says_so():
    """What was not kept is not in it."""
    timeline = simulated("1f1b", 2, 2, 1)
    timeline.since = 3.0
    console = Console(file=StringIO(), width=80)
    console.print(time_table(split_time(timeline), unit=" s"))
    assert console.file.getvalue().splitlines()[0].strip() == "where the time went, % of the last 9 s"


def test_bytes_for_people():
    assert [human_bytes(n) for n in (0, 999, 1500, 2_340_000, 10**9, 5 * 10**12)] == [
        "0 B", "999 B", "1.5 kB", "2.3 MB", "1.0 GB", "5.0 TB",
    ]  # fmt: skip


def test_the_live_display_shows_every_figure(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 300)
    prepared = prepare(load_config(None, ["model.layers=2", "model.width=32", "model.context=16", f"data={text}"]))
    console = Console(file=StringIO(), force_terminal=True, width=100)
    observer = TerminalObserver(console)
    observer.started(prepared, [["a", "b"], ["c"]], 0)
    live = {0: {"weights": 1500, "activations": 20}, 1: {"weights": 2_000_000}}
    observer.progress(Progress(250, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, live, 250))
    observer.close()
    shown = Text.from_ansi(console.file.getvalue()).plain
    for figure in (
        "stage 0: a .. b (2 blocks)", "stage 1: c (1 block)", "batch 250 of 1000", "ETA 0:00:30", "loss 2.5000",
        "1,234 tokens/s", "bubble 12.5%", "lr 3.00e-03", "activations", "1.5 kB", "2.0 MB",
    ):  # fmt: skip
        assert figure in shown, figure


def begun(tmp_path, *, terminal):
    """An observer of a run that has begun, and what is on its screen, line by line."""
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 300)
    prepared = prepare(load_config(None, ["model.layers=2", "model.width=32", "model.context=16", f"data={text}"]))
    console = Console(file=StringIO(), force_terminal=terminal, width=150)
    observer = TerminalObserver(console)
    observer.started(prepared, [["a", "b"], ["c"]], 0)
    return prepared, observer, lambda: on_screen(console.file.getvalue())


def on_screen(written):
    """The lines that are left after cursor movements up and erasures of lines."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part in ("\r", "\x1b[2K"):
            lines[row] = "" if part != "\r" else lines[row]
        elif not part.startswith("\x1b"):
            lines[row] += part
    return lines


def summary(folder):
    split = split_time(simulated("1f1b", 2, 2, 1))
    return RunSummary(folder, 3, 100, 1.0, 2.0, 2.0, 3.0, 0.1, {0: {"weights": 1}}, split)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_change_of_method_is_said_once(tmp_path, terminal):
    """When it happens; also where the run has gone back, and until its end."""
    _, observer, screen = begun(tmp_path, terminal=terminal)
    figures = Progress(25, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, {0: {"weights": 1}}, 250)
    observer.progress(figures)
    observer.switched(Switched(7, "1f1b", "diverged at batch 12: the loss was nan", 20))
    observer.progress(replace(figures, batch=26))
    observer.sampling()
    observer.finished(summary(tmp_path), simulated("1f1b", 2, 2, 1), None)
    observer.close()
    said = "back from 20 batches to 7; 1f1b from batch 7 on (diverged at batch 12: the loss was nan)"
    assert [line for line in screen() if "1f1b" in line] == [said]


@pytest.mark.parametrize(("ranks", "width", "whole"), [(2, 80, True), (6, 80, False), (6, 120, True), (32, 120, False)])
def test_bytes_of_many_ranks_fit_the_terminal(ranks, width, whole):
    held = {
        rank: {"frozen parameters and buffers": 1000 * rank, "weights": 5 * 10**8, "none": 0} for rank in range(ranks)
    }
    console = Console(file=StringIO(), width=width)
    console.print(bytes_table(held, width=width))
    title, headings, *rows = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert title == "live bytes"
    assert len(rows) == 2  # no row is broken
    assert ("rank 0" in headings) == whole
    if not whole:
        assert headings.split() == ["least", "most", str(ranks), "ranks"]
        assert rows[0].split()[4:] == ["0", "B", "(rank", "0)", f"{ranks - 1}.0", "kB", "(rank", f"{ranks - 1})", *(
            f"{sum(range(ranks))}.0 kB".split()
        )]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_the_last_lines_are_the_loss_and_the_folder(tmp_path, terminal):
    """The sample comes before them, and in a terminal a sign of life while it is generated."""
    _, observer, screen = begun(tmp_path, terminal=terminal)
    observer.progress(Progress(3, 3, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, {0: {"weights": 1}}, 250))
    observer.sampling()
    sign = "sampling a text from the trained model"
    if terminal:
        observer._live.refresh()
    assert any(sign in line for line in screen()) == terminal
    observer.finished(summary(tmp_path), simulated("1f1b", 2, 2, 1), "def [bold]f(x):\n    return x")
    observer.close()
    lines = [line.rstrip() for line in screen() if line.strip()]
    assert not any(sign in line for line in lines)
    assert lines[-2] == "validation loss 2.0000 nats per token on held-out text; unigram entropy 3.0000"
    assert lines[-1] == f"run folder: {tmp_path}"
    at = lines.index("sample")
    assert lines[at + 1 : at + 3] == ["def [bold]f(x):", "    return x"]
    assert at < next(number for number, line in enumerate(lines) if line.startswith("where the time went"))
    assert f"more text: penstock sample {tmp_path}" in lines


@pytest.mark.parametrize("terminal", [True, False])
def test_a_wish_to_end_is_answered(tmp_path, terminal):
    _, observer, screen = begun(tmp_path, terminal=terminal)
    observer.progress(Progress(25, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, {0: {"weights": 1}}, 250))
    observer.ending()
    observer.close()
    (said,) = [line for line in screen() if "stopping after the batches in flight" in line]
    assert said.startswith("stopping after")


def test_without_a_terminal_a_line_holds_every_figure():
    console = Console(file=StringIO(), width=400)
    live = {0: {"weights": 1500, "activations": 500}, 1: {"weights": 2_000_000}}
    TerminalObserver(console).progress(Progress(250, 1000, None, 10.0, 4000, 1234.0, 0.003, None, live, 250))
    assert console.file.getvalue().split("  ") == [
        "batch 250 of 1000", "loss -", "1,234 tokens/s", "bubble -", "lr 3.00e-03", "ETA 0:00:30",
        "live bytes by stage 2.0 kB + 2.0 MB\n",
    ]  # fmt: skip
