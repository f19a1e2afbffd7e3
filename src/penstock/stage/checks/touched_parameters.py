"""The check that nobody changes parameters or gradients in the loop over reports, where microbatches are under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError

_LOOKS = 64  # reports of a span at which values are compared: what is a habit shows at once
_SAMPLE = 16  # values of a parameter
_AGAIN = "Make a new pipeline, and load its last checkpoint if there is one"


class _Seen(NamedTuple):
    """A parameter when control went to the caller: its gradient, and how often both had been written to."""

    where: str
    name: str
    leaf: Tensor
    version: int
    trained: bool
    gradient: Tensor | None
    gradient_version: int


class _Module(Protocol):
    """The blocks of a stage, and the tensors that they compute with while a run is under way."""

    where: str
    bound: Mapping[str, Tensor] | None


class ParameterWatch:
    """Compares the parameters and gradients that a caller can reach before and after its code ran.

    Batches under way have read these weights by then, and have added to these gradients, and go on to do so. So what
    clamp_, load_state_dict, clip_grad_norm_ or zero_grad do there would spoil an update, and what requires_grad_ does
    would count from some microbatch on. Torch counts writes, but for those through `.data`: of these, one parameter
    after the other is looked at.

    Args:
        modules: of the stages.
    """

    def __init__(self, modules: Iterable[_Module]) -> None:
        self._modules = list(modules)
        self._seen: list[_Seen] = []
        self._looks, self._sampled = 0, (0, torch.empty(0))

    def begin(self) -> None:
        """Note that a span begins."""
        self._looks = 0

    def note(self) -> None:
        """Take note of all parameters."""
        self._seen = [
            _Seen(
                module.where, name, leaf, leaf._version, leaf.requires_grad,
                leaf.grad, -1 if leaf.grad is None else leaf.grad._version,
            )
            for module in self._modules
            for name, leaf in (module.bound or {}).items()
        ]  # fmt: skip
        self._looks += 1
        if self._seen and self._looks <= _LOOKS:
            which = self._looks % len(self._seen)
            self._sampled = which, _sample(self._seen[which].leaf)

    def check(self) -> None:
        """Make sure that they are as they were.

        Raises:
            ConfigError: one is not.
        """
        seen, self._seen = self._seen, []
        for where, name, leaf, version, trained, gradient, gradient_version in seen:
            if leaf.grad is not gradient or (gradient is not None and gradient._version != gradient_version):
                raise ConfigError(
                    f"{where}: the gradient of {name} was changed in the loop over reports (as by clip_grad_norm_ or "
                    "zero_grad), where later microbatches add to it already, so this update would be spoilt. Clip with "
                    "Pipeline(max_grad_norm=1.0); for other changes register a hook on the parameter "
                    f"(parameter.register_hook); gradients need no zeroing. {_AGAIN}"
                )
            if leaf.requires_grad is not trained:
                raise ConfigError(
                    f"{where}: requires_grad of {name} was changed in the loop over reports, but what is trained is "
                    f"settled when the pipeline is made; end the run, change it, and make a new pipeline. {_AGAIN}"
                )
            if leaf._version != version:
                _refuse_write(where, name)
        which, sample = self._sampled
        if seen and self._looks <= _LOOKS and not torch.equal(sample, _sample(seen[which].leaf)):
            _refuse_write(*seen[which][:2])


def _refuse_write(where: str, name: str) -> NoReturn:
    raise ConfigError(
        f"{where}: {name} was written in the loop over reports (as by load_state_dict, clamp_ or mul_), while "
        "microbatches under way have read it. Write between two runs; what belongs to every update, such as limits of "
        f"weights, goes into a hook of the optimizer (optimizer.register_step_post_hook). {_AGAIN}"
    )


def _sample(leaf: Tensor) -> Tensor:
    """Return some values of a tensor on the host as whole numbers, so that NaN equals itself; of others nothing."""
    if leaf.device.type != "cpu" or not leaf.is_floating_point() or not leaf.is_contiguous() or not leaf.numel():
        return torch.empty(0)
    return leaf.detach().view(-1)[:: max(1, leaf.numel() // _SAMPLE)].clone().view(torch.uint8)
