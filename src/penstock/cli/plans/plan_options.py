"""The options of `penstock plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import FLAG

ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="The model, as [bold]penstock profile[/bold] writes it; or --model."
    ),
]
PlannedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|SHAPE",
        help="Instead of --profile, with --cluster: by formulas, a preset of the built-in GPT (tiny, small, 124m, "
        "355m, 1.3b, 2.2b, 3.8b), or a shape: layers=24,hidden=2048,sequence=2048,vocabulary=51200, and heads=N.",
    ),
]
FormulaSizes = Annotated[
    str | None,
    typer.Option(
        "--microbatch-sizes",
        metavar="B,B..",
        help="With --model: samples per microbatch to try; those of 1,2,4 that divide the batch if not given.",
    ),
]
DeviceCounts = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N|NxN..|N+N..",
        help="How many, or levels of them, the innermost first: 8x4; with + between kinds that differ: 2+4. As "
        "many as the file of --cluster says (nodes) if not given.",
    ),
]
Bandwidths = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="B|B,B..",
        help="Bytes per second of a link, or of each level, as in 12GB,10Gbit; as measured if the profile says.",
    ),
]
Latencies = Annotated[
    str | None,
    typer.Option(
        "--latency",
        metavar="S|S,S..",
        help="Seconds that a message takes besides its bytes, on all links or on those of each level, as in 3e-6,2e-5; "
        "as measured, as the cluster says, or none.",
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE|SIZE,SIZE..",
        help="Of each device, as in 16GiB, or of each kind of them; no limit if not given.",
    ),
]
DeviceSpeeds = Annotated[
    str | None,
    typer.Option(
        "--speed",
        metavar="S|S,S..",
        help="Of each kind of devices: how many times as fast as the profiled one it is, as in 1,0.5.",
    ),
]
HostBandwidth = Annotated[
    str | None,
    typer.Option(
        "--host-bandwidth",
        metavar="B",
        help="Bytes per second from each device to the memory of the host, and as many back: with --memory, --cost "
        "simulated may have activations or optimizer states there, and dawnpiper's cost swaps.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="What each device may have in the memory of its host, with --cost simulated; no limit if not given.",
    ),
]
PlannerName = Annotated[
    str,
    typer.Option(
        "--planner",
        metavar="NAME",
        help="default, or as published: pipedream, dapple, spp, graphpipe, piper, mist, bapipe, dawnpiper, pase, "
        "2bw-paper.",
    ),
]
CostName = Annotated[
    str | None,
    typer.Option(
        "--cost",
        metavar="NAME",
        help="The cost function to plan for: that of a planner, or simulated. If not given, the planner's own; for "
        "default that of the program which the profile is from, simulated where the profile says enough for that.",
    ),
]
PerBatch = Annotated[
    int | None,
    typer.Option("--microbatches", metavar="M", help="Per batch; as the profile says, or 32.", min=1, max=1 << 20),
]
SamplesPerBatch = Annotated[
    int | None,
    typer.Option("--global-batch", metavar="B", help="Samples per batch, instead of microbatches.", min=1, max=1 << 30),
]
Straight = Annotated[
    bool, typer.Option("--straight", metavar=FLAG, help="With pipedream's cost: no stage has replicas.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="With cost simulated: write the plan, for [bold]penstock train --plan[/bold]."
    ),
]
Compression = Annotated[
    float | None,
    typer.Option(
        "--compression",
        metavar="RATIO",
        help="With pipedream's cost: activations are sent, compressed by so much.",
        min=1e-6,
        max=1e6,
    ),
]


LinkMatrix = Annotated[
    Path | None,
    typer.Option("--link-matrix", metavar="FILE", help="With planner spp: YAML, links: [[0, 9e9], [9e9, 0]], bytes/s."),
]
PlannedCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Devices and links of a preset such as h100, or of a file like one; of several (h100,a100) with a number "
        "of --devices for each.",
    ),
]
MethodsToTry = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="A,B..",
        help="With cost simulated: only these methods, as in 1f1b,gpipe; 3bw and 3bw-ahead are tried only if named.",
    ),
]
Objective = Annotated[
    str,
    typer.Option("--objective", metavar="NAME", help="throughput, time-to-target, devices (the fewest), or cost."),
]
EpochsByBatch = Annotated[
    str | None,
    typer.Option(
        "--epochs", metavar="B:E,B:E..", help="With time-to-target: epochs that each batch takes, as in 256:10,512:11."
    ),
]
EpochSamples = Annotated[
    float | None, typer.Option("--epoch-samples", metavar="N", help="With time-to-target: samples of an epoch.")
]
DevicePrice = Annotated[
    float | None,
    typer.Option(
        "--price",
        metavar="P",
        help="With objective cost: of a device for an hour; that of the cluster's file if not given, or 1.",
    ),
]
SmallerWorlds = Annotated[
    str | None,
    typer.Option("--worlds", metavar="N,N..", help="With --out: plans for fewer devices, too, at the same batch."),
]


TimelineFile = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="With cost simulated: draw the best plan, as SVG.")
]
WhatIfFlag = Annotated[
    bool, typer.Option("--what-if", metavar=FLAG, help="Also plan with twice the speed, bandwidth, memory and devices.")
]
