"""Snapshots of the stages of a rank, without tensors: what their copies hold, and until when.

It follows `penstock.runtime.rank.stage_snapshot`. Where a run is drained for snapshots the ledger of a rank does not
have them, since they are taken between two spans.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Schedule, Stage
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.simulate.memory.held import Held, HeldKind, Holdings


class Snapshots(NamedTuple):
    """The snapshots of a run.

    Attributes:
        every: they are taken after every so many batches.
        kept: each is kept until the next one is due, as while it is written; otherwise it is gone as soon as it has
            been handed over.
        drains: the pipeline is drained for them.
    """

    every: int
    kept: bool = False
    drains: bool = False

    def wants(self, batch: int) -> bool:
        """Return whether one is taken before a batch."""
        return batch > 0 and batch % self.every == 0


class _Copies(NamedTuple):
    """The copies of one snapshot of a stage."""

    batch: int
    counts: Counter[Held]


class KeptSnapshots:
    """Snapshots of all ranks of a process that are kept.

    Attributes:
        ranks: those of each rank.
    """

    def __init__(self) -> None:
        self.ranks: list[list[_Copies]] = []

    def make_room(self, batch: int) -> None:
        """Free those of earlier batches."""
        for kept in self.ranks:
            kept[:] = [copies for copies in kept if copies.batch >= batch]


class SnapshotCopies:
    """The snapshots of one rank.

    Args:
        plan: when they are taken.
        holdings: of the rank.
        kept: those of all ranks.
        delay: of the version rule.
    """

    def __init__(self, plan: Snapshots, holdings: Holdings, kept: KeptSnapshots, delay: int) -> None:
        self._plan, self._holdings, self._all, self._delay = plan, holdings, kept, delay
        self._taken: dict[Stage, int] = {}
        self._early: dict[tuple[Stage, int], Counter[Held]] = {}  # of snapshots that come, by their batches
        self._older: dict[tuple[Stage, int], Counter[Held]] = {}  # versions before those of snapshots that come
        self._kept: list[_Copies] = []
        kept.ranks.append(self._kept)
        self._frozen: set[Stage] = set()  # whose frozen parameters have been copied
        self._said = Counter[Held]()

    def keep_older(self, stage: Stage, batch: int, first: bool) -> None:
        """Copy the version before the newest, of which the rest is still to come.

        Args:
            stage: of which.
            batch: the version.
            first: as of `after_step`.
        """
        if self._plan.wants(batch):
            self._all.make_room(batch)
            if first:
                self._older[stage, batch] = Counter([Held(HeldKind.OLDER_COPY, stage.index)])

    def before_forward(self, stage: Stage, batch: int, first: bool) -> None:
        """Copy what is not trained before the first forward of a batch whose update comes later.

        With a delay of two also the version that it reads.

        Args:
            stage: of which.
            batch: which.
            first: as of `after_step`.
        """
        if self._plan.wants(batch) and self._taken.get(stage) != batch:
            self._all.make_room(batch)
            self._early[stage, batch] = self._untrained(stage)
            if self._delay > 1:
                self._older[stage, batch] = self._second(stage, batch, first)

    def after_step(self, stage: Stage, batch: int, first: bool, divides: bool) -> None:
        """Take a snapshot once a version is final, if one is due.

        Args:
            stage: of which.
            batch: the version.
            first: it is the first copy of the stage, which saves what all have.
            divides: all copies divide its state, so each saves its share.
        """
        if not self._plan.wants(batch):
            return
        self._taken[stage] = batch
        self._all.make_room(batch)
        copies = self._early.pop((stage, batch), None) or self._untrained(stage)
        older = self._older.pop((stage, batch), None)
        copies.update(self._second(stage, batch, first) if older is None else older)
        if first or divides:
            copies[Held(HeldKind.SNAPSHOT if first else HeldKind.SHARE, stage.index)] += 1
        self._kept.append(_Copies(batch, copies))
        self.record()
        if not self._plan.kept:
            self._kept.pop()

    def record(self) -> None:
        """Report what there is: the ledger does so after every action."""
        now = Counter[Held]()
        for counts in (*(copies.counts for copies in self._kept), *self._early.values(), *self._older.values()):
            now.update(counts)
        for more, fewer in ((self._said, now), (now, self._said)):
            for what, count in (more - fewer).items():
                self._holdings.change(what, count if more is now else -count)
        self._said = now

    def _second(self, stage: Stage, batch: int, first: bool) -> Counter[Held]:
        """Return the second version before the newest, if a snapshot has one."""
        has = first and self._delay > 1 and batch > 1
        return Counter([Held(HeldKind.OLDER_COPY, stage.index)] * has)

    def _untrained(self, stage: Stage) -> Counter[Held]:
        """Return what is copied that is not trained: of frozen parameters only what has changed since the last time."""
        copies = Counter([Held(HeldKind.BUFFERS, stage.index)])
        if stage not in self._frozen:
            self._frozen.add(stage)
            copies[Held(HeldKind.FROZEN, stage.index)] += 1
        return copies


def check_snapshots(schedule: Schedule, combine: Combine) -> None:
    """Refuse what snapshots are not predicted with.

    Raises:
        CapabilityError: it is such a thing.
    """
    if combine.apart:
        raise CapabilityError(
            f"{schedule.name}: the memory of snapshots is not predicted with pipelines that have weights of their own "
            f"(combine={combine.kind})"
        )
    if schedule.frozen:
        raise CapabilityError(
            f"{schedule.name}: the memory of snapshots is not predicted with stages that are not trained"
        )
