"""The training loop of one rank, from an initialised process group to saved weights."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.checkpoint.manager import Checkpoints
from penstock.comm.collective.gather import gather_json
from penstock.comm.collective.hand_out import from_first
from penstock.errors import CheckpointError, DataError, EndedError, PenstockError
from penstock.idle_time import split_time
from penstock.job.agent import end_agent
from penstock.job.cpus import Cpus, shares
from penstock.runtime.execute.evaluation import Evaluating
from penstock.runtime.malloc import keep_freed_memory
from penstock.runtime.rank.batch_source import Batches
from penstock.runtime.rank.reports import Report
from penstock.runtime.rank.timeline_files import read_timeline
from penstock.runtime.update.events import Evaluated
from penstock.schedule.ir.rules import RULES
from penstock.schedule.methods.wave_lags import RECORD
from penstock.timeline import Timeline
from penstock.train.config.lags_file import write_lags
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import unigram_entropy
from penstock.train.data.windows import Microbatches, batches
from penstock.train.export.sample import sample_text
from penstock.train.export.save_weights import save_weights
from penstock.train.graceful_stop import DrainRequest
from penstock.train.live_stats import Board, BubbleMeter
from penstock.train.metrics_file import Metrics
from penstock.train.observer import Observer, Progress, RunSummary
from penstock.train.phase_switcher import Phases
from penstock.train.process_group import first_of_the_job, process_group, shared_folder
from penstock.train.setup.build_pipeline import make_pipeline
from penstock.train.setup.early_stopping import Patience, known_in_run
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.prepare import Prepared, prepare_unproven
from penstock.train.setup.recorded import recorded
from penstock.train.setup.run_folder import check_is_saved, note_changes, set_aside_run
from penstock.train.troubles import Troubles

_SAMPLED_PARAMETERS = 200_000_000  # largest model to sample from at the end, as one rank must load all of it
_SAMPLING = 20.0  # seconds for that sample
_POST_EVERY = 0.5  # seconds between two posts of a rank's figures


def train(
    config: TrainConfig,
    folder: Path | None,
    observer: Observer,
    drain: Path | None = None,
    *,
    restart: bool = False,
    must_save: bool = False,
) -> None:
    """Train as one rank of a launched job; the rank with the last stage reports.

    Args:
        config: the same on every rank.
        folder: of the run, the same on every rank; None to let rank 0 make one. If it has checkpoints, the run resumes
            from the newest.
        observer: called on the reporting rank only.
        drain: a file whose existence requests the run to end early; None to handle signals instead.
        restart: begin again: what the folder has of the run is set aside.
        must_save: raise an error if the run has ended, but none of its checkpoints could be written.

    Raises:
        UnsavedRunError: so it is, and `must_save` is set.
        ConfigError: the number of processes of the job is not that of the pipelines' ranks.
        PenstockError: see `prepare_unproven`, `Prepared.proven` and `Pipeline`.
    """
    request = DrainRequest(drain)
    with request.handle_signals():
        keep_freed_memory()
        with process_group(config) as store:
            once = partial(from_first, what="looking for the largest token", group=dist.group.WORLD)
            prepared = prepare_unproven(config, once=once).proven(dist.group.WORLD)  # before there is a folder
            place = folder or shared_folder(config, store)
            if restart and dist.get_rank() == 0 and first_of_the_job(store, "restart"):
                set_aside_run(place)
            start = recorded(place).size  # before any rank has written more; a collective follows
            _Loop(prepared, place, store, observer, request).run()
        if must_save and config.checkpoint.every is not None:
            check_is_saved(place, start)


class _Loop:
    """The run on one rank."""

    def __init__(
        self, prepared: Prepared, folder: Path, store: Store, observer: Observer, request: DrainRequest
    ) -> None:
        config = self.config = prepared.config
        self.prepared, self.folder, self.observer, self.request = prepared, folder, observer, request
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.set_num_threads(config.threads or self._share_of_cpus())
        schedule = prepared.plan.schedule
        self.reports = self.rank == schedule.stage_at[schedule.num_stages - 1, 0].rank  # in the first pipeline
        self.microbatches = prepared.microbatches
        self.board = Board(store, self.rank, self.ranks)
        self.tokens_per_batch = prepared.tokens_per_batch
        self.rate = rate_schedule(config.lr_schedule, config.batches)
        self.pipeline = make_pipeline(prepared, dist.group.WORLD)
        request.doing = lambda: self.pipeline.doing
        self.metrics, self.troubles = Metrics(folder), Troubles(store)
        self._fingerprint = from_first(lambda: prepared.windows.corpus.fingerprint, "reading the text", None)
        self.checkpoints = Checkpoints(
            self.pipeline,
            folder,
            keep=config.checkpoint.keep,
            extra=self._extra,
            store=store,
            timeout=config.timeout,
            tell=self._tell_checkpoint,
        )
        self.phases = Phases(prepared, self.pipeline, self.checkpoints, self._gather)
        loaded = self.checkpoints.load(ready=self.phases.ready)
        self._begin_from(None if loaded is None else loaded.extra)
        self._posted = self._read_at = -math.inf
        self._figures: dict[int, dict[str, Any]] = {}  # of all ranks, as last read
        self._begun = 0.0
        self._trained = 0  # batches since this process started
        self._ending = False
        self._loss: float | None = None  # of the last batch
        self._meter = BubbleMeter(self.ranks)
        self._in_flight = self.pipeline.in_flight  # as it was reported last, also before a run was resumed

    def _begin_from(self, found: Mapping[str, Any] | None) -> None:
        """Start where the pipeline is, with the extra data of its checkpoint, if it was loaded from one."""
        self.first, self.sample = self.pipeline.batches, 0  # the first batch, and its first sample
        if found is not None:
            if "sample" not in found:
                raise CheckpointError(f"the checkpoints in {str(self.folder)!r} were not written by penstock train")
            self.sample = int(found["sample"])
            if found.get("corpus", self._fingerprint) != self._fingerprint:
                raise DataError(
                    f"the run in {str(self.folder)!r} was trained on other text: {found['corpus']} then, "
                    f"{self._fingerprint} now in {self.prepared.windows.corpus.name}. Use the same text, or start "
                    "a new run"
                )
        for fault in self.checkpoints.damaged if self.rank == 0 else ():
            self.metrics.add(damaged_checkpoint=fault)
            self.troubles.passed_over(fault)
        config = self.config
        self._patience = Patience(config.evaluate.patience, known_in_run(config))
        for evaluation in self.pipeline.evaluations:
            self._patience.record(evaluation.version, evaluation.loss)

    def run(self) -> None:
        """Train, validate, save, sample; or end early, with a checkpoint."""
        self._begun = time.perf_counter()
        if self.rank == 0 and (changes := note_changes(self.config, self.folder, self.pipeline.batches)):
            self.metrics.add(changed=self.pipeline.batches, values=changes)
        if self.reports:
            if self.pipeline.batches:
                self.metrics.add(resumed=self.pipeline.batches, method=self.config.row.name)
            self.observer.started(self.prepared, self.pipeline.parts, self.pipeline.batches)
        over = False
        while not over:
            self._enter_phase()
            self._train()
            assert self.pipeline.batches <= self.phases.end, "a divergence was noticed too late"
            self._keep_lags()
            over = self.pipeline.batches >= min(self.config.batches, self._patience.end)
            if any(self._gather(self.request.asked)) and not over:
                self._interrupted(self._save())
                self._leave()
                return
            if over or self.pipeline.batches < self.phases.end:
                break
            gone_back = self.phases.leave()
            if gone_back is not None:
                self._begin_from(gone_back)
        seconds = time.perf_counter() - self._begun
        if self.config.checkpoint.every is not None:  # so that the run can be continued with more batches or patience
            self._save()  # the observer has been notified of a failure
        self._write_timeline()
        validation = self._validate()
        save_weights(self.pipeline, self.prepared, self.folder)
        self._warn()
        troubles = self._all_troubles()
        peaks = {r: b for part in self._gather(list(self.pipeline.peak_bytes().items())) for r, b in part}
        if self.reports:
            self._finish(validation, seconds, self._timeline(), peaks, troubles)
        self._leave()

    def _share_of_cpus(self) -> int:
        """Return how many threads this rank gets."""
        mine = Cpus.of_this_process().as_json()
        return shares([Cpus.from_json(cpus) for cpus in self._gather(mine)])[self.rank]

    def _leave(self) -> None:
        """Wait for all ranks; if the job was asked to end, ask the agents of torchrun, too.

        Elastic tells only the machines that are signalled, and the agents of the others would wait for their agents
        for minutes.
        """
        if any(self._gather(self.request.asked)):
            end_agent(os.environ)

    def _keep_lags(self) -> None:
        """Write the recorded lags of waves into the run folder, if `combine.lag=record`."""
        if self.config.combine.lag == RECORD:
            parts = self._gather(self.pipeline.lags())
            if self.rank == 0:
                write_lags(self.folder, parts)

    def _enter_phase(self) -> None:
        """Switch to the method of the next batch."""
        switched = self.phases.enter(self._evaluating())
        if switched is not None and self.reports:
            back = {} if switched.came is None else {"back_from": switched.came}
            self.metrics.add(switch=switched.batch, method=switched.method, why=switched.why, **back)
            self.observer.switched(switched)

    def _train(self) -> None:
        """Train until the phase or the run ends, or early stopping applies."""
        every = self.config.checkpoint.every
        save = None if every is None else self.checkpoints.every(every)
        for report in self.pipeline.run(self._data(), save=save, evaluate=self._evaluating()):
            try:
                self._post()
                self._tell_in_flight()
                if self.request.asked:
                    self._stop()
                if self.reports:
                    self._loss = report.loss
                    self._trained += 1
                    self._progress(report, time.perf_counter() - self._begun)
                self._evaluated(report.evaluated)
            except BaseException:
                self.pipeline.abandon()  # otherwise this rank would train to the end before its peers notice
                raise
        if self.reports:
            self.metrics.add_updates(self.pipeline.decided())
        self._tell_in_flight()
        self._evaluated(self.pipeline.evaluated())

    def _tell_in_flight(self) -> None:
        """Report the microbatches in flight that were found for the links, once."""
        found = self.pipeline.in_flight
        if self.reports and found is not None and found != self._in_flight:
            self._in_flight = found
            self.metrics.add(in_flight=found.numbers, **found.state())
            self.observer.adapted(found)

    def _stop(self) -> None:
        """End the run early, as requested."""
        self.pipeline.stop()
        if self.reports and not self._ending:
            self._ending = True
            self.observer.ending()

    def _data(self) -> Iterator[Microbatches]:
        """Yield the remaining batches of the phase, until early stopping applies."""
        config, begin = self.config, self.pipeline.batches
        count, sample = max(config.batches - begin, 0), self._sample_at(begin)
        left = batches(self.prepared.windows, sample, count, self.microbatches, config.microbatch_size)
        for number, batch in enumerate(left, begin):
            if number >= min(self._patience.end, self.phases.end):
                return
            yield batch

    def _extra(self, batch: int) -> dict[str, Any]:
        """Return the extra data of a checkpoint."""
        return {"sample": self._sample_at(batch), "corpus": self._fingerprint} | self.phases.state(batch)

    def _sample_at(self, batch: int) -> int:
        """Return the number of the first sample of a batch."""
        return self.sample + (batch - self.first) * self.microbatches * self.config.microbatch_size

    def _tell_checkpoint(self, batch: int, failure: str | None) -> None:
        self.metrics.add(checkpoint=batch, **({} if failure is None else {"failure": failure}))
        self.troubles.checkpoint(batch, failure)

    def _evaluating(self) -> Evaluating | None:
        section = self.config.evaluate
        return None if section.every is None else Evaluating(section.every, lambda: self._held_out(section.samples))

    def _held_out(self, samples: int) -> Batches:
        """Return whole batches of held-out samples: at most `samples` of them, but at least one batch."""
        config, windows = self.config, self.prepared.windows
        count = max(min(samples, len(windows.validation)) // (self.microbatches * config.microbatch_size), 1)
        return batches(windows, 0, count, self.microbatches, config.microbatch_size, validation=True)

    def _evaluated(self, found: Iterable[Evaluated]) -> None:
        """Record evaluations made during training."""
        for evaluation in found:
            self._patience.record(evaluation.version, evaluation.loss)
            if self.reports:
                self.metrics.add_evaluations([evaluation])
                self.observer.evaluated(evaluation)

    def _save(self) -> str | None:
        """Write a checkpoint; returns None, or why it was not written."""
        try:
            self.checkpoints.save()
        except CheckpointError as error:
            return str(error)
        return None

    def _interrupted(self, failure: str | None) -> None:
        """Report the early end of the run.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        if failure is not None:
            raise CheckpointError(
                f"the run was requested to end after batch {self.pipeline.batches - 1}, but its checkpoint could not "
                f"be written ({failure}); earlier checkpoints are intact"
            )
        self._write_timeline()
        troubles = self._all_troubles()  # all have written theirs by then
        if self.reports:
            self.metrics.add(interrupted=self.pipeline.batches)
            self.observer.interrupted(self.folder, self.pipeline.batches, self._timeline(), troubles)

    def _write_timeline(self) -> None:
        """Write what this rank has recorded; a full disk costs only that."""
        with suppress(OSError):
            self.pipeline.write_timeline(self.folder)

    def _timeline(self) -> Timeline:
        """Return what all ranks have written; an empty one if that cannot be read."""
        try:
            return read_timeline(self.folder)
        except DataError:
            return Timeline(self.ranks)

    def _post(self) -> None:
        now = time.perf_counter()
        if now - self._posted >= _POST_EVERY:
            self._posted = now
            self._warn()
            self.board.post(
                {
                    "busy": sum(self.pipeline.busy_seconds().values()),
                    "time": now,
                    "bytes": self.pipeline.live_bytes()[self.rank],
                }
            )

    def _all_troubles(self) -> list[str]:
        return [line for part in self._gather(self.troubles.summary()) for line in part]

    def _warn(self) -> None:
        """Show what has gone wrong since the last time, on the reporting rank."""
        for trouble in self.troubles.news() if self.reports else ():
            self.observer.warned(trouble)

    def _figures_of_all(self) -> dict[int, dict[str, Any]]:
        """Return the figures of all ranks, read anew no more often than they are posted."""
        now = time.perf_counter()
        if now - self._read_at >= _POST_EVERY or len(self._figures) < self.ranks:
            self._read_at, self._figures = now, self.board.read()
            self._meter.update(self._figures)
        return self._figures

    def _progress(self, report: Report, seconds: float) -> None:
        figures = self._figures_of_all()
        done = report.batch + 1
        progress = Progress(
            batch=done,
            batches=self.config.batches,
            loss=report.loss,
            seconds=seconds,
            tokens=done * self.tokens_per_batch,
            tokens_per_second=self._trained * self.tokens_per_batch / seconds,
            rate=self.config.optimizer.lr * self.rate(report.batch),
            trained=self._trained,
            bubble=self._meter.bubble,
            live_bytes={rank: f["bytes"] for rank, f in figures.items()},
        )
        self.metrics.add_updates(report.decided)
        self.metrics.add(
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
        self.observer.progress(progress)

    def _validate(self) -> dict[str, float | None]:
        """Return the loss on held-out samples, with the newest weights and with averaged ones, if there are any."""
        kinds = {"validation_loss": False} | ({"averaged_loss": True} if self.config.ema_decay is not None else {})
        found = {}
        for kind, averaged in kinds.items():
            result = self.pipeline.evaluate(self._held_out(self.config.validation_samples), averaged=averaged)
            found[kind] = None if result is None else result[0]
        return found

    def _finish(
        self,
        validation: dict[str, float | None],
        seconds: float,
        timeline: Timeline,
        peaks: dict[int, dict[str, int]],
        troubles: list[str],
    ) -> None:
        summary = RunSummary(
            folder=self.folder,
            batches=self.pipeline.batches,
            tokens=self.pipeline.batches * self.tokens_per_batch,
            tokens_now=self._trained * self.tokens_per_batch,
            seconds=seconds,
            loss=self._loss,
            **validation,
            entropy=unigram_entropy(*self.prepared.windows.count_tokens(self.prepared.model.vocabulary)),
            bubble=timeline.bubble().bubble,
            peak_bytes=peaks,
            time=split_time(timeline),
            again=self.metrics.again if self._takes_back() else None,
            troubles=troubles,
        )
        self.metrics.add(
            **validation,
            unigram_entropy=summary.entropy,
            bubble=summary.bubble,
            time=summary.time.shares(),
            time_by_rank={rank: summary.time.shares(rank) for rank in range(self.ranks)},
            peak_bytes=peaks,
            seconds=round(seconds, 4),
        )
        sample = None
        if self.prepared.windows.corpus.text and self.config.sample_length:
            self.observer.sampling()
            sample = self._sample()
        self.observer.finished(summary, timeline, sample)

    def _takes_back(self) -> bool:
        """Whether a method of the run may take updates back."""
        plans = (self.prepared.plan, *self.prepared.others.values())
        return any(RULES[plan.schedule.rule].provisional for plan in plans)

    def _sample(self) -> str:
        """Sample some text; errors are caught, as a sample is not worth a failed run."""
        config, model = self.config, self.prepared.model
        if model.parameters > _SAMPLED_PARAMETERS:
            return f"(none: {model.parameters / 1e6:.0f} M parameters at once may be more than this rank can hold)"
        try:
            seconds = min(_SAMPLING, config.timeout / 4)  # by now the launcher waits for this rank only
            return sample_text(self.folder, config.prompt, config.sample_length, seed=config.seed, seconds=seconds)
        except EndedError:
            raise
        except (RuntimeError, PenstockError) as error:  # for example because weights are NaN
            return f"(none: {error})"

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, "ending the run", None)
