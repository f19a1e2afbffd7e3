"""What the options of `show` and `simulate` ask for: a proven schedule, a window, a network."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.schedule.in_flight_choice import InFlightChoice
    from penstock.schedule.machine.shared_machine import SharedCores
    from penstock.schedule.proof.proof import Proof
    from penstock.simulate.costs import Costs
    from penstock.simulate.sharding_traffic import Network
from typing import Annotated

import typer

from penstock.schedule.ir.limits import MOST_COST

LinkLatencies = Annotated[
    str,
    typer.Option(
        "--latency",
        metavar="TIME|TIME,TIME..",
        help="Time of a hop, on all links or on that of each two neighbouring ranks; it occupies no rank.",
    ),
]
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


def prove_asked(
    method: str | None,
    own: tuple[Path | None, str | None, str | None],
    sizes: tuple[int | None, int | None],
    changes: list[str] | None,
    segments: str | None,
    order: str | None,
    in_flight: str | None,
    costs: tuple[Costs, int],
    sharding: str | None = None,
    copies: tuple[float | None, float | None] = (None, None),
) -> tuple[Proof, InFlightChoice | None]:
    """Prove the schedule of a method or in a file, with recompute if asked for; and how `auto` was decided.

    Args:
        method: with its options.
        own: a file, its version rule and its correction.
        sizes: stages and microbatches.
        changes, segments, order: as given.
        costs: of so many ranks together: an order that is searched for given times gets them as options.
        sharding: as given, in place of the method's; added behind recomputes.
        copies: times of a copy of activations, and of optimizer states, if they are moved to the host's memory.
    """
    from penstock.schedule.build import ScheduleRequest
    from penstock.schedule.ir.in_flight_option import read_in_flight
    from penstock.schedule.methods.compatibility import sharding_of
    from penstock.schedule.methods.find_method import find_method
    from penstock.schedule.methods.method_parsing import check_given_once, written_method
    from penstock.simulate.auto_in_flight import choose_in_flight
    from penstock.simulate.costs import of_every_rank
    from penstock.simulate.order_options_from_costs import with_search_options
    from penstock.train.config.own_schedule import read_own_method

    (file, rule, correction), (stages, microbatches) = own, sizes
    if (method is None) == (file is None):
        raise ConfigError("give either a METHOD (penstock methods lists them) or --file")
    if file is not None and order is not None:
        raise ConfigError("a --file holds the order; leave --order out")
    options, choice = _order_options(changes), None
    if in_flight is not None:
        options["in_flight"] = read_in_flight(in_flight)
    own_method = None if file is None else read_own_method(str(file), rule, correction)
    if file is not None and own_method is None:
        proof = _prove_own(file, rule, correction, stages, microbatches, options)
        whole, added = segments is None and sharding is None, sharding or "none"
    else:
        chosen = written_method(method or "") if own_method is None else own_method[1]
        check_given_once(str(chosen.name), chosen.options, options)
        row = find_method(chosen.name)
        for what, value, its in (("rule", rule, row.rule), ("correction", correction, row.spec)):
            if own_method is None and value is not None:
                raise ConfigError(f"{what}: method {row.name!r} has its own, {its}; --{what} goes with --file")
        options = with_search_options(chosen.name, order, {**chosen.options, **options}, *costs)
        whole, added = segments is None, str(sharding_of(row, sharding))
        request = ScheduleRequest(chosen.name, stages or 4, microbatches or 8, order=order, options=options)
        request = replace(request, sharding=added if whole else "none")
        request, choice = choose_in_flight(request, of_every_rank(costs[0], request.stages))
        proof = request.prove()
    return _offloaded(proof if whole else _extended(proof, segments, added), *copies), choice


def _offloaded(proof: Proof, offload: float | None, swap: float | None) -> Proof:
    """Add copies of activations and of optimizer states to the host's memory, if a time of these is given."""
    from penstock.schedule.add_options import extend

    return extend(proof, offloads=offload is not None, swaps=swap is not None)


