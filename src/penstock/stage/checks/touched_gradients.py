"""The check that nobody changes gradients in the loop over reports, where further microbatches already add to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.errors import ConfigError


class _Seen(NamedTuple):
    """The gradient of a parameter when control went to the caller, and how often it had been written to."""

    where: str
    name: str
    leaf: Tensor
    gradient: Tensor | None
    version: int


class _Module(Protocol):
    """The blocks of a stage, and the tensors that they compute with while a run is under way."""

    where: str
    bound: Mapping[str, Tensor] | None


class GradientWatch:
    """Compares the gradients that a caller can reach before and after its code ran.

    Batches under way have added to them by then, and go on to do so. So what clip_grad_norm_ or zero_grad do there
    would spoil an update: it would be neither of the whole gradient nor of a clipped one.

    Args:
        modules: of the stages.
    """

    def __init__(self, modules: Iterable[_Module]) -> None:
        self._modules = list(modules)
        self._seen: list[_Seen] = []

    def note(self) -> None:
        """Take note of all gradients."""
        self._seen = [
            _Seen(module.where, name, leaf, leaf.grad, -1 if leaf.grad is None else leaf.grad._version)
            for module in self._modules
            for name, leaf in (module.bound or {}).items()
        ]

    def check(self) -> None:
        """Make sure that they are as they were.

        Raises:
            ConfigError: one is not.
        """
        seen, self._seen = self._seen, []
        for where, name, leaf, gradient, version in seen:
            if leaf.grad is not gradient or (gradient is not None and gradient._version != version):
                raise ConfigError(
                    f"{where}: the gradient of {name} was changed in the loop over reports (as by clip_grad_norm_ or "
                    "zero_grad), where later microbatches add to it already, so this update would be spoilt. Clip with "
                    "Pipeline(max_grad_norm=1.0); for other changes register a hook on the parameter "
                    "(parameter.register_hook); gradients need no zeroing. Make a new pipeline, and load its last "
                    "checkpoint if there is one"
                )
