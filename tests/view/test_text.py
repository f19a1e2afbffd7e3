"""Timelines drawn in the terminal: cells, blocks, what is left out, the legend; schedules in their text form."""

import re

import pytest

from penstock.schedule.methods.table import METHODS
from penstock.timeline import Interval, Timeline
from penstock.view.text import draw_timeline, superscript, wrap_schedule
from support.own_methods import prove
from support.simulated import simulated

LABEL = r"[A-Z]+e?\d+(?:\.\.\d+)?(?::\d+)?[a-z]?[<>]?"


def rows_of(drawing):
    return [line for line in drawing.splitlines() if line.startswith("rank ")]


def legend_of(timeline, width=1000, lines=None):
    """The drawing without its legend, and what the legend says."""
    drawing, _, legend = draw_timeline(timeline, width, lines, legend=True).plain.rstrip("\n").rpartition("\n\n")
    return drawing, legend


def test_a_drawn_timeline():
    """1F1B on two ranks with F = 1 and B = 2, drawn by hand; three columns are one unit of time."""
    assert draw_timeline(simulated("1f1b", 2, 2, 1), width=80).plain.splitlines() == [
        "rank 0 |F0|F1|·····|B0   |··|B1   ┃",
        "rank 1 ···|F0|B0   |F1|B1   ┃······",
        "time   0              5",
    ]


def test_passes_that_run_together_share_a_cell():
    rows = rows_of(draw_timeline(simulated("dualpipe-v", 2, 4, 1), width=400).plain)
    assert "|F2b  +B0a  |" in rows[1]
    styles = {span.style for span in draw_timeline(simulated("dualpipe-v", 2, 4, 1), width=400).spans}
    assert {"white on dodger_blue3", "black on dark_sea_green2"} <= styles


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.25, 1.25), (1.0, 0.55, 0.62), (0.7, 0.9, 1.13)])
def test_every_pass_is_drawn_with_its_version(times):
    rows = rows_of(draw_timeline(simulated(times=times), width=10_000).plain)
    assert len(rows) == 3
    for row in rows:
        for k in range(9):
            version = superscript(max(k // 3 - 1, 0))  # 2BW: batch t reads version max(t - 1, 0)
            assert f"F{k}{version}" in row
            assert f"B{k}{version}" in row
        assert row.count("┃") in (2, 3)  # the last two updates of a drain may stand at one moment


@pytest.mark.parametrize("width", [40, 79, 200])
def test_drawings_are_wrapped_to_the_width(width):
    drawing = draw_timeline(simulated(), width=width, legend=True).plain
    assert max(len(line) for line in drawing.splitlines()) <= width
    assert drawing.count("rank 0") >= (2 if width < 200 else 1)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "interleaved", "zb-v", "dualpipe-v", "chimera", "seq1f1b", "bpipe"])
