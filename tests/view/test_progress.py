"""Tables of times and bytes, and the progress of a run in the terminal."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from penstock.byte_sizes import human_bytes
from penstock.idle_time import Idle, TimeSplit, split_time
from penstock.runtime.plan.adapted_in_flight import AdaptedInFlight
from penstock.runtime.plan.pass_and_message_times import Measured
from penstock.schedule.in_flight_choice import NO_LINKS_HERE, InFlightChoice
from penstock.simulate.least_in_flight import RankTimes
from penstock.timeline import Timeline
from penstock.train.config.load import load_config
from penstock.train.observer import Progress, RunSummary, Switched
from penstock.train.prepare.prepare_run import prepare
from penstock.view.progress import TerminalObserver, peak_bytes_table
from penstock.view.tables import bytes_table, time_table
from support.simulated import simulated


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


def test_a_table_has_a_column_for_copies_where_there_are_any():
    split = TimeSplit(4.0, (3.0,), (Idle(copy=1.0),))
    console = Console(file=StringIO(), width=100)
    console.print(time_table(split))
    lines = console.file.getvalue().splitlines()
    assert lines[1].split()[-3:] == ["copy", "engine", "idle"]
    assert lines[2].split()[-3:] == ["25.0", "0.0", "25.0"]
    assert "copy: something comes back" in " ".join(lines)


def test_a_table_of_the_end_of_a_long_run_says_so():
    """What was not kept is not in it."""
    timeline = simulated("1f1b", 2, 2, 1)
    timeline.since = 3.0
    console = Console(file=StringIO(), width=80)
    console.print(time_table(split_time(timeline), unit=" s"))
    assert console.file.getvalue().splitlines()[0].strip() == "where the time went, % of the last 9 s"


def test_bytes_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 2_340_000, 2**30 - 1, 2**30, 5 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "2.2 MiB", "1.0 GiB", "1.0 GiB", "5.0 TiB",
    ]  # fmt: skip
    assert human_bytes(16.01 * 2**30, 2) == "16.01 GiB"


def test_the_live_display_shows_every_figure(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 300)
    prepared = prepare(load_config(None, ["model.layers=2", "model.width=32", "model.context=16", f"data={text}"]))
    console = Console(file=StringIO(), force_terminal=True, width=100)
    observer = TerminalObserver(console)
    observer.started(prepared, [["a", "b"], ["c"]], 0)
    live = {0: {"weights": 1536, "activations": 20}, 1: {"weights": 2 << 20}}
    observer.progress(Progress(250, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, live, 250))
    observer.close()
    shown = Text.from_ansi(console.file.getvalue()).plain
    for figure in (
        "stage 0: a .. b (2 blocks)", "stage 1: c (1 block)", "batch 250 of 1000", "ETA 0:00:30", "loss 2.5000",
        "1,234 tokens/s", "bubble 12.5%", "lr 3.00e-03", "activations", "1.5 KiB", "2.0 MiB",
    ):  # fmt: skip
        assert figure in shown, figure


def test_parallel_pipelines_and_what_they_share_are_told_at_the_beginning(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 300)
    model = ["model.layers=2", "model.width=32", "model.context=16", f"data={text}"]
    prepared = prepare(load_config(None, [*model, "width=2", "sharding=gradients"]))
    console = Console(file=StringIO(), width=120)
    TerminalObserver(console).started(prepared, [["a", "b"], ["c"]], 0)
    assert "on 2 stages in each of 2 parallel pipelines, sharding gradients, 1000 batches" in console.file.getvalue()


def begun(tmp_path, *, terminal):
    """An observer of a run that has begun, and what is on its screen, line by line."""
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 300)
    prepared = prepare(load_config(None, ["model.layers=2", "model.width=32", "model.context=16", f"data={text}"]))
    console = Console(file=StringIO(), force_terminal=terminal, width=150)
    observer = TerminalObserver(console)
    observer.started(prepared, [["a", "b"], ["c"]], 0)
    return prepared, observer, lambda: on_screen(console.file.getvalue())


def on_screen(written, before=("",)):
    """The lines that are left of those before and what is written, after cursor movements up and erasures of lines."""
    lines, row = list(before), len(before) - 1
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


def wrapped(lines, width):
    """The lines as a terminal that has become narrower shows them."""
    return [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]


@pytest.mark.parametrize("width", [100, 50])
def test_a_narrower_terminal_shows_no_rest_of_the_display_before(tmp_path, width):
    """Most terminals wrap what was written when they become narrower, so that it takes more rows."""
    _, observer, screen = begun(tmp_path, terminal=True)
    console = observer.console
    figures = Progress(250, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, {0: {"weights": 1500, "activations": 20}}, 250)
    observer.progress(figures)
    observer._live.auto_refresh = False
    observer._live.refresh()
    lines, written = wrapped(screen(), width), len(console.file.getvalue())
    console.width = width
    observer.progress(replace(figures, batch=251))
    observer._live.refresh()
    observer.close()
    shown = on_screen(console.file.getvalue()[written:], lines)
    at = next(number for number, line in enumerate(shown) if "block)" in line or "(1 block" in line)
    below = "\n".join(shown[at + 1 :])
    assert "250" not in below
    assert below.count("251") == 1
    assert below.count("tokens") == 1


def summary(folder, now=100):
    split = split_time(simulated("1f1b", 2, 2, 1))
    return RunSummary(folder, 3, 100, now, 1.0, 2.0, 2.0, 3.0, 0.1, {0: {"weights": 1}}, split)


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


@pytest.mark.parametrize("now", [100, 25])
def test_tokens_are_those_of_the_whole_run(tmp_path, now):
    """Of a resumed one those of this call, too, as its time and its tokens per second are of that."""
    _, observer, screen = begun(tmp_path, terminal=False)
    observer.finished(summary(tmp_path, now), simulated("1f1b", 2, 2, 1), None)
    observer.close()
    told = "3 batches, 100 tokens in 0:00:01 (100 tokens/s)"
    if now == 25:
        told = "3 batches, 100 tokens; 25 of them now, in 0:00:01 (25 tokens/s)"
    assert told in " ".join(" ".join(screen()).split())


@pytest.mark.parametrize(("ranks", "width", "whole"), [(2, 80, True), (6, 80, False), (6, 120, True), (32, 120, False)])
def test_bytes_of_many_ranks_fit_the_terminal(ranks, width, whole):
    held = {
        rank: {"frozen parameters and buffers": 1024 * rank, "weights": 5 * 10**8, "none": 0} for rank in range(ranks)
    }
    console = Console(file=StringIO(), width=width)
    console.print(bytes_table(held, width=width))
    title, headings, *rows = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert title == "live bytes"
    assert len(rows) == 2  # no row is broken
    assert ("rank 0" in headings) == whole
    if not whole:
        assert headings.split() == ["least", "most", str(ranks), "ranks"]
        assert rows[0].split()[4:] == ["0", "B", "(rank", "0)", f"{ranks - 1}.0", "KiB", "(rank", f"{ranks - 1})", *(
            f"{sum(range(ranks))}.0 KiB".split()
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


def test_an_interrupted_run_leaves_no_table_of_live_bytes(tmp_path):
    """The line about the end stands above the display, and of that the last batch and its figures stay."""
    _, observer, screen = begun(tmp_path, terminal=True)
    figures = Progress(25, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.125, {0: {"weights": 1, "scratch": 2}}, 250)
    observer.progress(figures)
    observer.ending()
    observer.progress(replace(figures, batch=26))
    observer._live.refresh()
    lines = screen()
    assert sum("scratch" in line for line in lines) == 1
    above = next(number for number, line in enumerate(lines) if "stopping after the batches" in line)
    assert all(above < number for number, line in enumerate(lines) if "scratch" in line or "26 of 1000" in line)
    observer.interrupted(tmp_path / "run", 27, Timeline(2), ())
    shown = [line.rstrip() for line in screen() if line.strip()]
    assert not [line for line in shown if "scratch" in line or "live bytes" in line]
    assert sum("26 of 1000" in line for line in shown) == 1
    assert sum("loss 2.5000" in line for line in shown) == 1
    assert shown[-2] == "stopped early; a checkpoint holds all 27 batches done. To resume:"


def test_peak_bytes_are_explained():
    """Their sum is more than the total, as each purpose has its most at another time."""
    console = Console(file=StringIO(), width=80)
    console.print(peak_bytes_table({0: {"weights": 600, "idle buffers": 600, "total": 900}}, console.width))
    said = " ".join(console.file.getvalue().split())
    assert "Each purpose at its own most" in said
    assert "Idle buffers: " in said
    console = Console(file=StringIO(), width=80)
    console.print(peak_bytes_table({0: {"weights": 600, "total": 600}}, console.width))
    assert "Idle buffers" not in console.file.getvalue()
    assert "Total on the device" not in console.file.getvalue()


def test_ranks_that_move_nothing_to_the_host_hold_all_of_their_total_on_the_device():
    moved = {"activations": 4096, "offloaded activations": 2048, "total": 6144, "total on the device": 4096}
    for width, numbers in ((80, ["4.0 KiB", "3.0 KiB"]), (35, ["3.0 KiB (rank 1)", "4.0 KiB (rank 0)", "7.0 KiB"])):
        console = Console(file=StringIO(), width=80)
        console.print(peak_bytes_table({0: moved, 1: {"activations": 3072, "total": 3072}}, width))
        row = next(line for line in console.file.getvalue().splitlines() if line.startswith("total on the device"))
        assert row.split("device")[1].split() == " ".join(numbers).split()
        assert "without what is in the memory of the host" in " ".join(console.file.getvalue().split())


def test_without_a_terminal_lines_fit_the_width_that_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(file=StringIO())
    live = {0: {"weights": 1536, "activations": 512}, 1: {"weights": 2 << 20}}
    TerminalObserver(console).progress(Progress(250, 1000, 2.5, 10.0, 4000, 1234.0, 0.003, 0.5, live, 250))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split()[-6:] == ["rank", "2.0", "KiB", "+", "2.0", "MiB"]


def test_without_a_terminal_a_line_holds_every_figure():
    console = Console(file=StringIO(), width=400)
    live = {0: {"weights": 1536, "activations": 512}, 1: {"weights": 2 << 20}}
    TerminalObserver(console).progress(Progress(250, 1000, None, 10.0, 4000, 1234.0, 0.003, None, live, 250))
    assert console.file.getvalue().split("  ") == [
        "batch 250 of 1000", "loss -", "1,234 tokens/s", "bubble -", "lr 3.00e-03", "ETA 0:00:30",
        "live bytes by rank 2.0 KiB + 2.0 MiB\n",
    ]  # fmt: skip


def test_microbatches_in_flight_that_were_found_are_a_line():
    measured = Measured((RankTimes(0.05, 0.1), RankTimes(0.05, 0.09)), ((0.041, 0.03),), (2000, 1000))
    console = Console(file=StringIO(), width=80)
    TerminalObserver(console).adapted(AdaptedInFlight(4, InFlightChoice((3, 1), (3, 1), (2, 1)), 2, measured))
    assert console.file.getvalue() == (
        "in flight: 3/1 microbatches on ranks 0 and 1 instead of 2/1: "
        "messages take 41 ms, a forward and backward 150 ms\n"
    )


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("stash", "5/1", "in flight: 5/1; the weights that rank 0 reads are 1 instead of 0.25 updates late"),
        ("newest", "4", "in flight: 4; the weights that rank 0 reads are "),
        ("2bw", "3/1", None),
        ("1f1b", "3", None),
        ("stash", "auto", None),
        ("1f1b:stages=1", "auto", f"in flight: {NO_LINKS_HERE}"),
    ],
)
def test_a_run_that_reads_weights_later_says_so_at_its_beginning(tmp_path, method, given, said):
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox " * 300)
    model = ["model.layers=2", "model.width=32", "model.context=16", f"data={text}", *f"method={method}".split(":")]
    prepared = prepare(load_config(None, [*model, f"options.in_flight={given}"]))
    console = Console(file=StringIO(), width=200)
    TerminalObserver(console).started(prepared, prepared.plan.parts, 0)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("in flight")]
    assert len(lines) == (said is not None)
    if said is not None:
        assert lines[0].startswith(said)
