"""Evaluates the weights of a version in a pipeline of their own, where all ranks are in one process.

An evaluation in the pipeline itself would drain it, under all rules but flush and double-buffer, and delays would begin
anew. Copies of the weights change nothing, whatever the method. (Pipelines that have weights of their own are evaluated
where they meet, since none of them has made the weights that they have in common then.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.data.batch_source import Batches
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.run_events import Evaluated


class CopiedVersions:
    """Copies the weights of every so-manieth version as the stages make them, one stage after the other.

    The last version of a run is left out: it is evaluated where it is.

    Args:
        pipeline: that is trained, where it begins; all of its ranks are here.
        other: another one of the same stages, which evaluates.
        every: which versions are evaluated.
        last: the number of batches of the run.
    """

    def __init__(self, pipeline: Pipeline, other: Pipeline, every: int, last: int) -> None:
        self._other, self._every, self._last = other, every, last
        self._weights = other.state_dict()
        self._updates = dict.fromkeys(self._weights, 0)
        self._copies: dict[int, dict[str, Tensor]] = {}
        if pipeline.batches:  # loaded from a checkpoint
            self._see(pipeline.batches, pipeline.state_dict())
        pipeline.on_update(self._see)

    def _see(self, update: int, weights: Mapping[str, Tensor]) -> None:
        self._updates |= dict.fromkeys(weights, update)
        if update % self._every == 0 and update < self._last:
            self._copies.setdefault(update, {}).update((name, tensor.clone()) for name, tensor in weights.items())

    def evaluated(self, data: Callable[[], Batches], *, over: bool) -> Iterator[Evaluated]:
        """Evaluate the versions that all stages have made, and have made the next one of, so that none is undone.

        Args:
            data: returns the held-out batches.
            over: no further update comes.

        Raises:
            ConfigError: the model has weights or buffers that no optimizer trains, so that those of a version are not
                known.
        """
        made = min(self._updates.values()) if self._copies else 0
        for version in sorted(self._copies):
            if version >= made and not over:
                return
            copies = self._copies.pop(version)
            if untrained := self._weights.keys() - copies.keys():
                raise ConfigError(
                    f"in one process, evaluations are of copies of the weights that are trained, but {min(untrained)} "
                    "is not; use a norm without statistics, such as GroupNorm, or set evaluate.every=null"
                )
            for name, tensor in self._weights.items():
                tensor.copy_(copies[name])
            if (found := self._other.evaluate(data())) is not None:
                yield Evaluated(version, found[0] * found[1], found[1])
