"""The phases of a run at work: the pipeline under the method of each, and the way back where training has diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoint.manager import Checkpoints
from penstock.errors import CheckpointError
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.pipeline import Pipeline, continue_under
from penstock.runtime.update.divergence import Trouble
from penstock.train.observer import Switched
from penstock.train.setup.phase_plan import MAIN, Course
from penstock.train.setup.prepare import Prepared


class Phases:
    """Those of one run; all ranks make the same calls together.

    Args:
        prepared: the run.
        pipeline: under the method of the first batch.
        checkpoints: to go back to.
        gather: every rank's value.
    """

    def __init__(
        self, prepared: Prepared, pipeline: Pipeline, checkpoints: Checkpoints, gather: Callable[[Any], list[Any]]
    ) -> None:
        self._prepared, self._pipeline, self._checkpoints, self._gather = prepared, pipeline, checkpoints, gather
        self._course = Course(prepared.config)
        self._present = self._course.phase(0)
        self._begun = -1  # the batch that the phase was entered with
        self._came: int | None = None  # how far the run had come before it went back

    def state(self, batch: int) -> dict[str, Any]:
        """What a checkpoint of `batch` keeps."""
        falls = self._course.state(batch)
        return {"falls": falls} if falls else {}

    def ready(self, batch: int, kept: Mapping[str, Any]) -> None:
        """A checkpoint of `batch` is to be loaded, with which this was kept: take the method that it comes from."""
        self._course.load(kept.get("falls", []))
        self._take(self._course.phase(batch - 1), None)

    def enter(self, evaluate: Evaluating | None) -> Switched | None:
        """Go on with the phase of the next batch; returns what is to be told, if its method is another one.

        Args:
            evaluate: evaluations on the way.
        """
        batch, first = self._pipeline.batches, self._begun < 0
        before, phase = self._present, self._course.phase(batch)
        self._take(phase, evaluate)
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
        """The phase is over; returns what was kept with the checkpoint that the run has gone back to, if it has.

        Raises:
            CheckpointError: it diverged, weights are not finite, and no checkpoint is from before.
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
            kept = self._checkpoints.load(limit=limit, ready=self.ready)
            if kept is not None and self._is_finite():
                return kept
            if kept is not None:  # of a batch that no pass had read yet
                limit, here = self._pipeline.batches - 1, -1
            elif finite and here >= 0:
                return None  # the synchronous method has to make do with what there is
            else:
                raise CheckpointError(
                    f"training diverged at batch {trouble.batch} ({trouble.why}): weights are not finite any more, and "
                    f"no checkpoint is left of batch {trouble.batch} or before. Lower the learning rate, or have "
                    "checkpoints written more often (checkpoint.every) and kept longer (checkpoint.keep)"
                )

    def _take(self, phase: str, evaluate: Evaluating | None) -> None:
        if phase != self._present:
            continue_under(self._pipeline, self._prepared.plan_of(phase), evaluate)
            self._present = phase

    def _is_finite(self) -> bool:
        return all(self._gather(self._pipeline.is_finite()))
