"""The commands that need no training: `penstock methods`, `show` and `simulate`."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.schedule.proof.check import Proof
    from penstock.simulate.auto_in_flight import InFlightChoice
    from penstock.simulate.costs import Costs
    from penstock.simulate.network import Network

_MOST_SHOWN = 1_000  # batches


def _at_least_0(unit: str, help: str) -> Any:
    """Return an option that takes a number which is not negative."""
    return typer.Option(metavar=unit, help=help, min=0)


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


def _prove(
    method: str | None,
    own: tuple[Path | None, str | None, str | None],
    sizes: tuple[int | None, int | None],
    changes: list[str] | None,
    segments: str | None,
    order: str | None,
    in_flight: str | None,
    costs: tuple[Costs, int],
    sharding: str | None = None,
    offload: float | None = None,
) -> tuple[Proof, InFlightChoice | None]:
    """Prove the schedule of a method or in a file, with recompute if asked for; and how `auto` was decided.

    Args:
        method: with its options.
        own: a file, its version rule and its correction.
        sizes: stages and microbatches.
        changes, segments, order: as given.
        costs: of so many ranks together: an order that is searched for given times gets them as options.
        sharding: as given, in place of the method's; added behind recomputes.
        offload: time of a copy to the host's memory, if activations are moved there.
    """
    from penstock.schedule.build import ScheduleRequest
    from penstock.schedule.ir.in_flight import read_in_flight
    from penstock.schedule.methods.compatibility import sharding_of
    from penstock.schedule.methods.find_method import find_method
    from penstock.schedule.methods.written import written_method
    from penstock.simulate.auto_in_flight import choose_in_flight
    from penstock.simulate.costs import of_every_rank
    from penstock.simulate.search_options import with_search_options

    (file, rule, correction), (stages, microbatches) = own, sizes
    if (method is None) == (file is None):
        raise ConfigError("give either a METHOD (penstock methods lists them) or --file")
    if file is not None and order is not None:
        raise ConfigError("a --file holds the order; leave --order out")
    options, choice = _order_options(changes), None
    if in_flight is not None:
        options["in_flight"] = read_in_flight(in_flight)
    if file is not None:
        proof = _prove_own(file, rule, correction, stages, microbatches, options)
        whole, added = segments is None and sharding is None, sharding or "none"
    else:
        chosen = written_method(method or "")
        row = find_method(chosen.name)
        for what, value, its in (("rule", rule, row.rule), ("correction", correction, row.correction)):
            if value is not None:
                raise ConfigError(f"{what}: method {row.name!r} has its own, {its}; --{what} goes with --file")
        options = with_search_options(chosen.name, order, {**chosen.options, **options}, *costs)
        whole, added = segments is None, str(sharding_of(row, sharding))
        request = ScheduleRequest(chosen.name, stages or 4, microbatches or 8, order=order, options=options)
        request = replace(request, sharding=added if whole else "none")
        request, choice = choose_in_flight(request, of_every_rank(costs[0], request.stages))
        proof = request.prove()
    return _offloaded(proof if whole else _extended(proof, segments, added), offload), choice


def _extended(proof: Proof, segments: str | None, sharding: str) -> Proof:
    """Add recomputes and sharding to a schedule.

    Raises:
        ConfigError: the segments are no number.
    """
    from penstock.schedule.extend import extend

    if segments is None:
        return extend(proof, sharding=sharding)
    if segments != "auto" and not (segments.isascii() and segments.isdigit() and len(segments) < 10):
        raise ConfigError(f"--segments takes a number of stages, or auto; got {segments!r:.80}")
    number: int | Literal["auto"] = "auto" if segments == "auto" else int(segments)
    return extend(proof, recomputes=True, segments=number, sharding=sharding)


def _offloaded(proof: Proof, offload: float | None) -> Proof:
    """Add copies of activations to the host's memory, if a time of these is given."""
    from penstock.schedule.extend import extend

    return proof if offload is None else extend(proof, offloads=True)


def _copy_time(proof: Proof, offload: float | None) -> float:
    """Return the time of a copy of one stage's activations, given that of a rank's whole share."""
    return (offload or 0.0) / max(proof.schedule.chunks.values())


def _prove_own(
    file: Path,
    rule: str | None,
    correction: str | None,
    stages: int | None,
    microbatches: int | None,
    options: dict[str, Any],
) -> Proof:
    """Prove the schedule in a file, under a version rule, and check that a correction goes with it."""
    from penstock.schedule.ir.rules import RULES
    from penstock.schedule.load import holds_function, prove_file
    from penstock.schedule.methods.corrections import correction_fault
    from penstock.schedule.methods.written import written_order

    own = written_order(str(file), rule, correction)
    path = Path(own.file)
    if holds_function(path):
        stages, microbatches = stages or 4, microbatches or 8
    proof = prove_file(path, stages, microbatches, {**options, **own.options}, own.rule)
    if own.correction is not None and (fault := correction_fault(RULES[proof.schedule.rule], own.correction)):
        raise ConfigError(f"{path}: {fault}")
    return proof


