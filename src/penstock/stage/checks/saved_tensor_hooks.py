"""Notices operations on weights that run under saved-tensor hooks of a block, where backwards look weights up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError


class ForeignHooksCheck(TorchFunctionMode):
    """A context of one forward, in which graphs keep the positions of weights by hooks of the pipeline's own.

    Hooks inside of it (`torch.autograd.graph.save_on_cpu`, `saved_tensors_hooks`) are given the weights themselves. If
    they copy them, the backward reads those of the forward. Those of torch's checkpoint run the forward again, which
    finds the right ones.

    Args:
        pack: of the pipeline's hooks.
        weights: the leaves that graphs are made on.
        where: the stage in messages.
    """

    def __init__(self, pack: Callable[..., Any], weights: Iterable[Tensor], where: str) -> None:
        super().__init__()
        self._pack, self._where = pack, where
        self._weights = {id(leaf) for leaf in weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and self._is_foreign(hooks[0]) and self._reads_weights(args, named):
            raise CapabilityError(
                f"{self._where}: a block reads weights under saved-tensor hooks of its own (save_on_cpu, "
                "saved_tensors_hooks), which may copy them, so its backward would read those of its forward, not those "
                "that the method says; leave the weights out of the hooks, or take a method that keeps the weights of "
                "the forward, such as stash or 2bw"
            )
        return func(*args, **named)

    def _is_foreign(self, pack: Callable[..., Any]) -> bool:
        return pack != self._pack and pack.__module__ != "torch.utils.checkpoint"

    def _reads_weights(self, args: Any, named: Mapping[str, Any]) -> bool:
        leaves = pytree.tree_leaves((args, named))
        return torch.is_grad_enabled() and not self._weights.isdisjoint(map(id, leaves))
