"""What graphs keep of weights whose backwards look them up: where they lie, not what they are.

What else a graph keeps (activations, and whatever the forward has made of weights) stays as it was, and may not be
written into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from penstock.errors import CapabilityError
from penstock.stage.autograd.deferred_weight_grads import Taken
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.module import graph_nodes

Place = TypeVar("Place")


class LookingUp(SavedBytes):
    """Hooks under which a forward is run; they count what else its graph keeps.

    Args:
        known: addresses of storages that live anyway.
        place: where a tensor lies among the weights; None where it is none of them.
        find: what lies at a place when the backward runs.
    """

    def __init__(
        self, known: set[int], place: Callable[[Tensor], Place | None], find: Callable[[Place], Tensor]
    ) -> None:
        self._place = place
        super().__init__(known, self._keep, partial(_found, find))

    def _keep(self, tensor: Tensor) -> object:
        place = self._place(tensor)
        if place is not None:
            return place
        self.add([tensor])
        return Taken(tensor)


def _found(find: Callable[[Any], Tensor], kept: object) -> Tensor:
    """What a graph has kept, with autograd's own check; of a weight, what is read now."""
    return kept.tensor if isinstance(kept, Taken) else find(kept)


def check_uncast(result: Any, weights: Iterable[Tensor], where: str, others: str, advice: str) -> None:
    """Make sure that a graph reads the weights themselves.

    Args:
        result: of the forward, in its graph.
        weights: its leaves; others are what the stage has received, of which casts do no harm.
        where, others, advice: for messages: which stage, what its backwards read, and what to do where they cannot.

    Raises:
        CapabilityError: it reads casts of them, as under autocast, which stay as the forward made them.
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
