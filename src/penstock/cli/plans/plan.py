"""The command `penstock plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.options import FLAG, AsJson, whole_numbers
from penstock.cli.output import check_can_write, print_json, say_written, write_file
from penstock.cli.plans.plan_devices import (
    devices_of,
    link_matrix_of,
    price_of,
    with_host,
    with_latency,
)
from penstock.cli.plans.profile_of_model import planned_profile
from penstock.errors import ConfigError


def plan(
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="FILE", help="The model, as [bold]penstock profile[/bold] writes it; or --model."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|SHAPE",
            help="Instead of --profile, with --cluster: by formulas, a preset of the built-in GPT (tiny, small, 124m, "
            "355m, 1.3b, 2.2b, 3.8b), or a shape: layers=24,hidden=2048,sequence=2048,vocabulary=51200, and heads=N.",
        ),
    ] = None,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option(
            "--microbatch-sizes",
            metavar="B,B..",
            help="With --model: samples per microbatch to try; those of 1,2,4 that divide the batch if not given.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="N|NxN..|N+N..",
            help="How many, or levels of them, the innermost first: 8x4; with + between kinds that differ: 2+4. As "
            "many as the file of --cluster says (nodes) if not given.",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--bandwidth",
            metavar="B|B,B..",
            help="Bytes per second of a link, or of each level, as in 12GB,10Gbit; as measured if the profile says.",
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            "--latency",
            metavar="S|S,S..",
            help="Seconds that a message takes besides its bytes, on all links or on those of each level, as in "
            "3e-6,2e-5; as measured, as the cluster says, or none.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE|SIZE,SIZE..",
            help="Of each device, as in 16GiB, or of each kind of them; no limit if not given.",
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(
            "--speed",
            metavar="S|S,S..",
            help="Of each kind of devices: how many times as fast as the profiled one it is, as in 1,0.5.",
        ),
    ] = None,
    host_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--host-bandwidth",
            metavar="B",
            help="Bytes per second from each device to the memory of the host, and as many back: with --memory, --cost "
            "simulated may have activations or optimizer states there, and dawnpiper's cost swaps.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="What each device may have in the memory of its host, with --cost simulated; no limit if not given.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="Devices and links of a preset such as h100, or of a file like one; of several (h100,a100) with a "
            "number of --devices for each.",
        ),
    ] = None,
    link_matrix: Annotated[
        Path | None,
        typer.Option(
            "--link-matrix", metavar="FILE", help="With planner spp: YAML, links: [[0, 9e9], [9e9, 0]], bytes/s."
        ),
    ] = None,
    planner: Annotated[
        str,
        typer.Option(
            "--planner",
            metavar="NAME",
            help="default, or as published: pipedream, dapple, spp, graphpipe, piper, mist, bapipe, dawnpiper, pase, "
            "2bw-paper.",
        ),
    ] = "default",
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost",
            metavar="NAME",
            help="The cost function to plan for: that of a planner, or simulated. If not given, the planner's own; for "
            "default that of the program which the profile is from, simulated where the profile says enough for that.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", metavar="M", help="Per batch; as the profile says, or 32.", min=1, max=1 << 20),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", metavar="B", help="Samples per batch, instead of microbatches.", min=1, max=1 << 30
        ),
    ] = None,
    straight: Annotated[
        bool, typer.Option("--straight", metavar=FLAG, help="With pipedream's cost: no stage has replicas.")
    ] = False,
    compression: Annotated[
        float | None,
        typer.Option(
            "--compression",
            metavar="RATIO",
            help="With pipedream's cost: activations are sent, compressed by so much.",
            min=1e-6,
            max=1e6,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B..",
            help="With cost simulated: only these methods, as in 1f1b,gpipe; 3bw and 3bw-ahead only if named.",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option("--objective", metavar="NAME", help="throughput, time-to-target, devices (the fewest), or cost."),
    ] = "throughput",
    epochs: Annotated[
        str | None,
        typer.Option(
            "--epochs",
            metavar="B:E,B:E..",
            help="With time-to-target: epochs that each batch takes, as in 256:10,512:11.",
        ),
    ] = None,
    epoch_samples: Annotated[
        float | None, typer.Option("--epoch-samples", metavar="N", help="With time-to-target: samples of an epoch.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            metavar="P",
            help="With objective cost: of a device for an hour; that of the cluster's file if not given, or 1.",
        ),
    ] = None,
    worlds: Annotated[
        str | None,
        typer.Option("--worlds", metavar="N,N..", help="With --out: plans for fewer devices, too, at the same batch."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE", help="With cost simulated: draw the best plan, as SVG.")
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", metavar=FLAG, help="Also plan with twice the speed, bandwidth, memory and devices."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="With cost simulated: write the plan, for [bold]penstock train --plan[/bold]."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan stages and their devices for a profiled model, by planners of papers or the best of all they know.

    Without a profile: penstock plan --model 1.3b --cluster h100 --devices 16 --global-batch 256 --out plan.yaml
    Exit code 1 if no plan fits.
    """
    from penstock.plan.cluster.files import THIS_MACHINE
    from penstock.plan.objectives import check_objective, choose
    from penstock.plan.planners.pipedream import Choices
    from penstock.plan.planning import PlanRequest, with_cost

    check_can_write(out, timeline)
    target, links = _target(epochs, epoch_samples), link_matrix_of(link_matrix, planner)
    tried = None if methods is None else tuple(name.strip() for name in methods.split(","))
    for measured in (False, True) if THIS_MACHINE in (cluster or "") else (True,):  # all is checked before
        known, clusters = planned_profile(profile, model, microbatch_sizes, cluster, devices, bandwidth, measured)
        found = devices_of(clusters, devices, bandwidth, memory, known, links is not None, speed)
        found = with_host(with_latency(found, latency), host_bandwidth, host_memory)
        asked = PlanRequest(known, found, planner, cost, microbatches, global_batch, methods=tried, links=links)
        request = with_cost(replace(asked, choices=Choices(straight, compression=compression)))
        smaller = _check_options(request, out, worlds, host_memory, timeline)
        hour = check_objective(request, objective, target, price_of(price, clusters, objective))
    chosen = choose(request, objective, target, hour)
    _print_answer(chosen, what_if, as_json)
    if chosen.planning.plans:
        _write_files(chosen.planning, out, smaller, timeline, as_json)
    if what_if and not as_json:
        _print_changes(chosen.planning)
    if not chosen.planning.plans:
        raise typer.Exit(1)


