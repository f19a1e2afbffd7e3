"""Parts of tensors in saved states, where processes share stages by tensor parallelism.

Each process saves the parts that it has, under the names of the whole tensors with what tells which part it is. So a
state may be read with another number of parts, or with none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.partition.tensor_parallel import Division, TensorSplit

_PIECE = re.compile(r"~(\d+)\.(\d+)\.(\d+)of(\d+)(?=/)")


class Piece(NamedTuple):
    """A part of a tensor in a saved state.

    Attributes:
        name: under which it was saved.
        split: which part of the whole it is.
    """

    name: str
    split: TensorSplit


def piece_name(what: str, name: str, split: TensorSplit) -> str:
    """Return the name of a part of a tensor in a saved state, such as weights~0.3.1of2/layers.0.attention.weight."""
    return f"{what}~{split.dimension}.{split.sections}.{split.index}of{split.size}/{name}"


def pieces_in(names: Collection[str]) -> dict[str, list[Piece]]:
    """Return the parts among the names of a saved state, by the names that the whole tensors would have."""
    found: dict[str, list[Piece]] = {}
    for name in names:
        marked = _PIECE.search(name)
        if marked is not None:
            split = TensorSplit(*map(int, marked.groups()))
            found.setdefault(name[: marked.start()] + name[marked.end() :], []).append(Piece(name, split))
    return {whole: sorted(parts, key=lambda piece: piece.split.index) for whole, parts in found.items()}


def joined_pieces(whole: str, pieces: Sequence[Piece], read: Callable[[str], Tensor]) -> Tensor:
    """Return the whole tensor of its saved parts.

    Args:
        whole: its name.
        pieces: of it.
        read: reads a tensor by its name in the saved state.

    Raises:
        CheckpointError: one is missing.
    """
    split = pieces[0].split
    if [piece.split.index for piece in pieces] != list(range(split.size)):
        raise CheckpointError(f"the checkpoint lacks parts of {whole}: {len(pieces)} of {split.size} are there")
    return split.whole([read(piece.name) for piece in pieces])


def own_pieces(division: Division, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return under what names this process saves tensors of its stage, by their names as of `rank.snapshot`.

    What is the same on all processes that share the stage is saved by the first of them.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        what, _, parameter = name.partition("/")
        if what.startswith("optimizer"):
            kind, _, parameter = parameter.partition("/")
            what = f"{what}/{kind}"
        split = division.splits.get(parameter)
        if split is not None and tensor.dim():
            found[name] = piece_name(what, parameter, split)
        elif not division.index:
            found[name] = name
    return found
