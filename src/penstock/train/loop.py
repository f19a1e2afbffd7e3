"""The training loop of one rank, from an initialised process group to saved weights."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import PenstockError
from penstock.models.gpt import TIED_EMBEDDINGS, gpt_blocks, language_loss
from penstock.runtime.collective import gather_json
from penstock.runtime.executor import Report
from penstock.runtime.pipeline import Pipeline
from penstock.timeline import Timeline
from penstock.train.board import Board, BubbleMeter
from penstock.train.config import TrainConfig
from penstock.train.corpus import unigram_entropy
from penstock.train.data import batches
from penstock.train.files import save_index, save_stage
from penstock.train.job import local_ranks, process_group, shared_folder
from penstock.train.observer import Observer, Progress, Summary
from penstock.train.optimizers import optimizer_factory
from penstock.train.prepare import Prepared, describe_model, prepare
from penstock.train.rate import rate_schedule
from penstock.train.sample import sample_text
from penstock.weights.decision import Decision

METRICS = "metrics.jsonl"
_SAMPLED_PARAMETERS = 200_000_000  # the sample at the end loads the whole model on one rank
_POST_EVERY = 0.5  # seconds between two postings of a rank's figures


def train(config: TrainConfig, folder: Path | None, observer: Observer) -> None:
    """Train as one rank of a launched job; the rank with the last stage reports.

    Args:
        config: the same on every rank.
        folder: of the run, the same on every rank; None to let rank 0 make one.
        observer: called on the reporting rank only.

    Raises:
        ConfigError: the job was launched with another number of processes than the pipeline has stages.
        PenstockError: as `prepare` and `Pipeline` say.
    """
    prepared = prepare(config)
    torch.set_num_threads(config.threads or max((os.cpu_count() or 1) // local_ranks(), 1))
    with process_group(config) as store:
        _Loop(prepared, folder or shared_folder(config, store), store, observer).run()


class _Loop:
    """One rank's run."""

    def __init__(self, prepared: Prepared, folder: Path, store: Store, observer: Observer) -> None:
        config = self.config = prepared.config
        self.prepared, self.folder, self.observer = prepared, folder, observer
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.reports = self.rank == config.stages - 1  # the last stage of the first pipeline
        self.microbatches = config.width * config.microbatches  # of a batch
        self.board = Board(store, self.rank, self.ranks)
        self.tokens_per_batch = self.microbatches * config.microbatch_size * prepared.model.context
        self.rate = rate_schedule(config.rate, config.batches)
        self.pipeline = Pipeline(
            gpt_blocks(prepared.model, config.seed),
            prepared.proof,
            loss=language_loss,
            optimizer=optimizer_factory(config.optimizer),
            rate=self.rate,
            divisor=self.tokens_per_batch,
            clip=config.clip,
            precision=config.precision,
            recompute=config.recompute,
            seed=config.seed,
            width=config.width,
            reduce=config.reduce,
            tied=TIED_EMBEDDINGS if config.model.tied else None,
            balance=config.balance,
            group=dist.group.WORLD,
            timeout=config.timeout,
        )
        self._posted = -math.inf
        self._meter = BubbleMeter(self.ranks)

    def run(self) -> None:
        """Train, validate, save, sample."""
        config = self.config
        begun = time.perf_counter()
        data = batches(self.prepared.windows, 0, config.batches, self.microbatches, config.microbatch_size)
        loss = None
        if self.reports:
            self.observer.started(self.prepared, self.pipeline.parts)
        for report in self.pipeline.run(data):
            try:
                self._post()
                if self.reports:
                    loss = report.loss
                    self._progress(report, time.perf_counter() - begun)
            except BaseException:
                self.pipeline.abandon()  # or this rank would train on to the end before anybody hears of it
                raise
        seconds = time.perf_counter() - begun
        if self.reports:
            self._log_updates(self.pipeline.decided())
        timeline = self.pipeline.timeline()
        validation = self._validate()
        self._save()
        peaks = {r: b for part in self._gather(list(self.pipeline.peak_bytes().items())) for r, b in part}
        if self.reports:
            self._finish(loss, validation, seconds, timeline, peaks)

    def _post(self) -> None:
        now = time.perf_counter()
        if now - self._posted >= _POST_EVERY:
            self._posted = now
            self.board.post(
                {
                    "busy": sum(self.pipeline.busy_seconds().values()),
                    "time": now,
                    "bytes": self.pipeline.live_bytes()[self.rank],
                }
            )

    def _progress(self, report: Report, seconds: float) -> None:
        figures = self.board.read()
        self._meter.update(figures)
        done = report.batch + 1
        progress = Progress(
            batch=done,
            batches=self.config.batches,
            loss=report.loss,
            seconds=seconds,
            tokens=done * self.tokens_per_batch,
            tokens_per_second=done * self.tokens_per_batch / seconds,
            rate=self.config.optimizer.lr * self.rate(report.batch),
            bubble=self._meter.bubble,
            live_bytes={rank: f["bytes"] for rank, f in figures.items()},
        )
        self._log_updates(report.decided)
        self._log(
            {
                "batch": report.batch,
                "loss": report.loss,
                "weight": report.weight,
                "tokens": progress.tokens,
                "seconds": round(seconds, 4),
                "tokens_per_second": round(progress.tokens_per_second, 1),
                "learning_rate": progress.rate,
                "bubble": None if progress.bubble is None else round(progress.bubble, 4),
                "live_bytes": progress.live_bytes,
            }
        )
        self.observer.progress(progress)

    def _validate(self) -> float | None:
        config = self.config
        per_batch = self.microbatches * config.microbatch_size
        samples = min(config.validation_samples, len(self.prepared.windows.validation))
        count = max(samples // per_batch, 1)
        data = batches(self.prepared.windows, 0, count, self.microbatches, config.microbatch_size, validation=True)
        result = self.pipeline.evaluate(data)
        return None if result is None else result[0]

    def _save(self) -> None:
        """Every rank writes its stage, the reporting rank the index."""
        stages, files = self.config.stages, {}
        if self.rank < stages:  # the other pipelines hold the same
            files = save_stage(self.folder, self.rank, stages, self.pipeline.state_dict())
        everything = {name: file for part in self._gather(files) for name, file in part.items()}
        if self.reports:
            text = self.prepared.windows.corpus.text
            save_index(self.folder, everything, describe_model(self.prepared.model), text=text)

    def _finish(
        self,
        loss: float | None,
        validation: float | None,
        seconds: float,
        timeline: Timeline,
        peaks: dict[int, dict[str, int]],
    ) -> None:
        summary = Summary(
            folder=self.folder,
            batches=self.pipeline.batches,
            tokens=self.pipeline.batches * self.tokens_per_batch,
            seconds=seconds,
            loss=loss,
            validation_loss=validation,
            entropy=unigram_entropy(*self.prepared.windows.count_tokens(self.prepared.model.vocabulary)),
            bubble=timeline.bubble().bubble,
            peak_bytes=peaks,
        )
        self._log(
            {
                "validation_loss": validation,
                "unigram_entropy": summary.entropy,
                "bubble": summary.bubble,
                "peak_bytes": peaks,
                "seconds": round(seconds, 4),
            }
        )
        self.observer.finished(summary, timeline)
        if self.prepared.windows.corpus.text and self.config.sample_length:
            self.observer.sampled(summary, self._sample())

    def _sample(self) -> str:
        """A sample, which is worth little enough that nothing may fail because of it."""
        config, model = self.config, self.prepared.model
        if model.parameters > _SAMPLED_PARAMETERS:
            return f"(none: {model.parameters / 1e6:.0f} M parameters at once may be more than this rank can hold)"
        try:
            return sample_text(self.folder, config.prompt, config.sample_length, seed=config.seed)
        except (RuntimeError, PenstockError) as error:  # weights that are not numbers any more, say
            return f"(none: {error})"

    def _log_updates(self, decided: Iterable[Decision]) -> None:
        """Updates are made later than losses are known, so they have lines of their own."""
        for d in decided:
            self._log({"update": d.batch, "loss": d.loss, "norm": d.norm, "skipped": d.skipped})

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, "ending the run", None)

    def _log(self, values: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps({key: _finite(value) for key, value in values.items()}) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
