"""The commands `penstock profile` and `penstock plan`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.options import FLAG, AsJson, ConfigFile, DataPath, TrainChanges
from penstock.cli.output import print_json
from penstock.cli.train import changes_of
from penstock.errors import ConfigError
from penstock.files import write_whole

_UNITS = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30,
    "tib": 2.0**40, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8,
}  # fmt: skip
_SIZE = re.compile(r"(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)\s*([a-z]*)(/s)?", re.IGNORECASE)


MicrobatchSizes = Annotated[
    str | None,
    typer.Option(
        "--microbatch-sizes", metavar="B,B..", help="Samples per microbatch to measure, as in 1,2,4; as configured."
    ),
]
MeasuredSeconds = Annotated[
    float,
    typer.Option("--seconds", metavar="S", help="For each block, size and kind of pass.", min=0.0, max=3600.0),
]
ProfileOut = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the profile there instead of printing it.")
]


ProfiledCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME|FILE", help="Instead of measuring: by formulas, for a transformer on such devices."
    ),
]
ModelLayers = Annotated[int | None, typer.Option("--layers", metavar="N", help="With --cluster: of the model.")]
ModelHidden = Annotated[int | None, typer.Option("--hidden", metavar="N", help="Its hidden size.")]
ModelSequence = Annotated[int | None, typer.Option("--sequence", metavar="N", help="Its tokens in a sequence.")]
ModelHeads = Annotated[int | None, typer.Option("--heads", metavar="N", help="Its heads; of size 128 if not given.")]
ModelVocabulary = Annotated[int | None, typer.Option("--vocabulary", metavar="N", help="Of its tokens.")]


def profile(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A profile, ours or one of another program; measure if not given."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PROGRAM", help="Who wrote it: pipedream (*.graph.txt) or piper (*.json)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the model; that of the file if not given.")
    ] = None,
    microbatch_sizes: MicrobatchSizes = None,
    seconds: MeasuredSeconds = 0.3,
    cluster: ProfiledCluster = None,
    layers: ModelLayers = None,
    hidden: ModelHidden = None,
    sequence: ModelSequence = None,
    heads: ModelHeads = None,
    vocabulary: ModelVocabulary = None,
    links: Annotated[
        bool, typer.Option("--links/--no-links", metavar=FLAG, help="Measure the link between two processes, too.")
    ] = True,
    data: DataPath = None,
    changes: TrainChanges = None,
    config: ConfigFile = None,
    out: ProfileOut = None,
    as_json: AsJson = False,
) -> None:
    """Measure what the blocks of a model cost on this machine; or convert a published profile; or check one of ours.

    Without FILE every distinct block of the GPT that [bold]penstock train[/bold] would train with the same options is
    measured once, as a stage of its own, and messages between two processes. For example: penstock profile --set
    model.preset=small --microbatch-sizes 1,2,4 --out small.yaml
    """
    numbers = (layers, hidden, sequence, heads, vocabulary)
    if cluster is not None or any(number is not None for number in numbers):
        _write_profile(_analytic(cluster, numbers, microbatch_sizes, name), out, as_json)
        return
    if file is None:
        if source is not None:
            raise ConfigError("--from converts the profile of another program; give its FILE")
        found = _measured(changes_of(None, None, changes, data=data), config, microbatch_sizes, seconds, links, name)
    else:
        given = {"--microbatch-sizes": microbatch_sizes, "--data": data, "--set": changes, "--config": config}
        unused = next((option for option, value in given.items() if value is not None), None)
        if unused is not None:
            raise ConfigError(f"{unused} is of measuring; leave it out, or FILE")
        found = _read(file, source, name)
    _write_profile(found, out, as_json)


def _analytic(cluster: str | None, numbers: tuple[int | None, ...], sizes: str | None, name: str | None) -> Any:
    """Return the profile of a transformer on the devices of a cluster.

    Raises:
        ConfigError: something is missing, or wrong.
    """
    from penstock.plan.cluster.files import find_cluster
    from penstock.plan.scale.analytic_profile import analytic_profile
    from penstock.plan.scale.model_shape import ModelShape

    names = ("--layers", "--hidden", "--sequence", "--vocabulary")
    layers, hidden, sequence, heads, vocabulary = numbers
    missing = [n for n, v in zip(names, (layers, hidden, sequence, vocabulary), strict=True) if v is None]
    if cluster is None or layers is None or hidden is None or sequence is None or vocabulary is None:
        missing += ["--cluster"] if cluster is None else []
        raise ConfigError(f"a profile by formulas needs {', '.join(missing)}, too")
    heads = max(1, hidden // 128) if heads is None else heads
    shape = ModelShape(name or f"{layers} x {hidden}", layers, hidden, sequence, heads, vocabulary=vocabulary)
    wanted = sorted(set(_whole_numbers("--microbatch-sizes", sizes))) if sizes else [1]
    return analytic_profile(shape, find_cluster(cluster), wanted)


def _measured(
    changes: list[str], config: Path | None, sizes: str | None, seconds: float, links: bool, name: str | None
) -> Any:
    """Measure a profile.

    Raises:
        PenstockError: options are wrong, or something that is needed is not there.
    """
    from penstock.train.config.load import load_config

    settings = load_config(config, changes)
    wanted = [settings.microbatch_size] if sizes is None else _whole_numbers("--microbatch-sizes", sizes)
    from penstock.measure.configured import measure_configured  # not before, as this imports torch

    with Console(stderr=True).status("measuring") as status:
        return measure_configured(
            settings, wanted, seconds, links, name, lambda block: status.update(f"measuring {block}")
        )


def _whole_numbers(option: str, text: str) -> list[int]:
    """Read numbers with commas between them.

    Raises:
        ConfigError: they are none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts) or len(parts) > 64:
        raise ConfigError(f"{option} takes whole numbers, as in 1,2,4, got {text!r:.80}")
    return [int(part) for part in parts]