def _extended(proof: Proof, segments: str | None, sharding: str) -> Proof:
    """Add recomputes and sharding to a schedule.

    Raises:
        ConfigError: the segments are no number.
    """
    from penstock.schedule.add_options import extend

    if segments is None:
        return extend(proof, sharding=sharding)
    if segments != "auto" and not (segments.isascii() and segments.isdigit() and len(segments) < 10):
        raise ConfigError(f"--segments takes a number of stages, or auto; got {segments!r:.80}")
    number: int | Literal["auto"] = "auto" if segments == "auto" else int(segments)
    return extend(proof, recomputes=True, segments=number, sharding=sharding)


def _prove_own(
    file: Path,
    rule: str | None,
    correction: str | None,
    stages: int | None,
    microbatches: int | None,
    options: dict[str, Any],
) -> Proof:
    """Prove the schedule in a file, under a version rule, and check that a correction goes with it."""
    from penstock.schedule.ir.version_rules import RULES
    from penstock.schedule.load import holds_function, prove_file
    from penstock.schedule.methods.corrections import correction_fault
    from penstock.schedule.methods.method_parsing import check_given_once, written_order

    own = written_order(str(file), rule, correction)
    path = Path(own.file)
    check_given_once(own.file, own.options, options)
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
    from penstock.schedule.ir.in_flight_option import read_in_flight
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


def asked_window(text: str | None) -> int | Literal["unlimited"] | None:
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


def with_copy_times(costs: Costs, proof: Proof, copies: tuple[float | None, float | None]) -> Costs:
    """Return costs with the times of copies of one stage, given those of a rank's whole share."""
    offload, swap = ((time or 0.0) / max(proof.schedule.chunks.values()) for time in copies)
    return replace(costs, copy=offload, swap=swap)


def asked_network(proof: Proof, width: int | None, bandwidth: float | None, parameters: float) -> Network | None:
    """Return the network of a sharded schedule; its stages are all alike.

    Raises:
        ConfigError: there are figures of a network, but the schedule is not sharded.
    """
    from penstock.simulate.sharding_traffic import Network

    if proof.shards:
        of_stage = parameters / proof.schedule.num_stages
        return Network(proof.schedule, width or 2, math.inf if bandwidth is None else bandwidth, of_stage)
    if width is not None or bandwidth is not None:
        raise ConfigError(f"--{'bandwidth' if width is None else 'width'} goes with --sharding, or a sharded schedule")
    return None


def asked_cores(text: str | None) -> SharedCores | None:
    """Return which ranks share cores; None if each has its own.

    Raises:
        ConfigError: it is neither a number nor two.
    """
    from penstock.schedule.machine.shared_machine import SharedCores

    if text is None:
        return None
    cores, slash, ranks = text.partition("/")
    try:
        number, per_host = float(cores), int(ranks) if slash else None
    except ValueError:
        raise ConfigError(f"--cores takes a number, or cores and ranks of a host as in 2/4, got {text!r:.80}") from None
    return SharedCores(number, per_host)


def on_machine(costs: Costs, network: Network | None, cores: str | None, links_of: int | None) -> Costs:
    """Return costs with what ranks share.

    Args:
        costs: without.
        network: of parallel pipelines.
        cores: as given.
        links_of: consecutive ranks that share the link of their host.

    Raises:
        ConfigError: cores are neither a number nor two.
    """
    from penstock.schedule.machine.shared_machine import SharedLinks

    links = None if links_of is None else SharedLinks(links_of)
    return replace(costs, network=network, cores=asked_cores(cores), links=links)


def at_least_0(unit: str, help: str) -> Any:
    """Return an option that takes a number which is not negative, and of which sums are numbers, too."""
    return typer.Option(metavar=unit, help=help, min=0, max=MOST_COST)


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


Bandwidth = Annotated[float | None, at_least_0("BYTES", "Bytes that a rank sends in a unit of time; no limit.")]
ParameterNumber = Annotated[float, at_least_0("N", "Parameters of the model; with 1, bytes are per parameter.")]
