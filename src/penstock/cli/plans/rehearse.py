"""The command `penstock rehearse`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.byte_sizes import human_bytes
from penstock.cli.options import AsJson, TrainChanges
from penstock.cli.output import print_json
from penstock.view.plurals import counted

if TYPE_CHECKING:
    from penstock.measure.single_rank_rehearsal import Rehearsal

PlanOrConfig = Annotated[Path, typer.Argument(metavar="FILE", help="A plan, or any configuration of penstock train.")]
RankNumber = Annotated[int, typer.Option("--rank", metavar="R", help="Which rank of the pipeline.", min=0)]
TimedBatches = Annotated[int, typer.Option("--batches", metavar="T", help="To time, after two others.", min=1)]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Of the device; exit code 1 if the rank holds more.")
]


def rehearse(
    file: PlanOrConfig,
    rank: RankNumber,
    batches: TimedBatches = 5,
    memory: MemoryLimit = None,
    changes: TrainChanges = None,
    as_json: AsJson = False,
) -> None:
    """Run the program of one rank of a plan alone, on one device: does it fit, and how fast is it?

    All other ranks are stand-ins that send and take messages of the same shapes, and do no work. For example:
    penstock rehearse plan.yaml --rank 3 --memory 16GiB
    """
    from penstock.byte_sizes import size_of
    from penstock.train.config.load import load_config

    limit = None if memory is None else size_of("--memory", memory)
    settings = load_config(file, changes or [])
    from penstock.measure.single_rank_rehearsal import rehearse as run  # not before, as this imports torch

    with Console(stderr=True).status(f"rehearsing rank {rank}"):
        found = run(settings, rank, batches)
    total = found.on_device
    if as_json:
        print_json(asdict(found) | {"fits": None if limit is None else total <= limit})
    else:
        _print(found)
        if limit is not None:
            Console().print(Text(f"It {'fits' if total <= limit else 'does not fit'} into {memory}."))
    if limit is not None and total > limit:
        raise typer.Exit(1)


def _print(found: Rehearsal) -> None:
    """Print what was found."""
    from penstock.view.timeline_labels import WORK

    console = Console()
    blocks = found.blocks
    named = " ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} .. {blocks[-1]} ({len(blocks)})"
    shared = f", shared by {found.processes} processes" if found.processes > 1 else ""
    console.print(Text(f"Rank {found.rank} of {found.ranks}, {found.method}{shared}: {named}"))
    console.print(Text("work of a batch, medians; a pass is that of one microbatch", "italic"))
    table = Table(box=None)
    for heading in ("work", "times", "s each", "s per batch"):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    for kind in sorted(found.passes, key=[*WORK, *found.passes].index):
        count, seconds = found.passes[kind]
        table.add_row(WORK.get(kind, kind), str(count), f"{seconds:.4g}", f"{count * seconds:.4g}")
    console.print(table)
    rate = found.samples / found.fastest if found.fastest else 0.0
    in_all = f", {found.width * rate:.4g} in {found.width} pipelines" if found.width > 1 else ""
    console.print(
        Text(
            f"Its own work takes {found.busy:.4g} s a batch by these medians, {found.fastest:.4g} s by the fastest of "
            f"each kind ({counted(found.threads, 'thread')}): at most {rate:.4g} samples per second in a pipeline"
            f"{in_all}."
        )
    )
    kinds = ", ".join(
        f"{kind} {human_bytes(count)}" for kind, count in found.peak.items() if count and "total" not in kind
    )
    apart = " on the device" if found.on_device < found.peak["total"] else ""
    each = "Each of them held" if shared else "Held"
    console.print(Text(f"{each} {human_bytes(found.on_device)} at most{apart} (each kind at its own most: {kinds})."))
    if found.left_out:
        console.print(Text(f"Not rehearsed: {'; '.join(found.left_out)}."))
