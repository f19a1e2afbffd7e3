"""Whatever is given to a command, it ends soon, with a message and a documented exit code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from support.command_line import run
from support.options import ODD_NAMES, WORK, options_with_text, with_option
from support.time_limit import time_limit

LONG = "9" * 5000
NAME = "f" * 300  # longer than a file system allows
MODEL = ["data=text.txt", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8"]

COMMANDS = [
    "show 1f1b --stages 1000000000", "show 1f1b --stages 16384 --microbatches 65536", "methods --stages 1000000000",
    "simulate 1f1b --microbatches 1000000000", f"show interleaved:chunks={LONG}", "show interleaved:chunks=999999",
    "show interleaved:chunks=nan", f"show interleaved --set options.chunks={LONG}", "show hanayo:waves=999999",
    "show 1f1b --segments ²", f"simulate 1f1b --window {LONG}", "show 1f1b --forward 1e308",
    "simulate 1f1b --latency 1e300", "show 1f1b --latency 1e16", "methods --latency 1e16", "simulate 1f1b --left 1e16",
    "simulate 1f1b --forward inf", "simulate 1f1b --batches 1000000000",
    "sample run --seed 1" + "0" * 26, "sample run --length 99999999999", "show \udcff",
    "compare --out o 1f1b:delays=99999999", "compare --out o --lr 1e999", "compare --out o --set methods={1:2}",
    "train --config /dev/zero", "train --resume \udcff", "simulate 1f1b --per-stage /dev/zero",
    f"train --resume {NAME}", f"sample {NAME}", f"compare --out {NAME}", f"show --file {NAME}.py",
    f"train --data {NAME}", f"train --config {NAME}", f"show --file {NAME}", f"simulate 1f1b --per-stage {NAME}",
]  # fmt: skip

FILES = {
    "cell.csv": "0F9999999,0B9999999", "long.csv": f"0F{LONG}", "many.csv": "0F999999,0B999999", "high.csv": "999999F0",
    "field.csv": "x" * 200_000, "bytes.csv": b"\xff\xfe", "m.txt": "microbatches 999999\nnodes 0@0\nrank 0: F0 B0",
    "stage.txt": "microbatches 1\nnodes 999999@0\nrank 0: F0 B0",
    "rank.txt": "microbatches 1\nnodes 0@999999\nrank 0: F0 B0",
    "range.txt": "microbatches 1\nnodes 0@0\nrank 0: F0..999999 B0", "deep.txt": "[F0+" * 3000,
    "digits.txt": f"microbatches {LONG}\nnodes 0@0\nrank 0: F0 B0",
    "slice.txt": "microbatches 1\nnodes 0@0\nrank 0: F0:1/999999 B0",
}  # fmt: skip

SETTINGS = [
    "timeout=1e300", "timeout=1e-300", "backend=evil", "backend=cpu:gloo,cuda:nccl,xpu:evil", "device=evil",
    "device=cuda:x", "device=cuda:99999999999999999999",
    "model={1: 2}", "model=[1]", "stages=10000000", "model.layers=10000000",
    f"model.layers=0x{'f' * 5000}", "model.context=1000000000000", f"seed={LONG}", "x=" + "[" * 10_000,
    "model=" + "{a: " * 5000, "options={chunks: 99999999999}", "options={1: 2}", "correction={1: 2}", "delays=99999999",
    "delays=2020-01-01", "lr=2020-99-99", "optimizer.lr=.inf", "balance=[99999999999]", "combine.lag=/dev/zero",
    'data="\\0"', "data=/dev/zero", "prompt=\udcff", "seed=!!python/object:os.system 1", "seed=!!int x", "seed=&a [*a]",
    "a..b=1", "=1", "checkpoint=null", "model.vocabulary=16777217", "model.width=1048576", "window=10000000",
]  # fmt: skip

YAML = {
    "bytes": b"\xff", "itself": "a: &a [*a]", "deep": "[" * 100_000, "keys": "1: 2\n? null\n: 3\n? [a]\n: 1",
    "aliases": "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 10}]\n" for a, b in pairwise("abcdefgh")),
    "zero": 'out: "\\0"', "half": 'prompt: "\\ud800"', "digits": f"seed: {LONG}",
}  # fmt: skip


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path: Path) -> Iterator:
    """Run a command that must be refused; returns what it has said."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: started.append(True))

    def call(*arguments: object, code: int = 2) -> str:
        with time_limit(10):
            found, out, err = run(monkeypatch, capsys, *arguments)
        assert (found, started) == (code, []), (out, err)
        assert err.startswith("error: ")
        assert len(err) < 3000
        return err

    return call


@pytest.mark.parametrize("command", COMMANDS, ids=lambda text: ascii(text)[1:40])
def test_arguments_that_cannot_be(refused, command: str) -> None:
    refused(*command.split(" "))


@pytest.mark.parametrize("name", FILES)
def test_schedules_that_cannot_be(refused, name: str) -> None:
    content = FILES[name]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("show", "--file", name)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda text: ascii(text)[1:40])
def test_settings_that_cannot_be(refused, setting: str) -> None:
    refused("train", *(part for change in (*MODEL, setting) for part in ("--set", change)))


@pytest.mark.parametrize("name", YAML)
def test_configurations_that_cannot_be(refused, name: str) -> None:
    content = YAML[name]
    Path("config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("train", "--config", "config.yaml", "--set", "data=text.txt")


def test_a_cost_that_is_too_large_is_told_with_its_limit(refused) -> None:
    assert "--latency takes times from 0 to 1e+15" in refused("simulate", "1f1b", "--latency", "1e308")
    for option in ("forward", "left"):
        said = refused("simulate", "1f1b", f"--{option}", "1e308")
        assert f"invalid value for '--{option}': input should be less than or equal to" in said, said
    Path("costs.json").write_text('[{"forward": 1e308, "backward_input": 1, "backward_weight": 1}]')
    said = " ".join(refused("simulate", "1f1b", "--per-stage", "costs.json", "--stages", "1").split())
    assert (
        "stage 0: expected forward, backward_input, backward_weight and optionally step and copy, all from 0 to 1e+15"
        in said
    )


def test_a_number_that_is_too_large_is_told_with_its_limit(refused) -> None:
    said = refused("train", "--set", "timeout=1e300")
    assert "timeout: input should be less than or equal to 10000000, got 1e+300" in said
    assert re.search(r"layers: input should be less than or equal to 10000 or null", refused(
        "train", "--set", "model.layers=10000000"
    ))  # fmt: skip
    assert "1f1b: 16384 stages x 65536 microbatches are 1,073,741,824 units" in " ".join(
        refused("show", "1f1b", "--stages", "16384", "--microbatches", "65536").split()
    )


@pytest.mark.parametrize(("command", "option"), options_with_text())
@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_is_taken_or_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    option: str,
    name: str,
) -> None:
    """For whatever takes one: new options are found by themselves. Nothing is trained or measured for it."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    monkeypatch.chdir(tmp_path)
    for long in WORK:
        monkeypatch.setattr(long, lambda *_, **__: sys.exit(0))
    with time_limit(20):
        code, out, err = run(monkeypatch, capsys, *with_option(command, option, ODD_NAMES[name]))
    assert code in (0, 1, 2)
    assert "Traceback" not in err
    assert not (code == 2 and len(err.splitlines()) > 4), err
    assert "\x1b[2J" not in out + err
