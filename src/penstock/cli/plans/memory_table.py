"""What each rank of the best plan holds at its peak, by kind, as a table."""

from __future__ import annotations

from penstock.byte_sizes import human_bytes
from penstock.cli.plans.terminal_width_table import FittedTable
from penstock.plan.candidates.memory_kinds import KINDS
from penstock.plan.candidates.planned_methods import method_of
from penstock.plan.stages.planned import Plan

_MOST = 4  # ranks that a terminal of 80 columns has room for


def memory_table(plan: Plan) -> FittedTable | None:
    """Return the bytes by kind, a column for each rank; of many those with the most and the least.

    None where the cost function knows no kinds.
    """
    if not all(rating.kinds for rating in plan.rating.stages):
        return None
    ranks = method_of(plan.planner, plan.settings).ranks(plan.settings["stages"])
    held = dict(zip(ranks, plan.rating.stages, strict=True))  # stages of a rank have the same, that of the rank
    order = sorted(held, key=lambda rank: -(held[rank].memory or 0.0))
    shown = sorted(held) if len(held) <= _MOST else [order[0], order[-1]]
    kinds = [kind for kind in KINDS if any(held[rank].kinds.get(kind) for rank in shown)]
    which = "" if len(shown) == len(held) else ", of the ranks with the most and the least"
    unit = "stage" if plan.chunks == 1 else "rank"
    columns = {
        f"{unit} {rank}": [
            *(human_bytes(round(held[rank].kinds.get(kind, 0.0)), 2) for kind in kinds),
            human_bytes(round(held[rank].memory or 0.0), 2),
        ]
        for rank in shown
    }
    title = f"memory of a device at its peak by kind, which add up{which}"
    return FittedTable(title, {"kind": [*kinds, "all together"], **columns})
