"""A run's checkpoints: where it goes on from, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import CheckpointError
from penstock.runtime.collective import gather_json
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.snapshot import Saving
from penstock.train.checkpoint import Checkpoint, clear_parts, open_newest
from penstock.train.config import TrainConfig
from penstock.train.metrics import Metrics
from penstock.train.writing import StoreWall, Writer


class Checkpoints:
    """Those of one rank of a job.

    Args:
        config: of the run.
        folder: of the run.
        store: of the job.
        metrics: told of every checkpoint.
        samples_per_batch: of all parallel pipelines.

    Attributes:
        batch, sample: where training begins; set by `load`.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, store: Store, metrics: Metrics, samples_per_batch: int
    ) -> None:
        self._folder, self._metrics, self._per_batch = folder, metrics, samples_per_batch
        self.batch = self.sample = 0
        replica, cut = divmod(dist.get_rank(), config.stages)
        self._writer = Writer(
            folder,
            [(c, r) for r in range(config.width) for c in range(config.stages)],
            [(cut, replica)],
            config.checkpoint.keep,
            lambda batch: {"samples": self.sample_at(batch), "config": config.model_dump()},
            StoreWall(store),
            config.timeout,
            self._tell,
        )
        every = config.checkpoint.every
        self.saving = None if every is None else Saving(every, self._writer.sink)

    def sample_at(self, batch: int) -> int:
        """The first sample of a batch."""
        return self.sample + (batch - self.batch) * self._per_batch

    def load(self, pipeline: Pipeline) -> None:
        """Go on from the newest whole checkpoint of the run, if there is one; all ranks call this.

        Raises:
            CheckpointError: there are some, but none is whole, or it does not fit.
        """
        place: str | None = None
        failure: CheckpointError | None = None
        if dist.get_rank() == 0:
            clear_parts(self._folder)
            try:
                newest, faults = open_newest(self._folder)
                place = None if newest is None else str(newest.folder)
                for fault in faults:
                    self._metrics.add(damaged_checkpoint=str(fault))
            except CheckpointError as error:
                failure = error
        found = gather_json([place, None if failure is None else str(failure)], "choosing a checkpoint", None)
        if found[0][1] is not None:
            raise failure or CheckpointError(found[0][1])
        if found[0][0] is None:
            return
        checkpoint = Checkpoint(Path(found[0][0]), check=False)  # the first rank has checked all files
        pipeline.load(checkpoint)
        self.batch, self.sample = checkpoint.batch, int(checkpoint.extra["samples"])

    def finish(self, pipeline: Pipeline, save: bool) -> str | None:
        """Wait for what is being written, and for a checkpoint of the drained pipeline; all ranks call this.

        Args:
            pipeline: drained.
            save: write one, unless that of the last batch is on its way.

        Returns:
            What has kept the last one from being written.
        """
        batch, failure = pipeline.batches, None
        saved = self.saving is not None and self.saving.wants(batch)
        if save and batch > self.batch and not saved:
            for snapshot in pipeline.snapshots():
                self._writer.sink(snapshot)
            saved = True
        if saved and batch > self.batch:
            failure = self._writer.finish(batch)
        self._writer.close()
        return failure

    def _tell(self, batch: int, failure: str | None) -> None:
        self._metrics.add(checkpoint=batch, **({} if failure is None else {"failure": failure}))
