"""What the runtime offers so far; every other proven schedule is drawn and simulated, and refused here by name."""

from __future__ import annotations

from penstock.errors import CapabilityError
from penstock.schedule.ir import Kind, Op, Schedule, passes

_OPS = frozenset({Op.F, Op.R, Op.B, Op.I, Op.W, Op.FUSED, Op.OFFLOAD, Op.FETCH, Op.REDUCE, Op.TIE, Op.DECIDE, Op.STEP})
_RULES = frozenset({"flush", "double-buffer", "stash"})


def check_offered(schedule: Schedule) -> None:
    """Make sure that the runtime can run a schedule.

    Raises:
        CapabilityError: it cannot yet; the message says what is missing.
    """
    whole = [action for program in schedule.programs for part in program for action in part]
    actions = [p for action in whole for p in passes(action)]
    missing = sorted(op.value for op in {a.op for a in (*whole, *actions)} - _OPS)
    if missing:
        raise CapabilityError(f"{schedule.name}: the runtime does not offer {', '.join(missing)} yet")
    if any(a.unit.count > 1 or a.unit.kind is Kind.EVAL for a in actions):
        raise CapabilityError(f"{schedule.name}: the runtime offers passes of one training microbatch so far")
    if any(p.op is Op.F and p.unit.first < 0 for program in schedule.programs for p in program.period):
        raise CapabilityError(f"{schedule.name}: the runtime offers periods that begin the forwards of their own batch")
    if schedule.frozen and schedule.slices > 1:
        raise CapabilityError(f"{schedule.name}: the runtime offers slices of sequences where all stages are trained")
    if schedule.rule not in _RULES:
        raise CapabilityError(f"{schedule.name}: the runtime does not offer version rule {schedule.rule!r} yet")
