"""The check that an optimizer steps every tensor that the backwards of a stage train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.stage.autograd.graph_walk import trained_leaves


class LeafCheck:
    """Finds tensors that accumulate gradients but belong to no module of the stage.

    A parameter is found at once. Another tensor may have been made in the forward, such as x.detach().requires_grad_()
    in a model of forces; it is found if a later forward trains the same one again.

    Args:
        where: the stage in messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._suspects: dict[tuple[str, ...], list[ref[Tensor]]] = {}

    def pending(self, names: Sequence[str]) -> bool:
        """Whether tensors that a forward of some blocks has trained still live: then the next one is to be checked."""
        if not self._suspects:
            return False
        return any(suspect() is not None for suspect in self._suspects.get(tuple(names), ()))

    def check(self, names: Sequence[str], result: Any, known: Iterable[object]) -> None:
        """Check the graph of a forward.

        Args:
            names: the blocks that ran.
            result: its ends.
            known: the leaves that it may train: those of the weights, and received inputs.

        Raises:
            ConfigError: it trains another tensor.
        """
        ours = {id(tensor) for tensor in known}
        before = {id(suspect()) for suspect in self._suspects.pop(tuple(names), ())}
        found = [leaf for leaf in trained_leaves(result) if id(leaf) not in ours]
        foreign = next((leaf for leaf in found if isinstance(leaf, nn.Parameter) or id(leaf) in before), None)
        if foreign is not None:
            raise ConfigError(
                f"{self._where}: a block or the loss trains a tensor of shape {tuple(foreign.shape)} that belongs to "
                "no module of this stage, so its optimizer would never step it. If it is a weight of another stage, of "
                "which something was kept on a module or by a hook, let the blocks between hand that on, as in (x, "
                "kept): what is kept belongs to another microbatch by now. Otherwise pass the module that owns it as a "
                "block (not one of its methods), or detach it"
            )
        if found and not before:
            self._suspects[tuple(names)] = [ref(leaf) for leaf in found]
