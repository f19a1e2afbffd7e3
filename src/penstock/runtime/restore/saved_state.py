"""Saved states of whole pipelines: what they offer, and whether they go with a pipeline.

`penstock.runtime.rank.snapshot` lists the names of what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.partition.parameter_names import block_of
from penstock.runtime.rank.snapshot import older_kind
from penstock.schedule.methods.data_parallel_sync import Combine

ANOTHER_MODEL = "load it into the model that it was saved from, or give this one a folder of its own"
PREDICTION = "prediction"  # among the facts: which one passes have read, as of `prediction_of`


@runtime_checkable
class SavedState(Protocol):
    """A saved state of a whole pipeline, whatever its depth, width and method were; `Pipeline.load` takes it."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Values that are the same on all stages, and under `values` those of all optimizers."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        ...


@runtime_checkable
class SavedRows(SavedState, Protocol):
    """A saved state of which rows of tensors can be read by themselves, such as a checkpoint."""

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor."""
        ...

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Read the rows of a tensor from `first` to before `end`, as far as there are such."""
        ...


class WholeTensors:
    """Takes rows of a saved state that gives whole tensors; the last one is kept, since several are asked for in turn.

    Args:
        saved: the state.
    """

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved
        self._last: tuple[str, Tensor | None] = "", None
        self.facts, self.names = saved.facts, saved.names

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        known, found = self._last
        if found is None or known != name:
            found = self._saved.tensor(name)
            self._last = name, found
        return found

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor."""
        return self.tensor(name).shape

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Return rows of a tensor."""
        return self.tensor(name)[first:end]


def check_pipelines(saved: SavedState, combine: Combine, width: int) -> None:
    """Make sure that the pipelines match a checkpoint in which pipelines have weights of their own.

    Raises:
        CheckpointError: their number is another one, or the checkpoint lacks the common model that `combine` takes.
    """
    apart = saved.facts.get("pipelines", 1)
    alike = combine.spec.drains and combine.agrees  # between two runs
    if apart != 1 and (apart != width or not combine.apart or alike):
        raise CheckpointError(
            f"the checkpoint of batch {saved.facts['batch']} has the weights of {apart} pipelines that differ, so it "
            f"goes on with width {apart} and pipelines that have weights of their own; here are {width}, combine="
            f"{combine.kind}. To change either, take a checkpoint from where pipelines have just been averaged"
        )
    if apart != 1 and combine.spec.buffers and not any(name.startswith("common/") for name in saved.names):
        raise CheckpointError(
            f"the checkpoint of batch {saved.facts['batch']} has the weights of {apart} pipelines that differ, and no "
            f"model that they have in common, from which combine={combine.kind} goes on; go on as before, or take a "
            "checkpoint from where pipelines have just been averaged"
        )


def check_names(saved: SavedState, blocks: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint has only tensors of the model's blocks.

    Raises:
        CheckpointError: it has tensors of blocks that the model does not have.
    """
    foreign = [name for name in saved.names if not _belongs(name, blocks)]
    if foreign:
        raise CheckpointError(
            f"the checkpoint has {len(foreign)} tensors of blocks that the model does not have, the first of them "
            f"{foreign[0].rpartition('/')[2]}; blocks of the model: {', '.join(blocks)}; {ANOTHER_MODEL}"
        )


def _belongs(saved: str, blocks: Mapping[str, Any]) -> bool:
    """Whether a tensor is of some block by its name in a saved state, which begins with what it is."""
    parts = saved.split("/")
    return any(block_of("/".join(parts[at:]), blocks) is not None for at in range(1, len(parts)))


def saved_older(saved: SavedState, prediction: Sequence[float | None] | None) -> int:
    """Return of how many versions before the newest a saved state has what passes read.

    Args:
        saved: the state.
        prediction: what they read in place of versions, as of `prediction_of`; another one is of no use.
    """
    if prediction is not None and saved.facts.get(PREDICTION, prediction) != prediction:
        return 0
    kinds = {re.split("[/@~]", name, maxsplit=1)[0] for name in saved.names}
    wanted = older_kind if prediction is None else "ahead.{}".format
    return next(back for back in count(1) if wanted(back) not in kinds) - 1
