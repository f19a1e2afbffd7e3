"""What the stages of a model are given while they are run one after the other, whatever graph they form."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from typing import Any

from penstock.comm.p2p.stage_routes import entrances, neighbors_of
from penstock.comm.p2p.trees import leaves_of
from penstock.measure.stages.stage_trial import BlockInput, BlockPlace
from penstock.schedule.ir.schedule import Schedule


class StageInputs:
    """What the stages of a model are given, as far as those before them have run.

    Args:
        given: a microbatch of the model.
        stages: how many there are.
        schedule: whose edges say which stages feed which; they are a chain if None.
    """

    def __init__(self, given: Any, stages: int, schedule: Schedule | None = None) -> None:
        self._given, self._outputs = given, dict[int, BlockInput]()
        self._takes: dict[int, tuple[int, ...]] = {index: (index - 1,) if index else () for index in range(stages)}
        self._returns: dict[int, tuple[bool, ...]] = dict.fromkeys(range(stages), (True,))
        self._entrances, self._fed = [0], set(range(stages - 1))
        if schedule is None:
            return
        neighbors = {index: neighbors_of(schedule, schedule.stage_at[index, 0]) for index in range(stages)}
        self._entrances = entrances(schedule)
        self._takes = {index: tuple(stage.index for stage in each.inputs) for index, each in neighbors.items()}
        self._returns = {index: each.returns for index, each in neighbors.items()}
        self._fed = {index for index, each in neighbors.items() if each.outputs}

    @property
    def order(self) -> Sequence[int]:
        """The stages, each behind those that feed it."""
        return tuple(TopologicalSorter(self._takes).static_order())

    def place(self, index: int) -> BlockPlace:
        """Return where a stage stands."""
        return BlockPlace(first=not self._takes[index], last=index not in self._fed)

    def add(self, index: int, output: BlockInput) -> None:
        """Keep the output of a stage, as those that it feeds are given it."""
        self._outputs[index] = output

    def of(self, index: int) -> BlockInput:
        """Return what a stage is given: a tuple where several feed it, as in a run."""
        sources = self._takes[index]
        if not sources:
            place = self._entrances.index(index)
            return BlockInput(self._given if len(self._entrances) == 1 else self._given[place])
        found = [self._outputs[source] for source in sources]
        wants = tuple(
            wanted and returned
            for each, returned in zip(found, self._returns[index], strict=True)
            for wanted in each.wants
        )
        return BlockInput(found[0].value if len(found) == 1 else tuple(each.value for each in found), wants)

    def divided(self, index: int, sizes: Sequence[int]) -> dict[int, int]:
        """Divide the bytes of the gradients of a stage's input, leaf by leaf, among the stages that feed it."""
        sources = self._takes[index]
        ends = accumulate((len(leaves_of(self._outputs[source].value)) for source in sources), initial=0)
        return {source: sum(sizes[first:last]) for source, (first, last) in zip(sources, pairwise(ends), strict=True)}
