"""Timelines as SVG: every action once, with its number and marks; room for numbers; bands; legends."""

import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from penstock.schedule.build import prove
from penstock.schedule.methods.table import METHODS
from penstock.timeline import Interval, Timeline
from penstock.view.line_plot import Curve, plot_document
from penstock.view.svg import LEFT, RIGHT, ROW, css, fill_of, hatch, luminance, text_on, timeline_svg
from penstock.view.timeline_labels import OPERATIONS
from support.drawings import PICTURE, picture
from support.simulated import simulated

SPACE = "{http://www.w3.org/2000/svg}"
WIDE = 0.636  # of DejaVu Sans, whose digits are wider than those of most fonts, in font sizes


class Picture:
    """What an SVG shows: groups of actions with their boxes, numbers and hatches; the legend; other words."""

    def __init__(self, timeline, title="title", width=1000):
        self.root = ElementTree.fromstring(timeline_svg(timeline, title, width))
        groups = [g for g in self.root.iter(f"{SPACE}g") if g.get("class")]
        self.actions = [g for g in groups if g.get("class") != "legend"]
        self.passes = [g for g in self.actions if g.get("class") not in ("STEP", "GATHER", "REDUCE")]
        self.updates = [g for g in self.actions if g.get("class") == "STEP"]
        self.legend = ["".join(g.itertext()) for g in groups if g.get("class") == "legend"]
        self.samples = [g for g in groups if g.get("class") == "legend"]
        self.words = " ".join(self.legend)
        self.width, self.height = float(self.root.get("width")), float(self.root.get("height"))
        self.size = next(float(g.get("font-size")) for g in self.root.iter(f"{SPACE}g") if g.get("font-size"))

    def said(self, group):
        return group.find(f"{SPACE}title").text

    def numbers(self, group):
        return ["".join(text.itertext()) for text in group.findall(f"{SPACE}text")]

    def boxes(self, group):
        """Its boxes, without the lines along edges and the outline of pairs."""
        found = [box for box in group.findall(f"{SPACE}rect") if box.get("fill") != "none"]
        return [box for box in found if box.get("height") != "2.5"]

    def fills(self, group):
        return [box.get("fill") for box in self.boxes(group)]


@pytest.mark.parametrize("method", ["1f1b", "2bw", "interleaved", "zb-v", "chimera", "seq1f1b", "timeprest", "bitpipe"])
def test_every_pass_is_drawn_once_with_its_number_and_colour(method):
    timeline = simulated(method, 4, 8, 2)
    drawn = Picture(timeline)
    passes = [i for i in timeline.work() if i.what != "STEP"]
    assert len(drawn.passes) == len(passes)
    found = Counter((group.get("class"), *drawn.numbers(group)) for group in drawn.passes)
    units = [re.fullmatch(r"[A-Z](\d+)(?:\.\.(\d+))?(?::(\d)/\d)?", i.label).groups() for i in passes]
    expected = [f"{first}-{last}" if last else f"{first}{place or ''}" for first, last, place in units]
    assert found == Counter((i.what, number) for i, number in zip(passes, expected, strict=True))
    colours = {}
    for group in drawn.passes:
        colours.setdefault(group.get("class"), set()).update(drawn.fills(group))
    shades = {"interleaved": 2, "zb-v": 2, "chimera": 2, "bitpipe": 4}.get(method, 1)
    assert {op: len(fills) for op, fills in colours.items()} == dict.fromkeys(colours, shades)
    assert sum(map(len, colours.values())) == len(set().union(*colours.values()))


@pytest.mark.parametrize("title", ["a<b>&'\"", "\x1b[2J\x00", "\udcff.py", "two\nlines"])
def test_any_title_is_text(title):
    """Names of files and schedules are those of others; XML takes no control characters."""
    shown = Picture(simulated("1f1b", 2, 2), title).root
    wanted = "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in title)
    assert next(shown.iter(f"{SPACE}text")).text == wanted
    plot_document([Curve(title, [(1.0, 1.0, 1.0, 1.0)], 0)], title, title, title).encode()
    ElementTree.fromstring(plot_document([Curve(title, [(1.0, 1.0, 1.0, 1.0)], 0)], title, title, title))


