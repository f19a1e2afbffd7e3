"""The training loop of one rank, from an initialised process group to saved weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.checkpoint.folder_claim import Owner
from penstock.checkpoint.manager import Checkpoints
from penstock.checks import is_whole
from penstock.comm.collective.all_gather_json import gather_json
from penstock.comm.collective.broadcast_json import from_first
from penstock.errors import CheckpointError, DataError
from penstock.job.cpus import Cpus, shares
from penstock.job.torchrun_agent import Agent
from penstock.runtime.data.batch_source import Batches
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.from_checked_plan import continue_under
from penstock.runtime.malloc import LARGEST, SMALL, keep_freed_memory
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.divergence import Trouble
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.methods.wave_lags import RECORD
from penstock.train.checkpoint_troubles import Troubles
from penstock.train.config.schema import TrainConfig
from penstock.train.config.wave_lags_record import write_lags
from penstock.train.config.written_config import note_changes
from penstock.train.data.window_sampler import WindowMicrobatches, Windows, batches
from penstock.train.export.save_weights import save_weights
from penstock.train.graceful_stop import DrainRequest
from penstock.train.metrics_file import Metrics
from penstock.train.observer import Observer, Switched
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import ChooseRecompute, Prepared, prepare
from penstock.train.process_group import first_of_the_job, process_group, shared_folder
from penstock.train.reporter import Reporter
from penstock.train.setup.early_stopping import Patience, known_in_run
from penstock.train.setup.phase_plan import MAIN, Course
from penstock.train.setup.recorded_progress import recorded
from penstock.train.setup.run_folder import check_is_saved, set_aside_run


def train(
    config: TrainConfig,
    folder: Path | None,
    observer: Observer,
    drain: Path | None = None,
    *,
    restart: bool = False,
    must_save: bool = False,
    choose: ChooseRecompute | None = None,
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
        choose: as of `prepare`.

    Raises:
        UnsavedRunError: so it is, and `must_save` is set.
        ConfigError: the number of processes of the job is not that of the pipelines' ranks.
        PenstockError: see `prepare` and `Pipeline`.
    """
    request = DrainRequest(drain, Agent(os.environ) if drain is None else None)  # a launcher of ours kills its workers
    with request.handle_signals():
        keep_freed_memory(LARGEST if config.keep_freed_memory else SMALL)
        with process_group(config) as store:
            once = partial(from_first, what="looking for the largest token", group=dist.group.WORLD)
            prepared = prepare(config, control=dist.group.WORLD, once=once, choose=choose)  # before there is a folder
            config = prepared.config
            place = folder or shared_folder(config, store)
            if restart and dist.get_rank() == 0 and first_of_the_job(store, "restart"):
                owner = Owner(place)  # until the checkpoints of this run have taken over
                owner.claim()
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
        self.prepared, self.folder, self.request = prepared, folder, request
        self.rank = dist.get_rank()
        torch.set_num_threads(config.threads or self._share_of_cpus())
        self.pipeline = make_pipeline(prepared, dist.group.WORLD)
        request.doing = lambda: self.pipeline.doing
        self.troubles = Troubles(store)
        self.metrics = Metrics(folder, self.troubles.lost)
        fingerprint = from_first(lambda: prepared.windows.corpus.fingerprint, "reading the text", None)
        self.samples = RunSamples(prepared.windows, prepared.microbatches, config.microbatch_size, fingerprint)
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
        self.reporter = Reporter(prepared, folder, self.pipeline, observer, self.metrics, self.troubles, store)

    def _begin_from(self, found: Mapping[str, Any] | None) -> None:
        """Start where the pipeline is, with the extra data of its checkpoint, if it was loaded from one."""
        self.samples.start(self.pipeline.batches, found, str(self.folder))
        for fault in self.checkpoints.damaged if self.rank == 0 else ():
            self.metrics.add(damaged_checkpoint=fault)
            self.troubles.passed_over(fault)
        config = self.config
        self._patience = Patience(config.evaluate.patience, known_in_run(config))
        for evaluation in self.pipeline.evaluations:
            self._patience.record(evaluation.version, evaluation.loss)

    def run(self) -> None:
        """Train, validate, save, sample; or end early, with a checkpoint."""
        if self.rank == 0 and (changes := note_changes(self.config, self.folder, self.pipeline.batches)):
            self.metrics.add(changed=self.pipeline.batches, values=changes)
        self.reporter.started()
        over = False
        while not over:
            self.reporter.switched(self.phases.enter())
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
        self._finish(self.reporter.seconds)
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
            self.request.end_agent()

    def _keep_lags(self) -> None:
        """Write the recorded lags of waves into the run folder, if `combine.lag=record`."""
        if self.config.combine.lag == RECORD:
            parts = self._gather(self.pipeline.lags())
            if self.rank == 0:
                try:
                    write_lags(self.folder, parts)
                except OSError as error:
                    self.troubles.lost(f"the recorded lags were not written: {error}")

    def _train(self) -> None:
        """Train until the phase or the run ends, or early stopping applies."""
        every = self.config.checkpoint.every
        save = None if every is None else self.checkpoints.every(every)
        for report in self.pipeline.run(self._data(), save=save, evaluate=self._evaluating()):
            try:
                self.reporter.post()
                self.reporter.adapted()
                if self.request.asked:
                    self.pipeline.stop()
                    self.reporter.ending()
                self.reporter.progress(report)
                self._evaluated(report.evaluated)
            except BaseException:
                self.pipeline.abandon()  # otherwise this rank would train to the end before its peers notice
                raise
        self.reporter.decided()
        self.reporter.adapted()
        self._evaluated(self.pipeline.evaluated())

    def _data(self) -> Iterator[WindowMicrobatches]:
        """Yield the remaining batches of the phase, until early stopping applies."""
        begin = self.pipeline.batches
        left = self.samples.batches(begin, max(self.config.batches - begin, 0))
        for number, batch in enumerate(left, begin):
            if number >= min(self._patience.end, self.phases.end):
                return
            yield batch

    def _extra(self, batch: int) -> dict[str, Any]:
        """Return the extra data of a checkpoint."""
        return self.samples.state(batch) | self.phases.state(batch)

    def _tell_checkpoint(self, batch: int, failure: str | None) -> None:
        self.metrics.add(checkpoint=batch, **({} if failure is None else {"failure": failure}))
        self.troubles.checkpoint(batch, failure)

    def _evaluating(self) -> Evaluating | None:
        section = self.config.evaluate
        return None if section.every is None else Evaluating(section.every, self._held_out)

    def _held_out(self) -> Batches:
        return self.samples.held_out(self.config.evaluate.samples)

    def _evaluated(self, found: Iterable[Evaluated]) -> None:
        """Record evaluations made during training."""
        for evaluation in found:
            self._patience.record(evaluation.version, evaluation.loss)
            self.reporter.evaluated(evaluation)

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
        self.reporter.write_timeline()
        self.reporter.interrupted(self._all_troubles())  # all have written theirs by then

    def _finish(self, seconds: float) -> None:
        """Save and validate at the end of a run that has trained all its batches.

        Args:
            seconds: that training took.
        """
        if self.config.checkpoint.every is not None:  # so that the run can be continued with more batches or patience
            self._save()  # the observer has been notified of a failure
        self.reporter.write_timeline()
        validation = self._validate()
        self.reporter.warn()  # before anything else may fail
        save_weights(self.pipeline, self.prepared, self.folder)
        self.reporter.warn()
        troubles = self._all_troubles()
        peaks = {r: b for part in self._gather(list(self.pipeline.peak_bytes().items())) for r, b in part}
        self.reporter.finished(validation, seconds, peaks, troubles)

    def _validate(self) -> dict[str, float | None]:
        """Return the loss on held-out samples, with the newest weights and with averaged ones, if there are any."""
        kinds = {"validation_loss": False} | ({"averaged_loss": True} if self.config.ema_decay is not None else {})
        found = {}
        for kind, averaged in kinds.items():
            result = self.pipeline.evaluate(self.samples.held_out(self.config.validation_samples), averaged=averaged)
            found[kind] = None if result is None else result[0]
        return found

    def _all_troubles(self) -> list[str]:
        return [line for part in self._gather(self.troubles.summary()) for line in part]

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, "ending the run", None)


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


