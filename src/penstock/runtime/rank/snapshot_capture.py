"""Capture of snapshots of a rank's stages while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

from torch import Tensor

from penstock.comm.core.devices import Done, SideStream
from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.rank.stage_snapshot import Fixed, take_fixed, take_snapshot
from penstock.runtime.update.decisions import Decisions
from penstock.schedule.ir.schedule import Stage
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights


class SnapshotCapture:
    """Takes the snapshots of one rank during one span.

    A snapshot has the module buffers from before the first forward of its batch. Where passes read delayed weights the
    update that creates its version comes after that forward, so the buffers are copied before it, and with a delay of
    two the version that the forward reads, which may be gone by then.

    Args:
        saving: when to take them and where they go; None for no snapshots.
        start: the first batch of the span.
        decisions: of the rank.
        recorder: receives the bytes that snapshots hold.
        held: weak references to snapshots that may still be alive, also those of earlier spans.
        side: copies snapshots to the host beside the work of a device; None where there is none.

    Attributes:
        holds: there may be snapshots whose bytes are to be reported.
    """

    def __init__(
        self,
        saving: Saving | None,
        start: int,
        decisions: Decisions,
        recorder: Recorder,
        held: list[ref[Snapshot]],
        side: SideStream | None = None,
    ) -> None:
        self._saving, self._start = saving, start
        self._decisions, self._recorder = decisions, recorder
        self._taken: dict[Stage, int] = {}  # the last batch before which one was taken
        self._fixed: dict[tuple[Stage, int], Fixed] = {}  # of the next ones, by their batches
        self._older: dict[tuple[Stage, int], dict[int, Mapping[str, Tensor]]] = {}
        self._held, self.holds = held, saving is not None or bool(held)
        self._side = side
        self._copying: dict[Stage, Done] = {}  # of weights that the next update of the stage writes

    def before_forward(self, stage: StageRuntime, batch: int) -> None:
        """Called before the first forward of a batch on a stage: copy the buffers if the update comes later."""
        if self._saving is None or batch == self._start or not self._saving.wants(batch):
            return
        pending = self._taken.get(stage.key) != batch  # the update before the batch comes later
        if pending and self._saving.make_room(batch):
            self._fixed[stage.key, batch] = take_fixed(stage)
            if self._decisions.delay > 1:
                self._keep(stage, batch, self._decisions.delay)

    def untrained(self, stage: StageRuntime, batch: int) -> None:
        """Called before the first forward of a batch on a stage without trained weights, and at the end of the span."""
        if self._saving is None or batch == self._start or not self._saving.wants(batch):
            return
        if self._saving.make_room(batch):
            self._deliver(stage, take_snapshot(stage, batch, None, side=self._side))

    def keep_older(self, stage: StageRuntime, batch: int) -> None:
        """Called after the update that creates version `batch`, where that is not final yet.

        Until pipelines are averaged, or the rest of it has come. Copies the version before, which may be gone by then.
        """
        if self._saving is None or not self._saving.wants(batch) or not self._saving.make_room(batch):
            return
        self._keep(stage, batch, 1)

    def _keep(self, stage: StageRuntime, batch: int, back: int) -> None:
        """Copy the version of so many updates before `batch`, which may be gone when the snapshot is taken."""
        weights = stage.weights
        if stage.place and weights.agreement is None:
            return  # the first copy saves it
        if isinstance(weights, TrainedWeights) and batch - back in weights.store.versions:
            self._older.setdefault((stage.key, batch), {})[back] = weights.store.copies(batch - back)

    def after_step(self, stage: StageRuntime, batch: int) -> None:
        """Called when version `batch` is final, also after averaging over pipelines: take a snapshot if one is due."""
        if self._saving is None or not self._saving.wants(batch):
            return
        fixed, older = self._fixed.pop((stage.key, batch), None), self._older.pop((stage.key, batch), None)
        self._taken[stage.key] = batch
        if self._saving.make_room(batch):
            self._deliver(stage, take_snapshot(stage, batch, self._decisions, fixed, older, self._side))

    def before_update(self, stage: StageRuntime) -> None:
        """Called before something writes the weights of a stage: the device does so after it has copied them."""
        copying = self._copying.pop(stage.key, None)
        if copying is not None and self._side is not None:
            self._side.before_work(copying)

    def _deliver(self, stage: StageRuntime, snapshot: Snapshot) -> None:
        assert self._saving is not None
        if self._side is not None and snapshot.copied is not None:
            self._copying[stage.key] = snapshot.copied
        self._held.append(ref(snapshot))
        self.record()  # before the sink clears it
        self._saving.sink(snapshot)

    def record(self) -> None:
        """Report the bytes of the snapshots that are still alive, for example until they are written."""
        if not self.holds:
            return
        held = [snapshot for known in self._held if (snapshot := known()) is not None and snapshot.tensors]
        self._held[:] = [ref(snapshot) for snapshot in held]
        early = sum(t.nbytes for kept in self._older.values() for copies in kept.values() for t in copies.values())
        early += sum(fixed.nbytes for fixed in self._fixed.values())
        self._recorder.hold("snapshots", sum(snapshot.nbytes for snapshot in held) + early)
