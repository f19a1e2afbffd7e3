"""Run `penstock` with arguments in the process of the tests."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from penstock.cli import main

Command = Callable[..., CompletedProcess[str]]  # the fixture `command`


def run(monkeypatch, capsys, *arguments, columns=160):
    """Run a command in this process; its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err