def _read(file: Path, source: str | None, name: str | None) -> Any:
    """Read a profile, ours or a published one, and check it.

    Raises:
        ConfigError: it is none.
    """
    from penstock.plan.profile.files import parse_profile, read_profile_text
    from penstock.plan.profile.from_pipedream import from_pipedream
    from penstock.plan.profile.from_piper import from_piper
    from penstock.plan.profile.layer_graph import layer_graph, sizes_of

    readers = {"pipedream": from_pipedream, "piper": from_piper}
    if source is not None and source not in readers:
        raise ConfigError(f"--from takes pipedream or piper, got {source!r:.80}")
    text = read_profile_text(file)
    if source is None:
        found = parse_profile(text, str(file))
        found = found if name is None else found.model_copy(update={"name": name[:200] or "model"})
    else:
        try:
            found = readers[source](text, name or file.name.partition(".")[0])
        except ConfigError as error:
            raise ConfigError(f"{str(file)!r}: {error}") from None
    for size in sizes_of(found):
        layer_graph(found, size)
    return found


def _write_profile(found: Any, out: Path | None, as_json: bool) -> None:
    """Print a profile, or write it to a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    from penstock.plan.profile.files import profile_text

    if out is not None:
        try:
            write_whole(out, profile_text(found))
        except OSError as error:
            raise ConfigError(f"cannot write the profile {str(out)!r}: {error.strerror or error}") from None
    elif as_json:
        print_json(found.model_dump(exclude_unset=True, exclude_none=True))
    else:
        sys.stdout.write(profile_text(found))


ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The model, as [bold]penstock profile[/bold] writes it."),
]
DeviceCounts = Annotated[
    str | None,
    typer.Option("--devices", metavar="N|NxN..", help="How many, or levels of them, the innermost first: 8x4."),
]
Bandwidths = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="B|B,B..",
        help="Bytes per second of a link, or of each level, as in 12GB,10Gbit; as measured if the profile says.",
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Of each device, as in 16GiB; no limit if not given."),
]
PlannerName = Annotated[
    str,
    typer.Option(
        "--planner", metavar="NAME", help="default, or as published: pipedream, dapple, spp, piper, mist, 2bw-paper."
    ),
]
CostName = Annotated[
    str | None,
    typer.Option(
        "--cost",
        metavar="NAME",
        help="The cost function to plan for: pipedream, dapple, spp, piper, mist, 2bw-paper or simulated. If not "
        "given, the planner's own; for default that of the program which the profile is from, simulated for what we "
        "measured.",
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
        "--cluster", metavar="NAME|FILE", help="Devices and links of a preset such as h100, or of a file like one."
    ),
]
MethodsToTry = Annotated[
    str | None,
    typer.Option("--methods", metavar="A,B..", help="With cost simulated: only these methods, as in 1f1b,gpipe."),
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
DevicePrice = Annotated[float, typer.Option("--price", metavar="P", help="With cost: of a device for an hour.")]
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


def plan(
    profile: ProfileFile = None,
    devices: DeviceCounts = None,
    bandwidth: Bandwidths = None,
    memory: DeviceMemory = None,
    cluster: PlannedCluster = None,
    link_matrix: LinkMatrix = None,
    planner: PlannerName = "default",
    cost: CostName = None,
    microbatches: PerBatch = None,
    global_batch: SamplesPerBatch = None,
    straight: Straight = False,
    compression: Compression = None,
    methods: MethodsToTry = None,
    objective: Objective = "throughput",
    epochs: EpochsByBatch = None,
    epoch_samples: EpochSamples = None,
    price: DevicePrice = 1.0,
    worlds: SmallerWorlds = None,
    timeline: TimelineFile = None,
    what_if: WhatIfFlag = False,
    out: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """Plan stages and their devices for a profiled model, by planners of papers or the best of all they know.

    Exit code 1 if no plan fits.
    """
    from penstock.plan.objectives import choose
    from penstock.plan.planners.pipedream import Choices
    from penstock.plan.planning import PlanRequest, with_cost

    if worlds is not None and out is None:
        raise ConfigError("--worlds writes plans beside that of --out; give --out, too")
    known = _known_profile(profile, devices, bandwidth or cluster)
    request = with_cost(
        PlanRequest(
            known,
            _devices_of(cluster, str(devices), bandwidth, memory, known.links, link_matrix is not None),
            planner,
            cost,
            microbatches,
            global_batch,
            Choices(straight, compression=compression),
            None if methods is None else tuple(name.strip() for name in methods.split(",")),
            None if link_matrix is None else _link_matrix(link_matrix, planner),
        )
    )
    if out is not None and request.cost != "simulated":
        raise ConfigError("--out takes plans that can be run, which --cost simulated finds")
    chosen = choose(request, objective, _target(epochs, epoch_samples), price)
    _print_answer(chosen, what_if, as_json)
    if not chosen.planning.plans:
        raise typer.Exit(1)
    if timeline is not None:
        _draw_timeline(timeline, chosen.planning, as_json)
    if out is not None:
        _write_plans(out, chosen.planning, _whole_numbers("--worlds", worlds) if worlds else [])


def _print_answer(chosen: Any, what_if: bool, as_json: bool) -> None:
    """Print plans, what was asked for them, and what more of each resource would bring."""
    from penstock.plan.objectives_report import trials_json, trials_table
    from penstock.plan.planned_timeline import what_would_help
    from penstock.plan.report import planning_json, planning_tables
    from penstock.view.tables import UNBOUNDED

    found = chosen.planning
    changes = list(what_would_help(found)) if what_if else []
    if as_json:
        print_json(planning_json(found) | trials_json(chosen) | {"what_if": [each._asdict() for each in changes]})
        return
    console = Console()
    console = console if console.is_terminal else Console(width=UNBOUNDED)  # programs get tables whole
    if chosen.objective != "throughput":
        console.print(trials_table(chosen))
    console.print(planning_tables(found))
    for change, seconds, gain in changes:
        said = "no plan fits" if seconds is None else f"{seconds:.5g} s per sample"
        console.print(Text(f"With {change}: {said}" + (f", {gain:.3g} times as fast." if gain else ".")))


def _write_plans(out: Path, found: Any, sizes: Sequence[int]) -> None:
    """Write the best plan, and beside it plans for fewer devices.

    Raises:
        ConfigError: one cannot be written, or nothing fits fewer devices.
    """
    from penstock.plan.report import plan_file

    _write_plan(out, plan_file(found))
    for size in sizes:
        _write_plan(out.with_stem(f"{out.stem}-{size}"), _smaller_world(found, size))


def _write_plan(path: Path, text: str) -> None:
    """Write a plan.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write the plan {str(path)!r}: {error.strerror or error}") from None


