"""Saves and loads the checkpoints of a pipeline."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.checkpoint.folder_claim import Owner
from penstock.checkpoint.format import (
    Checkpoint,
    batch_of,
    check_folder,
    checkpoints,
    clear_parts,
    discard_after,
    open_newest,
    set_aside,
)
from penstock.checkpoint.rank_announcements import LocalPosts, Posts, StorePosts
from penstock.checkpoint.writer import Writer
from penstock.comm.collective.control_plane import gather_json
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.saved_states import check_fresh, check_idle, save_between_runs
from penstock.schedule.ir.schedule import Stage

_LOG = logging.getLogger(__name__)
_WITHIN_A_RUN = "To save within a run: pipeline.run(loader, save=checkpoints.every(n)), every n batches"
_PATIENCE = 0.25  # of the shorter time-out: how long a rank in training waits for its disk


def _warn(batches: int, failure: str | None) -> None:
    """Say in the log that a checkpoint was not written."""
    if failure is not None:
        _LOG.warning("the checkpoint after %d batches was not written: %s", batches, failure)


class Loaded(NamedTuple):
    """A checkpoint that was loaded.

    Attributes:
        batch: the number of batches trained on when it was taken.
        extra: the data that was stored with it (`Checkpoints(extra=...)`).
    """

    batch: int
    extra: Mapping[str, Any]


def _check_arguments(pipeline: Any, folder: Any) -> None:
    """Refuse what is no pipeline, such as the folder in its place.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(pipeline, str | Path):
        raise ConfigError(f"the pipeline comes first: penstock.Checkpoints(pipeline, {str(pipeline)!r})")
    if not hasattr(pipeline, "snapshots"):
        raise ConfigError(f"Checkpoints takes the pipeline, not a {type(pipeline).__name__}")
    if not isinstance(folder, str | Path):
        raise ConfigError(f"Checkpoints takes the name of a folder, such as 'runs/mine'; got {folder!r:.80}")


