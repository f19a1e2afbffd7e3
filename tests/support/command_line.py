"""Run `penstock`: in the process of the tests, or in processes of its own as a person starts it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from penstock.cli import main

Command = Callable[..., CompletedProcess[str]]  # the fixture `command`

TINY = [
    "batches=3", "microbatches=2", "microbatch_size=2", "model.layers=2", "model.width=32", "model.heads=2",
    "model.context=16", "validation_samples=8", "sample_length=12", "threads=1",
]  # fmt: skip


def settings(*changes: str) -> list[str]:
    """Arguments of `penstock train` for a small model and three batches, with changes."""
    return [part for change in (*TINY, *changes) for part in ("--set", change)]


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object, columns: int = 160
) -> tuple[int, str, str]:
    """Run a command in this process; returns its exit code and what it printed, without what workers print."""
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err  # type: ignore[return-value]


def start(*command: object, **changes: Any) -> CompletedProcess[str]:
    """Run Python with arguments in a process of its own, such as ("-m", "penstock", "train")."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    changes = {"env": environment} | changes
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, **changes)


def only_folder(out: Path) -> Path:
    """The folder of the one run in `out`."""
    (folder,) = out.iterdir()
    return folder
