"""When a run ends early because evaluations find nothing better any more.

The end is a function of what evaluations have found, not of when a rank hears of it, so it is the same batch however
often the run was started again on the way. All ranks that read data hear of every evaluation a few batches later.
"""

from __future__ import annotations

import math

_HEARD = 6  # batches after the border of an evaluation, until when its result is everywhere: with slack


def heard_after(depth: int, microbatches: int) -> int:
    """Batches after a batch, until when whoever reads data has heard what was decided about it.

    Args:
        depth, microbatches: of the pipeline: so many batches may be under way.
    """
    return _HEARD + -(-(depth - 1) // microbatches)


class Patience:
    """Counts evaluations that are no better than the best so far.

    Args:
        limit: evaluations in a row without a better loss; None for no end.
        depth, microbatches: of the pipeline: so many batches may be under way.

    Attributes:
        end: the batch before which the run ends; infinite while there is hope.
    """

    def __init__(self, limit: int | None, depth: int = 1, microbatches: int = 1) -> None:
        self.end = math.inf
        self._limit, self._best, self._worse, self._seen = limit, math.inf, 0, -1
        self._lag = heard_after(depth, microbatches)

    def hear(self, version: int, loss: float | None) -> None:
        """Take notice of an evaluation, once of each version: they are found again after a restart."""
        if version <= self._seen:
            return
        self._seen = version
        if loss is not None and loss < self._best:
            self._best, self._worse = loss, 0
        else:
            self._worse += 1
        if self._limit is not None and self._worse >= self._limit:
            self.end = min(self.end, version + self._lag)
