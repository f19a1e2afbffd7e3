"""V-Half and V-Min (Qi et al., arXiv 2405.15362): two chunks per rank on a V, with half or a third of 1F1B's
activations.

A *building block* places the passes of one microbatch, in slots of one chunk's pass; it repeats every 6 slots (F, I and
W of two chunks), and how long activations live in it decides how many there are. On rank i, with chunk 1 as the way
back:

                F of chunk 0   F of chunk 1   I of chunk 1      I of chunk 0      d
    V-Min       i              2p-1-i         2p+d+i            4p+d-1-i          2 if 3 divides p, else 0
    V-Half      2i             3p-2-i         3p+d+2i-1         6p+d-2-i          3 if p is even, else 0

The weights' backwards fill what is free. The blocks are then pushed together: every rank runs its passes in this order
as soon as they are ready, and a weights' backward where none is or memory is full. Passes of the first and the last p
microbatches may overtake others of up to d slots before them: d keeps blocks apart that only meet in the steady state.

V-Half holds (p + 2) // 2 microbatches on every rank, V-Min at most (p + 4) // 3: where 3 does not divide p + 1 on every
rank, else less on some (p = 5: 2.5, 3, 3, 2, 3). With F = I = W their bubbles are, in F, (3p - 7) / 2 (p even) or
(3p - 4) / 2, and (4p - 5) / 2 or (4p - 7) / 2 (3 divides p), from p // 2 + 1 microbatches on and from 2 on. V-Half has
one F more where m = p + 1 and p is even; with p = 2 it has 1/2. (With p = 4 and m = 8 it has no more if passes may
overtake others of one more slot, so that is tried where the bubble is longer.) Where F, I and W differ, V-Min's grows
with m."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, zigzag
from penstock.schedule.ir.schedule import Action, Op, Stage

_PERIOD = 6


def v_half(stages: int, microbatches: int) -> Order:
    """V-Half: at most (p + 2) // 2 microbatches on a rank, about half of what 1F1B's first rank holds.

    Args:
        stages: p, the ranks; each has two stages.
        microbatches: m.
    """
    d, limit = 0 if stages % 2 else 3, 2 * ((stages + 2) // 2)
    blocks = [
        _Block(2 * i, 3 * stages - 2 - i, 3 * stages + d + 2 * i - 1, 6 * stages + d - 2 - i) for i in range(stages)
    ]
    pushed = _push_together(blocks, microbatches, limit, slack=d)
    if pushed.slots > 6 * microbatches + 3 * stages - (4 if stages % 2 else 7):
        further = _push_together(blocks, microbatches, limit, slack=d + 1)
        pushed = min(pushed, further, key=lambda each: each.slots)
    return pushed.order


def v_min(stages: int, microbatches: int) -> Order:
    """V-Min: at most (p + 4) // 3 microbatches on a rank, about a third of what 1F1B's first rank holds.

    Args:
        stages: p, the ranks; each has two stages.
        microbatches: m.
    """
    d = 0 if stages % 3 else 2
    blocks = [_Block(i, 2 * stages - 1 - i, 2 * stages + d + i, 4 * stages + d - 1 - i) for i in range(stages)]
    return _push_together(blocks, microbatches, limit=2 * ((stages + 4) // 3), slack=d).order


class _Block(NamedTuple):
    """The slots of a microbatch's passes on one rank."""

    forward_0: int
    forward_1: int
    backward_1: int
    backward_0: int

    @property
    def kinds(self) -> tuple[tuple[int, Op, int], ...]:
        """Slot, pass and chunk."""
        return tuple(zip(self, (Op.F, Op.F, Op.I, Op.I), (0, 1, 1, 0), strict=True))


class _RankProgress:
    """Chooses the passes of a rank one by one, and keeps what it holds.

    Args:
        held: its stages.
        block: of a microbatch.
        microbatches: m.
        limit: chunks' activations that may be held.
        slack: slots that a pass of the first and the last p microbatches may overtake.
    """

    def __init__(self, held: list[Stage], block: _Block, microbatches: int, limit: int, slack: int) -> None:
        self.found: list[Action] = []
        self._held, self._m, self._limit, self._slack = held, microbatches, limit, slack
        self._stages = (held[0].index + held[1].index + 1) // 2
        self._kinds, self._next = block.kinds, dict.fromkeys(block.kinds, 0)
        self._weights: deque[Action] = deque()
        self._active = [0, 0]  # activations of each chunk

    def choose(self, ready: dict[tuple[Op, int, int], int], now: int) -> Action | None:
        """The pass to run now, if there is one.

        Args:
            ready: (pass, stage, microbatch) -> when what it gives is there.
            now: the slot.
        """
        waiting = {kind: kind[0] + _PERIOD * k for kind, k in self._next.items() if k < self._m}
        first = min(waiting.values(), default=0)
        for kind, slot in sorted(waiting.items(), key=lambda item: item[1]):
            _, op, chunk = kind
            k = self._next[kind]
            action = pass_of(op, k, self._held[chunk])
            at_an_end = k < self._stages or k >= self._m - self._stages
            if (
                slot <= first + at_an_end * self._slack
                and self._has_room(op, chunk)
                and self._is_ready(action, ready, now)
            ):
                self._next[kind] += 1
                self._take(action, chunk)
                return action
        if not self._weights:
            return None
        action = self._weights.popleft()
        self._take(action, self._held.index(action.stage))
        return action

    def _take(self, action: Action, chunk: int) -> None:
        self.found.append(action)
        if action.op is Op.I:
            self._weights.append(action._replace(op=Op.W))
        else:
            self._active[chunk] += 1 if action.op is Op.F else -1

    def _has_room(self, op: Op, chunk: int) -> bool:
        """A forward of chunk 0 leaves room for one of chunk 1, without which nothing would ever come back."""
        return op is not Op.F or sum(self._active) < self._limit - (chunk == 0 and not self._active[1])

    def _is_ready(self, action: Action, ready: dict[tuple[Op, int, int], int], now: int) -> bool:
        (index, _, _), k, last = action.stage, action.unit.first, self._held[0].index + self._held[1].index
        needs = [(Op.F, index - 1, k)] if action.op is Op.F else [(Op.F, index, k), (Op.I, index + 1, k)]
        return all(ready.get(need, now + 1) <= now for need in needs if 0 <= need[1] <= last)


class _Pushed(NamedTuple):
    """Blocks that are pushed together, and how many slots they take."""

    order: Order
    slots: int


def _push_together(blocks: list[_Block], microbatches: int, limit: int, slack: int) -> _Pushed:
    placed = zigzag(len(blocks), 2)
    ranks = [
        _RankProgress(held, block, microbatches, limit, slack)
        for held, block in zip(by_rank(placed, len(blocks)), blocks, strict=True)
    ]
    ready: dict[tuple[Op, int, int], int] = {}
    now = 0
    while any(len(rank.found) < 6 * microbatches for rank in ranks):
        for rank in ranks:
            action = rank.choose(ready, now)
            if action is not None:
                ready[action.op, action.stage.index, action.unit.first] = now + 1
        now += 1
    return _Pushed(make_order([rank.found for rank in ranks], stages=placed), now)
