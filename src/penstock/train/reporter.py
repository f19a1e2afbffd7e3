"""Reports of a run while it trains and when it ends: lines of metrics, and events for the display.

Every rank posts its figures; the one with the last stage, which knows the losses, reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.comm.core.rank_grid import Holder
from penstock.errors import DataError
from penstock.idle_time import split_time
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.rank.timeline_files import read_timeline
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.ir.version_rules import RULES
from penstock.timeline import Timeline
from penstock.train.checkpoint_troubles import Troubles
from penstock.train.cross_rank_stats import Board, BubbleMeter, bytes_of_all
from penstock.train.data.corpus import unigram_entropy
from penstock.train.export.sample import sample_if_possible
from penstock.train.metrics_file import Metrics
from penstock.train.observer import Observer, Progress, RunSummary, Switched
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.lr_schedule import rate_schedule

_POST_EVERY = 0.5  # seconds between two posts of a rank's figures


class Reporter:
    """Tells of the run, on the reporting rank; on the others most of its methods do nothing.

    Args:
        prepared: the run.
        folder: of the run.
        pipeline: of the run, where it begins: fresh, or loaded from a checkpoint.
        observer: told on the reporting rank only.
        metrics: of the run.
        troubles: that ranks have noted.
        store: shared by all ranks.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        pipeline: Pipeline,
        observer: Observer,
        metrics: Metrics,
        troubles: Troubles,
        store: Store,
    ) -> None:
        self._prepared, self._folder, self._pipeline = prepared, folder, pipeline
        self._observer, self._metrics, self._troubles = observer, metrics, troubles
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        schedule = prepared.plan.schedule
        last = schedule.stage_at[schedule.num_stages - 1, 0]
        self._alone = pipeline.grid.everyone is None
        self._reports = self._alone or self._rank == pipeline.grid.process_of_all(Holder(0, last))
        self._rate = rate_schedule(prepared.config.lr_schedule, prepared.config.batches)
        self._board, self._meter = Board(store, self._rank, self._ranks), BubbleMeter(self._ranks)
        self._posted = self._read_at = -math.inf
        self._figures: dict[int, dict[str, Any]] = {}  # of all ranks, as last read
        self._begun = time.perf_counter()
        self._trained = 0  # batches since this process started
        self._start = pipeline.batches  # those of the runs before this one
        self._ending = False
        self._loss: float | None = None  # of the last batch
        self._in_flight = pipeline.in_flight  # as it was reported last, also before a run was resumed

    @property
    def seconds(self) -> float:
        """Seconds since training began in this process."""
        return time.perf_counter() - self._begun

    # --- while it trains --------------------------------------------------------------------------------------------

    def started(self) -> None:
        """Training begins."""
        self._begun = time.perf_counter()
        if self._reports:
            if self._pipeline.batches:
                self._metrics.add(resumed=self._pipeline.batches, method=self._prepared.config.row.name)
            self._observer.started(self._prepared, self._pipeline.parts, self._pipeline.batches)

    def switched(self, switched: Switched | None) -> None:
        """Another method takes over, if there is one."""
        if switched is not None and self._reports:
            back = {} if switched.came is None else {"back_from": switched.came}
            self._metrics.add(switch=switched.batch, method=switched.method, why=switched.why, **back)
            self._observer.switched(switched)

    def adapted(self) -> None:
        """Tell the microbatches in flight that were found for the links, once."""
        found = self._pipeline.in_flight
        if self._reports and found is not None and found != self._in_flight:
            self._in_flight = found
            self._metrics.add(in_flight=found.numbers, **found.state())
            self._observer.adapted(found)

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation during training is done."""
        if self._reports:
            self._metrics.add_evaluations([found])
            self._observer.evaluated(found)

    def ending(self) -> None:
        """The run was requested to end, which is told once."""
        if self._reports and not self._ending:
            self._ending = True
            self._observer.ending()

    def decided(self) -> None:
        """Write the updates of the last batches, of which no report has told."""
        if self._reports:
            self._metrics.add_updates(self._pipeline.decided())

    def post(self) -> None:
        """Post the figures of this rank now and then, and show what has gone wrong since."""
        now = time.perf_counter()
        if now - self._posted >= _POST_EVERY:
            self._posted = now
            self.warn()
            self._board.post(
                {
                    "busy": sum(self._pipeline.busy_seconds().values()),
                    "time": now,
                    "bytes": next(iter(self._pipeline.live_bytes().values())),
                }
            )

    def warn(self) -> None:
        """Show what has gone wrong since the last time."""
        for trouble in self._troubles.news() if self._reports else ():
            self._observer.warned(trouble)

    def progress(self, report: Report) -> None:
        """A batch is done."""
        if not self._reports:
            return
        self._loss = report.loss
        self._trained += 1
        config, per_batch, seconds = self._prepared.config, self._prepared.tokens_per_batch, self.seconds
        figures, done = self._figures_of_all(), report.batch + 1
        progress = Progress(
            batch=done,
            batches=config.batches,
            loss=report.loss,
            seconds=seconds,
            tokens=done * per_batch,
            tokens_per_second=self._trained * per_batch / seconds,
            rate=config.optimizer.lr * self._rate(report.batch),
            trained=self._trained,
            bubble=self._meter.bubble,
            live_bytes=self._pipeline.live_bytes() if self._alone else bytes_of_all(figures, self._ranks),
            skipped=[decision.batch for decision in report.decided if decision.skipped],
        )
        self._metrics.add_updates(report.decided)
        self._metrics.add(
            batch=report.batch,
            loss=report.loss,
            weight=report.weight,
            tokens=progress.tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(progress.tokens_per_second, 1),
            learning_rate=progress.rate,
            bubble=None if progress.bubble is None else round(progress.bubble, 4),
            live_bytes=progress.live_bytes,
        )
        self._observer.progress(progress)

    def _figures_of_all(self) -> dict[int, dict[str, Any]]:
        """Return the figures of all ranks, read anew no more often than they are posted."""
        now = time.perf_counter()
        if now - self._read_at >= _POST_EVERY or len(self._figures) < self._ranks:
            self._read_at, self._figures = now, self._board.read()
            self._meter.update(self._figures)
        return self._figures

    # --- when it ends -----------------------------------------------------------------------------------------------

    def write_timeline(self) -> None:
        """Write what this rank has recorded; a full disk costs only that.

        A run that had ended before it was resumed has trained nothing, and keeps the timeline of its training.
        """
        if self._pipeline.batches == self._start > 0:
            return
        try:
            self._pipeline.write_timeline(self._folder)
        except OSError as error:
            self._troubles.lost(f"the timeline of a rank was not written: {error.strerror or error}")

    def interrupted(self, troubles: Sequence[str]) -> None:
        """The run has ended early, after all ranks have written their timelines."""
        if self._reports:
            self._metrics.add(interrupted=self._pipeline.batches)
            self._observer.interrupted(self._folder, self._pipeline.batches, self._timeline(), troubles)

    def finished(
        self,
        validation: dict[str, float | None],
        seconds: float,
        peaks: dict[int, dict[str, int]],
        troubles: Sequence[str],
    ) -> None:
        """The run has ended, and its weights are saved.

        Args:
            validation: "validation_loss", and "averaged_loss" if weights were averaged.
            seconds: of training.
            peaks: peak bytes by purpose, per rank.
            troubles: of all ranks.
        """
        if not self._reports:
            return
        timeline, windows, per_batch = self._timeline(), self._prepared.windows, self._prepared.tokens_per_batch
        summary = RunSummary(
            folder=self._folder,
            batches=self._pipeline.batches,
            tokens=self._pipeline.batches * per_batch,
            tokens_now=self._trained * per_batch,
            seconds=seconds,
            loss=self._loss,
            **validation,
            entropy=unigram_entropy(*windows.count_tokens(self._prepared.model.shape.vocabulary)),
            bubble=timeline.bubble().bubble,
            peak_bytes=peaks,
            time=split_time(timeline),
            again=self._metrics.again if self._takes_back() else None,
            troubles=troubles,
        )
        self._metrics.add(
            **validation,
            unigram_entropy=summary.entropy,
            bubble=summary.bubble,
            time=summary.time.shares(),
            time_by_rank={rank: summary.time.shares(rank) for rank in range(timeline.ranks)},
            peak_bytes=peaks,
            seconds=round(seconds, 4),
        )
        self._observer.finished(summary, timeline, self._sample())

    def _sample(self) -> str | None:
        """Return text from the trained weights, if they were trained on text."""
        config = self._prepared.config
        if not (self._prepared.windows.corpus.text and config.sample_length):
            return None
        self._observer.sampling()
        return sample_if_possible(self._folder, self._prepared.model.shape.parameters, config)

    def _timeline(self) -> Timeline:
        """Return what all ranks have written; an empty one if that cannot be read."""
        try:
            return read_timeline(self._folder)
        except DataError:
            return Timeline(self._ranks)

    def _takes_back(self) -> bool:
        """Whether a method of the run may take updates back."""
        plans = (self._prepared.plan, *self._prepared.others.values())
        return any(RULES[plan.schedule.rule].provisional for plan in plans)
