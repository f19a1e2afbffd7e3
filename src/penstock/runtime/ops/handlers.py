"""The table of operations that the runtime offers, each with what binds its instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from penstock.runtime.ops.batch_ops import (
    AverageAction,
    DecideAction,
    GatherAction,
    ReduceAction,
    ReleaseAction,
    TieAction,
    bind_step,
)
from penstock.runtime.ops.bound import Bound
from penstock.runtime.ops.messages import Receive, Send
from penstock.runtime.ops.moves import SwapAction, bind_move
from penstock.runtime.ops.passes import Backward, Forward, Predict, RecomputeForward, WeightBackward, bind_forward
from penstock.runtime.ops.post_validation import Redo, Validate
from penstock.runtime.ops.sharded_passes import HeldBackward, HeldForward, HeldRecomputeForward, HeldWeightBackward
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.ir.schedule import Op
from penstock.schedule.machine.instructions import Instruction, LoweredProgram

HANDLERS: Mapping[Op, Callable[[Instruction, RankSpan], Bound]] = MappingProxyType(
    {
        Op.SEND: Send,
        Op.RECV: Receive,
        Op.F: bind_forward,
        Op.B: Backward,
        Op.I: Backward,
        Op.W: WeightBackward,
        Op.R: RecomputeForward,
        Op.REDO: Redo,
        Op.PREDICT: Predict,
        Op.REDUCE: ReduceAction,
        Op.TIE: TieAction,
        Op.DECIDE: DecideAction,
        Op.STEP: bind_step,
        Op.GATHER: GatherAction,
        Op.RELEASE: ReleaseAction,
        Op.VALIDATE: Validate,
        Op.AVERAGE: AverageAction,
        Op.OFFLOAD: bind_move,
        Op.FETCH: bind_move,
        Op.HOLD: bind_move,
        Op.RETURN: bind_move,
        Op.SWAPIN: SwapAction,
        Op.SWAPOUT: SwapAction,
    }
)


_HELD: Mapping[Op, Callable[[Instruction, RankSpan], Bound]] = MappingProxyType(
    {
        Op.F: HeldForward,
        Op.B: HeldBackward,
        Op.I: HeldBackward,
        Op.W: HeldWeightBackward,
        Op.R: HeldRecomputeForward,
    }
)
"""Passes of trained stages where weights are shards, or gradients wait for room."""


def bind(program: LoweredProgram, span: RankSpan) -> list[list[Bound]]:
    """Bind the instructions of a rank: of its period, its epilogue, and the period with a rejected version."""
    found = [[_handler(instruction, span)(instruction, span) for instruction in part] for part in program]
    for part, bounds in zip(program, found, strict=True):
        if program.places_reports:
            for instruction, bound in zip(part, bounds, strict=True):
                bound.report_lag = instruction.report_lag
        else:
            _answer_first(bounds)
    return found


def _answer_first(bounds: Sequence[Bound]) -> None:
    """Let no report go before the backward that follows the loss: the stages before wait for its gradient."""
    for before, after in pairwise(bound for bound in bounds if bound.op not in (Op.SEND, Op.RECV)):
        if isinstance(before, Forward) and isinstance(after, Backward) and before.begins_backward(after):
            after.report_lag = None  # and it waits for nothing


def _handler(instruction: Instruction, span: RankSpan) -> Callable[[Instruction, RankSpan], Bound]:
    action, gathers = instruction.action, span.updates.gathers
    if gathers is not None and gathers.holds_up_passes and action.op in _HELD and span.stages[action.stage].trained:
        return _HELD[action.op]
    return HANDLERS[action.op]
