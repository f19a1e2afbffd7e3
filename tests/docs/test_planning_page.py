"""docs/planning.md: its profile is one, its commands are understood, and its tables have all published rows."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import penstock
from penstock.plan.profile.files import parse_profile
from penstock.plan.profile.layer_graph import layer_graph

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
TYPED = [
    line.partition(" #")[0].partition(" > ")[0].strip()
    for line in re.findall(r"```text\n([^`]*--from.*?)```", PAGE, re.DOTALL)[0].splitlines()
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


def test_blocks_of_ones_own_are_measured_and_planned(command, tmp_path, monkeypatch):
    """The plan says how to call `Pipeline`, and a pipeline so made trains."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    blocks = {f"b{n}": torch.nn.Linear(8, 8) for n in range(4)}
    names = {"inputs": torch.randn(4, 8), "targets": torch.randn(4, 8), "loss": torch.nn.functional.mse_loss}
    names |= {"blocks": blocks, "optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "penstock": penstock}
    exec(code.replace("PipelineOptions())", "PipelineOptions(), seconds=0.0)"), names)
    (line,) = re.findall(r"^# penstock (plan .*)", code, re.MULTILINE)
    run = command(*shlex.split(line))
    assert (run.returncode, run.stderr) == (0, "")
    said = " ".join(run.stdout.split())
    (call,) = re.findall(r"For blocks of your own: Pipeline\((.*), \.\.\.\), with batches of 32 samples\.", said)
    pipeline = eval(f"penstock.Pipeline({call}, loss=loss, optimizer=optimizer)", names)
    assert sum(map(len, pipeline.parts)) == 4
    data = [(torch.randn(32, 8), torch.randn(32, 8))] * 2
    assert len(list(pipeline.run(data))) == 2


def test_the_tables_have_every_row():
    tables = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end of \1 -->", PAGE, re.DOTALL)
    counts = {name: len(rows.splitlines()) - 2 for name, rows in tables}
    assert counts == {"pipedream": 20, "piper": 13, "simulated": 4}
