"""Batches for as many updates as a learning-rate scheduler has rates for.

A scheduler that ends, as OneCycleLR does, would fail at an update, in the middle of the pipeline. Here the batch of
that update does not enter: it counts as one that could not be read, so all batches before it are finished first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.runtime.rank.batch_source import Batches
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.stage_weights import TrainedWeights
from penstock.weights.optim.rates import Rates


def while_scheduled(batches: Batches, stages: Iterable[StageRuntime], made: int | None) -> Batches:
    """Return the batches of a span, up to the first one whose update would have no rate.

    Args:
        batches: the data; what is no iterable is returned as it is.
        stages: of this process; where none has an optimizer, no end is noticed.
        made: the number of updates before the span; what each optimizer has made if None. Every batch is taken to make
            one, because processes must agree on the end before they know which updates are skipped.
    """
    trained = [stage.weights for stage in stages if isinstance(stage.weights, TrainedWeights)]
    updaters = [weights.updater for weights in trained if weights.updater.rates.is_scheduled]
    if not updaters or not hasattr(batches, "__iter__"):
        return batches
    return _checked(batches, [(updater.rates, updater.updates if made is None else made) for updater in updaters])


def _checked(batches: Batches, starts: Sequence[tuple[Rates, int]]) -> Iterator[object]:
    for number, batch in enumerate(batches):
        for rates, before in starts:
            rates.check(before + number)
        yield batch