class RunSamples:
    """The samples of a run, in batches of m microbatches.

    Args:
        windows: of the text.
        microbatches: m, through all parallel pipelines.
        size: samples of a microbatch.
        fingerprint: of the text, the same on every rank.
    """

    def __init__(self, windows: Windows, microbatches: int, size: int, fingerprint: str) -> None:
        self._windows, self._microbatches, self._size, self._fingerprint = windows, microbatches, size, fingerprint
        self._first, self._sample = 0, 0  # a batch, and the number of its first sample

    def start(self, batch: int, found: Mapping[str, Any] | None, folder: str) -> None:
        """Go on with a batch.

        Args:
            batch: the next one.
            found: what `state` returned for it, as a checkpoint holds it; None to begin with the first sample.
            folder: of the run, for messages.

        Raises:
            CheckpointError: the checkpoint has no such data.
            DataError: it is of another text.
        """
        sample: Any = 0
        if found is not None:
            sample = found.get("sample")
            if not is_whole(sample):
                raise CheckpointError(
                    f"the checkpoint after {batch} batches in {folder!r} was not written by penstock train: of the "
                    f"samples that have been trained on it says {sample!r:.80}; remove it to go on from the one before"
                )
            if found.get("corpus", self._fingerprint) != self._fingerprint:
                raise DataError(
                    f"the run in {folder!r} was trained on other text: {found['corpus']} then, "
                    f"{self._fingerprint} now in {self._windows.corpus.name}. Use the same text, or start a new run"
                )
        self._first, self._sample = batch, sample

    def state(self, batch: int) -> dict[str, Any]:
        """Return what a checkpoint of `batch` needs to go on with it."""
        return {"sample": self._sample_of(batch), "corpus": self._fingerprint}

    def batches(self, first: int, count: int) -> Iterator[WindowMicrobatches]:
        """Yield `count` batches, from batch `first` on."""
        return batches(self._windows, self._sample_of(first), count, self._microbatches, self._size)

    def held_out(self, samples: int) -> Iterator[WindowMicrobatches]:
        """Yield whole batches of held-out samples: at most `samples` of them, but at least one batch."""
        count = max(min(samples, len(self._windows.validation)) // (self._microbatches * self._size), 1)
        return batches(self._windows, 0, count, self._microbatches, self._size, validation=True)

    def _sample_of(self, batch: int) -> int:
        """Return the number of the first sample of a batch."""
        return self._sample + (batch - self._first) * self._microbatches * self._size
