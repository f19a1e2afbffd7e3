"""Reads rows of tensors from a saved state, however they were saved: whole, by rows, or in parts of tensor ranks.

Of what was saved whole or by rows, only those rows are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.runtime.rank.tensor_pieces import joined_pieces, pieces_in
from penstock.runtime.restore.saved_state import SavedRows, SavedState, WholeTensors
from penstock.weights.memory.row_shards import Rows


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