def _order_options(changes: list[str] | None) -> dict[str, Any]:
    """Parse the values of --set, which are options of an order.

    Raises:
        ConfigError: another key, or not a whole number.
    """
    from penstock.checks import nearest_keys
    from penstock.schedule.ir.in_flight import read_in_flight
    from penstock.train.config.key_reference import order_keys

    options: dict[str, Any] = {}
    for change in changes or ():
        key, _, value = (part.strip() for part in change.partition("="))
        section, _, name = key.rpartition(".")
        if section != "options":
            known = [option for option, _, _ in order_keys()]
            near = next(iter(nearest_keys(key, known)), "options.chunks")
            raise ConfigError(
                f"--set of show and simulate takes options of the order, such as {near}=4; got {change!r:.80}"
            )
        try:
            options[name] = read_in_flight(value) if name == "in_flight" else int(value)
        except ValueError:
            raise ConfigError(f"{key} takes a whole number, such as {key}=4; got {value!r:.80}") from None
    return options


def _window(text: str | None) -> int | Literal["unlimited"] | None:
    """What --window says.

    Raises:
        ConfigError: it is neither a positive number nor "unlimited".
    """
    if text is None:
        return None
    if text == "unlimited":
        return "unlimited"
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise ConfigError(f"--window takes a number of messages, from 1 to 999999999, or unlimited; got {text!r:.80}")
    return int(text)


def methods(
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    latency: Annotated[float, _at_least_0("TIME", "Time of a message; a forward takes 1, a backward 2.")] = 0.0,
    in_flight: InFlightNumber = None,
    as_json: AsJson = False,
) -> None:
    """List every method with what its schedule costs: weight copies, delay, activations, bubble."""
    from penstock.schedule.ir.in_flight import read_in_flight
    from penstock.simulate.method_facts import Links
    from penstock.view.tables import UNBOUNDED, combines_table, methods_json, methods_table

    stages, microbatches = stages or 4, microbatches or 8
    links = Links(latency, None if in_flight is None else read_in_flight(in_flight))
    if as_json:
        print_json(methods_json(stages, microbatches, links))
    else:
        console = Console()
        width = console.width if console.is_terminal else None
        if width is None:  # do not cut or wrap for programs that read the output
            console = Console(width=UNBOUNDED)
        console.print(methods_table(stages, microbatches, width, links))
        console.print(combines_table())


GatherTime = Annotated[
    float, _at_least_0("TIME", "Time to gather, or to sum, a rank's whole share, if state is sharded.")
]
OffloadTime = Annotated[
    float | None,
    _at_least_0(
        "TIME", "Move activations to the host's memory and back; TIME is that of a copy of a rank's whole share."
    ),
]
DrawingWidth = Annotated[
    int | None,
    typer.Option(metavar="N", help="Columns of the drawing.", min=40, max=10**6, show_default="those of the terminal"),
]


def show(
    method: MethodName = None,
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    batches: Annotated[
        int | None,
        typer.Option(metavar="T", help="Batches to draw; 1 if flushed, else 3.", min=1, max=_MOST_SHOWN),
    ] = None,
    forward: Annotated[float, _at_least_0("TIME", "Time of a forward.")] = 1.0,
    backward: Annotated[float, _at_least_0("TIME", "Time of a full backward.")] = 2.0,
    order: OrderName = None,
    changes: OrderOptions = None,
    segments: Segments = None,
    in_flight: InFlightNumber = None,
    latency: Annotated[float, _at_least_0("TIME", "Time of a message.")] = 0.0,
    file: OrderFile = None,
    rule: OrderRule = None,
    correction: OrderCorrection = None,
    sharding: ShardingLevel = None,
    gather: GatherTime = 1.0,
    offload: OffloadTime = None,
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
    from penstock.simulate.costs import Costs, StageCost
    from penstock.simulate.network import Network
    from penstock.simulate.simulate import simulate_schedule
    from penstock.view.schedule_drawing import print_drawing, schedule_json, write_svg
    from penstock.view.text import wrap_schedule

    times = forward, backward / 2, backward / 2
    share = Costs((StageCost(*times),), latency), 1
    own, sizes = (file, rule, correction), (stages, microbatches)
    with Console(stderr=True).status("proving the schedule"):  # a search for an order may take minutes
        proof, choice = _prove(method, own, sizes, changes, segments, order, in_flight, share, sharding, offload)
    schedule = proof.schedule
    span = batches or (3 if any(program.epilogue for program in schedule.programs) else 1)
    costs = replace(Costs.uniform(schedule, *times, latency=latency), copy=_copy_time(proof, offload))
    if proof.shards and gather:
        costs = replace(costs, network=Network.of_time(schedule, gather))
    simulation = simulate_schedule(proof, costs, span)
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


PerStage = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON list with forward, backward_input, backward_weight[, step] of each stage, in place of times given "
        "as options.",
    ),
]
WindowSize = Annotated[
    str | None,
    typer.Option(
        metavar="N|unlimited",
        help="Messages that may be outstanding between two ranks; the least that costs no time if not given.",
    ),
]


