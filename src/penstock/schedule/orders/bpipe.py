"""BPipe (Kim et al., ICML 2023): 1F1B, in which the first ranks park activations with the last ones.

1F1B holds p - r microbatches on rank r, so ranks r and p - 1 - r hold p + 1 together. A rank of the first half that is
about to hold more than ceil((p + 2) / 2) sends the newest one away, and fetches it again before its backward.

p=4, m=6:
    r0: F0 F1 F2 OFFLOAD2 F3 B0 FETCH2 F4 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.ir import Action, Op
from penstock.schedule.order import Order, make_order, pass_of
from penstock.schedule.orders.one_f_one_b import one_f_one_b


def bpipe(stages: int, microbatches: int) -> Order:
    """1F1B with activations balanced between pairs of ranks."""
    order, limit = one_f_one_b(stages, microbatches), -(-(stages + 2) // 2)
    return make_order([_parked(program.period, limit) for program in order.programs])


def _parked(passes: Sequence[Action], limit: int) -> list[Action]:
    """The passes of a rank with at most `limit` microbatches on it."""
    found: list[Action] = []
    here: list[int] = []
    away: list[int] = []  # the oldest first
    for place, action in enumerate(passes):
        k = action.unit.first
        if action.op is Op.F:
            if len(here) == limit:
                away.append(here.pop())
                found.append(pass_of(Op.OFFLOAD, away[-1], action.node))
            here.append(k)
            found.append(action)
            continue
        found.append(action)
        here.remove(k)
        following = next((a.unit.first for a in passes[place + 1 :] if a.op is Op.B), None)
        if following in away:
            away.remove(following)
            here.insert(0, following)
            found.append(pass_of(Op.FETCH, following, action.node))
    return found
