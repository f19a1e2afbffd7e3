"""By which method each batch of a run is trained, as far as it is known.

A run has a main method; a synchronous one may come before it (PipeMare's T3, arXiv 1910.05124), and one may take its
place from a batch on (the hybrid of Zhang and Abdelrahman), or where the main method has diverged. All of it follows
from the configuration and from decisions, never from when a rank hears of something; so it is the same on every rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from penstock.runtime.update.divergence import Trouble
from penstock.train.config.schema import TrainConfig
from penstock.train.setup.early_stopping import heard_after

MAIN, SYNC, FALLBACK = "main", "sync", "fallback"


class Fall(NamedTuple):
    """The main method has diverged, and another one has taken its place.

    Attributes:
        first: the first batch of the other one; an earlier one than it was at, where the run went back.
        end: the batch from which the main method goes on; None for never.
        why: what the divergence was.
    """

    first: int
    end: int | None
    why: str

    def holds(self, batch: int) -> bool:
        """Whether a batch is trained by the other method."""
        return self.first <= batch < (math.inf if self.end is None else self.end)


class Course:
    """Of one run.

    Args:
        config: of the run.

    Attributes:
        falls: that have happened.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._sync, self._fallback = config.sync, config.fallback
        self._lag = heard_after(config.stages, config.microbatches)
        self.falls: list[Fall] = []

    @property
    def _planned(self) -> Fall | None:
        """That of the configuration."""
        first, count = self._fallback.at, self._fallback.batches
        if first is None:
            return None
        return Fall(first, None if count is None else first + count, "fallback.at")

    def phase(self, batch: int) -> str:
        """What a batch belongs to: MAIN, SYNC or FALLBACK."""
        if batch < self._sync.batches:
            return SYNC
        planned = self._planned
        falls = [*self.falls, *([] if planned is None else [planned])]
        return FALLBACK if any(fall.holds(batch) for fall in falls) else MAIN

    def end(self, batch: int, trouble: Trouble | None = None) -> float:
        """The batch before which the phase of `batch` ends; infinite for none.

        Args:
            batch: which.
            trouble: what has been seen in this phase.
        """
        phase = self.phase(batch)
        end = min((b for b in self._borders() if b > batch and self.phase(b) != phase), default=math.inf)
        return end if trouble is None or phase != MAIN else min(end, max(trouble.batch + self._lag, batch))

    def begin(self, batch: int) -> int:
        """The first batch of the phase of `batch`."""
        phase = self.phase(batch)
        return max((b for b in self._borders() if 0 < b <= batch and self.phase(b - 1) != phase), default=0)

    def fall(self, first: int, batch: int, why: str) -> None:
        """The main method has diverged, and another one is to go on.

        Args:
            first: where it begins.
            batch: how far the run has come. Where it goes back, the other method is to come beyond that, or the run
                might go round in a circle.
            why: what the divergence was.
        """
        count = self._fallback.batches
        self.falls.append(Fall(first, None if count is None else batch + count, why))

    def why(self, batch: int) -> str:
        """Why the phase of `batch` began there, for people."""
        phase = self.phase(batch)
        if phase == SYNC:
            return f"the first {self._sync.batches} batches are synchronous"
        if phase == MAIN:
            return "the synchronous batches are over" if self.begin(batch) else "from the beginning"
        return next(
            (fall.why for fall in reversed(self.falls) if fall.holds(batch)), f"fallback.at={self._fallback.at}"
        )

    def state(self, batch: int) -> list[list[Any]]:
        """What a checkpoint of `batch` keeps: the falls before it. One at it is found again."""
        return [list(fall) for fall in self.falls if fall.first < batch]

    def load(self, state: list[list[Any]]) -> None:
        """Go on where `state` was taken."""
        self.falls = [Fall(*fall) for fall in state]

    def _borders(self) -> set[int]:
        planned = self._planned
        falls = [*self.falls, *([] if planned is None else [planned])]
        ends = {fall.end for fall in falls if fall.end is not None}
        return {self._sync.batches, *(fall.first for fall in falls), *ends}
