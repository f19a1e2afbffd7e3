"""Early stopping: ends a run when evaluations no longer improve.

The end is a function of the evaluations' results, not of when a rank receives them, so it is the same batch however
often the run was restarted. All ranks that read data receive every result a few batches after the evaluation.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.simulate.auto_in_flight import most_of_a_run
from penstock.train.config.schema import TrainConfig

_KNOWN = 6  # batches after an evaluation until its result has reached every rank, with slack


def known_after(in_flight: int, microbatches: int) -> int:
    """Return after how many batches a decision on a batch has reached every rank that reads data.

    Args:
        in_flight: microbatches in flight on a rank at most.
        microbatches: of a batch.
    """
    return _KNOWN + -(-(in_flight - 1) // microbatches)


def known_in_run(config: TrainConfig) -> int:
    """Return that number of batches for a run, whatever its links will ask for."""
    stages = config.stages
    given: Any = config.options.get("in_flight", 0)
    if isinstance(given, str):
        most = most_of_a_run(stages, config.microbatches)
    else:
        most = max(given) if isinstance(given, tuple) else given
    return known_after(max(stages, most), config.microbatches)


class Patience:
    """Counts consecutive evaluations without a better loss.

    Args:
        limit: how many of them end the run; None for no end.
        known_after: the number of batches after which the result of an evaluation is known everywhere.

    Attributes:
        end: the batch before which the run ends; infinite until that is decided.
    """

    def __init__(self, limit: int | None, known_after: int = _KNOWN) -> None:
        self.end = math.inf
        self._limit, self._best, self._worse, self._seen = limit, math.inf, 0, -1
        self._lag = known_after

    def record(self, version: int, loss: float | None) -> None:
        """Record the loss of a version; each version counts once, as results recur after a restart."""
        if version <= self._seen:
            return
        self._seen = version
        if loss is not None and loss < self._best:
            self._best, self._worse = loss, 0
        else:
            self._worse += 1
        if self._limit is not None and self._worse >= self._limit:
            self.end = min(self.end, version + self._lag)
