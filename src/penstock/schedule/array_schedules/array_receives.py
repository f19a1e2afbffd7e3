"""Where the RECVs of a schedule of arrays are posted: as `penstock.schedule.lowering.receives` finds it, in arrays.

All actions count for the lookahead here, as there are passes and STEPs only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.instruction_arrays import Flags, Numbers
from penstock.schedule.ir.arrays import ActionArrays, F
from penstock.schedule.lowering.receives import posts_out_of_order


class LaneUse(NamedTuple):
    """The messages of a lane in one part of its target's program, in the order in which they are sent.

    Attributes:
        route: of each message.
        lag: how many periods before its consumer's it is sent.
        position: of its consumer.
        first: its microbatch.
    """

    route: Numbers
    lag: Numbers
    position: Numbers
    first: Numbers


class PlacedReceives(NamedTuple):
    """The RECVs of a lane in one part of its target's program, in the order in which they are posted.

    Attributes:
        place: the position of the action before which each stands.
        route, first: of its message.
        ahead: whether it is for the next period.
    """

    place: Numbers
    route: Numbers
    first: Numbers
    ahead: Flags


def in_epilogue(use: LaneUse, window: int, lookahead: int) -> PlacedReceives:
    """Return the RECVs of a lane in an epilogue; arguments as of `in_period`."""
    posts = _posts(use.position.astype(np.int64), window, lookahead)
    return PlacedReceives(np.maximum(posts, 0).astype(np.int32), use.route, use.first, np.zeros(len(posts), dtype=bool))


def in_period(use: LaneUse, period: ActionArrays, window: int, lookahead: int, m: int) -> PlacedReceives:
    """Return the RECVs of a lane in a period.

    Args:
        use: its messages.
        period: of the rank that receives them.
        window: messages that may be posted and not used yet.
        lookahead: actions between a RECV and its consumer, at most.
        m: microbatches.

    Raises:
        NotCompiledError: messages are consumed in an order that needs more than `window` buffers.
    """
    length, count = len(period), len(use.position)
    before = -(-window // count)  # enough earlier periods to see the steady state
    once = use.lag.astype(np.int64) * length + use.position
    if (np.diff(once) > 0).all() and once[-1] < once[0] + length:  # used in the order sent
        freed = before * count + np.arange(count) - window
        steady = np.maximum(once + before * length - lookahead, once[freed % count] + (freed // count) * length + 1)
    else:
        positions = (once + length * np.arange(before + 2)[:, None]).ravel()
        steady = _posts(positions, window, lookahead)[before * count : (before + 1) * count]
    relative = steady - (before + use.lag) * length  # to the start of the consumer's period
    own = np.flatnonzero((period.op == F) & (period.first >= 0))
    early = np.maximum(relative + length, (own[0] if len(own) else length) + 1)
    ahead = (relative < 0) & (early < length)
    place = np.where(ahead, early, np.maximum(relative, 0))
    order = np.lexsort((np.arange(count), ahead - use.lag, place))
    first = use.first + m * ahead
    return PlacedReceives(place[order].astype(np.int32), use.route[order], first[order].astype(np.int32), ahead[order])


def _posts(positions: Numbers, window: int, lookahead: int) -> Numbers:
    if (np.diff(positions) > 0).all():  # used in the order sent
        posts = positions - lookahead
        posts[window:] = np.maximum(posts[window:], positions[: max(len(posts) - window, 0)] + 1)
        return posts
    found = posts_out_of_order(positions.tolist(), window, lookahead)
    if found is None:
        raise NotCompiledError("messages are used in an order that needs more buffers")
    return np.array(found)
