"""BPipe (Kim et al., ICML 2023): 1F1B, in which the first ranks park activations with the last ones.

1F1B holds p - r microbatches on rank r, so ranks r and p - 1 - r hold p + 1 together. A rank of the first half that is
about to hold more than ceil((p + 2) / 2) sends the newest one to its partner (OFFLOAD there, HOLD here) and has it back
(RETURN, FETCH) before its backward. The partner takes activations in while it computes. Where its HOLD and RETURN
stand is chosen for backwards that take two forwards: then forward k of rank r begins at r + k in the warm-up and at
r + 3 k afterwards, backward k at 3 p - 2 - 2 r + 3 k. From 9 ranks on a RETURN comes late where backwards are much
shorter or messages much longer than forwards: p = 16 with F = B takes a tenth longer than 1F1B.

p=4, m=6, without the stages:
    r0: F0 F1 F2 OFFLOAD2 F3 B0 FETCH2 F4 ...
    r3: F0 HOLD2 B0 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Action, Op, Payload, Stage
from penstock.schedule.orders.one_f_one_b import one_f_one_b


class _Parked(NamedTuple):
    """A HOLD or RETURN that a rank does for its partner, with the time at which the partner wants it, in forwards."""

    time: int
    op: Op
    microbatch: int


def bpipe(stages: int, microbatches: int) -> Order:
    """1F1B in which no rank holds more than ceil((p + 2) / 2) microbatches: ranks r and p - 1 - r share their memory.

    Args:
        stages: p, the ranks.
        microbatches: m.
    """
    order, limit = one_f_one_b(stages, microbatches), -(-(stages + 2) // 2)
    programs: list[list[Action]] = [list(program.period) for program in order.programs]
    for stage in order.stages[: stages // 2]:
        partner = order.stages[stages - 1 - stage.rank]
        programs[stage.rank], wanted = _parking(programs[stage.rank], stage, partner, stages, limit)
        programs[partner.rank] = _helping(programs[partner.rank], partner, stage, stages, wanted)
    return make_order(programs)


def _starts(action: Action, stages: int) -> int:
    """When a pass of 1F1B begins, in forwards."""
    r, k = action.stage.rank, action.unit.first
    if action.op is Op.F:
        return r + (k if k < stages - r else 3 * k)
    return 3 * stages - 2 - 2 * r + 3 * k


def _parking(
    passes: Sequence[Action], stage: Stage, partner: Stage, stages: int, limit: int
) -> tuple[list[Action], list[_Parked]]:
    """The passes of a rank with at most `limit` microbatches on it, and what that takes of its partner."""
    found: list[Action] = []
    wanted: list[_Parked] = []
    here: list[int] = []
    away: list[int] = []  # the oldest first
    for place, action in enumerate(passes):
        k = action.unit.first
        if action.op is Op.F:
            if len(here) == limit:
                away.append(here.pop())
                found.append(_move(Op.OFFLOAD, away[-1], stage, partner))
                wanted.append(_Parked(_starts(action, stages), Op.HOLD, away[-1]))
            here.append(k)
            found.append(action)
            continue
        found.append(action)
        here.remove(k)
        following = next((a.unit.first for a in passes[place + 1 :] if a.op is Op.B), None)
        if following in away:
            away.remove(following)
            here.insert(0, following)
            found.append(_move(Op.FETCH, following, stage, partner))
            wanted.append(_Parked(_starts(action, stages), Op.RETURN, following))
    return found, wanted


def _helping(
    passes: Sequence[Action], stage: Stage, partner: Stage, stages: int, wanted: Sequence[_Parked]
) -> list[Action]:
    """The passes of a partner, with its part before the first one that begins no earlier than it is wanted."""
    found: list[Action] = []
    rest = list(wanted)
    for action in passes:
        while rest and rest[0].time <= _starts(action, stages):
            found.append(_move(rest[0].op, rest[0].microbatch, stage, partner))
            del rest[0]
        found.append(action)
    return found + [_move(op, k, stage, partner) for _, op, k in rest]


def _move(op: Op, microbatch: int, stage: Stage, partner: Stage) -> Action:
    return pass_of(op, microbatch, stage)._replace(peer=partner, payload=Payload.PARKED)
