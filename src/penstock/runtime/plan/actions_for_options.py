"""What a schedule must have to be run with some options, or after another schedule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from penstock.comm.p2p.stage_routes import needs_decisions
from penstock.errors import ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.runtime.plan.capabilities import check_offered
from penstock.runtime.plan.sharding_limits import check_sharding, check_width
from penstock.runtime.plan.tensor_parallel_limits import check_tensor_parallel
from penstock.schedule.add_options import extend, extended
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.sharding import REPLICATED, Level, Sharding, read_sharding
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.proof.proof import Proof
from penstock.schedule.proof_serialization import RankProof
from penstock.schedule.transforms.batch_ops import check_together
from penstock.schedule.transforms.unfuse import taken_apart
from penstock.simulate.auto_in_flight import asks_for_auto

GivenSchedule = Schedule | Proof | ScheduleRequest
"""A schedule as a user may give it: proven or not, or by name."""


def schedule_of(given: GivenSchedule) -> Schedule:
    """The schedule itself.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(given, GivenSchedule):
        raise ConfigError(
            "method must be a name, what penstock.method returned, a function (stages, microbatches) -> order, or what "
            f"make_schedule, check or load_schedule returned, not {given!r:.80}"
        )
    return given if isinstance(given, Schedule) else given.schedule


def check_ranks(given: GivenSchedule, plain: Schedule) -> None:
    """Make sure that an order of a user's own has as many ranks as it was asked for.

    Args:
        given: the schedule as it was asked for.
        plain: the same, built.

    Raises:
        ConfigError: it has others.
    """
    if isinstance(given, ScheduleRequest) and plain.ranks != given.stages:
        raise ConfigError(
            f"{plain.name}: asked for {given.stages} stages, the order has {plain.ranks} ranks; return as many, or "
            "give what make_schedule returns of it as method="
        )


def with_all_actions(given: GivenSchedule, options: PipelineOptions, tied: Collection[int]) -> Schedule:
    """A schedule with every action that the options need, not proven yet.

    Args:
        given: the schedule.
        options: of the pipeline that runs it.
        tied: stages that share parameters.

    Raises:
        CapabilityError: the runtime does not offer it.
        ConfigError: its updates cannot wait for what all stages decide together, or the like.
        ScheduleError: it cannot have the recomputes that are wanted.
    """
    plain = taken_apart(schedule_of(given))  # executors run one pass at a time
    check_together(plain, options.deciding, tied)
    check_width(plain, read_sharding(options.data_parallel.sharding or REPLICATED), options.data_parallel.width)
    whole = extended(plain, **additions(plain, options, tied))
    check_offered(whole, options.data_parallel.combine)
    check_sharding(whole, options)
    check_tensor_parallel(whole, options, adapts=isinstance(given, ScheduleRequest) and asks_for_auto(given))
    return whole


def prove_with_all_actions(given: Schedule | Proof, options: PipelineOptions, tied: Collection[int]) -> Proof:
    """The proof of what `with_all_actions` returns; the given one if that adds nothing.

    Raises:
        ScheduleError: the schedule is wrong.
    """
    whole = schedule_of(given)
    plain = taken_apart(whole)
    known = plain is whole and not isinstance(given, RankProof)  # which is of one rank only
    return extend(given if known else plain, **additions(plain, options, tied))


def additions(plain: Schedule, options: PipelineOptions, tied: Collection[int]) -> dict[str, Any]:
    """What options add to a schedule: the arguments of `penstock.schedule.add_options.extended`."""
    parallel, recompute = options.data_parallel, options.recompute
    combine = parallel.combine
    return {
        "decides": bool(options.deciding) or needs_decisions(plain) or RULES[plain.rule].provisional,
        "reduces": parallel.width != 1 and not combine.apart,
        "recomputes": recompute.in_schedule,
        "segments": recompute.segments,
        "offloads": recompute.offloaded,
        "swaps": options.run.offload_optimizer != "none",
        "tied": tied,
        "averages": combine.every if combine.apart else None,
        "behind": combine.behind,
        "sharding": _sharding(plain, parallel.sharding),
    }


