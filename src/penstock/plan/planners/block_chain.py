"""A graph as a chain of blocks: what stands between any two cuts takes, in seconds and bytes, as matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.plan.profile.layer_graph import LayerGraph
from penstock.simulate.memory.held import Combination, HeldKind
from penstock.simulate.memory.predicted import AlwaysThere

Floats = npt.NDArray[np.float64]
_SCRATCH = 4.0 * (1 << 20)  # bytes: `penstock.weights.memory.scratch`, in float32


class BlockChain:
    """A graph as a chain of blocks, all of them recomputed or none.

    A row stands for a cut and a column for a later one.

    Attributes:
        blocks: how many.
        forward, seconds, steps: of the first 0, 1, .. blocks; seconds are those of a forward, a backward and a
            recompute, steps those of updates.
        times: seconds between two cuts.
        low_precision: passes compute in 16 bits, so there are master weights.
        buffer, whole: bytes of one copy of the weights as passes read it, and of one gradient or master weights.
        parameters, optimizer, frozen: bytes of what replicas add up, of what the optimizer remembers, and of frozen
            parameters and module buffers.
        kept: bytes that a microbatch in flight keeps.
        crossing: bytes of the edges that cross a cut.
    """

    def __init__(self, graph: LayerGraph, recompute: bool, optimizer_copies: float) -> None:
        layers = graph.layers
        self.blocks, self._recompute = len(layers), recompute
        self.forward = _sums([layer.forward or 0.0 for layer in layers])
        self.seconds = _sums([layer.seconds for layer in layers]) + (self.forward if recompute else 0.0)
        self.steps = _sums([layer.step for layer in layers])
        self.times = _between(self.seconds)
        self.parameters = _between(_sums([layer.parameters for layer in layers]))
        self.buffer = _between(_sums([layer.buffer for layer in layers]))
        self.low_precision = any(layer.whole is not None for layer in layers)
        whole = [layer.buffer if layer.whole is None else layer.whole for layer in layers]
        self.whole, self.frozen = _between(_sums(whole)), _between(_sums([layer.frozen for layer in layers]))
        self.optimizer = _between(_sums([
            optimizer_copies * size if layer.optimizer is None else layer.optimizer
            for layer, size in zip(layers, whole, strict=True)
        ]))  # fmt: skip
        stored = np.array([layer.stored for layer in layers])
        inputs = _sums([
            layer.data + sum(edge.bytes for edge in edges) for layer, edges in zip(layers, graph.inputs, strict=True)
        ])  # fmt: skip
        shared = _sums([layer.shared for layer in layers])
        graphs = _between(_sums(stored)) - (shared[None, :] - np.append(shared[1:], shared[-1])[:, None])
        self.kept = _between(inputs) if recompute else graphs
        self.crossing = np.zeros(self.blocks + 1)
        for edge in graph.edges:
            self.crossing[edge.source + 1 : edge.target + 1] += edge.bytes
        largest = _most_of(np.array(whole), np.zeros(self.blocks + 1))
        self._sizes = {
            HeldKind.GRAPH: graphs,
            HeldKind.SAVED: self.kept,
            HeldKind.FORWARD: _most_of(inputs[:-1] + stored, inputs),
            HeldKind.BACKWARD: _most_of(inputs[1:] + stored, inputs),
            HeldKind.OUTPUT: np.broadcast_to(self.crossing[None, :], self.kept.shape),
            HeldKind.GRADIENT: np.broadcast_to(self.crossing[:, None], self.kept.shape),
            HeldKind.OPTIMIZER: self.optimizer,
            HeldKind.SCRATCH: np.minimum(self.whole, np.maximum(largest, _SCRATCH)),
        }

    def in_flight(self, microbatches: float, scratch: bool) -> dict[HeldKind, float]:
        """Return what a stage with so many microbatches in flight holds at least at one moment."""
        own = {HeldKind.OPTIMIZER: 1.0, **({HeldKind.SCRATCH: 1.0} if scratch else {})}
        if not self._recompute:
            return own | {HeldKind.GRAPH: microbatches}
        return own | {HeldKind.SAVED: max(microbatches - 1, 0.0), HeldKind.BACKWARD: min(microbatches, 1.0)}

    def memory(self, there: AlwaysThere, held: Sequence[dict[HeldKind, float]]) -> Floats:
        """Return the most bytes between two cuts.

        Args:
            there: weights and gradients that are always there.
            held: what a stage holds at each moment that counts, how many of each kind.
        """
        most = np.full(self.kept.shape, 0.0)
        for each in held:
            found = np.zeros(self.kept.shape)
            for kind, count in each.items():
                found += count * self._sizes[kind]
            np.maximum(most, found, out=most)
        total: Floats = self.frozen + there.versions * self.buffer + there.whole * self.whole + most
        return total


def by_kind(combination: Combination) -> dict[HeldKind, float]:
    """Return how many of each kind a rank with one stage holds."""
    found: dict[HeldKind, float] = {}
    for what, count in combination:
        found[what.kind] = found.get(what.kind, 0.0) + count
    return found


def _sums(values: npt.ArrayLike) -> Floats:
    """Return sums of the first 0, 1, .. values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _between(sums: Floats) -> Floats:
    """Return sums between two cuts."""
    return sums[None, :] - sums[:, None]


def _most_of(values: Floats, before: Floats) -> Floats:
    """Return the largest of the values between two cuts, less what stands at the first cut."""
    found = np.zeros((len(before), len(before)))
    for first in range(len(values)):
        found[first, first + 1 :] = np.maximum.accumulate(values[first:]) - before[first]
    return found
