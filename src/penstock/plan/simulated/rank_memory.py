"""The most bytes that a rank holds, by where its stages begin and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.plan.simulated.block_chain import BlockChain, Floats
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import AlwaysThere

Moment: TypeAlias = Mapping[tuple[int, HeldKind], float]
"""What a rank holds at one moment: how many of each kind, of each of its stages."""

Cuts: TypeAlias = tuple[int, ...]
"""Where stages begin, and where the last one ends."""

_DIVIDED = (HeldKind.OPTIMIZER, HeldKind.SCRATCH)  # by parallel pipelines that shard


class StageSizes:
    """What a stage takes between two cuts: always, and of each kind.

    Attributes:
        fixed: bytes that are always there.
        kinds: bytes of each kind of what comes and goes.

    Args:
        chain: of blocks.
        there: weights and gradients that are always there.
        shards: pipelines that divide what the optimizer remembers, and its weights.
    """

    def __init__(self, chain: BlockChain, there: AlwaysThere, shards: int = 1) -> None:
        self.fixed: Floats = (
            chain.frozen + there.versions * chain.buffer + (there.whole + there.rows / shards) * chain.whole
        )
        self.kinds = {**chain.sizes, **{kind: chain.sizes[kind] / shards for kind in _DIVIDED}}
        self.kinds[HeldKind.WHOLE] = there.rows * chain.whole


class RankMemory:
    """The most bytes of one rank.

    Args:
        stages: that it has.
        sizes: of each of them.
        moments: what it holds at each moment that counts.
    """

    def __init__(self, stages: Sequence[int], sizes: StageSizes, moments: Sequence[Moment]) -> None:
        self._stages, self._fixed = stages, sizes.fixed
        kinds = sorted({key for each in moments for key in each})
        self._counts = np.array([[each.get(key, 0.0) for key in kinds] for each in moments])
        self._sizes = [(stage, sizes.kinds[kind]) for stage, kind in kinds]

    def between_cuts(self) -> Floats:
        """Return the bytes of a rank with one stage, between each cut and each later one."""
        most = np.zeros(self._fixed.shape)
        for counts in self._counts:
            found = np.zeros(most.shape)
            for count, (_, size) in zip(counts, self._sizes, strict=True):
                if count:
                    found += count * size
            np.maximum(most, found, out=most)
        total: Floats = self._fixed + most
        return total

    def at(self, cuts: Cuts) -> float:
        """Return the bytes with cuts."""
        sizes = np.array([size[cuts[stage], cuts[stage + 1]] for stage, size in self._sizes])
        fixed = sum(self._fixed[cuts[stage], cuts[stage + 1]] for stage in self._stages)
        return float(fixed + (self._counts @ sizes).max(initial=0.0))
