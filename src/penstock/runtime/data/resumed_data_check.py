"""The place of a run in its data, by which a resumed run notices that its data begin again.

A pipeline cannot look into a loader. It remembers the first two batches of its data as checksums, which are part of
every saved state, with how many batches followed. A run that goes on from a state that was saved on the way through the
data, and is given that first batch again, would train on the same samples twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, Subset

from penstock.runtime.data.batch_source import Batches, iterator_of
from penstock.runtime.data.checksum import checksum

_LOG = logging.getLogger(__name__)
_LOOKED_AT = 2  # batches: where the second is as the first, all may be alike
DATA = "data"
"""The name of the place among the facts of a saved state."""


@dataclass
class _DataPlace:
    """Where the data of a run are.

    Attributes:
        begun: their first batch.
        end: the batch after their last one, once that is known.
        first: checksums of their first batches.
    """

    begun: int = 0
    end: int | None = None
    first: list[int | None] = field(default_factory=list)


class DataPosition:
    """Notes where the data of each run begin and end, and warns if those of a resumed run begin again.

    Args:
        tells: this process takes the inputs of the first stage, and is the one that warns.
    """

    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self._place = _DataPlace()
        self._origin: list[int | None] = []  # checksums of the first batches of the data that training began with
        self._loaded: _DataPlace | None = None  # from where the next run is to go on

    def state(self) -> dict[str, Any]:
        """Return the place as plain JSON values, for a saved state; nothing if this process does not know it."""
        place = self._loaded or self._place
        return {**asdict(place), "origin": self._origin} if self._tells and place.first else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that `state` returned, or from an unknown one."""
        first, self._origin = list(state.get("first", ())), list(state.get("origin", ()))
        end = state.get("end")
        self._loaded = _DataPlace(int(state["begun"]), None if end is None else int(end), first) if first else None
        self._place = _DataPlace()

    def observed(self, batches: Batches, batch: int) -> Batches:
        """Return the data of a run that begins with batch number `batch`; its iterator notes what it yields."""
        return _Observed(self, batches, batch) if self._tells else batches

    def watch(self, batches: Batches, batch: int) -> Iterator[Any]:
        """Return an iterator over the data of a run; what `iter` raises is raised at once."""
        return self._noting(batches, iterator_of(batches), batch)

    def _noting(self, batches: Batches, rest: Iterator[Any], batch: int) -> Iterator[Any]:
        number = batch
        for following in rest:
            if number == batch:
                self._place = _DataPlace(batch)
            if number < batch + _LOOKED_AT:
                self._place.first.append(_sum(following))
                self._origin = self._origin if batch else self._place.first
            if number == batch and self._loaded is not None:
                loaded, self._loaded = self._loaded, None
                self._compare(loaded, batches, batch)
            number += 1
            yield following
        if number > batch:
            self._place.end = number

    def _compare(self, loaded: _DataPlace, batches: Batches, batch: int) -> None:
        """Warn if the data begin with the batch that those of the saved state have begun with, which is trained on."""
        begun, now = loaded.begun, self._place.first[0]
        if batch in (begun, loaded.end):  # at a border of the data
            return
        repeats = [first[0] for first in (loaded.first, self._origin) if first and first[0] not in first[1:]]
        if now is not None and now in repeats:
            what = "the data begin again with a batch that the pipeline has been trained on"
        elif _is_shuffled(batches):
            what = (
                f"the DataLoader begins again, but {batch - begun} of its batches have been trained on (in another "
                "order: give it one that it repeats, generator=torch.Generator().manual_seed(0))"
            )
        else:
            return
        done = batch if now in repeats and now != loaded.first[0] else batch - begun
        _LOG.warning(
            "run: after %d batches, %s. To go on where the checkpoint was taken:\n"
            "    rest = itertools.islice(batches, %d, None)  # which skips what it has been trained on\n"
            "    for report in pipeline.run(rest): ...\n"
            "(Over several epochs: batches = itertools.chain.from_iterable(loader for _ in range(epochs)), and "
            "pipeline.batches of them.)",
            batch, what, done,
        )  # fmt: skip


def _sum(batch: Any) -> int | None:
    """Return a checksum of a batch; None of one that makes its microbatches when they are asked for, or has none."""
    if type(batch) not in (tuple, list, dict):
        return None
    try:
        return checksum(batch)
    except (RuntimeError, TypeError):  # of tensors whose elements are not in a row, such as sparse ones
        return None


def _is_shuffled(batches: Batches) -> bool:
    """Whether these are all samples of a dataset in a random order, so that each time other ones come first."""
    if type(batches) is not DataLoader or isinstance(batches.dataset, Subset):
        return False
    return isinstance(batches.sampler, RandomSampler)


class _Observed:
    """The data of a run, of which a position is told."""

    def __init__(self, position: DataPosition, batches: Batches, batch: int) -> None:
        self._position, self._batches, self._batch = position, batches, batch

    def __iter__(self) -> Iterator[Any]:
        return self._position.watch(self._batches, self._batch)
