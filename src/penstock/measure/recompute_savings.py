"""What recomputing stages can save on a rank, and what else takes its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.byte_sizes import human_bytes
from penstock.runtime.plan.plan import PipelinePlan
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op, Stage, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.proof.proof import Proof
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.stage_sizes import StageBytes
from penstock.stage.autograd.recompute import RecomputeMode

SETTLED = 3
"""Batches after the first one that repeats, in which the last new peak comes."""
_KEPT = (HeldKind.GRAPH, HeldKind.SAVED, HeldKind.INPUT)  # of a microbatch in flight, by what is recomputed
_AGAIN = (HeldKind.GRAPH, HeldKind.BACKWARD)  # during its backward


class Savings:
    """The most that recomputing stages can save on a rank: what their microbatches in flight hold less.

    A stage that is recomputed as a whole reads its weights at other moments, so where these are gathered they count,
    too.

    Args:
        plan: that recomputes nothing.
        sizes: of its stages.
    """

    def __init__(self, plan: PipelinePlan, sizes: Mapping[int, StageBytes]) -> None:
        self._schedule, self._sizes = plan.schedule, sizes
        self._in_flight = {stage: _most_in_flight(plan.proof, stage) for stage in plan.schedule.stages}

    def most(self, way: Mapping[int, RecomputeMode], rank: int) -> int:
        """Return the bytes."""
        saved = 0
        for stage in self._schedule.on_rank(rank):
            mode = way.get(stage.index, "none")
            if mode != "none":
                kept = HeldKind.INPUT if mode == "stage" else HeldKind.SAVED
                less = (max(p[HeldKind.GRAPH], p[HeldKind.HALVED]) - p[kept] for p in self._passes(stage))
                saved += self._in_flight[stage] * max(0, *less)
                if mode == "stage" and self._schedule.sharding.level is Level.FULL:
                    saved += self._sizes[stage.index].version
        return saved

    def rest(self, rank: int) -> str:
        """Say what a rank holds however much is recomputed, and what would make it less."""
        stages = self._schedule.on_rank(rank)
        inputs = sum(self._in_flight[stage] * max(_least(p, _KEPT) for p in self._passes(stage)) for stage in stages)
        once = max(_least(p, _AGAIN) for stage in stages for p in self._passes(stage))
        said = f"Of that are {human_bytes(inputs)} inputs of microbatches in flight, and {human_bytes(once)} what a "
        said += "backward of one has made again: smaller microbatches take less of both"
        moments = sum(max(self._sizes[stage.index].optimizer) for stage in stages)
        if not moments:
            return said
        divided = self._schedule.sharding.level is not Level.NONE
        how = "more width divides it further" if divided else "sharding divides it among parallel pipelines (width)"
        return f"{said}; {human_bytes(moments)} is the optimizer's state: {how}"

    def _passes(self, stage: Stage) -> list[Mapping[HeldKind, int]]:
        """Return what passes of a microbatch take on a stage; of each slice where sequences come in slices."""
        sizes = self._sizes[stage.index]
        return [each.passes for each in sizes.slices] or [sizes.passes]


def _least(passes: Mapping[HeldKind, int], kinds: Sequence[HeldKind]) -> int:
    """Return the least bytes of some kinds, of those that were measured."""
    return min((passes[kind] for kind in kinds if kind in passes), default=0)


def _most_in_flight(proof: Proof, stage: Stage) -> int:
    """Return the most microbatches of a stage between forward and the end of their backward, in a span."""
    held = most = 0
    for action in actions_of(proof.schedule, stage.rank, proof.steady_from + SETTLED):
        for p in passes(action):
            if p.stage == stage and p.op in (Op.F, Op.B, Op.W):
                held += p.unit.count if p.op is Op.F else -p.unit.count
                most = max(most, held)
    return most