def _draw_timeline(path: Path, found: Any, quiet: bool) -> None:
    """Draw the best plan, and say what its ranks wait for.

    Raises:
        ConfigError: it cannot be played, or the file cannot be written.
    """
    from penstock.plan.planned_timeline import idle_shares, planned_timeline
    from penstock.view.svg import timeline_svg

    played = planned_timeline(found)
    best = found.plans[0]
    _write_plan(path, timeline_svg(played, f"{found.request.profile.name}: {best.notes[0].partition(':')[0]}"))
    if not quiet:
        shares = ", ".join(f"{cause} {share:.1%}" for cause, share in idle_shares(played).items())
        Console().print(Text(f"Ranks are idle for: {shares or 'nothing'} (docs/design.md has the causes)."))


def _smaller_world(found: Any, size: int) -> str:
    """Return the plan for fewer devices with the same samples in a batch.

    Raises:
        ConfigError: there are no such devices, or no plan fits them.
    """
    from dataclasses import replace

    from penstock.plan.objectives import fewer_devices
    from penstock.plan.planning import make_plan
    from penstock.plan.report import plan_file

    best, request = found.plans[0], found.request
    samples = found.sizes[best.samples].microbatches * best.samples
    request = replace(request, devices=fewer_devices(request.devices, size), samples=samples, microbatches=None)
    smaller = make_plan(request)
    if not smaller.plans:
        raise ConfigError(f"--worlds: no plan fits {size} devices; leave it out, or give more memory")
    return plan_file(smaller)


