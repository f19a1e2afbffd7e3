"""`penstock show`: the drawing, and on request the text form, an SVG or JSON."""

import json
from xml.etree import ElementTree

import pytest

from support.command_line import run


def test_the_drawing_comes_first_and_the_text_form_is_left_out(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "show", "1f1b", "--stages", 2, "--microbatches", 2)
    assert code == 0
    assert out.splitlines() == [
        "1f1b: 2 stages, 2 microbatches, 1 batch",
        "rank 0 |F0|F1|·····|B0   |··|B1   ┃",
        "rank 1 ···|F0|B0   |F1|B1   ┃······",
        "time   0              5",
        "",
        "F0 forward of microbatch 0, B backward; all read version 0 of the weights; ┃ update; · idle",
        "bubble 0.3333 = idle / total over 1 batch, drained at the end",
    ]


def test_the_text_form_is_what_files_hold(monkeypatch, capsys, tmp_path):
    code, out, _ = run(monkeypatch, capsys, "show", "zb-v", "--stages", 2, "--microbatches", 3, "--text")
    assert code == 0
    assert out.startswith("schedule zb-v\nrule flush\n")
    assert "|" not in out
    (tmp_path / "mine.txt").write_text(out)
    code, again, _ = run(monkeypatch, capsys, "show", "--file", tmp_path / "mine.txt", "--text")
    assert (code, again) == (0, out)


def test_the_text_form_is_wrapped_for_a_terminal_only(monkeypatch, capsys):
    """Piped, a rank has one line."""
    _, piped, _ = run(monkeypatch, capsys, "show", "timeprest", "--text", columns=60)
    monkeypatch.setenv("FORCE_COLOR", "1")  # of rich: as on a terminal
    _, shown, _ = run(monkeypatch, capsys, "show", "timeprest", "--text", columns=60)
    first = "rank 0: F0^t-1 F1^t-1 F2^t-1 F3^t-1 F4^t-1 F5^t-1"
    assert f"{first} B-8..-1^t-1 STEP[t-1] F6^t F7^t\n" in piped
    assert f"{first}\n        B-8..-1^t-1 STEP[t-1] F6^t F7^t\n" in shown


@pytest.mark.parametrize("width", [40, 72, 120])
def test_drawings_are_as_wide_as_asked_for(monkeypatch, capsys, width):
    """Or as the terminal."""
    arguments = ("show", "2bw", "--stages", 2, "--microbatches", 4)
    _, asked, _ = run(monkeypatch, capsys, *arguments, "--width", width)
    _, given, _ = run(monkeypatch, capsys, *arguments, columns=width)
    assert asked == given
    assert 0.6 * width < max(len(line.rstrip()) for line in asked.splitlines() if line.startswith("rank")) <= width


def test_long_drawings_are_shortened_unless_asked_for_whole(monkeypatch, capsys):
    arguments = ("show", "2bw", "--stages", 8, "--microbatches", 16)
    _, short, _ = run(monkeypatch, capsys, *arguments, columns=80)
    _, whole, _ = run(monkeypatch, capsys, *arguments, "--whole", columns=80)
    assert "⋯ left out, time " in short
    assert short.splitlines()[-1] == "--whole draws what is left out"
    assert len(short.splitlines()) < 50
    assert "left out" not in whole
    monkeypatch.setenv("LINES", "200")
    assert run(monkeypatch, capsys, *arguments, columns=80)[1] == whole


def test_another_order_is_drawn(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "show", "1f1b", "--order", "forward-only", "--stages", 2)
    assert code == 0
    assert "rank 0 |Fe0|Fe1|" in out
    assert "B0" not in out
    assert "Fe0 forward of microbatch 0 of an evaluation" in out


def test_json_and_svg(monkeypatch, capsys, tmp_path):
    code, out, _ = run(
        monkeypatch, capsys, "show", "2bw", "--microbatches", 3, "--batches", 2, "--json", "--svg", tmp_path / "x.svg"
    )
    shown = json.loads(out)
    assert code == 0
    assert shown["orders"][3] == [  # both batches read version 0; updates stand before the batch after next
        *(f"{op}{k}^0" for k in range(6) for op in "FB"), "STEP[0]", "STEP[1]",
    ]  # fmt: skip
    assert shown["schedule"].startswith("schedule 2bw\n")
    assert {i["label"] for i in shown["timeline"]} >= {"F5", "B5", "STEP1", "activation 5", "gradient 5"}
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")
    _, out, _ = run(monkeypatch, capsys, "show", "dualpipe-v", "--json")
    pairs = [i["parts"] for i in json.loads(out)["timeline"] if i["what"] == "FUSED"]
    assert {tuple(part["what"] for part in parts) for parts in pairs} == {("F", "B")}


def test_one_of_something_is_no_plural(monkeypatch, capsys, tmp_path):
    svg = tmp_path / "x.svg"
    _, out, _ = run(monkeypatch, capsys, "show", "gpipe", "--stages", 2, "--microbatches", 1, "--svg", svg)
    assert "total over 1 batch, drained" in " ".join(out.split())
    assert "gpipe: 2 stages, 1 microbatch, 1 batch<" in svg.read_text()
    run(monkeypatch, capsys, "show", "gpipe", "--stages", 1, "--microbatches", 2, "--batches", 2, "--svg", svg)
    assert "gpipe: 1 stage, 2 microbatches, 2 batches<" in svg.read_text()