def adapting(given: GivenSchedule, options: PipelineOptions) -> ScheduleRequest | None:
    """What asks for as many microbatches in flight as links ask for; None where nothing does.

    Raises:
        ConfigError: stages cannot go on under another schedule with these options.
    """
    if not isinstance(given, ScheduleRequest) or not asks_for_auto(given):
        return None
    combine, staleness = options.data_parallel.combine, options.staleness
    if not combine.apart and not staleness.chosen:
        return given
    kept = f"combine={combine.kind}" if combine.apart else "delays of your own choice"
    raise ConfigError(
        f"in_flight={given.options['in_flight']!r} does not go with {kept}, under which stages cannot go on with "
        "another schedule once the links have been measured; give a number (for given times: penstock simulate "
        "--in-flight auto --latency), or leave one of them out"
    )


def check_limits_something(auto: ScheduleRequest | None, options: PipelineOptions) -> None:
    """Make sure that a limit of the bytes in flight stands where something is chosen for it.

    Raises:
        ConfigError: nothing is.
    """
    if options.microbatches.in_flight_bytes is not None and auto is None:
        raise ConfigError(
            "in_flight_bytes limits what in_flight='auto' takes (penstock train: options.in_flight=auto); ask for "
            "that, or leave in_flight_bytes out"
        )


def with_own_sharding(given: GivenSchedule, options: PipelineOptions) -> PipelineOptions:
    """Options with the sharding that a method has by itself, where they ask for none.

    So it is added behind what else options add, such as recomputes, and other methods that follow are sharded alike.
    """
    if not isinstance(given, ScheduleRequest) or callable(given.method):
        return options
    if options.data_parallel.sharding is not None or given.sharding is not None:
        return options
    own = find_method(given.method).sharding
    return options if own == Level.NONE else options.changed(sharding=own)


def without_own_sharding(given: GivenSchedule, options: PipelineOptions) -> GivenSchedule:
    """A schedule without the sharding that its method has by itself, where options ask for one."""
    if not isinstance(given, ScheduleRequest) or callable(given.method):
        return given
    if options.data_parallel.sharding is None or given.sharding is not None:
        return given
    return replace(given, sharding="none") if find_method(given.method).needs_sharded_state else given


def _sharding(plain: Schedule, wanted: str | Sharding | None) -> Sharding:
    """What is to be added to a schedule: nothing to one that has what is wanted, or any where none is.

    Raises:
        ConfigError: it has another one.
    """
    found, has = read_sharding(wanted or REPLICATED), plain.sharding
    if has.level is Level.NONE or found.level is Level.NONE:
        return found
    if has.level is not found.level or has != found._replace(
        weights=found.weights or has.weights, gradients=found.gradients or has.gradients
    ):
        raise ConfigError(f"{plain.name}: the schedule has sharding {has}, but {found} is asked for; leave one out")
    return REPLICATED


def _sharding_of_versions(schedule: Schedule) -> str:
    """What is sharded; where that is all versions, also under which rule, as then it says how many there are."""
    level = schedule.sharding.level
    return f"{level} under rule {schedule.rule}" if level is Level.FULL else str(level)


def check_same_places(present: Schedule, other: Schedule) -> None:
    """Make sure that stages need not move, and that a batch is divided in the same way.

    Raises:
        ConfigError: a schedule has other stages, other ranks for them, other edges between them or other microbatches.
    """
    differences = {
        "microbatches per batch": (present.microbatches, other.microbatches),
        "stages": (present.num_stages, other.num_stages),
        "ranks": (present.ranks, other.ranks),
        "directions": (present.directions, other.directions),
        "the place of stages": (sorted(present.stages), sorted(other.stages)),
        "what stages hand on to which": (sorted(present.edges), sorted(other.edges)),
        "frozen stages": (sorted(present.frozen), sorted(other.frozen)),
        "slices of a sequence": (present.slices, other.slices),
        "sharding": (_sharding_of_versions(present), _sharding_of_versions(other)),
    }
    for what, (here, there) in differences.items():
        if here != there:
            numbers = f" ({here} and {there})" if isinstance(here, int | str) else ""
            raise ConfigError(
                f"{present.name} cannot be followed by {other.name}: they differ in {what}{numbers}; a run changes "
                "between methods that hold the same stages on the same ranks and take the same batches, such as 2bw, "
                "stash, 1f1b and gpipe"
            )