def test_a_shade_belongs_to_a_chunk_of_the_rank():
    """The first chunk of rank 0 is stage 0, the second one stage 4: dark and light."""
    drawn = Picture(simulated("interleaved", 4, 4, 1))
    fills = {(int(re.search(r"stage (\d)", drawn.said(g))[1]), drawn.fills(g)[0]) for g in drawn.passes}
    darkest, lightest = css(fill_of("F", 0, 2)), css(fill_of("F", 1, 2))
    assert {stage for stage, fill in fills if fill == darkest} == {0, 1, 2, 3}
    assert {stage for stage, fill in fills if fill == lightest} == {4, 5, 6, 7}


def test_passes_that_run_together_are_two_halves_of_one_box():
    timeline = simulated("dualpipe-v", 4, 8, 1)
    drawn = Picture(timeline)
    pairs = [g for g in drawn.passes if g.get("class") == "FUSED"]
    fused = [i for i in timeline.work() if i.parts]
    assert len(pairs) == len(fused) > 10
    for pair in pairs:
        forward, backward = drawn.boxes(pair)
        assert float(forward.get("y")) + float(forward.get("height")) == float(backward.get("y"))
        assert forward.get("x") == backward.get("x")
        assert forward.get("width") == backward.get("width")
        first, second = re.findall(r"([FB])(\d+), stage", drawn.said(pair))
        assert (first[0], second[0]) == ("F", "B")
        assert drawn.numbers(pair) == [first[1], second[1]]
        assert set(drawn.fills(pair)) <= {css(fill_of(op, shade, 2)) for op in "FB" for shade in (0, 1)}
    assert "run together" in drawn.words
    assert "run together" not in Picture(simulated("zb-v", 4, 8, 1)).words


def test_hatching_tells_versions_apart():
    """2BW: batches 0 and 1 read version 0, batch 2 reads 1 and batch 3 reads 2."""
    drawn = Picture(simulated("2bw", 3, 3, 4))
    kinds = {}
    for group in drawn.passes:
        version = int(re.search(r"reads version (\d)", drawn.said(group))[1])
        kinds.setdefault(version, set()).add(directions(group))
    assert kinds == {0: {""}, 1: {"/"}, 2: {"\\"}}
    samples = {"".join(s.itertext()): directions(s.find(f"{SPACE}g")) for s in drawn.samples}
    assert {name: kind for name, kind in samples.items() if "version" in name} == {
        f"reads version {v} of the weights": kind for v, kind in enumerate(["", "/", "\\"])
    }
    one = Picture(simulated("1f1b", 3, 3, 1))
    assert not any(directions(group) for group in one.passes)
    assert "all read version 0 of the weights" in one.words


def directions(group):
    """How the lines of hatches run."""
    found = set()
    for path in group.findall(f"{SPACE}path"):
        for x0, y0, x1, y1 in re.findall(r"M([-\d.]+) ([-\d.]+)L([-\d.]+) ([-\d.]+)", path.get("d")):
            if float(x0) != float(x1):
                found.add("/" if (float(x1) - float(x0)) * (float(y1) - float(y0)) < 0 else "\\")
    return "".join(sorted(found))


def test_hatches_stay_in_their_box_and_meet_at_its_edges():
    for pattern in (1, 2, 3):
        for x, y, width, height in ((0, 0, 18, 14), (57.3, 52, 22.4, 26), (100, 83, 3, 26)):
            numbers = [float(n) for n in re.findall(r"[\d.]+", hatch(pattern, x, y, width, height))]
            assert numbers
            assert all(x - 0.1 <= n <= x + width + 0.1 for n in numbers[::2])
            assert all(y - 0.1 <= n <= y + height + 0.1 for n in numbers[1::2])
    assert hatch(0, 0, 0, 18, 14) == ""


def test_updates_are_marked_where_they_happen():
    timeline = simulated("2bw", 3, 3, 3)
    drawn = Picture(timeline)
    steps = [i for i in timeline.work() if i.what == "STEP"]
    assert len(drawn.updates) == len(steps) == 9
    assert {g.find(f"{SPACE}title").text.split(",")[0] for g in drawn.updates} == {"STEP0", "STEP1", "STEP2"}
    places = {drawn.said(g): drawn.boxes(g)[0] for g in drawn.updates}
    after = next(g for g in drawn.passes if drawn.said(g).startswith("F6, stage 0"))  # reads what STEP0 has made
    bar = next(box for said, box in places.items() if said.startswith("STEP0, stage 0"))
    assert float(bar.get("x")) + 1.2 == pytest.approx(float(drawn.boxes(after)[0].get("x")), abs=0.1)
    assert "update" in drawn.words
    assert "update" not in Picture(Timeline(1, [Interval(0, "compute", 0, 1, "F", "F0")])).words


