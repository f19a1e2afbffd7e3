"""Saved states of whole pipelines: what they offer, the rows that ranks read of them, and whether they fit.

`penstock.runtime.rank.snapshot` lists the names of what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.partition.parameter_names import block_of
from penstock.runtime.rank.snapshot import older_kind
from penstock.runtime.rank.tensor_pieces import joined_pieces, pieces_in
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.weights.memory.row_shards import Rows

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


# Reads rows of tensors from a saved state, however they were saved: whole, by rows, or in parts of tensor ranks.
#
# Of what was saved whole or by rows, only those rows are read.


class SavedTensors:
    """The tensors of a saved state, by what they would be called if all were saved whole.

    Args:
        saved: the state.
    """

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved if isinstance(saved, SavedRows) else WholeTensors(saved)
        self._names, self._firsts, self._pieces = saved.names, _first_rows(saved.names), pieces_in(saved.names)

    def __contains__(self, whole: str) -> bool:
        """Whether there is a tensor of this name, or rows or parts of it."""
        return any(whole in names for names in (self._names, self._firsts, self._pieces))

    def rows(
        self, kind: str, name: str, rows: Rows, shape: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Read rows of a tensor; yields them in parts, each with its place behind the first of them.

        Args:
            kind: what of a parameter it is, such as "weights" or "optimizer/exp_avg".
            name: of the parameter.
            rows: which; of a tensor that does not have as many in all, such as a counter of steps, everything.
            shape: that all of it must have, as far as these rows tell; None for any.

        Raises:
            CheckpointError: rows are missing, or it has another shape.
        """
        whole, everything = f"{kind}/{name}", rows.end - rows.first == rows.all
        if whole in self._names:
            found = self._saved.shape(whole)
            check_shape(name, found, shape)
            read = everything or not len(found)
            yield 0, self._saved.tensor(whole) if read else self._saved.rows(whole, rows.first, rows.end)
        elif whole in self._pieces:
            tensor = joined_pieces(whole, self._pieces[whole], self._saved.tensor)
            check_shape(name, tensor.shape, shape)
            yield 0, tensor if everything or not tensor.dim() else rows.of(tensor)
        else:
            for first, end in self._parts(whole, rows.all):
                if first < rows.end and end > rows.first:
                    length, *rest = self._saved.shape(f"{kind}@{first}/{name}")
                    if first + length < end:
                        raise CheckpointError(f"the checkpoint lacks rows {first + length} to {end - 1} of {whole}")
                    check_shape(name, (rows.all + first + length - end, *rest), shape)
                    start = max(rows.first, first)
                    part = self._saved.rows(f"{kind}@{first}/{name}", start - first, min(rows.end, end) - first)
                    yield start - rows.first, part

    def joined(self, kind: str, name: str, rows: Rows) -> Tensor:
        """Read rows of a tensor, at least one, as one tensor; arguments as of `rows`."""
        found = [part for _, part in self.rows(kind, name, rows)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _parts(self, whole: str, rows: int) -> Iterator[tuple[int, int]]:
        """Return the first row of every part of a tensor that was saved by rows, and the one behind the last.

        Raises:
            CheckpointError: the first part is missing.
        """
        firsts = self._firsts.get(whole, [])
        if not firsts or firsts[0]:
            raise CheckpointError(f"the checkpoint lacks the first rows of {whole}")
        return zip(firsts, [*firsts[1:], rows], strict=True)


def check_shape(name: str, found: Sequence[int], wanted: Sequence[int] | None) -> None:
    """Make sure that a saved tensor has the shape of the model's.

    Raises:
        CheckpointError: it has another one.
    """
    if wanted is not None and tuple(found) != tuple(wanted):
        raise CheckpointError(
            f"{name} has shape {tuple(found)} in the checkpoint and {tuple(wanted)} in the model; give the model the "
            "shape that it was saved with"
        )


def check_type(name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Make sure that a saved tensor has numbers of the kind of the model's; floating-point ones are rounded.

    Raises:
        CheckpointError: one has floating-point or complex numbers, or truth values, and the other has not.
    """
    if _kind_of_number(found) != _kind_of_number(wanted):
        raise CheckpointError(
            f"{name} is {found} in the checkpoint and {wanted} in the model; give the model the type that it was saved "
            "with"
        )


def _kind_of_number(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return whether numbers are floating-point, complex, or truth values."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _first_rows(names: Collection[str]) -> dict[str, list[int]]:
    """Return, by what tensors saved by rows would be called as a whole, the first rows of their parts, in order."""
    found: dict[str, list[int]] = {}
    for name in names:
        kind, at, rest = name.partition("@")
        if at and kind.count("/") == kind.startswith("optimizer"):  # else it is in the name of a parameter
            first, _, known = rest.partition("/")
            if first.isdecimal():
                found.setdefault(f"{kind}/{known}", []).append(int(first))
    return {whole: sorted(firsts) for whole, firsts in found.items()}