def _check_options(
    request: Any, out: Path | None, worlds: str | None, host_memory: str | None, timeline: Path | None
) -> Mapping[int, Any]:
    """Refuse options that do not go together, before anything is searched.

    Returns:
        The devices of the smaller worlds that are asked for, by their number.

    Raises:
        ConfigError: they do not.
    """
    from penstock.plan.plan_export import PUBLISHED_METHODS

    cost = request.cost

    if out is not None and cost not in ("simulated", *PUBLISHED_METHODS):
        raise ConfigError(f"--out takes plans that can be run; those by cost {cost!r} cannot, use --cost simulated")
    if timeline is not None and cost != "simulated":
        raise ConfigError(
            f"--timeline draws plans that are simulated; leave it out, or give --cost simulated, not {cost!r}"
        )
    if host_memory is not None and cost != "simulated":
        raise ConfigError(f"--host-memory is for --cost simulated; {cost} knows no such limit, so leave it out")
    return _smaller_worlds(worlds, out, request.devices)


def _smaller_worlds(worlds: str | None, out: Path | None, devices: Any) -> Mapping[int, Any]:
    """Return the devices of some smaller worlds, by their number.

    Raises:
        ConfigError: there are no such devices, or no file to write plans beside.
    """
    from penstock.plan.objectives import fewer_devices

    if worlds is None:
        return {}
    if out is None:
        raise ConfigError("--worlds writes plans beside that of --out; give --out, too")
    try:
        return {size: fewer_devices(devices, size) for size in whole_numbers("--worlds", worlds)}
    except ConfigError as error:
        raise ConfigError(f"--worlds: {error}") from None


def _print_answer(chosen: Any, what_if: bool, as_json: bool) -> None:
    """Print plans and what was asked for them; as JSON also what more of each resource would bring."""
    from penstock.cli.plans.plan_tables import planning_tables
    from penstock.cli.plans.profile_of_model import tokens_of_sample
    from penstock.plan.objectives import trials_json, trials_table
    from penstock.plan.plan_export import planning_json
    from penstock.plan.planned_timeline import what_would_help
    from penstock.view.tables import table_console

    found = chosen.planning
    tokens = tokens_of_sample(found.request.profile) if chosen.objective == "cost" else None
    if as_json:
        changes = [each._asdict() for each in what_would_help(found)] if what_if else []
        print_json(planning_json(found) | trials_json(chosen, tokens) | {"what_if": changes})
        return
    console = table_console()
    if chosen.objective != "throughput":
        console.print(trials_table(chosen, tokens))
    console.print(planning_tables(found, console.width))


