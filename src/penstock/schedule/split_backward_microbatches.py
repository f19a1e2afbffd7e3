"""Which backwards of a stage come in two halves."""

from __future__ import annotations

from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.stage_state.microbatch_state import Piece


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
