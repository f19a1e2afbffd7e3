"""The command `penstock verify`."""

from __future__ import annotations

import traceback
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

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
    from penstock.train.config.load import load_config
    from penstock.verify.verify import verify as run
    from penstock.view.verification import print_verification, verification_json

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
