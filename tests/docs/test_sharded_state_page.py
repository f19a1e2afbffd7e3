"""docs/sharded-state.md: its figures are the simulator's, and what it says of them is so."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.schedule.build import prove
from penstock.schedule.methods.table import METHODS
from penstock.simulate.costs import Costs
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from support.drawings import SHARDED, sharded_anew

TEXT = SHARDED.read_text()


def run_script(sharding: str) -> dict[str, Any]:
    code, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code.count('sharding="gradients"') == 1
    names: dict[str, Any] = {}
    exec(compile(code.replace('"gradients"', repr(sharding)), "sharded-state.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_script_of_the_page_has_the_numbers_of_a_run_without_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = ModuleType("my_project")
    inputs = torch.randn(40, 4)
    project.loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)  # type: ignore[attr-defined]
    project.make_model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_project", project)
    found = {}
    for sharding in ("gradients", "none", "optimizer"):
        (tmp_path / sharding).mkdir()
        monkeypatch.chdir(tmp_path / sharding)
        found[sharding] = run_script(sharding)
        assert "peak bytes" in capsys.readouterr().out
    plain = found.pop("none")
    assert len(plain["losses"]) == 5
    for names in found.values():
        assert names["losses"] == plain["losses"]
        assert all(torch.equal(tensor, plain["weights"][name]) for name, tensor in names["weights"].items())


@pytest.mark.long
def test_the_table_is_that_of_the_simulator() -> None:
    assert sharded_anew(TEXT) == TEXT, "run python tests/support/drawings.py"


def test_what_the_page_says_of_its_table() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if "chunks=4`" in line]
    figures = {name: [row[2:] for row in rows if row[0] == f"`{name}`"] for name in {row[0].strip("`") for row in rows}}
    layered, deep = (figures[f"{name}:chunks=4"] for name in ("layered", "depth-first-full"))
    assert [row[:4] for row in layered] == [["6", "4", "1.88", "2, 2"]] * 3  # 2v - k, v, 3/4 (6/4 + 1)
    assert len({row[-1] for row in layered}) == 1
    sent = [float(row[2]) for row in deep]
    assert 1.5 * sent[0] < sent[1] < sent[2] / 1.5
    assert float(deep[-1][-1]) > float(layered[-1][-1])


def test_the_page_names_the_methods_that_take_each_level() -> None:
    some = [name for name, row in METHODS.items() if [*map(str, row.shardings)] == ["optimizer", "gradients"]]
    assert some == ["2bw", "2bw-eager", "2bw-ahead"]
    assert ", ".join(f"`{name}`" for name in some[:-1]) + f" and\n`{some[-1]}`" in TEXT
    for row in METHODS.values():
        assert len(row.shardings) in (2, 3) or row.rule != "flush"


@pytest.mark.parametrize("m", [8, 16])
def test_2bw_exposes_nothing_in_a_long_run(m: int) -> None:
    """The command that the page gives: 4 ranks, a sum and a gather of 0.75 * 4 / 4 / 2 each."""
    assert re.search("`penstock simulate 2bw --sharding gradients\\n--width 4 --bandwidth 2`", TEXT)
    proof = prove("2bw", 4, m, sharding="gradients")
    costs = replace(Costs.uniform(proof.schedule), network=Network(proof.schedule, 4, 2.0, 1 / 4))
    found = simulate_schedule(proof, costs, 4).shards
    assert found is not None
    assert found.exposed_per_batch == 0
    assert 0 < found.exposed <= 2 * 0.75 / 2


@pytest.mark.parametrize(("time", "hidden"), [(7.0, True), (7.25, False)])
def test_how_much_2bw_hides(time: float, hidden: bool) -> None:
    proof = prove("2bw", 4, 8, sharding="gradients")
    costs = replace(Costs.uniform(proof.schedule), network=Network.of_time(proof.schedule, time))
    found = simulate_schedule(proof, costs, 4).shards
    assert found is not None
    assert (found.exposed_per_batch == 0) == hidden
