"""The command `penstock verify`, and its results in the terminal."""

from __future__ import annotations

import traceback
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from penstock.checks import finite_or_none
from penstock.cli.options import (
    AsJson,
    Changes,
    ConfigFile,
    DataPath,
    ListKeys,
    Microbatches4,
    OptionalMethod,
    OrderCorrection,
    OrderFile,
    OrderRule,
    Stages2,
)
from penstock.cli.output import print_json, print_words
from penstock.cli.train import changes_of, print_train_keys
from penstock.errors import PenstockError
from penstock.verify.differences import Difference, TensorPlace
from penstock.verify.report import Verification, method_and_options

_DELAYED = 3
"""Batches of a run in which a delay of one update shows."""


def verify(
    method: OptionalMethod = None,
    stages: Stages2 = None,
    microbatches: Microbatches4 = None,
    batches: Annotated[
        int, typer.Option(metavar="T", help="Batches to train; delays show from the third one on.", min=1, max=10**6)
    ] = 4,
    file: OrderFile = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    data: DataPath = None,
    changes: Changes = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    keys: ListKeys = False,
) -> None:
    """Train some batches with the pipeline and by the equations of its method, and compare every number.

    All ranks run in this process (with tensor_parallel, in processes of their own), which must hold the whole model
    several times: use a small model of the same kind.
    Synchronous methods are also compared with plain torch. Exit code 1 if anything differs.
    """
    from penstock.cli.verify import print_verification, verification_json
    from penstock.train.config.load import load_config
    from penstock.verify.verify import verify as run

    if keys:
        print_train_keys()
        return
    own = {"rule": rule, "corrected_by": correction}
    settings = load_config(
        config, changes_of(method, file, changes, stages=stages, microbatches=microbatches, data=data, **own)
    )
    with Console(stderr=True).status(f"training {batches} batches, again and again"):
        found = run(settings, batches)
    if as_json:
        print_json(verification_json(found))
    else:
        print_verification(Console(), found)
        print_words(Console(), Text(found.verdict, "green" if found.agrees else "red"))
    if found.error is not None and not isinstance(found.error, PenstockError):
        traceback.print_exception(found.error)
    if not found.agrees:
        raise typer.Exit(1)


def verification_json(found: Verification) -> dict[str, Any]:
    """Return everything as plain values; numbers that are not finite, or have no counterpart, are null."""
    config = found.config
    return {
        "agrees": found.agrees,
        "verdict": found.verdict,
        "config": config.model_dump(),
        "batches": found.batches,
        "plain_left_out": found.left_out,
        "error": None if found.error is None else f"{type(found.error).__name__}: {found.error}",
        "compared": {
            row.kind: {"reference": _values(row.reference), "plain": row.plain and _values(row.plain)}
            for row in found.rows
        },
    }


def _values(difference: Difference) -> dict[str, Any]:
    values = asdict(difference) | {"agrees": difference.agrees}
    for which in ("worst", "first"):
        place: TensorPlace | None = getattr(difference, which)
        if place is not None:
            values[which] = {k: finite_or_none(v) for k, v in place._asdict().items()}
    return values


def print_verification(console: Console, found: Verification) -> None:
    """Print the table of a verification, the tensors that differ most, and what the columns mean.

    Names of tensors are never divided: they have lines of their own, which the console does not wrap.
    """
    differences = [d for row in found.rows for d in (row.reference, row.plain) if d is not None]
    apart = any(difference.worst is not None for difference in differences)
    console.print(_table(found, apart))
    for other, differs in (
        ("the reference", {row.kind: row.reference for row in found.rows}),
        ("plain torch", {row.kind: row.plain for row in found.rows if row.plain is not None}),
    ):
        worst = {kind: difference.worst.name for kind, difference in differs.items() if difference.worst is not None}
        lines = [f"most in, compared with {other}:", *(f"  {kind:<15}  {name}" for kind, name in worst.items())]
        for line in lines if worst else ():
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(_notes(found, apart))


def _table(found: Verification, apart: bool) -> Group:
    """A row for each run that the pipeline is compared with and each kind of numbers.

    Where all numbers are equal, the cells for the size and batch of a difference are empty, or (not `apart`) missing.
    """
    config = found.config
    wide = f", width {config.width}" if config.width > 1 else ""
    shape = f"stages {config.stages}, microbatches {config.microbatches}{wide}, batches {found.batches}"
    table = Table(box=None)
    table.add_column("compared with", no_wrap=True)
    table.add_column("differ", justify="right", no_wrap=True)
    for column in ("relative", "absolute", "batch") if apart else ():
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("[bold]reference[/bold]")
    for row in found.rows:
        table.add_row(f"  {row.kind}", *_cells(row.reference, found.batches))
    plain = {row.kind: row.plain for row in found.rows if row.plain is not None}
    table.add_row("[bold]plain torch[/bold]", "" if plain else "[dim]left out[/dim]")
    for kind, difference in plain.items():
        table.add_row(f"  {kind}", *_cells(difference, found.batches))
    return Group(Text(f"{method_and_options(config)}: {shape}", "table.title"), table)


def _notes(found: Verification, apart: bool) -> Text:
    """What the columns and rows mean."""
    plain = [row.plain for row in found.rows if row.plain is not None]
    note = f"Plain torch is left out, because {found.left_out}."
    if plain:
        note = f"From plain torch, a relative {max(d.tolerance for d in plain):g} is allowed."
    how_far = "Relative: |a - b| / |b| of a tensor; absolute: of its elements. " if apart else ""
    few = " With fewer than 3 batches, delays do not show." if found.batches < _DELAYED else ""
    notes = f"{how_far}Decisions: norm, loss scale, skipped or not. Final state: what would be saved. {note}{few}"
    return Text(notes, "table.caption")


def _cells(difference: Difference, end: int) -> tuple[str, ...]:
    colour, worst = "green" if difference.agrees else "red", difference.worst
    counts = f"[{colour}]{difference.differing} of {difference.compared}[/{colour}]"
    if worst is None:
        return (counts,)
    batch = "end" if worst.batch == end else str(worst.batch)
    return counts, f"{worst.relative:.1e}", f"{worst.absolute:.1e}", batch
