"""The check that nobody changes gradients, or steps weights, in the loop over reports.

Further microbatches already add to these gradients, and updates are part of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.errors import ConfigError


class _Seen(NamedTuple):
    """The gradient of a parameter when control went to the caller, and how often it had been written to.

    The latter is None where others may be writing to it meanwhile.
    """

    where: str
    name: str
    leaf: Tensor
    gradient: Tensor | None
    version: int | None


class _Module(Protocol):
    """The blocks of a stage, their own parameters, and the tensors that they compute with while a run is under way."""

    where: str
    bound: Mapping[str, Tensor] | None

    @property
    def trained(self) -> Mapping[str, Tensor]: ...


class GradientWatch:
    """Compares the gradients that a caller can reach before and after its code ran, and refuses its optimizers.

    Batches under way have added to them by then, and go on to do so. So what clip_grad_norm_ or zero_grad do there
    would spoil an update: it would be neither of the whole gradient nor of a clipped one. An optimizer of the caller's
    own sees no gradients, and would do nothing.

    Args:
        modules: of the stages.
        stepped: returns what the optimizers of the stages step.
    """

    def __init__(self, modules: Iterable[_Module], stepped: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._modules, self._stepped = list(modules), stepped
        self._seen: list[_Seen] = []

    @contextmanager
    def away(self, *, summing: bool = False) -> Iterator[None]:
        """Let the caller's code run, and make sure that it steps nothing, and leaves all gradients as they were.

        Args:
            summing: they may be added to those of other ranks meanwhile.

        Raises:
            ConfigError: one was changed; or, in the caller's code, it steps parameters of the pipeline.
        """
        self._note(summing)
        handle = register_optimizer_step_pre_hook(self._check_step)  # optimizers of stages go by whether there are any
        try:
            yield
        finally:
            handle.remove()
        self._check()

    def _note(self, summing: bool) -> None:
        self._seen = [
            _Seen(module.where, name, leaf, leaf.grad, None if summing or leaf.grad is None else leaf.grad._version)
            for module in self._modules
            for name, leaf in (module.bound or {}).items()
        ]

    def _check(self) -> None:
        seen, self._seen = self._seen, []
        for where, name, leaf, gradient, version in seen:
            written = gradient is not None and version is not None and gradient._version != version
            if leaf.grad is not gradient or written:
                raise ConfigError(
                    f"{where}: the gradient of {name} was changed in the loop over reports (as by clip_grad_norm_ or "
                    "zero_grad), where later microbatches add to it already, so this update would be spoilt. Clip with "
                    "Pipeline(max_grad_norm=1.0); for other changes register a hook on the parameter "
                    "(parameter.register_hook); gradients need no zeroing. Make a new pipeline, and load its last "
                    "checkpoint if there is one"
                )

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step in the loop over reports; torch calls this before the step of every optimizer.

        Raises:
            ConfigError: it would step parameters of the pipeline.
        """
        ours = {id(tensor) for module in self._modules for tensor in (*module.trained.values(), *_bound(module))}
        ours |= {id(tensor) for tensor in self._stepped()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called in the loop over reports, but updates are part of "
                "run(), made by an optimizer for each stage: Pipeline(..., optimizer=lambda named: "
                f"torch.optim.{type(optimizer).__name__}(named, ...)). Leave step() out of the loop, and backward() "
                "and zero_grad(), too; the batches under way are finished, and the pipeline can go on"
            )


def _bound(module: _Module) -> Iterable[Tensor]:
    return (module.bound or {}).values()