def test_the_network_has_a_lane_below_each_rank():
    """Every gather and every sum once, at its time, with the number of its stage, under the passes of its rank."""
    timeline = simulated("layered", 2, 4, 1, gather=0.5)
    drawn = Picture(timeline)
    sent = [i for i in timeline.intervals if i.what in ("GATHER", "REDUCE") and i.end > i.start]
    lanes = [g for g in drawn.actions if g.get("class") in ("GATHER", "REDUCE")]
    assert len(lanes) == len(sent) == 8
    assert Counter((g.get("class"), *drawn.numbers(g)) for g in lanes) == Counter((i.what, str(i.stage)) for i in sent)
    begin = min(i.start for i in sent)
    assert begin < timeline.start  # the first weights are gathered before the first pass
    scale = (drawn.width - LEFT - RIGHT) / (timeline.start + timeline.makespan - begin)
    for lane, interval in zip(lanes, sent, strict=True):
        (box,) = drawn.boxes(lane)
        assert float(box.get("x")) == pytest.approx(LEFT + (interval.start - begin) * scale, abs=0.1)
        assert float(box.get("width")) == pytest.approx((interval.end - interval.start) * scale, abs=0.1)
        row = next(b for g in drawn.passes for b in drawn.boxes(g) if f"stage {interval.stage}," in drawn.said(g))
        assert 0 < float(box.get("y")) - float(row.get("y")) - ROW < 5
    words = "".join(drawn.legend)
    assert "weights gathered" in words
    assert "gradients summed" in words
    assert "on the network: stage" in words
    assert not {"GATHER", "REDUCE"} & {g.get("class") for g in Picture(simulated("breadth-first", 2, 4, 1)).actions}
    assert "network" not in Picture(simulated("breadth-first", 2, 4, 1)).words


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16)])
def test_numbers_are_large_enough_and_fit_in_their_boxes(method, stages, microbatches):
    endless = prove(method, stages, microbatches).schedule.programs[0].epilogue
    drawn = Picture(simulated(method, stages, microbatches, 3 if endless else 1))
    assert 10 <= drawn.size <= 12
    assert drawn.width <= 1000
    for group in drawn.passes:
        texts, boxes = group.findall(f"{SPACE}text"), drawn.boxes(group)
        assert texts, drawn.said(group)
        for text in texts:
            size = float(text.get("font-size") or drawn.size)
            assert size >= 9.5
            tails = [len(t.text) * float(t.get("font-size")) for t in text]
            needed = WIDE * (size * len(text.text) + sum(tails))
            holding = [b for b in boxes if inside(float(text.get("x")), float(text.get("y")), b)]
            (box,) = holding
            assert needed <= float(box.get("width")), drawn.said(group)
            assert size <= float(box.get("height"))


def inside(x, y, box):
    left, top, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
    return left <= x <= left + width and top < y <= top + height


@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-v", "timeprest"])
def test_boxes_do_not_overlap_and_stay_in_the_picture(method):
    drawn = Picture(simulated(method, 8, 16, 2))
    rows = {}
    for group in drawn.passes:
        for box in drawn.boxes(group):
            x, width = float(box.get("x")), float(box.get("width"))
            rows.setdefault(box.get("y"), []).append((x, x + width))
            assert x >= 50
            assert x + width <= drawn.width
            assert float(box.get("y")) + float(box.get("height")) < drawn.height
    for row in rows.values():
        assert all(before[1] <= after[0] + 0.2 for before, after in pairwise(sorted(row)))
    legend = [re.findall(r"[\d.]+", s.get("transform")) for s in drawn.samples]
    assert all(float(x) <= drawn.width and float(y) + 14 <= drawn.height for x, y in legend)


