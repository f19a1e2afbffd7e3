"""The options of `show` and `simulate` alone; those of other commands as well are in `penstock.cli.options`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError
from penstock.schedule.ir.limits import MOST_COST


def at_least_0(unit: str, help: str) -> Any:
    """Return an option that takes a number which is not negative, and of which sums are numbers, too."""
    return typer.Option(metavar=unit, help=help, min=0, max=MOST_COST)


LinkLatencies = Annotated[
    str,
    typer.Option(
        "--latency",
        metavar="TIME|TIME,TIME..",
        help="Time of a hop, on all links or on that of each two neighbouring ranks; it occupies no rank.",
    ),
]


def read_latency(text: str) -> float | tuple[float, ...]:
    """Read one latency for all links, or one for each.

    Raises:
        ConfigError: these are no numbers from 0 on.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(0 <= each <= MOST_COST for each in found):
        raise ConfigError(f"--latency takes times from 0 to {MOST_COST:g}, as in 0.1 or 0.1,0.5,0.1, got {text!r:.80}")
    return found if len(found) > 1 else found[0]


OrderOptions = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=N", help="An option of the order, as in [bold]--set options.chunks=4[/bold]."),
]
OrderName = Annotated[
    str | None,
    typer.Option(
        "--order", metavar="NAME", help="Another order of passes than the method's, such as zb-exact or forward-only."
    ),
]
Segments = Annotated[
    str | None,
    typer.Option(
        "--segments",
        metavar="N|auto",
        help="Recompute forwards before their backwards, N stages from one input; auto: square root of the stages.",
    ),
]


ShardingLevel = Annotated[
    str | None,
    typer.Option(
        "--sharding",
        metavar="LEVEL",
        help="What parallel pipelines split of a stage: optimizer, gradients or full (ZeRO-1, 2 and 3).",
    ),
]
GatherTime = Annotated[
    float, at_least_0("TIME", "Time to gather, or to sum, a rank's whole share, if state is sharded.")
]
OffloadTime = Annotated[
    float | None,
    at_least_0(
        "TIME", "Move activations to the host's memory and back; TIME is that of a copy of a rank's whole share."
    ),
]
SwapTime = Annotated[
    float | None,
    at_least_0(
        "TIME", "Keep optimizer states in the host's memory; TIME is that of a copy of a rank's whole share, one way."
    ),
]
DrawingWidth = Annotated[
    int | None,
    typer.Option(metavar="N", help="Columns of the drawing.", min=40, max=10**6, show_default="those of the terminal"),
]
PerStage = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON list with forward, backward_input, backward_weight[, step[, copy]] of each stage, in place of times "
        "given as options.",
    ),
]
WindowSize = Annotated[
    str | None,
    typer.Option(
        metavar="N|unlimited",
        help="Messages that may be outstanding between two ranks; the least that costs no time if not given.",
    ),
]


HostCores = Annotated[
    str | None,
    typer.Option(
        "--cores",
        metavar="N[/R]",
        help="Cores that all ranks share, or R ranks of each host: while more of them work, each is slowed down.",
    ),
]


HostLinks = Annotated[
    int | None,
    typer.Option(
        "--shared-links",
        metavar="R",
        help="R consecutive ranks share the link of their host: what leaves or comes at one time divides its rate. "
        "With 1, each rank has one link for all its messages, sums and gathers.",
        min=1,
    ),
]
PipelineNumber = Annotated[
    int | None, typer.Option(metavar="W", help="Parallel pipelines, with --sharding; 2 if not given.", min=1)
]
Bandwidth = Annotated[float | None, at_least_0("BYTES", "Bytes that a rank sends in a unit of time; no limit.")]
ParameterNumber = Annotated[float, at_least_0("N", "Parameters of the model; with 1, bytes are per parameter.")]
