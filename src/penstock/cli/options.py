"""The options that several commands have: one name, one meaning and one form for each, wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError
from penstock.schedule.ir.limits import MOST_MICROBATCHES, MOST_STAGES

FLAG = " "  # the place of a value, which a flag has none of

_METHOD = "A row of [bold]penstock methods[/bold], also with options, as in interleaved:chunks=4"
_OWN = (
    "An order of your own: Python with a function (stages, microbatches) -> order, a schedule as text, or torch's CSV"
)
_STAGES, _MICROBATCHES = "Stages (ranks) of the pipeline", "Microbatches per batch, that is per update"
_SET = "Set anything else; --keys lists all keys. As in [bold]--set optimizer.lr=0.001[/bold]."

MethodName = Annotated[str | None, typer.Argument(metavar="METHOD", help=f"{_METHOD}; or give --file.")]
OptionalMethod = Annotated[str | None, typer.Argument(metavar="METHOD", help=f"{_METHOD}; 2bw if not given.")]
MethodNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="METHOD", help=f"{_METHOD}, or after 50 batches of 1f1b, as in 2bw:sync=50. 1f1b and 2bw if not given."
    ),
]

MaybeStages = Annotated[
    int | None, typer.Option("--stages", metavar="N", min=1, max=MOST_STAGES, help=f"{_STAGES}; 4 if not given.")
]
MaybeMicrobatches = Annotated[
    int | None,
    typer.Option("--microbatches", metavar="M", min=1, max=MOST_MICROBATCHES, help=f"{_MICROBATCHES}; 8 if not given."),
]
Stages2 = Annotated[
    int | None, typer.Option("--stages", metavar="N", min=1, max=MOST_STAGES, help=f"{_STAGES}; 2 if not given.")
]
Microbatches4 = Annotated[
    int | None,
    typer.Option("--microbatches", metavar="M", min=1, max=MOST_MICROBATCHES, help=f"{_MICROBATCHES}; 4 if not given."),
]
Stages8 = Annotated[
    int | None, typer.Option("--stages", metavar="N", min=1, max=MOST_STAGES, help=f"{_STAGES}; 8 if not given.")
]

InFlightNumber = Annotated[
    str | None,
    typer.Option(
        "--in-flight",
        metavar="N|N/N/..|auto",
        help="Microbatches in flight on the first rank, or on each; auto: as many as hide the time of messages. "
        "auto+delay: also where that makes weights later.",
    ),
]

OrderFile = Annotated[Path | None, typer.Option("--file", metavar="FILE", help=f"{_OWN}.")]
OrderRule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        metavar="NAME",
        help="Version rule of an order in Python: flush (if not given), double-buffer, stash, newest, or another "
        "[bold]version rule[/bold] of penstock methods.",
    ),
]
OrderCorrection = Annotated[
    str | None,
    typer.Option(
        "--correction",
        metavar="NAME",
        help="Correction of an order of your own, where its rule needs or allows one, such as spectrain, "
        "pipemare:reschedule=100.",
    ),
]
OrderFiles = Annotated[list[str] | None, typer.Option("--file", metavar="FILE", help=f"{_OWN}. Also several times.")]
DataPath = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="PATH", help="Text file, folder, or tokens (.npy, .bin); the standard library if not given."
    ),
]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_SET)]
TrainChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set anything else; [bold]penstock train --keys[/bold] lists all keys."
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "--plan",
        metavar="FILE",
        help="YAML with keys and values, or what penstock plan wrote; options and --set go before them.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print JSON instead of a table.")]
ListKeys = Annotated[bool, typer.Option("--keys", metavar=FLAG, help="List every key with its default and meaning.")]


def whole_numbers(option: str, text: str) -> list[int]:
    """Read numbers with commas between them.

    Raises:
        ConfigError: they are none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts) or len(parts) > 64:
        raise ConfigError(f"{option} takes whole numbers, as in 1,2,4, got {text!r:.80}")
    return [int(part) for part in parts]