def test_a_very_long_timeline_is_shortened_in_the_middle():
    """What is drawn and what is counted make up all passes and updates."""
    timeline = simulated("2bw", 8, 16, 40)
    drawn = Picture(timeline)
    (said,) = [t.text for t in drawn.root.iter(f"{SPACE}text") if t.text and "left out" in t.text]
    passes, updates = map(int, re.search(r": (\d+) passes and (\d+) updates", said).groups())
    assert len(drawn.passes) + passes == sum(i.what != "STEP" for i in timeline.work())
    assert len(drawn.updates) + updates == sum(i.what == "STEP" for i in timeline.work())
    assert drawn.height < 1800
    assert {drawn.said(g).split(",")[0] for g in drawn.passes} >= {"F0", "B639"}
    assert {f"reads version{found}" for found in re.findall(r"s? \d[\d, ]*", drawn.words)} == {
        "reads versions 0, 38 ", "reads version 1 ", "reads version 36 ", "reads version 37 ",
    }  # fmt: skip
    assert not any("left out" in text for text in Picture(simulated("2bw", 8, 16, 3)).root.itertext())


def test_the_legend_names_what_is_drawn_and_nothing_else():
    words = {
        "backward for the inputs": {"zb-v", "dualpipe-v"},
        "first chunk; second chunk": {"zb-v", "dualpipe-v", "interleaved"},
        "down; up": {"chimera"},
        "run together": {"dualpipe-v"},
        "subscript: slice": {"seq1f1b"},
        "a-b: microbatches a to b together": {"timeprest"},
        "reads version 1": {"2bw", "timeprest"},
    }
    for method in set().union(*words.values()) | {"1f1b"}:
        legend = Picture(simulated(method, 4, 8, 3 if method in ("2bw", "timeprest") else 1)).words
        assert {word for word in words if word in legend} == {word for word, where in words.items() if method in where}
        assert "forward" in legend
        assert "idle" in legend
    recomputed = Picture(simulated("1f1b", 4, 4, 1, recomputes=True))
    assert "recompute" in recomputed.words
    boxes = [box for g in recomputed.passes if g.get("class") == "R" for box in recomputed.boxes(g)]
    assert boxes
    assert all("stroke-dasharray" in box.attrib for box in boxes)


def test_titles_and_measured_times():
    timeline = simulated()
    root = ElementTree.fromstring(timeline_svg(timeline, "2BW <3 stages>"))
    texts = ["".join(e.itertext()) for e in root.iter(f"{SPACE}text")]
    assert "2BW <3 stages>" in texts
    assert f"bubble {timeline.bubble().bubble:.3f} (idle time / total)" in texts
    assert Picture(Timeline(2)).passes == []
    uneven = [Interval(0, "compute", k, k + (0.9 if k else 1e-5), "F", f"F{k}") for k in range(40)]
    drawn = Picture(Timeline(1, uneven))  # one pass that is too short for its number
    assert [drawn.numbers(g) for g in drawn.passes] == [[], *([str(k)] for k in range(1, 40))]


def test_colours_differ_in_grey_and_bear_their_numbers():
    """Lightness alone tells forward, backward and halves of one stage apart, and forward and backward of two chunks."""
    grey = {op: luminance(fill_of(op, 0, 1)) for op in "FBIW"}
    ordered = sorted(grey[op] for op in "FIW"), sorted(grey[op] for op in "FB")
    assert all(after - before > 0.15 for row in ordered for before, after in pairwise(row))
    two = sorted(luminance(fill_of(op, shade, 2)) for op in "FB" for shade in (0, 1))
    assert all(after - before > 0.08 for before, after in pairwise(two))
    for op in [*OPERATIONS, "PREDICT"]:
        for shades in (1, 2, 4):
            for shade in range(shades):
                fill = fill_of(op, shade, shades)
                ink = luminance((26, 26, 26) if text_on(fill) != "#ffffff" else (255, 255, 255))
                dark, light = sorted((ink, luminance(fill)))
                assert (light + 0.05) / (dark + 0.05) >= 4.4, (op, shade, shades)


def test_the_picture_of_the_readme_is_drawn_by_this_code():
    assert PICTURE.read_text() == picture(), "run python tests/support/drawings.py"
    assert all(f"reads version {version} of the weights" in picture() for version in (0, 1, 2))
