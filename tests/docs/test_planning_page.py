"""docs/planning.md: its profile is one, its commands are understood, and its tables have all published rows."""

import re
import shlex
from pathlib import Path

import pytest

from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
TYPED = [
    line.partition(" #")[0].partition(" > ")[0].strip()
    for line in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
]  # the first ones measure, and are run on a smaller model by tests/measure/test_model_profile.py


def test_the_profile_of_the_page():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    graph = layer_graph(parse_profile(text, "page"), 2)
    assert [layer.name for layer in graph.layers] == ["embedding", "left", "right", "head"]
    assert [way.name for way in graph.layers[1].ways] == ["plain", "recompute"]


@pytest.mark.parametrize("line", TYPED)
def test_the_commands_of_the_page(line, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yaml = "format: penstock profile 1\nlayers: [{name: a, forward: 1, backward: 2}]\n"
    for name in ("vgg16.yaml", "bert.yaml", "blocks.yaml"):
        (tmp_path / name).write_text(yaml)
    costs = "forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1"
    (tmp_path / "vgg16.graph.txt").write_text(f"a -- Linear -- {costs}\n")
    run = command(*shlex.split(line)[1:])
    assert (run.returncode, run.stderr) == (0, "")


def test_the_tables_have_every_row():
    tables = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end of \1 -->", PAGE, re.DOTALL)
    assert {name: len(rows.splitlines()) - 2 for name, rows in tables} == {"pipedream": 20, "piper": 13}