class Checkpoints:
    """Saves a pipeline to a folder that all ranks can access, and loads the newest checkpoint from there.

        checkpoints = Checkpoints(pipeline, "runs/mine")
        checkpoints.load()
        for report in pipeline.run(batches[pipeline.batches :], save=checkpoints.every(100)):
            ...
        checkpoints.save()

    A checkpoint holds everything that training depends on: weights (both versions under 2bw), optimizer state, module
    buffers, loss scale, and the number of batches trained on. Between processes, every rank makes this object and calls
    its methods together with the others. A folder belongs to the first object that writes to it, or to the last one of
    a process that has loaded from it, for as long as that lives; others write nothing there, and say so.
    The end of Python waits for a checkpoint that is being written; a process of `torch.multiprocessing` ends without,
    so call `wait` there.

    Args:
        pipeline: to save and load.
        folder: of the run; checkpoints are written to its subfolder "checkpoints".
        keep: how many checkpoints to keep; older ones are removed.
        extra: a function, number of batches -> data to store with that checkpoint, serializable as JSON.
        store: the key-value store through which ranks announce what they have written; torch's default store if None.
        timeout: seconds to wait for the files of other ranks.
        tell: called with the number of batches of each checkpoint, and None or the reason why it was not written, by a
            thread on the rank of the first stage. By default, failures are logged as warnings, and so is what `load`
            has passed over.

    Raises:
        ConfigError: `keep` is less than 1.

    Attributes:
        damaged: what was wrong with the checkpoints that `load` skipped.
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
        tell: Callable[[int, str | None], None] = _warn,
    ) -> None:
        _check_arguments(pipeline, folder)
        self._pipeline, self._folder, self._grid = pipeline, Path(folder), pipeline.grid
        self.damaged: list[str] = []
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, got {keep}")
        grid = pipeline.grid
        everyone = grid.tensor.everyone
        self._rank, self._ranks = (0, 1) if everyone is None else (dist.get_rank(everyone), everyone.size())
        self._store, self._limits = store, (timeout, _PATIENCE * min(timeout, pipeline.timeout))
        self._keep, self._extra, self._tell = keep, extra, tell
        self._owner = Owner(self._folder)
        self._writer = self._make_writer()
        self._written = -1  # the batch of the last checkpoint that was loaded or waited for
        self._failure: str | None = None  # why that was not written
        self._known = False  # what is in the folder was looked at by `load`, or written by this object

    def __repr__(self) -> str:
        """Return the folder."""
        return f"<Checkpoints in {str(self._folder)!r}>"

    def _make_writer(self) -> Writer:
        """Make a writer that ignores earlier announcements; all ranks make it together."""
        grid, schedule = self._grid, self._pipeline.schedule

        def places(pipeline: int, stages: Iterable[Stage]) -> list[tuple[int, int]]:  # counted through tensor ranks
            return [(stage.index, pipeline * schedule.directions + stage.direction) for stage in sorted(stages)]

        here = [grid.width * grid.tensor.index + pipeline for pipeline in grid.pipelines]
        own = [place for pipeline in here for place in places(pipeline, self._pipeline.stages)]
        posts: Posts = LocalPosts()
        if grid.group is not None:
            name = self._of_first(uuid.uuid4().hex, "preparing for checkpoints")
            posts = StorePosts(self._store or _get_default_store(), name)
        pipelines = range(grid.width * grid.tensor.size)
        parts = [place for pipeline in pipelines for place in places(pipeline, schedule.stages)]
        return Writer(
            self._folder, parts, own, self._keep, self._extra, posts, *self._limits, self._tell, self._owner.writing
        )

    def every(self, batches: int) -> Saving:
        """Return the `save` argument of `Pipeline.run` that writes a checkpoint every so many batches.

        Raises:
            ConfigError: there are checkpoints of a longer training in the folder, and `load` has not been called.
        """
        if (fault := self._of_another_run()) is not None:
            raise ConfigError(fault)
        return Saving(batches, self._sink, self._make_room, shares=True)

    def _of_another_run(self) -> str | None:
        """Say what is wrong if `load` would prefer a checkpoint of another training to those of this one."""
        newest = -1 if self._known else max(map(batch_of, checkpoints(self._folder)), default=-1)
        if newest <= self._pipeline.batches:
            return None
        return (
            f"there is a checkpoint after {newest} batches in {str(self._folder)!r} already, and this pipeline has "
            f"trained on {self._pipeline.batches}, so it would be taken for the newer one: call checkpoints.load() "
            "first to go on with it, or give this run a folder of its own"
        )

    def load(
        self, *, limit: int | None = None, ready: Callable[[int, Mapping[str, Any]], None] = lambda *_: None
    ) -> Loaded | None:
        """Load the newest intact checkpoint; return what it was, or None if there is no checkpoint.

        All ranks call this, and each verifies its share of the files.

        Args:
            limit: the largest number of batches allowed; later checkpoints are removed once one has been found.
            ready: called before the pipeline loads the checkpoint, with the number of batches and the extra data; it
                may switch the pipeline to another method.

        Raises:
            CheckpointError: there are checkpoints, but none is intact, or it does not fit the pipeline.
            PenstockError: a run is under way, or the pipeline broke in an earlier one.
        """
        check_idle(self._pipeline)
        self.wait()
        self._writer, self._failure, self._known = self._make_writer(), None, True
        newest, self.damaged = open_newest(self._folder, self._find(limit), self._open)
        for fault in self.damaged if self._rank == 0 and self._tell is _warn else ():
            _LOG.warning("a damaged checkpoint was passed over: %s", fault)
        if newest is None:
            return None
        failure: str | None = None
        try:
            if self._rank == 0:
                if limit is not None:
                    discard_after(self._folder, limit)
                set_aside(self._folder, newest.folder)
        except CheckpointError as error:
            failure = str(error)
        failure = self._of_first(failure, "setting damaged checkpoints aside")
        if failure is not None:
            raise CheckpointError(failure)
        try:
            ready(newest.batch, newest.extra)
            self._pipeline.load(newest)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if isinstance(error, PenstockError):
                raise
            raise CheckpointError(
                f"the index in {str(newest.folder)!r} is whole, but not of the form that this version of penstock "
                f"writes: {error!r}; remove that folder to go on from the checkpoint before it"
            ) from error
        self._written = self._writer.goes_on_from(newest)
        return Loaded(newest.batch, newest.extra)

    def _find(self, limit: int | None) -> list[Path]:
        """Return the checkpoints in the folder, which is this object's from now on, from the oldest on.

        Raises:
            CheckpointError: the folder is not as it should be, or another process has it.
        """
        found: list[str] = []
        failure: str | None = None
        if self._rank == 0:
            try:
                with self._owner.writing(take_over=True) if self._folder.is_dir() else nullcontext():
                    check_folder(self._folder)
                    clear_parts(self._folder)
                found = list(map(str, checkpoints(self._folder, limit)))
            except OSError as error:
                failure = f"cannot resume in {str(self._folder)!r}: {error}"
            except CheckpointError as error:
                failure = str(error)
        found, failure = self._of_first([found, failure], "looking for checkpoints, in load()")
        if failure is not None:
            raise CheckpointError(failure)
        return list(map(Path, found))

    def save(self) -> None:
        """Write a checkpoint between two runs, unless it exists, and wait for it; all ranks call this together.

        Raises:
            CheckpointError: it was not written; earlier ones are intact. Or nothing has been trained yet.
            ConfigError: a process has weights from before another one trained them further, for another pipeline; or
                as `every`.
            PenstockError: a run is under way (`every` saves within one), or the pipeline broke in an earlier one.
        """
        check_idle(self._pipeline, _WITHIN_A_RUN)
        batch = self._pipeline.batches
        if not batch:
            raise CheckpointError(
                "there is nothing to save: nothing has been trained yet, and no checkpoint was loaded"
            )
        stale = self._of_another_run()
        try:
            check_fresh(self._pipeline)
        except ConfigError as error:
            stale = str(error)
        # wait for the previous one, as there is time now
        found = self._gather([stale, self.wait()], "saving a checkpoint, in save()")
        stale = next((text for text, _ in found if text is not None), None)
        if stale is not None:
            raise ConfigError(stale)
        failures = [failure for _, failure in found]
        if batch == self._written and not any(failures):
            return
        if batch == self._written:
            self._writer = self._make_writer()
        if self._make_room(batch):
            save_between_runs(self._pipeline, self.every(1))
        self._written = -1
        failure = self.wait()
        if failure is not None:
            raise CheckpointError(f"the checkpoint after {batch} batches was not written: {failure}")

    def wait(self) -> str | None:
        """Wait until the last checkpoint is complete on every rank; return None or why it was not written."""
        if self._writer.batch != self._written and self._writer.batch >= 0:
            self._written = self._writer.batch
            self._failure = self._writer.finish(self._written)
        return self._failure

    def _sink(self, snapshot: Snapshot) -> None:
        self._writer.sink(snapshot)  # looked up late, as `load` makes a new writer

    def _make_room(self, batch: int) -> bool:
        self._known = True
        return self._writer.make_room(batch)

    def _open(self, path: Path) -> Checkpoint:
        """Open a checkpoint if all ranks find it intact."""
        checkpoint, fault = None, None
        try:
            checkpoint = Checkpoint(path, (self._rank, self._ranks))
        except CheckpointError as error:
            fault = str(error)
        faults = [f for f in self._gather(fault, "checking a checkpoint") if f is not None]
        if faults or checkpoint is None:
            raise CheckpointError(faults[0])
        return checkpoint

    def _of_first(self, value: Any, what: str) -> Any:
        """Return the value of rank 0 on all ranks."""
        return self._gather(None if self._rank else value, what)[0]

    def _gather(self, value: Any, what: str) -> list[Any]:
        return [value] if self._grid.group is None else gather_json(value, what, self._grid.everyone)
