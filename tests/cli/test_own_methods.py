"""Whole methods of one's own: an order, a rule, a correction and its reference, as an object or in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.compare.config import comparison_config
from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.config.own_schedule import is_same, read_own_method
from penstock.verify.verify import verify
from support.command_line import run, settings
from support.own_methods import FILES, FOLDER, own, written
from support.pool import Pool

METHOD = """
import penstock
from penstock.verify.reference import ReferenceReading


class Halved(penstock.Corrector):
    def __init__(self, layout, place, factor):
        super().__init__(layout, place)
        self.factor = factor

    def before_step(self, gradient, newest, factor):
        for view in gradient.views.values():
            view.mul_(self.factor if self.place.stage == 0 else 1.0)

    compares = True


def order(stages, microbatches, *, more=0):
    ranks = []
    for rank in range(stages):
        ahead = stages - 1 - rank + more
        ranks.append(" ".join(f"F{k} B{k - ahead}" for k in range(microbatches)))
    return ranks


def reference(stage, place, *, factor):
    def step(stage):
        for parameter in stage.newest.values():
            parameter.grad.mul_(factor if place.stage == 0 else 1.0)
        stage.optimizer.step()

    stage.step = step


method = penstock.Method(
    "halved", "the first stage learns more slowly", "nobody", order, "stash",
    penstock.CorrectionSpec(
        "halved", "nothing much", rules=("stash",),
        options={"factor": penstock.Option(0.5, "of the gradient", "share")},
        alike=False, corrector=Halved,
    ),
    settings={"optimizer.lr": 0.01},
    reference=reference,
)
"""
TINY = settings("sample_length=0", "lr_schedule.decay=none", "lr_schedule.warm_up=0", "microbatches=3")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(METHOD)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def pipeline(method: Any, group: Any = None, **more: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    blocks, nadam = [nn.Linear(4, 4) for _ in range(4)], lambda named: torch.optim.NAdam(named, lr=0.1)
    sizes = {"stages": None if group else 2, "microbatches": 2} | more
    return penstock.Pipeline(blocks, method, loss=nn.functional.mse_loss, optimizer=nadam, group=group, **sizes)


def losses(made: penstock.Pipeline) -> list[float | None]:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(5)]
    return [report.loss for report in made.run(data)]


def test_an_object_goes_wherever_the_name_of_a_method_does(mine: Path) -> None:
    method = penstock.load_method(mine)
    plain, same = losses(pipeline("stash")), losses(pipeline(penstock.method(method, factor=1)))
    assert plain == same
    found = losses(pipeline(method))
    assert found != plain
    proof = penstock.make_schedule(penstock.method(method, more=0), 2, 2)
    assert losses(pipeline(proof, stages=None, microbatches=None)) == found
    assert proof.schedule.name == "halved"
    switched = pipeline("1f1b")
    switched.switch(method)
    assert losses(switched) == found


@pytest.mark.parametrize("name", FILES)
def test_those_of_the_examples_are_proven_and_drawn(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for command in ("show", "simulate"):
        code, out, said = run(monkeypatch, capsys, command, "--file", written(name), "--stages", 2, "--microbatches", 2)
        assert (code, said) == (0, ""), said
        assert command == "simulate" or out.startswith(f"{name}: 2 stages, 2 microbatches")


def _on_ranks(group: dist.ProcessGroup | None, file: str, name: str) -> list[float | None]:
    return losses(pipeline(penstock.load_method(file, name), group))


@pytest.mark.processes
def test_every_process_takes_its_own_object(pool: Pool) -> None:
    told = pool.submit(_on_ranks, str(FOLDER / "nag_pp.py"), "nag-pp", ranks=2)
    assert told[1] == losses(pipeline(own("nag-pp")))


def test_it_is_verified_against_its_own_reference(mine: Path) -> None:
    tiny = [*TINY[1::2], f"data={mine.parent / 'text.txt'}", "batches=5", "threads=1"]
    for options in ("", ":more=1", ":factor=0.25"):
        config = load_config(None, [f"schedule={mine}{options}", *tiny])
        assert config.optimizer.lr == 0.01  # the method's own
        assert verify(config, 4).agrees
    mine.write_text(METHOD.replace("grad.mul_(factor", "grad.mul_(factor / 2"))
    assert not verify(load_config(None, [f"schedule={mine}", *tiny]), 4).agrees


WRONG = [
    ('"halved", "the', '"2bw", "the', "", "Penstock has a method of this name"),
    ('"halved", "nothing', '"pipemare", "nothing', "", "Penstock has a correction 'pipemare'"),
    ('order, "stash"', 'order, "stosh"', "", "unknown version rule 'stosh'. Did you mean 'stash'"),
    ('order, "stash"', '"1f2b", "stash"', "", "unknown order '1f2b'"),
    ('order, "stash"', 'order, "newest"', "", "needs version rule stash, not 'newest'"),
    ("method = ", "other = penstock.Method('other', '', '', order, 'stash')\nmethod = ", "", "choose one: "),
    ("", "", ":method=halve", "holds no method 'halve'; it holds 'halved'"),
    ("", "", ":rule=newest", "rule: method 'halved' in"),
    ("", "", ":factor=2", "factor takes a number from 0 to 1; got 2"),
    ("", "", ":fator=0.5", "has no option 'fator'"),
    ("method = ", "1 / 0\nmethod = ", "", "ZeroDivisionError"),
    ("    ranks = []", "    ranks = [][0]", "", "line 19: IndexError"),
    ("method = ", "other = penstock.Method('halved', '', '', order, 'stash')\nmethod = ", "", "two methods of"),
    ('penstock.Option(0.5, "of the gradient", "share")', "0.5", "", "'factor' must be a penstock.Option, not 0.5"),
    ('"share"', '"part"', "", "unknown kind 'part' of an option"),
    ("corrector=Halved", "corrector=None", "", "needs corrector=, a subclass of penstock.Corrector"),
    ("place, factor)", "place)", "", "must take (layout, place, factor), but takes (layout, place)"),
    ("(stages, microbatches, *, more=0)", "(stages)", "", "must take (stages, microbatches), but takes (stages)"),
]
UNCALLED = [
    ("    compares = True", "", "before_step is called only if compares is True"),
    ("compares = True", "compares = reads_ahead = True", "reads_ahead is True, but Halved has no ahead"),
    ("super().__init__(layout, place)", "pass", "must call super"),
    ("(penstock.Corrector)", "", "must be a subclass of penstock.Corrector"),
]


@pytest.mark.parametrize(("text", "instead", "said"), UNCALLED, ids=[said for *_, said in UNCALLED])
def test_a_corrector_of_ones_own_that_nothing_would_call_is_refused(
    text: str, instead: str, said: str, mine: Path
) -> None:
    mine.write_text(METHOD.replace(text, instead, 1))
    with pytest.raises(ConfigError, match=said):
        pipeline(penstock.load_method(mine))


@pytest.mark.parametrize(("text", "instead", "options", "said"), WRONG, ids=[said for *_, said in WRONG])
@pytest.mark.parametrize("command", ["show", "train", "compare"])
def test_what_is_wrong_with_one_is_said(
    command: str, text: str, instead: str, options: str, said: str, mine: Path, monkeypatch: Any, capsys: Any
) -> None:
    mine.write_text(METHOD.replace(text, instead, 1))
    more = ["--out", mine.parent / "out"] if command == "compare" else []
    code, _, told = run(monkeypatch, capsys, command, "--file", f"{mine}{options}", *more)
    assert (code, said in " ".join(told.split())) == (2, True), told


def test_without_a_reference_it_is_trained_but_not_verified(mine: Path) -> None:
    mine.write_text(METHOD.replace("    reference=reference,\n", ""))
    config = load_config(None, [f"schedule={mine}", *TINY[1::2], f"data={mine.parent / 'text.txt'}", "batches=5"])
    with pytest.raises(ConfigError, match="method 'halved' has no reference to compare with"):
        verify(config, 2)


def test_it_is_compared_by_its_file_and_its_text_counts(mine: Path, monkeypatch: Any, capsys: Any) -> None:
    sizes = ["--stages", 2, "--microbatches", 2, "--batches", 3, "--seeds", 1, "--data", mine.parent / "text.txt"]
    small = ("model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "evaluate.samples=8")
    sizes += [word for each in small for word in ("--set", each)]
    out = mine.parent / "out"
    asked = ["compare", "stash", *sizes, "--out", out, "--file", f"{mine}:factor=1", "--file", mine, "--json"]
    code, printed, said = run(monkeypatch, capsys, *asked)
    assert code == 0, said
    rows = {row["method"]: row for row in json.loads(printed)}
    assert list(rows) == ["stash", "mine.py:factor=1", "mine.py"]
    assert rows["stash"]["loss"] == rows["mine.py:factor=1"]["loss"] != rows["mine.py"]["loss"]
    code, _, said = run(monkeypatch, capsys, *asked)  # from the folder
    assert (code, "3 of 3 runs had finished before" in said) == (0, True), said
    mine.write_text(METHOD.replace("1.0", "0.9"))
    code, _, said = run(monkeypatch, capsys, *asked)
    assert (code, "its file has changed since" in " ".join(said.split())) == (2, True), said
    mine.unlink()
    code, printed, said = run(monkeypatch, capsys, "compare", "2bw", *sizes, "--out", out, "--json")
    assert (code, len(json.loads(printed))) == (0, 4), said  # the folder keeps it
    kept = json.loads((out / "comparison.json").read_text())["config"]["contenders"]
    with pytest.raises(ConfigError, match="holds the Python code of a method of one's own"):
        comparison_config([], {}, values={"contenders": kept})


def test_methods_of_one_file_are_not_the_same() -> None:
    one, other = (read_own_method(written(name), None, None) for name in ("nag-pp", "nag-pp-no-stash"))
    assert one is not None
    assert other is not None
    assert is_same(one[0], one[0])
    assert not is_same(one[0], other[0])


@pytest.mark.processes
def test_it_is_trained_and_goes_on_without_its_file(mine: Path, command: Any) -> None:
    """The folder of the run keeps it, with its options."""
    rest = ("--data", mine.parent / "text.txt", "--batches", 3, *TINY)
    ends = []
    for name, method in (("own", ("--file", f"{mine}:factor=1")), ("stash", ("stash", "--set", "optimizer.lr=0.01"))):
        done = command("train", *method, *rest, "--set", f"out={mine.parent / name}")
        assert done.returncode == 0, done.stderr
        mine.unlink(missing_ok=True)
        (folder,) = (mine.parent / name).iterdir()
        done = command("train", "--resume", folder, "--batches", 6)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if name == "own":
            with pytest.raises(ConfigError, match="holds the Python code of a method of one's own"):
                load_config(folder / "config.yaml", [])
        ends.append([line["loss"] for line in lines if "batch" in line])
    assert len(ends[0]) == 6
    assert ends[0] == ends[1]