PipelineNumber = Annotated[
    int | None, typer.Option(metavar="W", help="Parallel pipelines, with --sharding; 2 if not given.", min=1)
]
Bandwidth = Annotated[float | None, _at_least_0("BYTES", "Bytes that a rank sends in a unit of time; no limit.")]
ParameterNumber = Annotated[float, _at_least_0("N", "Parameters of the model; with 1, bytes are per parameter.")]


def _network(proof: Proof, width: int | None, bandwidth: float | None, parameters: float) -> Network | None:
    """Return the network of a sharded schedule; its stages are all alike.

    Raises:
        ConfigError: there are figures of a network, but the schedule is not sharded.
    """
    from penstock.simulate.network import Network

    if proof.shards:
        of_stage = parameters / proof.schedule.num_stages
        return Network(proof.schedule, width or 2, math.inf if bandwidth is None else bandwidth, of_stage)
    if width is not None or bandwidth is not None:
        raise ConfigError(f"--{'bandwidth' if width is None else 'width'} goes with --sharding, or a sharded schedule")
    return None


def simulate(
    method: MethodName = None,
    stages: MaybeStages = None,
    microbatches: MaybeMicrobatches = None,
    forward: Annotated[float, _at_least_0("TIME", "F, time of a forward of a rank's whole share.")] = 1.0,
    backward_input: Annotated[float, _at_least_0("TIME", "Time of the backward for the inputs.")] = 1.0,
    backward_weight: Annotated[float, _at_least_0("TIME", "Time of the backward for the weights.")] = 1.0,
    batches: Annotated[int, typer.Option(metavar="T", help="Batches between two drains.", min=1, max=_MOST_SHOWN)] = 1,
    step: Annotated[float, _at_least_0("TIME", "Time of an update.")] = 0.0,
    latency: Annotated[float, _at_least_0("TIME", "Time of a hop; it occupies no rank.")] = 0.0,
    transfer: Annotated[float, _at_least_0("TIME", "Time that a message occupies its lane before that.")] = 0.0,
    fused: Annotated[float, _at_least_0("PART", "Time of a fused pair, as a part of that of both.")] = 1.0,
    left: Annotated[float, _at_least_0("PART", "Part of the activations that is left between I and W.")] = 1.0,
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
    as_json: AsJson = False,
) -> None:
    """Predict makespan, bubble, activations, versions and messages of a span of batches."""
    from penstock.idle_time import split_time
    from penstock.simulate.costs import Costs, StageCost, read_stage_costs
    from penstock.simulate.long_run import steady_bubble
    from penstock.simulate.simulate import simulate_schedule
    from penstock.view.tables import sharding_table, simulation_table, time_table

    if per_stage is not None:
        share = read_stage_costs(per_stage, None, latency, transfer), stages or 4
    else:
        share = Costs((StageCost(forward, backward_input, backward_weight),), latency, transfer), 1
    share = replace(share[0], left=left), share[1]
    own, sizes = (file, rule, correction), (stages, microbatches)
    with Console(stderr=True).status("proving the schedule"):  # a search for an order may take minutes
        proof, choice = _prove(method, own, sizes, changes, segments, order, in_flight, share, sharding, offload)
    if per_stage is not None:
        costs = read_stage_costs(per_stage, proof.schedule.num_stages, latency, transfer)
    else:
        costs = Costs.uniform(proof.schedule, forward, backward_input, backward_weight, latency=latency, step=step)
    costs = replace(costs, transfer=transfer, fused=fused, left=left, copy=_copy_time(proof, offload))
    costs = replace(costs, network=_network(proof, width, bandwidth, parameters))
    simulation = simulate_schedule(proof, costs, batches, window=_window(window))
    in_a_long_run = max(steady_bubble(simulation.lowered, costs, proof.steady_from + 2), 0.0)
    if as_json:
        chosen = {} if choice is None else {"in_flight": asdict(choice)}
        print_json(simulation.figures() | {"bubble_in_a_long_run": in_a_long_run} | chosen)
    else:
        table = simulation_table(simulation, batches, in_a_long_run)
        sharded = sharding_table(simulation)
        Console().print(table, *([] if sharded is None else [sharded]), time_table(split_time(simulation.timeline), ""))
        _say(Console(), choice)
