"""Weights that a backward looks up when it runs, where its forward read others.

Some methods keep one version only: it is rewritten while microbatches are in flight, and their backwards read what is
there by then (PipeMare, arXiv 1910.05124), or an estimate. So a graph keeps of the weights only where they lie; what
else it keeps (activations, and whatever the forward has made of weights) stays as it was, and may not be written into.
Which version is read is proven beforehand, and looked up in the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import CapabilityError
from penstock.runtime.late import Taken
from penstock.runtime.saved import SavedBytes
from penstock.runtime.stage import graph_nodes
from penstock.schedule.versions import VersionRule
from penstock.weights.buffers import Buffer, Handle


class _Place(NamedTuple):
    """Where a tensor lies in any buffer of the stage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Rebinding:
    """The weights that the backwards of a stage read now.

    Args:
        where: for messages.
        again_on_newest: a forward that is run again in a backward reads what that reads, not what it has read before,
            which may be gone.

    Attributes:
        others, advice: for messages: what backwards read, and what to do where they cannot.
    """

    others = "the newest"
    advice = "take a method that keeps the weights of the forward, such as stash or 2bw"

    def __init__(self, where: str, again_on_newest: bool = False) -> None:
        self._where, self.again_on_newest = where, again_on_newest
        self._flats: Mapping[torch.dtype, Tensor] = {}
        self._motion: Mapping[torch.dtype, Tensor] = {}
        self._gap = 0.0
        self._dtypes: dict[int, torch.dtype] = {}

    def turn_to(self, weights: Buffer, motion: Buffer | None = None, gap: float = 0.0) -> None:
        """From now on backwards read `weights - gap * motion`, each tensor made when it is asked for."""
        self._flats = {flat.dtype: flat for flat in weights.flats}
        self._motion = {} if motion is None else {flat.dtype: flat for flat in motion.flats}
        self._gap = gap if self._motion else 0.0

    def saved(self, known: set[int], weights: Handle) -> SavedBytes:
        """Hooks under which a forward on `weights` is run; they count what else the graph keeps."""
        flats = weights.whole.flats
        return _Saved(known, {flat.untyped_storage().data_ptr(): flat.dtype for flat in flats}, self)

    def found(self, kept: Taken | _Place) -> Tensor:
        """What a graph has kept, with autograd's own check."""
        if isinstance(kept, _Place):
            return self.tensor(kept)
        return kept.tensor

    def tensor(self, place: _Place) -> Tensor:
        """What lies at a place now."""
        found = self._flats[place.dtype].as_strided(place.shape, place.stride, place.offset)
        if not self._gap or place.dtype not in self._motion:
            return found
        motion = self._motion[place.dtype].as_strided(place.shape, place.stride, place.offset)
        return found - self._gap * motion

    def check(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that a graph reads the weights themselves.

        Args:
            result: of the forward, in its graph.
            weights: its leaves; others are what the stage has received, of which casts do no harm.

        Raises:
            CapabilityError: it reads casts of them, as under autocast, which stay as the forward made them.
        """
        ours = {id(leaf) for leaf in weights}
        for node in graph_nodes(result):
            if type(node).__name__ == "ToCopyBackward0" and _is_of(ours, node):
                raise CapabilityError(
                    f"{self._where}: a block casts its weights (torch.autocast, or .to()), so its backward would read "
                    f"those of its forward, not {self.others}; pass precision='bf16' or 'fp16' to the pipeline "
                    f"instead, or {self.advice}"
                )


def check_real(rule: VersionRule, trained: Mapping[str, Tensor], where: str) -> None:
    """Make sure that weights are real numbers, where copies of them are made or backwards look them up.

    Raises:
        CapabilityError: they are complex.
    """
    found = _complex(trained)
    if found is not None and (rule.rebinds or rule.copies_forward):
        raise CapabilityError(
            f"{where}: {found} is complex; version rule {rule.name!r} is offered for real parameters. Take a method "
            "whose passes read the weights of the forward, such as stash or 2bw"
        )


def check_real_delays(trained: Mapping[str, Tensor], where: str) -> None:
    """The same where backwards look weights up because of delays of their own.

    Raises:
        CapabilityError: they are complex.
    """
    found = _complex(trained)
    if found is not None:
        raise CapabilityError(
            f"{where}: {found} is complex; backward_delays are offered for real parameters. Leave them out, so that "
            "backwards read the weights of their forward"
        )


def _complex(trained: Mapping[str, Tensor]) -> str | None:
    return next((name for name, weight in trained.items() if weight.is_complex()), None)


def _is_of(ours: set[int], node: Any) -> bool:
    """Whether the input of a cast is a weight, or a view of one."""
    following = node.next_functions[0][0]
    while type(following).__name__.removesuffix("0").removesuffix("1") in _VIEWS:
        following = following.next_functions[0][0]
    return type(following).__name__ == "AccumulateGrad" and id(following.variable) in ours


_VIEWS = frozenset(
    f"{name}Backward"
    for name in (
        "T", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Slice", "Select", "Expand", "Unsqueeze",
        "Squeeze", "Alias", "AsStrided", "Narrow",
    )
)  # fmt: skip


class _Saved(SavedBytes):
    """Keeps where weights lie, and everything else as it is."""

    def __init__(self, known: set[int], weights: Mapping[int, torch.dtype], rebinding: Rebinding) -> None:
        self._weights = weights
        super().__init__(known, self._keep, rebinding.found)

    def _keep(self, tensor: Tensor) -> Taken | _Place:
        dtype = self._weights.get(tensor.untyped_storage().data_ptr())
        if dtype is None or dtype != tensor.dtype:
            self.add([tensor])
            return Taken(tensor)
        return _Place(dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
