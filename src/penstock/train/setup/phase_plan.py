"""Plans which method trains each batch: synchronous warm-up, main method, fallback.

A run has a main method; a synchronous one may precede it (PipeMare's T3, arXiv 1910.05124), and one may replace it from
a given batch on (the hybrid of Zhang and Abdelrahman) or when the main method has diverged. The plan follows from the
configuration and from decisions, never from when a rank receives something, so it is the same on every rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from penstock.runtime.update.divergence import Trouble
from penstock.train.config.schema import TrainConfig
from penstock.train.setup.early_stopping import known_in_run

MAIN, SYNC, FALLBACK = "main", "sync", "fallback"


class Fall(NamedTuple):
    """A period in which another method replaces the main one, which has diverged.

    Attributes:
        first: the first batch of the other method; earlier than the divergence if the run went back to a checkpoint.
        end: the batch from which the main method resumes; None for never.
        why: a description of the divergence.
    """

    first: int
    end: int | None
    why: str

    def holds(self, batch: int) -> bool:
        """Return whether a batch is trained by the other method."""
        return self.first <= batch < (math.inf if self.end is None else self.end)


class Course:
    """The phases of one run.

    Args:
        config: of the run.

    Attributes:
        falls: the divergences so far.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._sync, self._fallback = config.sync, config.fallback
        self._lag = known_in_run(config)
        self.falls: list[Fall] = []

    @property
    def _planned(self) -> Fall | None:
        """The fallback that the configuration asks for, if any."""
        first, count = self._fallback.at, self._fallback.batches
        if first is None:
            return None
        return Fall(first, None if count is None else first + count, "fallback.at")

    def phase(self, batch: int) -> str:
        """Return the phase of a batch: MAIN, SYNC or FALLBACK."""
        if batch < self._sync.batches:
            return SYNC
        planned = self._planned
        falls = [*self.falls, *([] if planned is None else [planned])]
        return FALLBACK if any(fall.holds(batch) for fall in falls) else MAIN

    def end(self, batch: int, trouble: Trouble | None = None) -> float:
        """Return the batch before which the phase of `batch` ends; infinite for none.

        Args:
            batch: any batch of the phase.
            trouble: the divergence seen in this phase, if any.
        """
        phase = self.phase(batch)
        end = min((b for b in self._borders() if b > batch and self.phase(b) != phase), default=math.inf)
        return end if trouble is None or phase != MAIN else min(end, max(trouble.batch + self._lag, batch))

    def begin(self, batch: int) -> int:
        """Return the first batch of the phase of `batch`."""
        phase = self.phase(batch)
        return max((b for b in self._borders() if 0 < b <= batch and self.phase(b - 1) != phase), default=0)

    def fall(self, first: int, batch: int, why: str) -> None:
        """Replace the main method, which has diverged, by the fallback.

        Args:
            first: the first batch of the fallback.
            batch: the number of batches trained. If the run goes back, the fallback must last beyond this, or the run
                might repeat itself for ever.
            why: a description of the divergence.
        """
        count = self._fallback.batches
        self.falls.append(Fall(first, None if count is None else batch + count, why))

    def why(self, batch: int) -> str:
        """Return why the phase of `batch` began, for display."""
        phase = self.phase(batch)
        if phase == SYNC:
            return f"the first {self._sync.batches} batches are synchronous"
        if phase == MAIN:
            return "the synchronous batches are over" if self.begin(batch) else "from the beginning"
        return next(
            (fall.why for fall in reversed(self.falls) if fall.holds(batch)), f"fallback.at={self._fallback.at}"
        )

    def state(self, batch: int) -> list[list[Any]]:
        """Return the data to store with a checkpoint of `batch`: earlier divergences; one at `batch` will recur."""
        return [list(fall) for fall in self.falls if fall.first < batch]

    def load(self, state: list[list[Any]]) -> None:
        """Restore the state of a checkpoint."""
        self.falls = [Fall(*fall) for fall in state]

    def _borders(self) -> set[int]:
        planned = self._planned
        falls = [*self.falls, *([] if planned is None else [planned])]
        ends = {fall.end for fall in falls if fall.end is not None}
        return {self._sync.batches, *(fall.first for fall in falls), *ends}
