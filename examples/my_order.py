"""A custom order: `penstock show --file examples/my_order.py --stages 3 --microbatches 4` proves and draws it.

Each rank runs two more forwards ahead than in 1F1B, so that short delays of its neighbours do not stop it.
"""

from __future__ import annotations


def order(stages: int, microbatches: int, *, more: int = 2) -> list[str]:
    """Return the passes of each rank, as text."""
    programs = []
    for rank in range(stages):
        ahead = min(stages - rank - 1 + more, microbatches)
        passes = [f"F{k}" for k in range(ahead)]
        for k in range(microbatches):
            if ahead + k < microbatches:
                passes.append(f"F{ahead + k}")
            passes.append(f"B{k}")
        programs.append(" ".join(passes))
    return programs
