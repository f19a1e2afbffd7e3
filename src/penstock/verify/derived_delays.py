"""Derives the delays of an order for the sequential reference, where the reference does not know the order itself."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import CapabilityError
from penstock.schedule.add_options import extend
from penstock.schedule.ir.schedule import Op, Schedule, passes
from penstock.schedule.ir.version_rules import RULES, Source
from penstock.schedule.methods.method import Method
from penstock.schedule.transforms.recompute import Segments
from penstock.verify.reference.order_delays import USUAL, ReferenceOrder

KNOWN = "endless-1f1b"
"""The order whose delays the reference knows; it also knows those of version rules that do not depend on the order."""


def order_of(
    method: Method,
    schedule: Schedule,
    recompute: str | Sequence[str] = "none",
    segments: Segments = 1,
    *,
    usual: bool = True,
) -> ReferenceOrder:
    """Describe a schedule's order for the reference, as numbers of updates between passes.

    Args:
        method: whose order it has.
        schedule: without RECOMPUTE actions.
        recompute, segments: as in `penstock.runtime.pipeline.Pipeline`.
        usual: whether the order has its usual numbers of microbatches in flight, and other options.

    Raises:
        CapabilityError: stages recompute differently under a rule where that changes what passes read.
    """
    rule = RULES[schedule.rule]
    delays = None
    if method.delays is not None and usual:
        delays = method.delays(schedule.num_stages, schedule.microbatches)
    elif rule.forward is not Source.BATCH and not (usual and method.order == KNOWN):
        delays = _updates_before_own(schedule, Op.F)
    if recompute == "none" or rule.recompute is not Source.NEWEST:
        return USUAL._replace(delays=delays)  # a recomputed forward reads the same weights, so it changes nothing
    if not isinstance(recompute, str):
        raise CapabilityError(
            f"{schedule.name}: under rule {schedule.rule} numbers depend on what is recomputed, and the reference "
            "recomputes all stages alike; set recompute to one word"
        )
    if recompute == "block":
        return ReferenceOrder(delays, "block")
    again = extend(schedule, recomputes=True, segments=segments).schedule
    members = {index for segment in again.segments for index in segment[1:]}
    firsts = [index for index in range(again.num_stages) if index not in members]
    sizes = [end - first for first, end in zip(firsts, [*firsts[1:], again.num_stages], strict=True)]
    return ReferenceOrder(delays, "stage", sizes, _updates_before_own(again, Op.R))


def _updates_before_own(schedule: Schedule, op: Op) -> list[list[int]]:
    """Count, per stage and microbatch, the updates between the version that a pass reads and the batch's own update."""
    m = schedule.microbatches
    found: dict[tuple[int, int], int] = {}
    for program in schedule.programs:
        for action in program.period:
            for p in passes(action):
                if p.op is op and p.reads is not None:
                    for number in p.unit.microbatches:
                        batch, k = divmod(number, m)
                        found[p.stage.index, k] = batch - p.reads.versions[-1]
    return [[found.get((index, k), 0) for k in range(m)] for index in range(schedule.num_stages)]
