"""When snapshots of a rank's stages are taken, while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

from torch import Tensor

from penstock.comm.core.recorder import Recorder
from penstock.runtime.rank.snapshot import Saving, Snapshot, copies_of_fixed, take
from penstock.runtime.update.decisions import Decisions
from penstock.schedule.ir.schedule import Stage
from penstock.stage.stage_runtime import StageRuntime


class Keeping:
    """Takes the snapshots of one span.

    The buffers of a stage belong to a snapshot as they were before the first forward of its batch. With double-buffered
    weights the update that bears its version comes after that forward; the buffers are copied then.

    Args:
        saving: which, and where they go; none if None.
        start: the first batch of the span.
        decisions: as the rank knows them.
        recorder: told how many bytes they hold.
        held: those that somebody may still have, those of earlier spans included.
    """

    def __init__(
        self,
        saving: Saving | None,
        start: int,
        decisions: Decisions,
        recorder: Recorder,
        held: list[ref[Snapshot]],
    ) -> None:
        self._saving, self._start = saving, start
        self._decisions, self._recorder = decisions, recorder
        self._taken: dict[Stage, int] = {}  # the last batch before which one was taken
        self._fixed: dict[Stage, Mapping[str, Tensor]] = {}  # of the next one
        self._older: dict[Stage, Mapping[str, Tensor]] = {}
        self._held = held

    def before_forward(self, stage: StageRuntime, batch: int) -> None:
        """Before the first forward of a batch on a stage."""
        if self._saving is None or batch == self._start or not self._saving.wants(batch):
            return
        late = self._taken.get(stage.key) != batch  # the update before the batch comes later
        if late and self._saving.make_room(batch):
            self._fixed[stage.key] = copies_of_fixed(stage)

    def untrained(self, stage: StageRuntime, batch: int) -> None:
        """Before the first forward of a batch on a stage that nothing is trained on, and at the end of the span."""
        if self._saving is None or batch == self._start or not self._saving.wants(batch):
            return
        if self._saving.make_room(batch):
            self._hand_over(take(stage, batch, None))

    def before_meeting(self, stage: StageRuntime, batch: int) -> None:
        """After the update that bears version `batch`, which the other pipelines will change.

        The version before may be gone when that is done.
        """
        if self._saving is None or not self._saving.wants(batch) or not self._saving.make_room(batch):
            return
        if stage.store is not None and batch - 1 in stage.store.versions:
            self._older[stage.key] = stage.store.copies(batch - 1)

    def after_step(self, stage: StageRuntime, batch: int) -> None:
        """After the update that bears version `batch`, and after pipelines have met: a snapshot, if it is time."""
        if self._saving is None or not self._saving.wants(batch):
            return
        fixed = self._fixed.pop(stage.key, None)
        self._taken[stage.key] = batch
        if self._saving.make_room(batch):
            self._hand_over(take(stage, batch, self._decisions, fixed, self._older.pop(stage.key, None)))

    def _hand_over(self, snapshot: Snapshot) -> None:
        assert self._saving is not None
        self._held.append(ref(snapshot))
        self.record()  # before anybody clears it
        self._saving.sink(snapshot)

    def record(self) -> None:
        """Take down the bytes of snapshots that are still held, by their writer for example."""
        if self._saving is None and not self._held:
            return
        held = [snapshot for known in self._held if (snapshot := known()) is not None and snapshot.tensors]
        self._held[:] = [ref(snapshot) for snapshot in held]
        parts = (*self._fixed.values(), *self._older.values())
        early = sum(tensor.nbytes for copies in parts for tensor in copies.values())
        self._recorder.hold("snapshots", sum(snapshot.nbytes for snapshot in held) + early)
