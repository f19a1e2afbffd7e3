"""The page of a comparison: one file, nothing from outside, curves where the numbers are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from penstock.compare.config import comparison_config
from penstock.compare.contender_run import Key, Score, TrialResult
from penstock.compare.prepared_contender import prepare_contender
from penstock.compare.results import Findings
from penstock.view.comparison_page import comparison_page, write_findings
from penstock.view.comparison_progress import plus_minus
from penstock.view.line_plot import Curve, plot_svg
from support.comparisons import task_of

VOID = {"meta"}


class Page(HTMLParser):
    """Holds tags to be closed in order, and gathers what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def findings(ends: Mapping[str, float | None], *changes: str) -> Findings:
    """One or two rates, two seeds; losses fall to these ends, or the run diverges."""
    config = comparison_config(
        ["stages=2", "microbatches=2", "batches=4", "seeds=2", f"data={__file__}", "model.layers=2", "model.width=8",
         "model.heads=2", "model.context=8", f"methods={','.join(ends)}", *changes], {}
    )  # fmt: skip
    results = {}
    for label, end in ends.items():
        for seed in range(2):
            for lr in config.rates:
                key, diverged = Key(label, seed, lr), 3 if end is None else None
                last = [] if end is None else [Score(4, end + seed / 10)]
                scores = (Score(2, 4.0), *last)
                count = 4 if end is not None else 3
                results[key] = TrialResult(key, scores, (4.5,) * count, (0.5,) * count, diverged, 1.0)
    return Findings(config, [prepare_contender(config, label, task_of) for label in ends], results)


@pytest.mark.parametrize("changes", [[], ["lr=0.1,0.2"]])
def test_the_page_is_one_file_without_anything_from_outside(changes: list[str]) -> None:
    text = comparison_page(findings({"1f1b": 2.0, "2bw": 2.2, "stash": None}, *changes))
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not {"src", "href", "srcset", "data", "action", "style"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?:|url\(|@import|//", text)
    assert page.tags.count("details") == 3
    assert page.tags.count("table") == (3 if changes else 2)
    words = " ".join(page.words)
    assert "2.0500 ± 0.0707" in words
    assert "+9.76 ± 0.34 %" in words  # of 2.2 / 2.0 and 2.3 / 2.1
    assert "stash (diverged)" in words
    assert {"baseline", "worse", "diverged"} <= set(page.words)


def test_all_curves_are_there_and_well_formed() -> None:
    text = comparison_page(findings({"1f1b": 2.0, "2bw": 2.2}))
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    titles = [svg.attrib["aria-label"] for svg in plots if "aria-label" in svg.attrib]
    assert titles == [
        *(f"validation loss against {x}" for x in ("updates", "tokens", "simulated time")),
        "training loss against updates",
        "norm of the gradient against updates",
        "delay of the forward on every stage",
    ]
    for svg in plots[:6]:
        assert len(svg.findall("polyline")) == 2
        numbers = [float(n) for line in svg.findall("polyline") for n in re.split("[ ,]", line.attrib["points"])]
        assert all(0 <= n <= 372 for n in numbers)


def test_curves_of_all_batches_are_lines_however_few_evaluations_there_are() -> None:
    """Of the loss and the norm of every batch: four batches here, of two seeds, and two evaluations after the start."""
    text = comparison_page(findings({"1f1b": 2.0, "2bw": 2.2}))
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)[:6]:
        plot = ElementTree.fromstring(svg)
        title = plot.attrib["aria-label"]
        points = {"training": 4, "norm": 4, "validation": 2, "delay": 2}[title.split()[0]]
        lines = [line.attrib["points"].split() for line in plot.findall("polyline")]
        assert [len(set(line)) for line in lines] == [points, points], title
        marks = [path for path in plot.findall("path") if path.find("title") is not None]
        assert len(marks) == 2 * points
        ticks = [t.text for t in plot.findall("text") if t.attrib["y"] == str(plot_bottom(plot) + 16)]
        assert all(tick and float(tick) == int(float(tick)) for tick in ticks), title
    assert "Training loss and norm: of every batch." in text


def plot_bottom(plot: ElementTree.Element) -> float:
    return float(plot.attrib["height"]) - 44


def test_long_runs_are_drawn_with_few_points() -> None:
    from penstock.view.comparison_page import _grouped

    losses = [float(k) for k in range(130)]
    points = _grouped(losses, 130)
    assert [x for x, _ in points] == [float(min(3 * k, 130)) for k in range(1, 45)]
    assert points[0] == (3.0, 1.0)  # the mean of 0, 1 and 2, after three updates
    assert points[-1] == (130.0, 129.0)
    assert _grouped([1.0, math.nan, math.inf], 100) == [(2.0, 1.0)]  # the second group has no finite number
    assert _grouped([5.0, 4.0], 2) == [(1.0, 5.0), (2.0, 4.0)]


def test_nothing_is_wider_than_a_small_screen_but_in_boxes_that_scroll() -> None:
    """390 pixels, of which the margins take 32; plots shrink to what is left."""
    text = comparison_page(findings({"1f1b": 2.0, "2bw": 2.2, "stash": None}, "lr=0.1,0.2"))
    assert text.count("<div class='scroll'><table>") == text.count("<table>") == 3
    assert text.count("<div class='scroll'><svg") == text.count("<details>") == 3
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg [^>]*role='img'.*?</svg>", text, re.DOTALL)]
    assert len(plots) == 7
    assert {plot.attrib["width"] for plot in plots} == {"372"}
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]  # type: ignore[index]
    assert ".scroll { overflow-x: auto }" in style
    assert ".plots svg { max-width: 100%; height: auto }" in style
    assert "name='viewport' content='width=device-width" in text
    for plot in plots:
        for words in plot.findall("text"):
            wide = 0.58 * float(words.attrib["font-size"]) * len(words.text or "")
            start = float(words.attrib["x"]) - {"middle": wide / 2, "end": wide}.get(words.get("text-anchor", ""), 0)
            if "transform" not in words.attrib:
                assert start >= -4
                assert start + wide <= float(plot.attrib["width"]) + 4, words.text