@pytest.mark.parametrize("width", [61, 80, 160])
def test_blocks_cut_no_label_and_lose_no_column(method, width):
    timeline = simulated(method, 4, 8, 2)
    whole = rows_of(draw_timeline(timeline, 10_000).plain)
    wrapped = rows_of(draw_timeline(timeline, width).plain)
    assert ["".join(row[7:] for row in wrapped[rank::4]) for rank in range(4)] == [row[7:] for row in whole]
    labels = [re.findall(LABEL, row) for row in whole]
    assert [[label for row in wrapped[rank::4] for label in re.findall(LABEL, row)] for rank in range(4)] == labels
    blocks = [len(row) - 7 for row in wrapped[::4]]
    assert len(blocks) <= -(-sum(blocks) // (0.75 * (width - 7)))


@pytest.mark.parametrize("method", ["2bw", "stash", "wpipe", "dualpipe-v"])
@pytest.mark.parametrize(("width", "lines"), [(60, 1), (80, 36), (80, 30), (120, 20)])
def test_what_is_left_out_is_counted(method, width, lines):
    """Labels and updates that are drawn, and those that are counted, make up all of them."""
    timeline = simulated(method, 4, 16, 3)
    drawing = draw_timeline(timeline, width, lines).plain
    (said,) = re.findall(r"⋯ left out, time (\S+) to (\S+): (\d+) pass(?:es)?(?: and (\d+) updates?)? ⋯", drawing)
    passes = [i for i in timeline.work() if i.what != "STEP"]
    drawn = sum(len(re.findall(rf"(?<!\+){LABEL}", row)) for row in rows_of(drawing))
    assert drawn + int(said[2]) == len(passes)
    bars = {(i.rank, i.start) for i in timeline.work() if i.what == "STEP"}
    assert sum(row.count("┃") for row in rows_of(drawing)) + int(said[3] or 0) == len(bars)
    assert sum(float(said[0]) <= start < float(said[1]) for _, start in bars) == int(said[3] or 0)
    if lines > 15:  # else it has two blocks, which are higher
        assert len(drawing.splitlines()) <= lines + 2
    assert rows_of(drawing)[0][7:] == rows_of(draw_timeline(timeline, width).plain)[0][7:]


def test_nothing_is_left_out_of_what_fits():
    timeline = simulated("1f1b", 4, 8, 1)
    assert draw_timeline(timeline, 80, 36).plain == draw_timeline(timeline, 80).plain
    assert "left out" not in draw_timeline(timeline, 80).plain


SIGNS = {  # a sign, and what a legend says of it
    r"\+[A-Z]": "run together",
    "┃": "┃ update",
    "·": "· idle",
    r"\d[abc][|<> +⁰]": ": chunks of a rank",
    r"\d[ab]?[<>]": "> and <: pipelines down and up the ranks",
    "[⁰-⁹]": "superscript: version",
    r"\d\.\.\d": r"to \d+ together",
    r"\d:\d": "slice 0 of 2",
    r"[A-Z]e\d": "of an evaluation",
    "F": "F0.* forward of microbatch 0",
    "B": "B.* backward",
    "I": "I backward for the inputs",
    "W": "W backward for the weights",
    "R": "R recompute",
}


@pytest.mark.parametrize("method", METHODS)
def test_a_legend_explains_the_signs_of_its_drawing_and_no_others(method):
    drawing, legend = legend_of(simulated(method, 4, 8, 2))
    rows = "".join(row[7:] for row in rows_of(drawing))
    for sign, meaning in SIGNS.items():
        assert bool(re.search(sign, rows)) == bool(re.search(meaning, legend)), (sign, meaning)
    assert ("all read version 0" in legend) == (not re.search("[⁰-⁹]", rows))


def test_a_legend_of_recomputes_evaluations_and_what_is_left_out():
    drawing, legend = legend_of(simulated("1f1b", 4, 4, 1, recomputes=True))
    assert "|R0 " in drawing.replace("|R0|", "|R0 |")
    assert "R recompute" in legend
    odd = [Interval(0, "compute", k, k + 1, "F" if k % 9 else "R", f"{'F' if k % 9 else 'R'}{k}") for k in range(99)]
    odd[45] = odd[45]._replace(what="W", label="W45")
    assert "W backward" in legend_of(Timeline(1, odd), 60)[1]
    drawing, legend = legend_of(Timeline(1, odd), 60, 6)
    assert "W45" not in drawing
    assert "W backward" not in legend
    assert "· idle" not in legend


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


def test_updates_that_take_time_are_bars():
    work = [Interval(0, "compute", k, k + 1, "F", f"F{k}") for k in range(3)]
    step = Interval(0, "compute", 3, 5, "STEP", "STEP0", version=1)
    drawing, legend = legend_of(Timeline(1, [*work, step]))
    assert drawing.splitlines()[0] == "rank 0 |F0|F1|F2┃┃┃┃┃┃|"
    assert "┃ update" in legend
    assert "superscript" not in legend
    drawing, legend = legend_of(Timeline(1, [*work, step._replace(end=90)]), 60, 6)
    assert re.search(r"left out, time \S+ to \S+: 0 passes ⋯", drawing)
    assert "┃ update" in legend


def test_nothing_and_very_uneven_timelines_can_be_drawn():
    assert "nothing ran" in draw_timeline(Timeline(2)).plain
    uneven = Timeline(1, [Interval(0, "compute", 0, 1e-6, "F", "F0"), Interval(0, "compute", 1e-6, 100, "B", "B0")])
    assert "B0" in draw_timeline(uneven, 100).plain
