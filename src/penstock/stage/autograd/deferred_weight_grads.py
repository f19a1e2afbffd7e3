"""What the first half of a backward leaves to the second one (`penstock.stage.autograd.split_backward`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import CapabilityError

Gradients = Callable[[Tensor], Iterable[tuple[str, Tensor]]]
"""The gradient that has arrived at an operation -> names of weights and their gradients."""


class Late:
    """What of a backward has been put off: operations that read weights, and the gradients that have arrived there.

    Attributes:
        shared: names of weights whose gradients have to be summed up before they are added to others.
        expected: the forward is over, so that a backward is that of the schedule.
    """

    def __init__(self) -> None:
        self.shared: set[str] = set()
        self.expected = False
        self._roots: list[GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._plain: list[tuple[Gradients, Tensor]] = []
        self._read: set[str] = set()

    def read(self, names: Collection[str]) -> None:
        """An operation reads weights, and gives their gradients without the help of a graph."""
        self.shared.update(self._read.intersection(names))
        self._read.update(names)

    def add(self, roots: Iterable[GradientEdge], gradients: Iterable[Tensor]) -> None:
        """A gradient has arrived at an operation with a graph of its own."""
        if self._wants():
            self._roots += roots
            self._gradients += gradients

    def add_plain(self, gradients: Gradients, gradient: Tensor) -> None:
        """A gradient has arrived at an operation without one."""
        if self._wants():
            self._plain.append((gradients, gradient))

    def _wants(self) -> bool:
        """Whether what has arrived is for the weights: a block may ask for gradients of its own while it runs."""
        if torch.is_grad_enabled():
            raise CapabilityError(
                "a block asks for gradients that can be differentiated again (create_graph=True), which a backward in "
                "two halves does not offer; take an order without I and W, such as 1f1b"
            )
        return self.expected

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Those that have arrived."""
        return [*self._gradients, *(gradient for _, gradient in self._plain)]

    @torch.no_grad()
    def run(self, weights: Mapping[str, Tensor], add: Callable[[str, Tensor], None]) -> None:
        """Add the gradients of the weights, and let go of everything.

        Args:
            weights: the leaves, by name. What comes from graphs is added to where their `.grad` points.
            add: adds a gradient of one of them to the same.
        """
        roots, gradients, plain = self._roots, self._gradients, self._plain
        self._roots, self._gradients, self._plain = [], [], []
        sums: dict[str, Tensor] = {}
        for ask, arrived in plain:
            for name, gradient in ask(arrived):
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


class Taken:
    """A tensor that gradients will need, and that nobody may have written into by then; as autograd keeps them."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    @property
    def tensor(self) -> Tensor:
        """As it was."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}; expected version "
                f"{self._version} instead"
            )
        return self._tensor
