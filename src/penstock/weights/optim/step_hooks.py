"""What users have called with every step of an optimizer: hooks of torch, and a `step` that they have replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from penstock.weights.optim.optimizer_adapters import Joined


class RowHook:
    """A step hook that also makes sense of some rows of the parameters.

    Args:
        hook: as torch takes it.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        self._hook(*args)


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return all that is called with every step; it wants to see all parameters together, once per update."""
    found = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    for part in (optimizer, *optimizer.parts) if isinstance(optimizer, Joined) else (optimizer,):
        found += part._optimizer_step_pre_hooks.values()
        found += part._optimizer_step_post_hooks.values()
        step = vars(part).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # torch's schedulers only note the call
            found.append(step)
    return found


HOOKS_ON_ROWS = "has step hooks, which would see rows of parameters only; leave them out, or set sharding to none"
"""What is wrong with an optimizer that steps rows and whose hooks do not say that they take these."""


def hooks_take_rows(optimizer: Optimizer) -> bool:
    """Return whether all that is called with every step makes sense of some rows of the parameters only."""
    return all(isinstance(hook, RowHook) for hook in step_hooks(optimizer))
