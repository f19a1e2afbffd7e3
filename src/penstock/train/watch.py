"""Watching optimizers at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.weights.update import OptimizerFactory

Named = list[tuple[str, nn.Parameter]]
See = Callable[[str, int, str, Tensor, int], None]
"""Is shown "gradients" or "weights", the number of the update, a parameter's name and tensor, the pipeline."""


class Watch:
    """An optimizer factory whose optimizers show what they are given and what they make of it.

    Hooks, not a subclass, because torch's own classes are stepped with a few parameters at a time where updates rotate.

    Args:
        factory: makes the optimizers.
        see: is shown it; None to watch the state at the end only.
    """

    def __init__(self, factory: OptimizerFactory, see: See | None = None) -> None:
        self._factory, self._see = factory, see
        self._made: list[tuple[int, Named, Optimizer]] = []

    def __call__(self, named: Named) -> Optimizer:
        """Make one; of those for the same parameters, the n-th is that of pipeline n."""
        optimizer, see = self._factory(named), self._see
        pipeline = sum(others[0][0] == named[0][0] for _, others, _ in self._made)
        self._made.append((pipeline, named, optimizer))
        if see is None:
            return optimizer
        updates = dict.fromkeys((name for name, _ in named), 0)

        def before(*_: object) -> None:
            for name, p in named:
                if p.grad is not None:
                    see("gradients", updates[name], name, p.grad, pipeline)

        def after(*_: object) -> None:
            for name, p in named:
                if p.grad is not None:
                    see("weights", updates[name], name, p, pipeline)
                    updates[name] += 1

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    def states(self) -> Iterator[tuple[str, Tensor | float, int]]:
        """The present state of all optimizers: name, value, pipeline."""
        for pipeline, named, optimizer in self._made:
            for name, parameter in named:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{key} of {name}", value, pipeline