def test_delays_are_explained_and_summarized() -> None:
    text = comparison_page(findings({"1f1b": 2.0, "stash": 2.2, "1f1b:delays=3": 2.1}))
    assert "the delay is the number of updates in between" in text
    assert "Delay: updates between the weights that forwards read and the weights updated" in text
    rows = dict(re.findall(r"<tr><td>([^<]+)</td>.*<td>([^<]*)</td></tr>", text[: text.index("<h2>Curves")]))
    assert rows == {"1f1b": "0", "stash": "0.5 0", "1f1b:delays=3": "3"}


def test_a_comparison_without_a_finished_run_has_a_page() -> None:
    empty = findings({"1f1b": 2.0})
    text = comparison_page(Findings(empty.config, empty.contenders, {}))
    assert text.count("nothing to show") == 5  # all but the delays


def test_tables_are_written_with_the_page(tmp_path) -> None:
    found = findings({"1f1b": 2.0, "stash": None})
    write_findings(found, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.html", "results.csv", "summary.csv"]
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert rows[0].startswith("method,seed,lr,updates,samples,tokens,simulated_time,training_loss,validation_loss,")
    assert rows[1] == "1f1b,0,0.003,2,16,128,18.0,4.5,4.0,0.5,0 0,0 0,False"
    assert next(row for row in rows if row.endswith("True")) == "stash,0,0.003,3,24,192,21.0,4.5,,0.5,0.5 0,0.5 0,True"
    assert len(rows) == 1 + 2 * 2 + 2 * 2


# --- curves -----------------------------------------------------------------------------------------------------------


def points(svg: str) -> list[tuple[float, float]]:
    drawn = ElementTree.fromstring(svg).find("polyline").attrib["points"]  # type: ignore[union-attr]
    return [tuple(map(float, pair.split(","))) for pair in drawn.split()]  # type: ignore[misc]


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_where_their_numbers_say(log: bool) -> None:
    values = [(10.0**k if log else float(k)) for k in range(3)]
    svg = plot_svg([Curve("a", [(x, y, y, y) for x, y in enumerate(values)], 0)], "t", "x", "y", log=log)
    (x0, y0), (x1, y1), (x2, y2) = points(svg)
    assert x2 - x1 == pytest.approx(x1 - x0, abs=0.2)
    assert y1 - y2 == pytest.approx(y0 - y1, abs=0.2)
    assert y2 < y1 < y0


def test_ticks_are_round_and_stand_at_their_numbers() -> None:
    svg = plot_svg([Curve("a", [(0.0, 1.0, 1.0, 1.0), (300_000.0, 2.0, 2.0, 2.0)], 0)], "t", "x", "y")
    found = {
        text.text: float(text.attrib["x"])
        for text in ElementTree.fromstring(svg).findall("text")
        if text.text[-1:] == "k"
    }
    assert list(found) == ["50k", "100k", "150k", "200k", "250k", "300k"]
    (x0, _), (x1, _) = points(svg)
    assert found["150k"] == pytest.approx((x0 + x1) / 2, abs=0.2)


def test_bands_crosses_names_and_single_points() -> None:
    curves = [
        Curve("a<b", [(0.0, 2.0, 1.0, 3.0), (1.0, 2.0, 2.0, 2.0)], 0),
        Curve("", [(0.0, 2.0, 2.0, 2.0)], 1, ends=True),
        Curve("none", [], 2),
    ]
    svg = ElementTree.fromstring(plot_svg(curves, "t", "x", "y"))
    texts = [text.text for text in svg.findall("text")]
    assert len(svg.findall("polygon")) == 1
    assert "a<b" in texts
    assert "none" not in texts
    assert sum("l8 8" in path.attrib["d"] for path in svg.findall("path")) == 1
    alone = plot_svg([Curve("a", [(0.3, 2.0, 2.0, 2.0)], 0)], "t", "x", "y", log_x=True)
    assert points(alone)[0][0] == pytest.approx((58 + 372 - 14) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [(3.47034, 0.01, "3.4703 ± 0.0100"), (1.0, None, "1.0000"), (None, None, "-"), (math.nan, 1, "-")],
)
def test_numbers_with_their_spread(value: float | None, spread: float | None, text: str) -> None:
    assert plus_minus(value, spread, ".4f") == text


@pytest.mark.parametrize("rates", [(1e-3, 3e-3), (1e-3, 2.5e-3), (1e-4, 1e-1), (0.1, 0.30001)])
def test_numbers_of_an_axis_stay_apart_and_in_the_picture(rates: tuple[float, float]) -> None:
    """As wide as letters are at most, on a logarithmic axis whose last number stands at its end."""
    svg = ElementTree.fromstring(
        plot_svg([Curve("a", [(r, 1.0, 1.0, 1.0) for r in rates], 0)], "t", "x", "y", log_x=True)
    )
    below = [
        text for text in svg.iter("text") if text.get("text-anchor") == "middle" and re.match(r"[\d.]", text.text or "")
    ]
    spans = [(float(text.get("x") or 0), 6.2 * len(text.text or "")) for text in below]
    assert len(spans) >= 2
    assert all(x - width / 2 >= 0 and x + width / 2 <= float(svg.get("width") or 0) for x, width in spans)
    assert all(x + width / 2 < after - other / 2 for (x, width), (after, other) in pairwise(spans))


def test_every_plot_shrinks_with_the_page() -> None:
    text = comparison_page(findings({"1f1b": 2.0, "2bw": 2.2}, "lr=0.1,0.2"))
    inside = ""
    for tag in re.findall(r"<div class='plots'>|<div class='scroll'>|</div>|<svg", text):
        inside = tag if tag.startswith("<div") else "" if tag == "</div>" else inside
        assert tag != "<svg" or inside, "it would be wider than a phone"
