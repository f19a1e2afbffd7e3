"""The training loop of one rank, from an initialised process group to saved weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.checkpoint.folder_claim import Owner
from penstock.checkpoint.manager import Checkpoints
from penstock.comm.collective.control_plane import from_first, gather_json
from penstock.errors import CheckpointError
from penstock.job.cpus import Cpus, shares
from penstock.job.place import Agent
from penstock.runtime.data.batch_source import Batches
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.malloc import LARGEST, SMALL, keep_freed_memory
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.methods.wave_lags import RECORD
from penstock.train.checkpoint_troubles import Troubles
from penstock.train.config.schema import TrainConfig
from penstock.train.config.wave_lags_record import write_lags
from penstock.train.config.written_config import note_changes
from penstock.train.data.run_samples import RunSamples
from penstock.train.data.window_sampler import WindowMicrobatches
from penstock.train.evaluation_of_copies import CopiedVersions
from penstock.train.export.save_weights import save_weights
from penstock.train.graceful_stop import DrainRequest
from penstock.train.metrics_file import Metrics
from penstock.train.observer import Observer
from penstock.train.phase_switcher import Phases
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import ChooseRecompute, Prepared, prepare
from penstock.train.process_group import first_of_the_job, group_of_one, process_group, shared_folder
from penstock.train.reporter import Reporter
from penstock.train.setup.early_stopping import Patience, known_in_run
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
            _Loop(prepared, place, store, observer, request, dist.group.WORLD).run()
        if must_save and config.checkpoint.every is not None:
            check_is_saved(place, start)


def train_here(prepared: Prepared, folder: Path, observer: Observer) -> None:
    """Train with all ranks in this process; the run resumes if its folder has checkpoints.

    Raises:
        PenstockError: see `Pipeline`.
    """
    threads = torch.get_num_threads()
    try:
        with group_of_one(prepared.config) as store, torch.random.fork_rng(devices=[]):
            _Loop(prepared, folder, store, observer, DrainRequest(None), None).run()
    finally:
        torch.set_num_threads(threads)


class _Loop:
    """The run on one rank, or on all of them where there is no group."""

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        store: Store,
        observer: Observer,
        request: DrainRequest,
        group: dist.ProcessGroup | None,
    ) -> None:
        config = self.config = prepared.config
        self.prepared, self.folder, self.request = prepared, folder, request
        self.rank = dist.get_rank()
        torch.set_num_threads(config.threads or self._share_of_cpus())
        self.pipeline = make_pipeline(prepared, group)
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
        self.copies: CopiedVersions | None = None
        if group is None and (every := config.evaluate.every) is not None and not self.pipeline.combine.apart:
            self.copies = CopiedVersions(self.pipeline, make_pipeline(prepared), every, config.batches)
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
                self._evaluate_copies(over=False)
            except BaseException:
                self.pipeline.abandon()  # otherwise this rank would train to the end before its peers notice
                raise
        self.reporter.decided()
        self.reporter.adapted()
        self._evaluated(self.pipeline.evaluated())
        self._evaluate_copies(over=True)

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
        return None if section.every is None or self.copies is not None else Evaluating(section.every, self._held_out)

    def _held_out(self) -> Batches:
        return self.samples.held_out(self.config.evaluate.samples)

    def _evaluated(self, found: Iterable[Evaluated]) -> None:
        """Record evaluations made during training."""
        for evaluation in found:
            self._patience.record(evaluation.version, evaluation.loss)
            self.reporter.evaluated(evaluation)

    def _evaluate_copies(self, *, over: bool) -> None:
        """Evaluate the versions whose weights were copied, and are known by now."""
        if self.copies is not None:
            self._evaluated(self.copies.evaluated(self._held_out, over=over))

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