def _target(epochs: str | None, samples: float | None) -> Any:
    """Read the curve of epochs.

    Raises:
        ConfigError: it is none, or half of it is missing.
    """
    from penstock.plan.objectives import Target

    if epochs is None and samples is None:
        return None
    if epochs is None or samples is None:
        raise ConfigError("give both --epochs and --epoch-samples")
    pairs = [part.strip().partition(":") for part in epochs.split(",")]
    try:
        found = {int(batch): float(count) for batch, _, count in pairs}
    except ValueError:
        raise ConfigError(f"--epochs takes batches and epochs, as in 256:10,1024:12.5, got {epochs!r:.80}") from None
    return Target(found, samples)


def _link_matrix(path: Path, planner: str) -> Any:
    """Read the bandwidths between all pairs of devices.

    Raises:
        ConfigError: it cannot be read, is none, or no planner takes it.
    """
    from penstock.plan.any_links.device_order import checked_links
    from penstock.yaml_file import read_yaml

    if planner != "spp":
        raise ConfigError("--link-matrix is for --planner spp; others know levels of devices (--devices, --bandwidth)")
    return checked_links(read_yaml(path).get("links"))


def _devices_of(
    cluster: str | None,
    devices: str,
    bandwidth: str | None,
    memory: str | None,
    links: Sequence[Any],
    with_links: bool = False,
) -> Any:
    """Return the devices of a cluster, or those that options describe.

    Raises:
        ConfigError: they cannot be read, or do not fit together.
    """
    if cluster is None:
        if with_links and bandwidth is None:
            bandwidth = "1GB"  # not used
        return _devices(devices, bandwidth, memory, links)
    from dataclasses import replace

    from penstock.plan.cluster.files import find_cluster

    if bandwidth is not None:
        raise ConfigError("--cluster says what links do; leave --bandwidth out, or --cluster")
    (count, *more) = _whole_numbers("--devices, with --cluster,", devices)
    if more:
        raise ConfigError("--devices takes one number with --cluster, which knows its nodes")
    found = find_cluster(cluster).devices(count)
    return found if memory is None else replace(found, memory=size_of("--memory", memory))


