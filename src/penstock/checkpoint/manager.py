"""The checkpoints of a pipeline: where it goes on from, and what it leaves behind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.checkpoint.format import Checkpoint, checkpoints, clear_parts, discard_after, open_newest, set_aside
from penstock.checkpoint.writer import LocalWall, StoreWall, Wall, Writer
from penstock.comm.collective.gather import gather_json
from penstock.errors import CheckpointError, ConfigError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.ir.schedule import Stage

_PATIENCE = 0.25  # of the shorter time-out: as long a rank in training waits for its disk


class Checkpoints:
    """Those in one folder, which all ranks see.

        checkpoints = Checkpoints(pipeline, "runs/mine")
        checkpoints.load()
        for report in pipeline.run(batches[pipeline.batches :], save=checkpoints.every(100)):
            ...
        checkpoints.save()

    Args:
        pipeline: theirs; all ranks make this object together.
        folder: of the run; checkpoints lie in a folder of it.
        keep: how many stay; older ones are removed.
        extra: of the number of batches, what is kept with a checkpoint, as JSON can say it.
        store: of the job, where ranks tell each other what they have written; torch's own if None.
        timeout: seconds to wait for what others write.
        tell: called on the rank of the first stage, by a thread, with the number of batches of a checkpoint and None,
            or what has kept it from being written.

    Raises:
        ConfigError: keep is less than 1.

    Attributes:
        damaged: what was wrong with checkpoints that `load` has passed over.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path | str,
        *,
        keep: int = 2,
        extra: Callable[[int], Mapping[str, Any]] = lambda _: {},
        store: Store | None = None,
        timeout: float = 300.0,
        tell: Callable[[int, str | None], None] = lambda *_: None,
    ) -> None:
        self._pipeline, self._folder, self._grid = pipeline, Path(folder), pipeline.grid
        self.damaged: list[str] = []
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, got {keep}")
        grid = pipeline.grid
        self._rank, self._ranks = (0, 1) if grid.group is None else (dist.get_rank(grid.group), grid.group.size())
        self._store, self._limits = store, (timeout, _PATIENCE * min(timeout, pipeline.timeout))
        self._keep, self._extra, self._tell = keep, extra, tell
        self._writer = self._make_writer()
        self._written = -1  # the batch of the last one that was loaded or waited for
        self._failure: str | None = None  # what has kept that from being written

    def _make_writer(self) -> Writer:
        """One that knows nothing of what others have posted before; all ranks make it together."""
        grid, schedule = self._grid, self._pipeline.schedule

        def places(pipeline: int, stages: Iterable[Stage]) -> list[tuple[int, int]]:
            return [(stage.index, pipeline * schedule.directions + stage.direction) for stage in sorted(stages)]

        own = [place for pipeline in grid.pipelines for place in places(pipeline, self._pipeline.stages)]
        wall: Wall = LocalWall()
        if grid.group is not None:
            name = self._gather(uuid.uuid4().hex, "preparing for checkpoints")[0]
            wall = StoreWall(self._store or _get_default_store(), name)
        parts = [place for pipeline in range(grid.width) for place in places(pipeline, schedule.stages)]
        return Writer(self._folder, parts, own, self._keep, self._extra, wall, *self._limits, self._tell)

    def every(self, batches: int) -> Saving:
        """What `Pipeline.run` is to be told to have one written whenever so many batches are done."""
        return Saving(batches, self._sink, self._make_room)

    def load(
        self, *, limit: int | None = None, ready: Callable[[int, Mapping[str, Any]], None] = lambda *_: None
    ) -> Mapping[str, Any] | None:
        """Go on from the newest whole checkpoint; returns what was kept with it, None if there is none.

        All ranks call this, and each checks its share of the files.

        Args:
            limit: the largest number of batches that it may have; those after it are removed, once it is found.
            ready: called before the pipeline takes it, with the number of batches and what was kept with it; the
                pipeline may be switched to another method then.

        Raises:
            CheckpointError: there are some, but none is whole, or it does not fit.
        """
        self.wait()
        self._writer, self._failure = self._make_writer(), None
        found: list[str] = []
        failure: str | None = None
        if self._rank == 0:
            try:
                clear_parts(self._folder)
                found = list(map(str, checkpoints(self._folder, limit)))
            except OSError as error:
                failure = f"cannot go on in {str(self._folder)!r}: {error}"
        found, failure = self._gather([found, failure], "looking for checkpoints")[0]
        if failure is not None:
            raise CheckpointError(failure)
        newest, self.damaged = open_newest(self._folder, list(map(Path, found)), self._open)
        if newest is None:
            return None
        try:
            if self._rank == 0:
                if limit is not None:
                    discard_after(self._folder, limit)
                set_aside(self._folder, newest.folder)
        except CheckpointError as error:
            failure = str(error)
        failure = self._gather(failure, "setting damaged checkpoints aside")[0]
        if failure is not None:
            raise CheckpointError(failure)
        ready(newest.batch, newest.extra)
        self._pipeline.load(newest)
        self._written = newest.batch
        return newest.extra

    def save(self) -> str | None:
        """Have one written between two runs, unless it is there already, and wait for it; all ranks call this.

        Returns:
            What has kept it from being written.
        """
        batch = self._pipeline.batches
        failures = self._gather(self.wait(), "saving")  # of the one before: nobody is in a hurry now
        if batch == 0 or (batch == self._written and not any(failures)):
            return None
        if batch == self._written:
            self._writer = self._make_writer()
        if self._writer.make_room(batch):
            for snapshot in self._pipeline.snapshots():
                self._writer.sink(snapshot)
        self._written = -1
        return self.wait()

    def wait(self) -> str | None:
        """Wait until the last one that was begun is complete on every rank; returns what has kept it from being."""
        if self._writer.batch != self._written and self._writer.batch >= 0:
            self._written = self._writer.batch
            self._failure = self._writer.finish(self._written)
        return self._failure

    def _sink(self, snapshot: Snapshot) -> None:
        self._writer.sink(snapshot)  # of the writer there is then: `load` makes a new one

    def _make_room(self, batch: int) -> bool:
        return self._writer.make_room(batch)

    def _open(self, path: Path) -> Checkpoint:
        """Open a checkpoint that is whole in the eyes of all ranks."""
        checkpoint, fault = None, None
        try:
            checkpoint = Checkpoint(path, (self._rank, self._ranks))
        except CheckpointError as error:
            fault = str(error)
        faults = [f for f in self._gather(fault, "checking a checkpoint") if f is not None]
        if faults or checkpoint is None:
            raise CheckpointError(faults[0])
        return checkpoint

    def _gather(self, value: Any, what: str) -> list[Any]:
        return [value] if self._grid.group is None else gather_json(value, what, self._grid.control)
