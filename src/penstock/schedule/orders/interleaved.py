"""Interleaved 1F1B (Megatron-LM; Narayanan et al., arXiv 2104.04473, sec. 2.2): several chunks per rank, in turns.

Stage c lies on rank c mod p. Microbatches go through the chunks in groups of g: all of a group through chunk 0, then
all of it through chunk 1, and so on; backwards take the chunks the other way round. Rank r runs 2 (p - 1 - r) + (v - 1)
g forwards ahead of its backwards. The bubble shrinks to (p - 1)(F + B) / v, and there are about v times as many
messages.

p=2, v=2, m=4 (lower case is chunk 1):
    r0: F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3
    r1: F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

The paper asks for m to be a multiple of p. Any m will do: there are as many groups as fit, and they share the rest, so
none is smaller than p unless m is. (With a smaller last group the ranks would wait for each other in a circle.)"""

from __future__ import annotations

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.ir.arrays import ActionArrays, ArrayOrder, B, F, ProgramArrays
from penstock.schedule.ir.order import Order, pass_of
from penstock.schedule.ir.placement import by_rank, looped
from penstock.schedule.ir.schedule import Action, Op, Stage


def interleaved(
    stages: int, microbatches: int, *, chunks: int = 2, group: int | None = None, in_flight: int | None = None
) -> Order:
    """Run groups of microbatches through the chunks of a rank in turn, one forward and one backward at a time.

    Args:
        stages: p, the ranks.
        microbatches: m.
        chunks: v, stages per rank.
        group: g, the microbatches that run through a chunk together; p if None.
        in_flight: passes of chunks in flight on the first rank, 2 (p - 1) + (v - 1) g + 1 if None; the last rank has
            (v - 1) g + 1, those between them go down evenly. Over slow links both are to be larger (`group` too:
            `penstock.simulate.least_in_flight`).
    """
    placed, groups = looped(stages, chunks), groups_of(stages, microbatches, group)
    last = (chunks - 1) * len(groups[0])
    ahead = ahead_on(stages, last, 2 * (stages - 1) if in_flight is None else in_flight - 1 - last)
    programs = [
        ProgramArrays(_alternate(*_in_turns(held, groups), ahead[rank]))
        for rank, held in enumerate(by_rank(placed, stages))
    ]
    return ArrayOrder.of(programs, placed)


def ahead_on(stages: int, last: int, more: int) -> list[int]:
    """Return forwards ahead on every rank: `last` on the last one, and up to so many more on those before, evenly."""
    return [last - (-max(more, 0) * behind) // max(stages - 1, 1) for behind in reversed(range(stages))]


def _in_turns(held: list[Stage], groups: list[range]) -> tuple[ActionArrays, ActionArrays]:
    """Return the forwards and the backwards of a rank, in their orders."""
    indices = np.array([stage.index for stage in held])[:, None]
    turns = [(indices, indices[::-1], np.array(group)) for group in groups]
    forwards = ActionArrays.joined([ActionArrays.of(F, chunks, ks) for chunks, _, ks in turns])
    return forwards, ActionArrays.joined([ActionArrays.of(B, chunks, ks) for _, chunks, ks in turns])


def _alternate(forwards: ActionArrays, backwards: ActionArrays, ahead: int) -> ActionArrays:
    """Return a warm-up of `ahead` forwards, then a forward and a backward in turn, then the remaining backwards."""
    slots = np.arange(len(forwards))
    order = np.argsort(np.concatenate([2 * slots, 2 * (slots + min(ahead, len(slots))) + 1]))
    return ActionArrays.joined([forwards, backwards])[order]


def groups_of(stages: int, microbatches: int, group: int | None) -> list[range]:
    """Return the microbatches of each group; the first groups are the larger ones.

    Raises:
        ScheduleError: the group size is smaller than p.
    """
    if group is not None and group < stages:
        raise ScheduleError(
            f"a group of microbatches must be at least as large as the number of stages, {stages}; got {group}"
        )
    count = max(microbatches // (group or stages), 1)
    size, larger = divmod(microbatches, count)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(count)]
    return [range(first, last) for first, last in zip([0, *ends], ends, strict=False)]


def passes_in_turns(held: list[Stage], groups: list[range], backward: Op) -> tuple[list[Action], list[Action]]:
    """Return the forwards and the backwards of a rank, in their orders."""
    turns = [(place, k) for group in groups for place in range(len(held)) for k in group]
    return [pass_of(Op.F, k, held[i]) for i, k in turns], [pass_of(backward, k, held[-1 - i]) for i, k in turns]
