"""The commands that need no training: `penstock methods`, `show` and `simulate`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock.cli.options import (
    FLAG,
    AsJson,
    InFlightNumber,
    MaybeMicrobatches,
    MaybeStages,
    MethodName,
    OrderCorrection,
    OrderFile,
    OrderRule,
)
from penstock.cli.output import print_json
from penstock.cli.study_options import (
    Bandwidth,
    DrawingWidth,
    GatherTime,
    HostCores,
    HostLinks,
    LinkLatencies,
    OffloadTime,
    OrderName,
    OrderOptions,
    ParameterNumber,
    PerStage,
    PipelineNumber,
    Segments,
    ShardingLevel,
    SwapTime,
    WindowSize,
    asked_network,
    asked_window,
    at_least_0,
    on_machine,
    prove_asked,
    read_latency,
    with_copy_times,
)

if TYPE_CHECKING:
    from penstock.schedule.in_flight_choice import InFlightChoice


from penstock.errors import ConfigError
from penstock.guarded_files import write_whole
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import format_action
from penstock.simulate.simulate import Simulation
from penstock.view.plurals import counted
from penstock.view.svg import timeline_svg
from penstock.view.text import draw_timeline

_MOST_SHOWN = 1_000  # batches
_LINES = 40  # of a drawing, if the terminal has fewer
_BESIDE = 8  # lines of the terminal that title, legend and prompt take


def methods(
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    latency: Annotated[float, at_least_0("TIME", "Time of a message; a forward takes 1, a backward 2.")] = 0.0,
    in_flight: InFlightNumber = None,
    as_json: AsJson = False,
) -> None:
    """List every method with what its schedule costs: weight copies, delay, activations, bubble."""
    from penstock.schedule.ir.in_flight_option import read_in_flight
    from penstock.simulate.method_figures import Links
    from penstock.view.tables import combines_table, methods_json, methods_table, table_console, width_to_fit

    stages, microbatches = stages or 4, microbatches or 8
    links = Links(latency, None if in_flight is None else read_in_flight(in_flight))
    if as_json:
        print_json(methods_json(stages, microbatches, links))
    else:
        console = table_console()
        console.print(methods_table(stages, microbatches, width_to_fit(console), links))
        console.print(combines_table())


def show(
    method: MethodName = None,
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    batches: Annotated[
        int | None,
        typer.Option(metavar="T", help="Batches to draw; 1 if flushed, else 3.", min=1, max=_MOST_SHOWN),
    ] = None,
    forward: Annotated[float, at_least_0("TIME", "Time of a forward.")] = 1.0,
    backward: Annotated[float, at_least_0("TIME", "Time of a full backward.")] = 2.0,
    order: OrderName = None,
    changes: OrderOptions = None,
    segments: Segments = None,
    in_flight: InFlightNumber = None,
    latency: Annotated[float, at_least_0("TIME", "Time of a message.")] = 0.0,
    file: OrderFile = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    sharding: ShardingLevel = None,
    gather: GatherTime = 1.0,
    offload: OffloadTime = None,
    offload_optimizer: SwapTime = None,
    text: Annotated[
        bool, typer.Option("--text", metavar=FLAG, help="Print the text form, which --file reads, instead.")
    ] = False,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the drawing to this SVG file.")] = None,
    width: DrawingWidth = None,
    whole: Annotated[
        bool, typer.Option("--whole", metavar=FLAG, help="Leave nothing out of the middle of a long drawing.")
    ] = False,
) -> None:
    """Draw a schedule: what every rank does when, and the version of the weights that each pass reads."""
    from penstock.cli.study_commands import print_drawing, schedule_json, write_svg
    from penstock.simulate.costs import Costs, StageCost
    from penstock.simulate.sharding_traffic import Network
    from penstock.simulate.simulate import simulate_schedule
    from penstock.view.text import wrap_schedule

    times = forward, backward / 2, backward / 2
    share = Costs((StageCost(*times),), latency), 1
    own, sizes, copies = (file, rule, correction), (stages, microbatches), (offload, offload_optimizer)
    with Console(stderr=True).status("proving the schedule"):  # a search for an order may take minutes
        proof, choice = prove_asked(method, own, sizes, changes, segments, order, in_flight, share, sharding, copies)
    schedule = proof.schedule
    span = batches or (3 if any(program.epilogue for program in schedule.programs) else 1)
    network = Network.of_time(schedule, gather) if proof.shards and gather else None
    costs = replace(Costs.uniform(schedule, *times, latency=latency), network=network)
    simulation = simulate_schedule(proof, with_copy_times(costs, proof, copies), span)
    if svg is not None:
        write_svg(svg, simulation, span)
    console = Console() if width is None else Console(width=width)
    if as_json:
        print_json(schedule_json(simulation, span))
    elif text:
        form = wrap_schedule(str(schedule), console.width) if console.is_terminal else str(schedule)
        console.print(form.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
    else:
        print_drawing(console, simulation, span, whole=whole)
        _say(console, choice)


def _say(console: Console, choice: InFlightChoice | None) -> None:
    """Print how many microbatches in flight were chosen, and why no more."""
    if choice is not None:
        console.print(f"in flight: {choice}", markup=False, highlight=False)


def _in_json(choice: InFlightChoice | None) -> dict[str, Any]:
    """Return how many microbatches in flight were chosen, and why no more."""
    return {} if choice is None else {"in_flight": asdict(choice)}


def simulate(
    method: MethodName = None,
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    forward: Annotated[float, at_least_0("TIME", "F, time of a forward of a rank's whole share.")] = 1.0,
    backward_input: Annotated[float, at_least_0("TIME", "Time of the backward for the inputs.")] = 1.0,
    backward_weight: Annotated[float, at_least_0("TIME", "Time of the backward for the weights.")] = 1.0,
    batches: Annotated[int, typer.Option(metavar="T", help="Batches between two drains.", min=1, max=_MOST_SHOWN)] = 1,
    step: Annotated[float, at_least_0("TIME", "Time of an update.")] = 0.0,
    latency: LinkLatencies = "0",
    transfer: Annotated[float, at_least_0("TIME", "Time that a message occupies its lane before that.")] = 0.0,
    cores: HostCores = None,
    shared_links: HostLinks = None,
    fused: Annotated[float, at_least_0("PART", "Time of a fused pair, as a part of that of both.")] = 1.0,
    left: Annotated[float, at_least_0("PART", "Part of the activations that is left between I and W.")] = 1.0,
    per_stage: PerStage = None,
    order: OrderName = None,
    changes: OrderOptions = None,
    segments: Segments = None,
    in_flight: InFlightNumber = None,
    file: OrderFile = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    window: WindowSize = None,
    sharding: ShardingLevel = None,
    width: PipelineNumber = None,
    bandwidth: Bandwidth = None,
    parameters: ParameterNumber = 1.0,
    offload: OffloadTime = None,
    offload_optimizer: SwapTime = None,
    as_json: AsJson = False,
) -> None:
    """Predict makespan, bubble, activations, versions and messages of a span of batches."""
    from penstock.simulate.costs import Costs, StageCost, read_stage_costs
    from penstock.simulate.long_run import steady_bubble
    from penstock.simulate.simulate import simulate_schedule
    from penstock.view.tables import sharding_table, simulation_table, time_table

    sizes, copies, links = (stages, microbatches), (offload, offload_optimizer), read_latency(latency)
    if per_stage is not None:
        share = read_stage_costs(per_stage, None, links, transfer), stages or 4
    else:
        share = Costs((StageCost(forward, backward_input, backward_weight),), links, transfer), 1
    share, own = (replace(share[0], left=left), share[1]), (file, rule, correction)
    with Console(stderr=True).status("proving the schedule"):  # a search for an order may take minutes
        proof, choice = prove_asked(method, own, sizes, changes, segments, order, in_flight, share, sharding, copies)
    if per_stage is not None:
        costs = read_stage_costs(per_stage, proof.schedule.num_stages, links, transfer)
    else:
        costs = Costs.uniform(proof.schedule, forward, backward_input, backward_weight, latency=links, step=step)
    costs = with_copy_times(replace(costs, transfer=transfer, fused=fused, left=left), proof, copies)
    costs = on_machine(costs, asked_network(proof, width, bandwidth, parameters), cores, shared_links)
    simulation = simulate_schedule(proof, costs, batches, window=asked_window(window))
    in_a_long_run = max(steady_bubble(simulation.lowered, costs, proof.steady_from + 2), 0.0)
    if as_json:
        print_json(simulation.figures() | {"bubble_in_a_long_run": in_a_long_run} | _in_json(choice))
    else:
        tables = simulation_table(simulation, batches, in_a_long_run), sharding_table(simulation)
        Console().print(*filter(None, tables), time_table(simulation.time_split, ""))
        _say(Console(), choice)


def print_drawing(console: Console, simulation: Simulation, batches: int, *, whole: bool) -> None:
    """Print the timeline of a span, with its title, a legend and the bubble.

    Args:
        console: to print to; the drawing is as wide, and unless `whole` about as high.
        simulation: of the span.
        batches: its length.
        whole: leave nothing out of the middle of a long drawing.
    """
    lines = None if whole else max(console.height - _BESIDE, _LINES)
    drawing = draw_timeline(simulation.timeline, console.width, lines, legend=True)
    shortened = "left out" in drawing.plain
    drawing.rstrip()
    console.print(_title(simulation, batches), style="bold", highlight=False, soft_wrap=True)
    console.print(drawing, soft_wrap=True)
    bubble = (
        f"bubble {simulation.bubble.bubble:.4f} = idle / total over {counted(batches, 'batch')}, drained at the end"
    )
    console.print(bubble, style="dim", highlight=False)
    if shortened:
        console.print("--whole draws what is left out", style="dim", highlight=False)


def write_svg(path: Path, simulation: Simulation, batches: int) -> None:
    """Write the timeline of a span to an SVG file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, timeline_svg(simulation.timeline, _title(simulation, batches)))
    except OSError as error:
        raise ConfigError(f"cannot write the drawing to {str(path)!r}: {error.strerror or error}") from None


def schedule_json(simulation: Simulation, batches: int) -> dict[str, Any]:
    """Return a schedule, the order of every rank, the timeline and the figures of a span as plain values."""
    schedule = simulation.lowered.schedule
    orders = [[format_action(a, stage=False) for a in actions_of(schedule, r, batches)] for r in range(schedule.ranks)]
    intervals = [i._asdict() | {"parts": [p._asdict() for p in i.parts]} for i in simulation.timeline.intervals]
    return {"schedule": str(schedule), "orders": orders, "timeline": intervals, **simulation.figures()}


def _title(simulation: Simulation, batches: int) -> str:
    schedule = simulation.lowered.schedule
    shape = (schedule.ranks, "stage"), (schedule.microbatches, "microbatch"), (batches, "batch")
    return f"{schedule.name}: {', '.join(counted(*size) for size in shape)}"