def _print_changes(found: Any) -> None:
    """Print what more of each resource would bring; searches take a while, so they come last."""
    from penstock.plan.planned_timeline import what_would_help
    from penstock.plan.stages.planned import LEAST_GAIN
    from penstock.view.tables import table_console

    console = table_console()
    for change, seconds, gain in what_would_help(found):
        said = "no plan fits" if seconds is None else f"{seconds:.5g} s per sample"
        faster = f"{gain:.3g} times as fast" if gain and gain >= LEAST_GAIN else "no faster"
        console.print(Text(f"With {change}: {said}" + (f", {faster}." if gain else ".")))


def _write_files(found: Any, out: Path | None, worlds: Mapping[int, Any], timeline: Path | None, as_json: bool) -> None:
    """Write the drawing and the plans that are asked for, the best one last, and say what to do with it.

    Raises:
        ConfigError: a file cannot be written, or nothing fits fewer devices.
    """
    from penstock.plan.plan_export import plan_file, run_settings

    if out is not None:
        write_file("plan", out, plan_file(found))
        for size, devices in worlds.items():
            path = out.with_stem(f"{out.stem}-{size}")
            write_file("plan", path, _plan_of_smaller_world(found, devices))
            if not as_json:
                say_written("plan", path)
        if not as_json and found.request.profile.settings:
            say_written("plan", out, "penstock train --plan {}")
        elif not as_json:
            say_written("plan", out)
            Console().print(Text(_in_python(run_settings(found))), soft_wrap=True)
    if timeline is not None:
        _draw_timeline(timeline, found, as_json)


def _in_python(of: Mapping[str, Any]) -> str:
    """Return the settings of a plan as a call, for a model that `penstock train` does not have."""
    options = "".join(f", {key}={value}" for key, value in of.get("options", {}).items())
    method = f"penstock.method({of['method']!r}{options})" if options else repr(of["method"])
    groups = "".join(f", {key}={of[key]!r}" for key in ("sharding", "rank_order") if key in of)
    parallel = f"penstock.DataParallel({of['width']}{groups})" if groups else of["width"]
    more = f", data_parallel={parallel}" * (of["width"] > 1)
    if "offload" in of:
        more += f", recompute=penstock.Recompute({of['recompute']!r}, offload={of['offload']!r})"
    else:
        more += f", recompute={of['recompute']!r}" * (of["recompute"] != "none")
    if "offload_optimizer" in of:
        more += f", device=penstock.Device(offload_optimizer={of['offload_optimizer']!r})"
    return (
        f"For blocks of your own: Pipeline(blocks, method={method}, stages={of['stages']}, "
        f"microbatches={of['microbatches']}, partition={of['balance']}{more}, ...), with batches of "
        f"{of['width'] * of['microbatches'] * of['microbatch_size']} samples."
    )


def _draw_timeline(path: Path, found: Any, quiet: bool) -> None:
    """Draw the best plan, and say what its ranks wait for.

    Raises:
        ConfigError: it cannot be played, or the file cannot be written.
    """
    from penstock.plan.planned_timeline import idle_shares, planned_timeline
    from penstock.view.svg import timeline_svg

    played = planned_timeline(found)
    best = found.plans[0]
    title = f"{found.request.profile.name}: {best.notes[0].partition(':')[0]}"
    write_file("drawing", path, timeline_svg(played, title))
    if not quiet:
        shares = ", ".join(f"{cause} {share:.1%}" for cause, share in idle_shares(played).items())
        Console().print(Text(f"Ranks are idle for: {shares or 'nothing'} (docs/design.md has the causes)."))
        say_written("drawing", path)


def _plan_of_smaller_world(found: Any, devices: Any) -> str:
    """Return the plan for fewer devices with the same samples in a batch.

    Raises:
        ConfigError: they are more than those of the best plan, or no plan fits them.
    """
    from penstock.plan.plan_export import plan_file
    from penstock.plan.planning import make_plan

    best, most = found.plans[0], found.request.devices.count
    if devices.count > most:  # the objective has chosen fewer than there are
        raise ConfigError(
            f"--worlds: {devices.count} devices are more than the {most} of the best plan; leave them out"
        )
    samples = found.sizes[best.samples].microbatches * best.samples
    smaller = make_plan(replace(found.request, devices=devices, samples=samples, microbatches=None))
    if not smaller.plans:
        raise ConfigError(f"--worlds: no plan fits {devices.count} devices; leave it out, or give more memory")
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
