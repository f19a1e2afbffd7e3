"""Hooks that record what optimizers receive and produce."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.weights.optim.optimizer_factory import OptimizerFactory
from penstock.weights.optim.step_hooks import RowHook

Named = list[tuple[str, nn.Parameter]]
See = Callable[[str, int, str, Tensor, int], None]
"""Called with "gradients" or "weights", the number of the update, a parameter's name and tensor, and the pipeline."""


class WatchedFactory:
    """An optimizer factory whose optimizers report every gradient they receive and every weight they produce.

    Not a subclass: other optimizers than torch's own step on copies of gradients at first.

    Args:
        factory: makes the optimizers.
        see: receives the tensors; None to read the optimizer state at the end only.
        waits: report copies, and only once an update can no longer be undone (`penstock.weights.provisional_update`).
    """

    def __init__(self, factory: OptimizerFactory, see: See | None = None, waits: bool = False) -> None:
        self._factory, self._see, self._waits = factory, see, waits
        self._made: list[tuple[int, Named, Optimizer]] = []
        self._updates: dict[Optimizer, dict[str, int]] = {}
        self._waiting: dict[Optimizer, list[tuple[str, int, str, Tensor, int]]] = {}

    def __call__(self, named: Named) -> Optimizer:
        """Make an optimizer; the n-th one for the same parameters belongs to pipeline n."""
        optimizer = self._factory(named)
        pipeline = sum(others[0][0] == named[0][0] for _, others, _ in self._made)
        self._made.append((pipeline, named, optimizer))
        if self._see is None:
            return optimizer
        updates = self._updates[optimizer] = dict.fromkeys((name for name, _ in named), 0)
        waiting = self._waiting[optimizer] = []

        def before(*_: object) -> None:
            given = [(name, p.grad) for name, p in named if p.grad is not None]
            if any(kind == "weights" and name == given[0][0] for kind, _, name, *_ in waiting):
                self._show(waiting)
            for name, gradient in given:
                self._note(optimizer, ("gradients", updates[name], name, gradient, pipeline))

        def after(*_: object) -> None:
            for name, p in named:
                if p.grad is not None:
                    self._note(optimizer, ("weights", updates[name], name, p, pipeline))
                    updates[name] += 1

        optimizer.register_step_pre_hook(RowHook(before))
        optimizer.register_step_post_hook(RowHook(after))
        return optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        """All that have been made."""
        return [optimizer for _, _, optimizer in self._made]

    def undone(self, optimizer: Optimizer) -> None:
        """Discard what was recorded of the last update, which has been undone."""
        waiting = self._waiting.get(optimizer, [])
        for kind, _, name, *_ in waiting:
            self._updates[optimizer][name] -= kind == "weights"
        waiting.clear()

    def states(self) -> Iterator[tuple[str, Tensor | float, int]]:
        """Yield name, value and pipeline of all optimizer state, after reporting all updates that still wait."""
        for waiting in self._waiting.values():
            self._show(waiting)
        for pipeline, named, optimizer in self._made:
            for name, parameter in named:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{key} of {name}", value, pipeline

    def _note(self, optimizer: Optimizer, shown: tuple[str, int, str, Tensor, int]) -> None:
        assert self._see is not None
        if self._waits:
            kind, number, name, tensor, pipeline = shown
            self._waiting[optimizer].append((kind, number, name, tensor.detach().clone(), pipeline))
        else:
            self._see(*shown)

    def _show(self, waiting: list[tuple[str, int, str, Tensor, int]]) -> None:
        assert self._see is not None
        for shown in waiting:
            self._see(*shown)
        waiting.clear()
