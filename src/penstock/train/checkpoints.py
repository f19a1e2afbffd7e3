"""The checkpoints of a pipeline: where it goes on from, and what it leaves behind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.errors import CheckpointError
from penstock.runtime.collective import gather_json
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.snapshot import Saving
from penstock.train.checkpoint import Checkpoint, clear_parts, open_newest, set_aside
from penstock.train.writing import LocalWall, StoreWall, Wall, Writer


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

    Attributes:
        damaged: on the first rank, what was wrong with checkpoints that `load` has passed over.
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
        self._pipeline, self._folder, self._team = pipeline, Path(folder), pipeline.team
        self.damaged: list[str] = []
        team, cuts = pipeline.team, range(pipeline.schedule.cuts)
        here = set(pipeline.nodes)
        own = [(node.cut, replica) for replica in team.replicas for node in sorted(here)]
        wall: Wall = LocalWall()
        if team.group is not None:
            name = gather_json(uuid.uuid4().hex, "preparing for checkpoints", team.control)[0]
            wall = StoreWall(store or _get_default_store(), name)
        parts = [(cut, replica) for replica in range(team.width) for cut in cuts]
        self._writer = Writer(self._folder, parts, own, keep, extra, wall, timeout, tell)
        self._written = -1  # the last batch before which one was begun

    def every(self, batches: int) -> Saving:
        """What `Pipeline.run` is to be told to have one written whenever so many batches are done."""
        return Saving(batches, self._writer.sink, self._writer.make_room)

    def load(self) -> Mapping[str, Any] | None:
        """Go on from the newest whole checkpoint; returns what was kept with it, None if there is none.

        All ranks call this. The first one checks all files; the others trust it.

        Raises:
            CheckpointError: there are some, but none is whole, or it does not fit.
        """
        place: str | None = None
        failure: CheckpointError | None = None
        if self._first:
            clear_parts(self._folder)
            try:
                newest, faults = open_newest(self._folder)
                self.damaged = list(map(str, faults))
                if newest is not None:
                    place = str(newest.folder)
                    set_aside(self._folder, newest.folder)
            except CheckpointError as error:
                failure = error
            except OSError as error:
                failure = CheckpointError(f"cannot go on in {str(self._folder)!r}: {error}")
        if self._team.group is not None:
            mine = [place, None if failure is None else str(failure)]
            place, message = gather_json(mine, "choosing a checkpoint", self._team.control)[0]
            failure = failure or (CheckpointError(message) if message is not None else None)
        if failure is not None:
            raise failure
        if place is None:
            return None
        checkpoint = Checkpoint(Path(place), check=False)
        self._pipeline.load(checkpoint)
        self._written = checkpoint.batch
        return checkpoint.extra

    def save(self) -> str | None:
        """Have one written between two runs, unless it is there already, and wait for it; all ranks call this.

        Returns:
            What has kept it from being written.
        """
        if self._pipeline.batches in (0, self._written, self._writer.batch):
            return self.wait()
        self._writer.make_room(self._pipeline.batches)
        for snapshot in self._pipeline.snapshots():
            self._writer.sink(snapshot)
        return self.wait()

    def wait(self) -> str | None:
        """Wait until the last one that was begun is complete on every rank; returns what has kept it from being."""
        if self._writer.batch <= self._written:
            return None
        self._written = self._writer.batch
        return self._writer.finish(self._written)

    @property
    def _first(self) -> bool:
        return self._team.group is None or dist.get_rank(self._team.group) == 0
