"""Saved-tensor hooks that make graphs keep the positions of weights, which the backward looks up, not their values.

Everything else that a graph keeps (activations, and tensors that the forward computed from weights) is saved as usual
and must not be written into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from penstock.errors import CapabilityError
from penstock.stage.autograd.deferred_weight_grads import SavedTensor
from penstock.stage.autograd.saved_bytes import SavedBytes, graph_nodes

Position = TypeVar("Position")


class WeightLookupHooks(SavedBytes):
    """Saved-tensor hooks for a forward whose backward looks weights up; they count the other saved bytes.

    Args:
        known: identities of storages that live anyway.
        position: returns the position of a tensor among the weights; None if it is none of them.
        present: returns the tensor at a position while the forward runs: a block may take gradients itself.
        find: returns the tensor at a position when the backward runs.
    """

    def __init__(
        self,
        known: set[int],
        position: Callable[[Tensor], Position | None],
        present: Callable[[Position], Tensor],
        find: Callable[[Position], Tensor],
    ) -> None:
        self._position, self._find, self._unpacker = position, find, _Unpacker(present)
        super().__init__(known, self._keep, self._unpacker)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._unpacker.find = self._find

    def _keep(self, tensor: Tensor) -> object:
        position = self._position(tensor)
        if position is not None:
            return position
        self.add([tensor])
        return SavedTensor(tensor)


class _Unpacker:
    """Unpacks saved tensors, with autograd's own check for writes; a weight is looked up.

    Attributes:
        find: returns the tensor at a position, now.
    """

    def __init__(self, find: Callable[[Any], Tensor]) -> None:
        self.find = find

    def __call__(self, kept: object) -> Tensor:
        return kept.tensor if isinstance(kept, SavedTensor) else self.find(kept)


def check_uncast(result: Any, weights: Iterable[Tensor], where: str, others: str, advice: str) -> None:
    """Make sure that a graph reads the weights themselves, not casts of them.

    Args:
        result: the output of the forward, in its graph.
        weights: the leaves of the weights; other leaves are received inputs, whose casts do no harm.
        where, others, advice: for messages: the stage, the weights that its backwards read, and what to do instead.

    Raises:
        CapabilityError: it reads casts of weights, as under autocast; their values stay those of the forward.
    """
    ours = {id(leaf) for leaf in weights}
    for node in graph_nodes(result):
        if type(node).__name__ == "ToCopyBackward0" and _is_of(ours, node):
            raise CapabilityError(
                f"{where}: a block casts its weights (torch.autocast, or .to()), so its backward would read "
                f"those of its forward, not {others}; pass precision='bf16' or 'fp16' to the pipeline "
                f"instead, or {advice}"
            )


def _is_of(ours: set[int], node: Any) -> bool:
    """Return True if the input of a cast is a weight, or a view of one."""
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
