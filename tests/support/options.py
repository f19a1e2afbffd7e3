"""Every option of every command that takes a file, a folder or a name, and names that are hard to take."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from penstock.cli.app import _MODULES, make_app

WORK = (
    "penstock.launch.launch.launch_local", "penstock.verify.verify.verify", "penstock.compare.run.ComparisonRun.run",
    "penstock.measure.configured.measure_configured", "penstock.measure.single_rank_rehearsal.rehearse",
    "penstock.launch.fork_server.start_method",
)  # fmt: skip
"""What takes long, or starts processes: to be replaced where only options are tried."""


def options_with_text() -> list[tuple[str, str]]:
    """Every option and argument of every command that takes a file, a folder or a name, as they are declared."""
    found = []
    for name, command in typer.main.get_command(make_app()).commands.items():  # type: ignore[attr-defined]
        kinds = get_type_hints(getattr(import_module(f"penstock.cli.{_MODULES[name]}"), name))
        texts = [p for p in command.params if {Path, str} & {kinds.get(p.name), *_inside(kinds.get(p.name))}]
        found += [(name, max((o for o in p.opts if o.startswith("-")), key=len, default=str(p.name))) for p in texts]
    return found


def _inside(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from _inside(part)


BESIDE = {
    "train": "1f1b --set data=text.txt --set out=runs",
    "verify": "1f1b --set data=text.txt --batches 1",
    "compare": "1f1b 2bw --data text.txt --out out --batches 1 --seeds 1",
    "profile": "--cluster h100 --layers 2 --hidden 8 --sequence 8 --vocabulary 8",
    "plan": "--model tiny --cluster h100 --devices 2 --global-batch 4", "scale": "--x 8",
    "sample": "run", "show": "1f1b", "simulate": "1f1b", "methods": "",
}  # fmt: skip
"""What a command is given besides the option that is tried."""
ODD_NAMES = {
    "long": "f" * 300,
    "long, in a folder": f"{'f' * 300}/x.yaml",
    "half a character": "\udcff",
    "terminal": "\x1b[2J",
}


def with_option(command: str, option: str, value: str) -> list[str]:
    """The arguments of a command with one option, or an argument, besides those that it needs."""
    beside = BESIDE[command].split()
    if option in beside:
        at = beside.index(option)
        del beside[at : at + 2]
    return [command, *beside, *([option, value] if option.startswith("-") else [value])]
