"""The check that nobody changes parameters or gradients, or steps, in the loop over reports.

Microbatches under way have read these weights and add to these gradients; updates are part of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.errors import ConfigError
from penstock.stage.checks.released_weight_placeholders import AbsentWeight

_LOOKS = 64  # reports of a span at which values are compared: what is a habit shows at once
_SAMPLE = 16  # values of a parameter
_AGAIN = "Make a new pipeline, and load its last checkpoint if there is one"


class _Seen(NamedTuple):
    """A parameter when control went to the caller: its gradient, and how often both had been written to.

    What others may be writing to meanwhile has None for it.
    """

    where: str
    name: str
    leaf: Tensor
    version: int | None
    trained: bool
    gradient: Tensor | None
    gradient_version: int | None


class _Tensors(Protocol):
    """The parameters of a stage, and the tensors that its blocks compute with while a run is under way."""

    where: str
    bound: Mapping[str, Tensor] | None

    @property
    def trained(self) -> Mapping[str, Tensor]: ...

    def placed(self) -> list[tuple[str, Tensor | None]]: ...


class ParameterWatch:
    """Compares the parameters and gradients that a caller can reach before and after its code ran; refuses its steps.

    Batches under way have read these weights by then, and have added to these gradients, and go on to do so. So what
    clamp_, load_state_dict, clip_grad_norm_ or zero_grad do there would spoil an update, and what requires_grad_ does
    would count from some microbatch on. Torch counts writes, but for those through `.data`: of these, one parameter
    after the other is looked at. An optimizer of the caller's own sees no gradients, and would do nothing.

    Args:
        stages: the parameters of each.
        stepped: returns what the optimizers of the stages step.
        alone: no other rank has part in weights or gradients of these stages.
    """

    def __init__(
        self, stages: Iterable[_Tensors], stepped: Callable[[], Iterable[Tensor]] = tuple, *, alone: bool = True
    ) -> None:
        self._stages, self._stepped, self._alone = list(stages), stepped, alone
        self._seen: list[_Seen] = []
        self._placed: list[list[tuple[str, Tensor | None]]] = []
        self._looks, self._sampled = 0, (0, b"")

    def begin(self) -> None:
        """Note that a span begins."""
        self._looks = 0

    @contextmanager
    def away(self, *, summing: bool = False) -> Iterator[None]:
        """Let the caller's code run, and make sure that it steps nothing, and leaves all parameters as they were.

        Args:
            summing: gradients may be added to those of other ranks meanwhile.

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
            _Seen(
                stage.where,
                name,
                leaf,
                leaf._version if self._alone else None,
                leaf.requires_grad,
                leaf.grad,
                None if summing or leaf.grad is None else leaf.grad._version,
            )
            for stage in self._stages
            for name, leaf in (stage.bound or {}).items()
            if not isinstance(leaf, AbsentWeight)  # which refuses whatever is done to it
        ]
        self._placed = [stage.placed() for stage in self._stages]
        self._looks += 1
        if self._seen and self._alone and self._looks <= _LOOKS:
            which = self._looks % len(self._seen)
            self._sampled = which, _sample(self._seen[which].leaf)

    def _check(self) -> None:
        for stage, before in zip(self._stages, self._placed, strict=True):
            for (name, was), (_, now) in zip(before, stage.placed(), strict=True):
                if now is not was:
                    raise ConfigError(
                        f"{stage.where}: another tensor was put in the place of {name} in the loop over reports (as "
                        "by module.weight = nn.Parameter(...), register_parametrization or load_state_dict("
                        f"assign=True)), which no update would know of; change modules between two runs. {_AGAIN}"
                    )
        seen, self._seen = self._seen, []
        for where, name, leaf, version, trained, gradient, gradient_version in seen:
            written = gradient is not None and gradient_version is not None and gradient._version != gradient_version
            if leaf.grad is not gradient or written:
                raise ConfigError(
                    f"{where}: the gradient of {name} was changed in the loop over reports (as by clip_grad_norm_ or "
                    "zero_grad), where later microbatches add to it already, so this update would be spoilt. Clip with "
                    "Pipeline(max_grad_norm=1.0); for other changes register a hook on the parameter "
                    f"(parameter.register_hook); gradients need no zeroing. {_AGAIN}"
                )
            if leaf.requires_grad is not trained:
                raise ConfigError(
                    f"{where}: requires_grad of {name} was changed in the loop over reports, but what is trained is "
                    f"settled when the pipeline is made; change it between two runs. {_AGAIN}"
                )
            if version is not None and leaf._version != version:
                _refuse_write(where, name)
        which, sample = self._sampled
        if seen and self._alone and self._looks <= _LOOKS and sample != _sample(seen[which].leaf):
            _refuse_write(*seen[which][:2])

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step in the loop over reports; torch calls this before the step of every optimizer.

        Raises:
            ConfigError: it would step parameters of the pipeline.
        """
        ours = {id(tensor) for stage in self._stages for tensor in (*stage.trained.values(), *_bound(stage))}
        ours |= {id(tensor) for tensor in self._stepped()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called in the loop over reports, but updates are part of "
                "run(), made by an optimizer for each stage: Pipeline(..., optimizer=lambda named: "
                f"torch.optim.{type(optimizer).__name__}(named, ...)). Leave step() out of the loop, and backward() "
                "and zero_grad(), too; the batches under way are finished, and the pipeline can go on"
            )


def _bound(stage: _Tensors) -> Iterable[Tensor]:
    return (stage.bound or {}).values()


def _refuse_write(where: str, name: str) -> NoReturn:
    raise ConfigError(
        f"{where}: {name} was written in the loop over reports (as by load_state_dict, clamp_ or mul_), while "
        "microbatches under way have read it. Write between two runs; what belongs to every update, such as limits of "
        f"weights, goes into a hook of the optimizer (optimizer.register_step_post_hook). {_AGAIN}"
    )


def _sample(leaf: Tensor) -> bytes:
    """Return the bytes of some values of a tensor on the host, in which NaN equals itself; of others none."""
    if leaf.device.type != "cpu" or not leaf.is_floating_point() or not leaf.is_contiguous() or not leaf.numel():
        return b""
    return leaf.detach().view(-1)[:: max(1, leaf.numel() // _SAMPLE)].clone().view(torch.uint8).numpy().tobytes()
