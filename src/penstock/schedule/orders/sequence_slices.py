"""Slices of sequences as units: a slice's forward needs the keys and values of the slices before it (causal attention).

Seq1F1B (Sun et al., arXiv 2406.03488): 1F1B over slices. Forwards run in the order (microbatch, slice), backwards take
the slices of a microbatch from the last to the first. Rank r runs p - r - 2 + k slices ahead. The bubble and the
activations are those of 1F1B, over k.

TeraPipe (Li et al., arXiv 2102.07988): GPipe over slices.

p=2, m=2, k=2:
    Seq1F1B  r0: F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0      TeraPipe  r0: F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0
             r1: F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0                r1: F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0
"""

from __future__ import annotations

from penstock.schedule.ir.order import Order, alternate, make_order
from penstock.schedule.ir.schedule import Action, Op, Stage, Unit, straight


def seq1f1b(stages: int, microbatches: int, *, slices: int = 2) -> Order:
    """Run 1F1B over slices of sequences.

    Args:
        stages: p, the ranks.
        microbatches: m.
        slices: k, the number of slices of each sequence.
    """
    return make_order(
        [
            alternate(*_passes(stage, microbatches, slices), stages - stage.rank - 2 + slices)
            for stage in straight(stages)
        ]
    )


def terapipe(stages: int, microbatches: int, *, slices: int = 2) -> Order:
    """Run GPipe over slices of sequences.

    Args:
        stages: p, the ranks.
        microbatches: m.
        slices: k, the number of slices of each sequence.
    """
    return make_order(
        [[a for half in _passes(stage, microbatches, slices) for a in half] for stage in straight(stages)]
    )


def _passes(stage: Stage, microbatches: int, slices: int) -> tuple[list[Action], list[Action]]:
    """Return all forwards and all backwards of a rank, in their orders."""
    forwards = [
        Action(Op.F, stage, Unit(k, slice=(j, slices) if slices > 1 else None))
        for k in range(microbatches)
        for j in range(slices)
    ]
    backwards = [
        Action(Op.B, stage, Unit(k, slice=(j, slices) if slices > 1 else None))
        for k in range(microbatches)
        for j in reversed(range(slices))
    ]
    return forwards, backwards
