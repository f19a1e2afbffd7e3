"""Switches a running pipeline between the methods of a run's phases, and goes back to a checkpoint after divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import CheckpointError
from penstock.runtime.from_checked_plan import continue_under
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.divergence import Trouble
from penstock.train.observer import Switched
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.phase_plan import MAIN, Course


class Phases:
    """The phases of one run; all ranks make the same calls together.

    Args:
        prepared: the run.
        pipeline: with the method of the first batch.
        checkpoints: to go back to.
        gather: returns the values of all ranks.
    """

    def __init__(
        self, prepared: Prepared, pipeline: Pipeline, checkpoints: Checkpoints, gather: Callable[[Any], list[Any]]
    ) -> None:
        self._prepared, self._pipeline, self._checkpoints, self._gather = prepared, pipeline, checkpoints, gather
        self._course = Course(prepared.config)
        self._present = self._course.phase(0)
        self._begun = -1  # the first batch of the present phase
        self._came: int | None = None  # the batches trained before the run went back

    def state(self, batch: int) -> dict[str, Any]:
        """Return the data to store with a checkpoint of `batch`."""
        falls = self._course.state(batch)
        return {"falls": falls} if falls else {}

    def ready(self, batch: int, kept: Mapping[str, Any]) -> None:
        """Switch to the method of a checkpoint of `batch`, before it is loaded; `kept` was stored with it."""
        self._course.load(kept.get("falls", []))
        self._take(self._course.phase(batch - 1))

    def enter(self) -> Switched | None:
        """Start the phase of the next batch; return an event for the observer if its method is another one."""
        batch, first = self._pipeline.batches, self._begun < 0
        before, phase = self._present, self._course.phase(batch)
        self._take(phase)
        self._begun, came, self._came = batch, self._came, None
        since = self._course.begin(batch)
        self._pipeline.look_out(since if phase == MAIN else math.inf)
        if phase == before and came is None and not (first and phase != MAIN):
            return None
        method = self._pipeline.schedule.name
        return Switched(batch, method, self._course.why(batch), came)

    @property
    def end(self) -> float:
        """The batch before which the phase ends, as far as it is known."""
        return self._course.end(self._begun, self._pipeline.trouble)

    def leave(self) -> Mapping[str, Any] | None:
        """End the phase; return the extra data of the checkpoint that the run has gone back to, if it has.

        Raises:
            CheckpointError: the run diverged, weights are not finite, and there is no earlier checkpoint.
        """
        trouble, batch = self._pipeline.trouble, self._pipeline.batches
        if trouble is None or self._present != MAIN:
            return None
        kept = None
        finite = self._is_finite()
        if not finite or self._prepared.config.fallback.restore == "always":
            kept = self._go_back(trouble, finite)
        first = self._pipeline.batches
        self._came = None if kept is None else batch
        self._course.fall(first, batch, f"diverged at batch {trouble.batch}: {trouble.why}")
        return kept

    def _go_back(self, trouble: Trouble, finite: bool) -> Mapping[str, Any] | None:
        """Load the newest checkpoint from before a divergence whose weights are finite."""
        limit, here = trouble.batch, self._pipeline.batches
        while True:
            loaded = self._checkpoints.load(limit=limit, ready=self.ready)
            if loaded is not None and self._is_finite():
                return loaded.extra
            if loaded is not None:  # its weights are not finite, but no pass had read them yet
                limit, here = self._pipeline.batches - 1, -1
            elif finite and here >= 0:
                return None  # the synchronous method continues with the present weights
            else:
                raise CheckpointError(
                    f"training diverged at batch {trouble.batch} ({trouble.why}): weights are not finite any more, and "
                    f"there is no checkpoint of batch {trouble.batch} or before. Lower the learning rate, or write "
                    "checkpoints more often (checkpoint.every) and keep more of them (checkpoint.keep)"
                )

    def _take(self, phase: str) -> None:
        if phase != self._present:
            continue_under(self._pipeline, self._prepared.plan_of(phase))
            self._present = phase

    def _is_finite(self) -> bool:
        return all(self._gather(self._pipeline.is_finite()))
