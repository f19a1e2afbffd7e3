"""Actions with absolute numbers: what a rank runs in a span, and which actions lie before it.

In a period every number is relative to batch t, in an epilogue to T, the batch after the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.schedule.ir.schedule import Action, Copy, Kind, Op, Schedule, Unit, WeightRef


def actions_of(
    schedule: Schedule, rank: int, batches: int, older: int = 0, ops: Collection[Op] | None = None
) -> Iterator[Action]:
    """Yield the actions of a rank in a span of `batches` batches, with absolute numbers (see `shift`).

    Args:
        schedule: whose.
        rank: which.
        batches: length of the span.
        older: number of the oldest base version.
        ops: of the actions that are wanted, besides fused ones; None for all.
    """
    period, epilogue = (
        part if ops is None else [action for action in part if action.parts or action.op in ops]
        for part in schedule.program(rank)
    )
    for t, part in [*((t, period) for t in range(batches)), (batches, epilogue)]:
        for action in part:
            shifted = shift(action, t, schedule.microbatches, older)
            if shifted is not None:
                yield shifted


def since(unit: Unit, microbatches: int) -> int:
    """Return the first batch in whose period (or at whose border, in an epilogue) a unit is not before the span."""
    return -unit.first if unit.kind is Kind.BATCH else -(unit.first // microbatches)


def existing(action: Action, batches: int, microbatches: int) -> Action | None:
    """Return the part of an action that exists in the period (or epilogue) of batch `batches`, not renumbered."""
    unit = action.unit
    if action.parts:
        alive = tuple([p for p in action.parts if batches >= since(p.unit, microbatches)])
        if len(alive) == len(action.parts):
            return action
        if len(alive) < 2:
            return alive[0] if alive else None
        return action._replace(stage=alive[0].stage, unit=alive[0].unit, parts=alive)
    if batches < since(unit, microbatches) or (unit.every > 1 and (unit.first + batches + 1) % unit.every):
        return None
    return action


def shift(action: Action, batches: int, microbatches: int, older: int = 0) -> Action | None:
    """Return an action with the numbers of batch `batches`, or None where it lies before the span.

    Args:
        action: an action with relative numbers.
        batches: t for a period, T for an epilogue.
        microbatches: m.
        older: number of the oldest base version. A span begins with the newest one (number 0 here) and, where the rule
            delays, some before it, which may be the same weights.
    """
    found = existing(action, batches, microbatches)
    if found is None:
        return None
    if found.parts:
        parts = tuple([_renumber(p, batches, microbatches, older) for p in found.parts])
        return found._replace(unit=parts[0].unit, parts=parts)
    return _renumber(found, batches, microbatches, older)


def _renumber(action: Action, batches: int, microbatches: int, older: int) -> Action:
    op, stage, unit, reads, _, peer, payload = action
    first = unit.first + (batches if unit.kind is Kind.BATCH else batches * microbatches)
    if reads is not None and (batches or min(reads.versions) < older):
        derive = reads.derive and Copy(reads.derive.label, reads.derive.first + batches * microbatches)
        reads = WeightRef(tuple([max(v + batches, older) for v in reads.versions]), derive)
    elif not batches:
        return action
    return Action(op, stage, Unit(first, unit.count, unit.slice, unit.kind, unit.every), reads, (), peer, payload)
