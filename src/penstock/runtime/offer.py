"""What the runtime offers so far; every other proven schedule is drawn and simulated, and refused here by name."""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import CapabilityError, ConfigError
from penstock.runtime.recompute import Recompute
from penstock.schedule.batchwise import with_decisions, with_reductions, with_ties
from penstock.schedule.check import Proof, check
from penstock.schedule.ir import Kind, Op, Schedule, chain, passes, straight
from penstock.schedule.recompute import with_recompute

_OPS = frozenset({Op.F, Op.R, Op.B, Op.REDUCE, Op.TIE, Op.DECIDE, Op.STEP})
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
    if any(a.unit.slice is not None or a.unit.count > 1 or a.unit.kind is Kind.EVAL for a in actions):
        raise CapabilityError(f"{schedule.name}: the runtime offers passes of one whole training microbatch so far")
    if any(p.op is Op.F and p.unit.first < 0 for program in schedule.programs for p in program.period):
        raise CapabilityError(f"{schedule.name}: the runtime offers periods that begin the forwards of their own batch")
    if schedule.nodes != straight(schedule.ranks) or schedule.edges != chain(schedule.cuts) or schedule.frozen:
        raise CapabilityError(f"{schedule.name}: the runtime offers chains with one trained cut per rank so far")
    if schedule.rule not in _RULES:
        raise CapabilityError(f"{schedule.name}: the runtime does not offer version rule {schedule.rule!r} yet")


def proven(
    schedule: Schedule | Proof,
    *,
    decides: bool = False,
    reduces: bool = False,
    recompute: Recompute = "none",
    tied: Collection[int] = (),
) -> Proof:
    """The proof of a schedule, with what is asked for and not yet in it.

    Args:
        schedule: what the user gives.
        decides: updates wait for what all stages decide together.
        reduces: parallel pipelines add their gradients.
        recompute: "stage" for forwards that are run again in actions of their own.
        tied: cuts that share parameters.

    Raises:
        ConfigError: the user gives something else.
    """
    if not isinstance(schedule, Schedule | Proof):
        raise ConfigError(f"schedule must come from make_schedule, prove or check, not {schedule!r:.80}")
    plain = whole = schedule.schedule if isinstance(schedule, Proof) else schedule
    operations = {a.op for program in plain.programs for a in program.period}
    if recompute == "stage" and Op.R not in operations:
        whole = with_recompute(whole)
    if reduces and Op.REDUCE not in operations:
        whole = with_reductions(whole, everywhere=True)
    if tied and Op.TIE not in operations:
        whole = with_ties(whole, tied)
    if decides and Op.DECIDE not in operations:
        whole = with_decisions(whole)
    return schedule if whole is plain and isinstance(schedule, Proof) else check(whole)
