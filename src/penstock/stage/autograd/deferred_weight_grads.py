"""The weight gradients that the first half of a split backward (I) leaves to the second half (W)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import CapabilityError

WeightGradFunction = Callable[[Tensor], Iterable[tuple[str, Tensor]]]
"""The gradient of an operation's output -> names of the weights that it read, and their gradients."""


class DeferredWeightGrads:
    """The deferred half of a backward: operations that read weights, and the gradients that have arrived at them.

    `penstock.stage.autograd.split_backward` fills it, `run` computes the weight gradients.

    Attributes:
        shared: names of weights that several operations read: their gradients are summed before they are added to those
            of other microbatches.
        expected: set once the forward is over; a backward after that is the schedule's own.
    """

    def __init__(self) -> None:
        self.shared: set[str] = set()
        self.expected = False
        self._roots: list[GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._plain: list[tuple[WeightGradFunction, Tensor]] = []
        self._read: set[str] = set()
        self._graph_task: int | None = None  # of the first gradient: torch's number of the run of a backward

    def read(self, names: Collection[str]) -> None:
        """Note the weights of an operation whose gradients are computed without a graph."""
        for name in names:
            (self.shared if name in self._read else self._read).add(name)

    def add(self, roots: Iterable[GradientEdge], gradients: Iterable[Tensor]) -> None:
        """Defer an operation with a graph of its own, given the gradients that have arrived at its outputs."""
        if self._is_expected():
            self._roots += roots
            self._gradients += gradients

    def add_plain(self, gradients: WeightGradFunction, gradient: Tensor) -> None:
        """Defer an operation without a graph, given the gradient that has arrived at its output."""
        if self._is_expected():
            self._plain.append((gradients, gradient))

    def _is_expected(self) -> bool:
        """Return True if the gradient is one of the schedule's backward, not one that a block computes in its forward.

        Raises:
            CapabilityError: the block asks for gradients that can be differentiated again, or runs backwards of its own
                within that of the schedule: whether the weights are to take part cannot be told.
        """
        if torch.is_grad_enabled():
            raise CapabilityError(
                "a block asks for gradients that can be differentiated again (create_graph=True), which a backward in "
                "two halves does not offer; take an order without I and W, such as 1f1b"
            )
        if not self.expected:
            return False
        task = torch._C._current_graph_task_id()
        if self._graph_task not in (None, task):
            raise CapabilityError(
                "a block computes gradients within a backward, in a hook or Function of its own (as implicit layers "
                "do), which a backward in two halves does not offer; take an order without I and W, such as 1f1b"
            )
        self._graph_task = task
        return True

    @property
    def gradients(self) -> Sequence[Tensor]:
        """The gradients that have arrived so far."""
        return [*self._gradients, *(gradient for _, gradient in self._plain)]

    def run(self, weights: Mapping[str, Tensor], add: Callable[[str, Tensor], None]) -> None:
        """Compute the weight gradients, add them to the gradient of the batch, and free everything.

        Args:
            weights: the leaves, by name; gradients from graphs are added where their `.grad` points.
            add: adds the gradient of one weight there.
        """
        roots, gradients, plain = self._roots, self._gradients, self._plain
        self._roots, self._gradients, self._plain = [], [], []
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for compute, arrived in plain:
                for name, gradient in compute(arrived):
                    if name not in self.shared:
                        add(name, gradient)
                    else:
                        sums[name] = sums[name] + gradient if name in sums else gradient
            if roots:
                ends = [*roots, *(get_gradient_edge(weights[name]) for name in sums)]
                torch.autograd.backward(ends, [*gradients, *sums.values()], inputs=list(weights.values()))
            else:
                for name, gradient in sums.items():
                    add(name, gradient)


class SavedTensor:
    """A tensor saved for the backward, with the check for writes in between that autograd makes for its own.

    Reading it raises RuntimeError if it was written into.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    @property
    def tensor(self) -> Tensor:
        """The tensor, unchanged since it was saved."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version "
                f"{self._version} instead"
            )
        return self._tensor
