"""What a pipeline adds to a schedule that has been built, and the schedule of its evaluations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.ir.sharding import Level, Sharding, read_sharding
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.orders.forward_only import forward_through
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.stage_state.microbatch_state import Piece
from penstock.schedule.transforms.apply_version_rule import apply_rule
from penstock.schedule.transforms.batch_ops import (
    with_averages,
    with_decisions,
    with_reductions,
    with_ties,
    without_averages,
)
from penstock.schedule.transforms.offload import with_offload, with_swaps
from penstock.schedule.transforms.recompute import Segments, with_recompute
from penstock.schedule.transforms.sharding import with_sharding


def extended(
    schedule: Schedule,
    *,
    decides: bool = False,
    reduces: bool = False,
    recomputes: bool | Collection[int] = False,
    segments: Segments = 1,
    offloads: bool | Collection[int] = False,
    swaps: bool = False,
    tied: Collection[int] = (),
    averages: int | None = None,
    behind: int = 0,
    sharding: str | Sharding = "none",
) -> Schedule:
    """A schedule with what is asked for and not yet in it; the schedule itself if that is nothing. Nothing is proven.

    Args:
        schedule: which.
        decides: updates wait for what all stages decide together.
        reduces: parallel pipelines add their gradients.
        recomputes: forwards are run again, in actions of their own; of all stages, or of some, by index.
        segments: how many stages do so together, where the schedule does not say (see `with_recompute`).
        offloads: activations are moved to the host's memory, and back: of all stages that recompute nothing, or of
            some, by index.
        swaps: optimizer states are in the host's memory between updates.
        tied: stages that share parameters.
        averages: parallel pipelines average their weights, or the like, after every so many batches.
        behind: they add there what they have made so many batches before.
        sharding: what parallel pipelines split of the state of a stage, after recomputes have been added.

    Raises:
        ConfigError: it is sharded, and recomputes, averages or another sharding are asked for; it has AVERAGEs in other
            places than behind each STEP, or after other batches; or recomputes of its own, and segments are asked for.
        ScheduleError: its rule, or its order, is not one for recomputes.
    """
    operations = schedule.operations
    level = schedule.sharding.level
    if level is not Level.NONE and (averages is not None or (recomputes and Op.R not in operations)):
        what = "pipelines with weights of their own have nothing to share" if averages else "add recomputes first"
        raise ConfigError(f"{schedule.name}: the schedule has sharding {level}; {what}")
    whole = _recomputed(schedule, recomputes, segments)
    if offloads and Op.OFFLOAD not in operations:
        whole = with_offload(whole, None if offloads is True else offloads)
    if reduces and Op.REDUCE not in operations:
        whole = with_reductions(whole, everywhere=True)
    whole = with_sharding(whole, read_sharding(sharding))
    if tied and Op.TIE not in operations:
        whole = with_ties(whole, tied)
    if decides and Op.DECIDE not in operations:
        whole = with_decisions(whole)
    if swaps and Op.SWAPIN not in operations:
        whole = with_swaps(whole)
    if averages is not None:
        whole = _averaged(whole, averages, behind)
    return whole


def _recomputed(schedule: Schedule, recomputes: bool | Collection[int], segments: Segments) -> Schedule:
    """Add recomputes; arguments as of `extended`.

    Raises:
        ConfigError: there are others.
    """
    has = Op.R in schedule.operations
    if recomputes and not has:
        return with_recompute(schedule, segments, None if recomputes is True else recomputes)
    if not isinstance(recomputes, bool) and not schedule.recomputed <= set(recomputes) and has:
        raise ConfigError(
            f"{schedule.name}: the schedule recomputes stages {sorted(schedule.recomputed)} by itself, so recompute "
            "cannot choose others; leave it out"
        )
    if recomputes and segments != 1:
        raise ConfigError(
            f"{schedule.name}: the schedule has recomputes of its own, so leave segments={segments!r} out"
        )
    return schedule


def _averaged(schedule: Schedule, averages: int, behind: int) -> Schedule:
    """Add AVERAGEs; arguments as of `extended`.

    Raises:
        ConfigError: there are others.
    """
    averaged = with_averages(without_averages(schedule), averages, behind)
    if Op.AVERAGE in schedule.operations and averaged != schedule:
        raise ConfigError(
            f"{schedule.name}: the schedule has AVERAGEs of its own, but pipelines that meet every {averages} "
            "batches have them directly after the STEPs of these batches"
            + (f", of {behind} batches before" if behind else "")
            + "; leave them out of the schedule"
        )
    return averaged


def extend(
    given: Schedule | Proof,
    *,
    decides: bool = False,
    reduces: bool = False,
    recomputes: bool | Collection[int] = False,
    segments: Segments = 1,
    offloads: bool | Collection[int] = False,
    swaps: bool = False,
    tied: Collection[int] = (),
    averages: int | None = None,
    behind: int = 0,
    window: int | None = None,
    sharding: str | Sharding = "none",
) -> Proof:
    """Add to a schedule what is asked for and not yet in it, and prove the result.

    Args:
        given: a schedule, or its proof.
        decides, reduces, recomputes, segments, offloads, swaps, tied, averages, behind, sharding: as of `extended`.
        window: messages that may be outstanding on a lane; what the schedule says if None (see `make_schedule`).

    Raises:
        ConfigError: as `extended`.
        ScheduleError: the schedule is wrong, or its order is not one for segments of several stages.
    """
    plain = given.schedule if isinstance(given, Proof) else given
    whole = extended(
        plain,
        decides=decides,
        reduces=reduces,
        recomputes=recomputes,
        segments=segments,
        offloads=offloads,
        swaps=swaps,
        tied=tied,
        averages=averages,
        behind=behind,
        sharding=sharding,
    )
    if window is not None:
        whole = with_window(whole, window)
    if whole is plain and isinstance(given, Proof):
        return given
    if whole.segments and not plain.segments:
        _check_segments(plain, segments)
    return check(whole)


def _check_segments(schedule: Schedule, segments: Segments) -> None:
    """Refuse segments of several stages that an order is not made for.

    Raises:
        ScheduleError: some ranks would wait for ever for the recomputes of others, or the like.
    """
    made = with_recompute(schedule, segments)
    try:
        check(made)
    except ScheduleError as error:
        raise ScheduleError(
            f"{schedule.name}: segments of {len(made.segments[0])} stages that recompute together do not go with "
            f"this order; set segments to 1, or take one with a stage per rank, such as 1f1b. ({error})"
        ) from None


def evaluation_of(schedule: Schedule) -> Schedule:
    """Build the forward-only schedule by which the model of another one is evaluated."""
    order = forward_through(
        tuple(stage for stage in schedule.stages if not stage.direction),
        schedule.edges,
        schedule.ranks,
        schedule.microbatches,
    )
    return apply_rule(replace(order, frozen=schedule.frozen), RULES["frozen"], schedule.microbatches, "evaluation")


def with_window(schedule: Schedule, window: int) -> Schedule:
    """Set how many messages may be outstanding on a lane.

    Raises:
        ConfigError: it is no positive whole number.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(f"window must be a whole number of messages, at least 1; got {window!r}")
    return schedule.with_window(window) if isinstance(schedule, ArraySchedule) else replace(schedule, window=window)


def halved_units(schedule: Schedule, stage: Stage, sends: bool) -> frozenset[Piece]:
    """Return the microbatches of a batch (and slices) of which a stage runs the backward in two halves.

    Not where the second half follows at once, and the first one finds nothing to send: one walk through the activations
    is shorter than two.

    Args:
        schedule: whose.
        stage: of which.
        sends: it sends gradients back.
    """
    if Op.W not in schedule.operations:  # which is known, and asked for each stage
        return frozenset()
    m, actions = schedule.microbatches, [p for a in schedule.program(stage.rank).period for p in passes(a)]
    pairs = zip([None, *actions], actions, strict=False)
    units = [
        late.unit
        for early, late in pairs
        if late.stage == stage
        and late.op is Op.W
        and (sends or early is None or (early.op, early.stage, early.unit) != (Op.I, stage, late.unit))
    ]
    return frozenset((k % m, unit.slice[0] if unit.slice else 0) for unit in units for k in unit.microbatches)
