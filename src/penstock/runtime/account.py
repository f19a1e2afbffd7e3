"""What the parameter-sized memory of a rank is used for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.runtime.node import NodeRuntime
from penstock.runtime.recorder import Recorder

_OPTIMIZER = "optimizer"


def take_down(recorder: Recorder, nodes: Iterable[NodeRuntime], *, optimizers: bool) -> None:
    """Tell a recorder what the stages of its rank hold now, by what for, in bytes.

    Args:
        recorder: of the rank.
        nodes: its stages.
        optimizers: their states may have changed since the last time, too.
    """
    totals: Counter[str] = Counter()
    for node in nodes:
        totals.update(node.bytes_by_role())
        if optimizers and node.updater is not None:
            totals[_OPTIMIZER] += node.updater.nbytes
    roles = totals.keys() - {_OPTIMIZER}
    for role in recorder.roles - roles:  # of a method before this one
        recorder.hold(role, 0)
    recorder.roles = roles
    for role, nbytes in totals.items():
        recorder.hold(role, nbytes)
