"""Runs of `penstock train` whose reports and weights are those of another run, up to roundings of float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.train.export.weights_folder import load_weights
from support.command_line import Command, only_folder, settings

EVERY_KIND = ("evaluate.every=2", "checkpoint.every=2", "ema_decay=0.5")
"""Changes under which a run evaluates, saves and averages."""
REPORTED = ("loss", "norm", "evaluated", "validation_loss", "averaged_loss")


def write_text(folder: Path) -> Path:
    """Write a text to train on."""
    path = folder / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def train(command: Command, method: str, out: Path, text: Path, *changes: str) -> Path:
    """Run the command; returns the folder of the run."""
    ran = command("train", method, *settings(*EVERY_KIND, *changes, f"out={out}"), "--data", text)
    assert ran.returncode == 0, ran.stderr
    return only_folder(out)


def reported(folder: Path, what: str) -> list[float]:
    """What a run has reported under a name."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[what] for line in lines if what in line]


def assert_same_reports(here: Path, there: Path) -> None:
    """Losses, norms and evaluations are the same."""
    for what in REPORTED:
        found, wanted = reported(here, what), reported(there, what)
        assert found, what
        assert found == pytest.approx(wanted, rel=2e-5), what


def assert_same_weights(here: Path, there: Path) -> None:
    """So are trained weights, and their averages."""
    for folder in ("", "averaged"):
        found, wanted = (load_weights(run / folder) for run in (here, there))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].shape == tensor.shape
            assert (found[name] - tensor).norm() <= 2e-5 * tensor.norm(), name
