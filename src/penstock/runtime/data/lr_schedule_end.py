"""Batches for as many updates as a learning-rate scheduler has rates for.

A scheduler that ends, as OneCycleLR does, would fail at an update, in the middle of the pipeline. Here the batch of
that update does not enter: it counts as one that could not be read, so all batches before it are finished first. The
rank that reads the data must notice; where its own stages are frozen, another one tells it how the scheduler goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.runtime.data.batch_source import Batches
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.updates.lr_scheduler_table import ScheduledSettings, SchedulerFactory

Scheduled = tuple[ScheduledSettings, int]
"""What a scheduler sets by update, and how many updates have been made."""


class Schedules:
    """The schedulers of the stages in this process, or of others where these have none.

    Args:
        factory: makes schedulers; None for none.
        stages: of this process.
        grid: all ranks.
    """

    def __init__(self, factory: SchedulerFactory | None, stages: Iterable[StageRuntime], grid: RankGrid) -> None:
        weights = [stage.weights for stage in stages]
        self._updaters = [one.updater for one in weights if isinstance(one, TrainedWeights)]
        self._factory, self._grid = factory, grid
        self._asks: bool | None = False if factory is None or grid.group is None else None  # None: not known yet
        self._table: ScheduledSettings | None = None

    def limit(self, batches: Batches, made: int | None) -> Batches:
        """Return the batches of a span, up to the first one whose update would have no rate; all ranks call it.

        Args:
            batches: the data; what is no iterable is returned as it is.
            made: the number of updates before the span; what each optimizer has made if None. Every batch is taken to
                make one, because processes must agree on the end before they know which updates are skipped.
        """
        tables = self._elsewhere() or self._own()
        if not tables or not hasattr(batches, "__iter__"):
            return batches
        return _checked(batches, [(table, before if made is None else made) for table, before in tables])

    def _own(self) -> list[Scheduled]:
        return [(each.rates.scheduled, each.updates) for each in self._updaters if each.rates.scheduled is not None]

    def _elsewhere(self) -> list[Scheduled]:
        """The scheduler of the first rank that has one, where this one has none; nothing where none has to ask."""
        if self._asks is False:
            return []
        own = self._own()
        mine: Any = [own[0][0].plain() if self._asks is None else None, own[0][1]] if own else None
        told = gather_json(mine, "telling how the learning rates of run() go", self._grid.control)
        known = next((one for one in told if one is not None), None)
        if self._asks is None:
            self._asks = known is not None and None in told
        if own or known is None or self._factory is None:
            return []
        self._table = self._table or ScheduledSettings.like(self._factory, known[0])
        return [(self._table, known[1])]


def _checked(batches: Batches, tables: Sequence[Scheduled]) -> Iterator[object]:
    for number, batch in enumerate(batches):
        for table, before in tables:
            table.check(before + number)
        yield batch
