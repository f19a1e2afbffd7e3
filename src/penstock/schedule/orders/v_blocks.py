"""Building blocks on a V of two chunks per rank (Qi et al., arXiv 2405.15362, sec. 3.1 and app. A).

A block says in which slots the passes of one microbatch run. It repeats every six slots (F, I and W of two chunks), so
no two passes of a rank may fall into the same slot modulo six; weights' backwards take what is free. From rank to rank
on the way forth passes come later by the same 1 to 5 slots, which may be fewer from some rank on; on the way back each
rank follows the one before at once. How long activations live in a block decides how many are held.
"""

from __future__ import annotations

from itertools import accumulate, combinations_with_replacement, permutations

PERIOD = 6

Block = tuple[tuple[int, int, int, int], ...]
"""Per rank, the slots of F of chunk 0 and 1 and of I of chunk 1 and 0."""


def building_blocks(ranks: int) -> list[Block]:
    """All blocks of so many ranks, each once."""
    steps = {
        (far,) * count + (near,) * (ranks - 1 - count)
        for near, far in combinations_with_replacement(range(1, PERIOD), 2)
        for count in range(ranks)
    }
    made = (_block(places, forth) for places in permutations(range(1, PERIOD), 3) for forth in sorted(steps))
    return list(dict.fromkeys(block for block in made if all(len({s % PERIOD for s in row}) == 4 for row in block)))


def _block(places: tuple[int, ...], steps: tuple[int, ...]) -> Block:
    """The block whose passes begin on rank 0 in these places of a period, the first forward in place 0.

    Args:
        places: of F of chunk 1, I of chunk 1 and I of chunk 0.
        steps: slots from each rank to the next one on the way forth.
    """
    forth, back = list(accumulate(steps, initial=0)), list(range(len(steps), -1, -1))
    turn, home, end = places
    forward_1 = _after(forth[-1], turn - back[0])
    backward_1 = _after(forward_1 + back[0], home)
    backward_0 = _after(backward_1 + forth[-1], end - back[0])
    return tuple(
        (down, forward_1 + up, backward_1 + down, backward_0 + up) for down, up in zip(forth, back, strict=True)
    )


def _after(slot: int, place: int) -> int:
    """The first slot after another one in a place of a period."""
    return slot + 1 + (place - slot - 1) % PERIOD