def _known_profile(profile: Path | None, devices: str | None, bandwidth: str | None) -> Any:
    """Read the profile to plan for, where the other options that a plan needs are there, too.

    Raises:
        ConfigError: options are missing; the message names all of them.
    """
    from penstock.plan.profile.files import read_profile

    known = None if profile is None else read_profile(profile)
    given = {
        "--profile FILE": known is not None,
        "--devices N": devices is not None,
        "--bandwidth B": bandwidth is not None or (known is not None and bool(known.links)),
    }
    if known is None or devices is None:
        lacking = [option for option, is_there in given.items() if not is_there]
        raise ConfigError(
            f"plan needs {' and '.join(lacking)} (no bandwidth where the profile has measured links, or for one "
            "device). First penstock profile --out mine.yaml, then penstock plan --profile mine.yaml --devices 4"
        )
    return known


def _devices(devices: str, bandwidth: str | None, memory: str | None, links: Sequence[Any]) -> Any:
    """Read the options that describe devices; links count as they were measured if no bandwidth is given.

    Raises:
        ConfigError: they cannot be read, or do not fit together.
    """
    from penstock.plan.stages.devices import DeviceLevel, Devices

    parts = re.split("[x×]", devices.strip().lower())
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part) < 9 for part in parts):
        raise ConfigError(f"--devices takes a number, or numbers as in 8x4, got {devices!r:.80}")
    if len(parts) > 8:
        raise ConfigError(f"--devices takes 8 levels at most, got {len(parts)}")
    latency = 0.0
    if bandwidth is None and links:
        if len(links) not in (1, len(parts)):
            raise ConfigError(
                f"the profile has {len(links)} links for {len(parts)} level{'s' if len(parts) > 1 else ''} of devices; "
                "give --bandwidth, or levels of --devices for the links"
            )
        bandwidth, latency = ",".join(repr(link.bandwidth) for link in links), max(link.latency for link in links)
    if bandwidth is None and {int(part) for part in parts} != {1}:
        raise ConfigError("--bandwidth is missing: bytes per second of a link between devices, as in 12GB or 10Gbit")
    speeds = [size_of("--bandwidth", part) for part in (bandwidth or "1GB").split(",")]
    speeds *= len(parts) if len(speeds) == 1 else 1
    if len(speeds) != len(parts):
        raise ConfigError(
            f"--bandwidth has {len(speeds)} numbers for {len(parts)} levels of devices; give one, or one each"
        )
    levels = tuple(DeviceLevel(int(part), speed) for part, speed in zip(parts, speeds, strict=True))
    return Devices(levels, None if memory is None else size_of("--memory", memory), latency)


def size_of(option: str, text: str) -> float:
    """Read a number of bytes with its unit.

    Raises:
        ConfigError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or len(text) > 40 or found[2].lower() not in _UNITS:
        raise ConfigError(f"{option} takes a size such as 1.25e9, 16GiB, 12GB or 10Gbit, got {text!r:.80}")
    return float(found[1]) * _UNITS[found[2].lower()]
