"""A graph as a chain of blocks: what stands between any two cuts takes, in seconds and bytes, as matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_row import between, running_sums
from penstock.simulate.memory.held import HeldKind

Floats = npt.NDArray[np.float64]
_TOGETHER = 1 << 20  # numbers: `penstock.weights.memory.gradient_scratch`
_SCRATCH = 4.0 * _TOGETHER  # bytes, in float32


class PassSums(NamedTuple):
    """Seconds of a microbatch in the first 0, 1, .. blocks.

    Attributes:
        forward: of forwards.
        first, second: of the halves of backwards; a whole one is a first half.
    """

    forward: Floats
    first: Floats
    second: Floats

    @property
    def busy(self) -> Floats:
        """All passes."""
        return self.forward + self.first + self.second

    @property
    def path(self) -> Floats:
        """What other stages wait for."""
        return self.forward + self.first


class BlockChain:
    """A graph as a chain of blocks.

    A row stands for a cut and a column for a later one.

    Attributes:
        blocks: how many.
        passes: of one microbatch, without recompute, with whole backwards.
        halved: the same with backwards in halves; None if the profile does not know them of every layer.
        steps: seconds of updates of the first 0, 1, .. blocks.
        low_precision: passes compute in 16 bits, so there are master weights.
        buffer, whole: bytes of one copy of the weights as passes read it, and of one gradient or master weights.
        parameters, frozen: bytes of what replicas add up, and of frozen parameters and module buffers.
        updates: 1.0 where some block between two cuts has an update, and 0.0 where none has.
        crossing, returning: bytes of the edges that cross a cut, and of the gradients that come back for them.
        own_graphs: bytes that a block keeps for its backward at least, wherever it is cut.
        movable: what can be moved to the host's memory is known of every block.
        pieces: bytes of the largest part of an optimizer's state that comes and goes at once, where it is away.
        sizes: bytes of each kind of what is held, of a microbatch or at all.
        stage_sizes: what stages take with all that is always there, as far as it has been asked for (`StageSizes`).
    """

    def __init__(self, graph: LayerGraph, optimizer_copies: float) -> None:
        layers = graph.layers
        self.blocks = len(layers)
        forward = running_sums([layer.forward or 0.0 for layer in layers])
        backward = running_sums([layer.seconds - (layer.forward or 0.0) for layer in layers])
        self.passes = PassSums(forward, backward, np.zeros(self.blocks + 1))
        halves = [layer.halves for layer in layers if layer.halves is not None]
        known = len(halves) == self.blocks
        self.halved = PassSums(forward, *(running_sums([h[n] for h in halves]) for n in (0, 1))) if known else None
        self.steps = running_sums([layer.step for layer in layers])
        self.parameters = between(running_sums([layer.parameters for layer in layers]))
        self.buffer = between(running_sums([layer.buffer for layer in layers]))
        self.low_precision = any(layer.whole is not None for layer in layers)
        whole = [layer.buffer if layer.whole is None else layer.whole for layer in layers]
        self.whole, self.frozen = (
            between(running_sums(whole)),
            between(running_sums([layer.frozen for layer in layers])),
        )
        updated = [layer.has_update for layer in layers]
        self.updates, self._not_updated = (between(running_sums(updated)) > 0).astype(float), updated.count(False)
        self.crossing, self.returning = np.zeros((2, self.blocks + 1))
        for edge in graph.edges:
            self.crossing[edge.source + 1 : edge.target + 1] += edge.bytes
            self.returning[edge.source + 1 : edge.target + 1] += edge.bytes * layers[edge.source].returned
        states = np.array([
            optimizer_copies * size if layer.optimizer is None else layer.optimizer
            for layer, size in zip(layers, whole, strict=True)
        ])  # fmt: skip
        optimizer, nothing = between(running_sums(states)), np.zeros(self.blocks + 1)
        largest = _most_of(np.array(whole), nothing)
        of_one = [
            1.0 if not size or layer.largest is None else min(layer.largest / size, 1.0)
            for layer, size in zip(layers, whole, strict=True)
        ]
        self.pieces = _most_of(states * of_one, nothing) + 2 * _SCRATCH
        self.stage_sizes: dict[tuple[Any, ...], Any] = {}
        self.sizes = self._activations(graph, known) | {
            HeldKind.OPTIMIZER: optimizer,
            HeldKind.SCRATCH: np.minimum(self.whole, np.maximum(largest, _SCRATCH)),
        }

    def least_updates(self, stages: int) -> int:
        """Return how many of some stages have an update at least, however blocks are divided among them."""
        return max(stages - self._not_updated, int(self.updates[0, -1]))

    def stage_times(
        self,
        passes: PassSums,
        cuts: npt.NDArray[np.intp],
        again: npt.NDArray[np.bool_],
        between: Sequence[int],
        devices: Devices,
        ranks: int,
        slow: Floats | float = 1.0,
        slices: int = 1,
    ) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of each stage in a forward and in both parts of a backward; of a whole one in the first.

        They include what messages take of the stage, and what lies between two passes. So runs that are forecast and
        candidates that are searched for have the same times.

        Args:
            passes: sums over blocks; `self.halved` where backwards come in two halves.
            cuts: where stages begin, and where the last one ends.
            again: the stages that run each block again before its backward.
            between: the stages whose input comes from another rank.
            devices: on which they run.
            ranks: of the whole run.
            slow: how many times as long as the profile says each stage takes.
            slices: of a sequence, which passes take one by one.
        """
        forward, first, second = (np.diff(sums[cuts]) * slow for sums in passes)
        pause = devices.between * slices
        there, back = self._work_of_messages(
            cuts, between, lambda nbytes: devices.message_work(nbytes / slices, ranks) * slices
        )
        first = first + forward * again + back + pause
        return forward + there + pause, first, second + devices.between if passes is self.halved else second

    def _work_of_messages(
        self, cuts: npt.NDArray[np.intp], between: Sequence[int], work: Callable[[float], float]
    ) -> tuple[Floats, Floats]:
        """Return the seconds that messages take of each stage in a forward, and in a backward.

        All messages take as long as the longest of their direction; where no gradient comes back, one without bytes
        does.

        Args:
            cuts, between: as of `stage_times`.
            work: seconds of a message of so many bytes, at each of its ends.
        """
        found, into = list[Floats](), np.array(between, int)
        for nbytes in (self.crossing[cuts[into]], self.returning[cuts[into]]):
            each = np.where(nbytes > 0, work(float(nbytes.max(initial=0.0))), work(0.0))
            found.append(np.bincount([*into - 1, *into], [*each, *each], len(cuts) - 1).astype(float))
        return found[0], found[1]

    def _activations(self, graph: LayerGraph, halves_known: bool) -> dict[HeldKind, Floats]:
        """Return the bytes of what passes of a microbatch hold, and of its messages."""
        layers, shape = graph.layers, (self.blocks + 1, self.blocks + 1)
        stored = np.array([layer.stored for layer in layers])
        self.movable = all(layer.movable is not None for layer in layers)
        inputs = running_sums([
            layer.data + sum(edge.bytes for edge in edges) for layer, edges in zip(layers, graph.inputs, strict=True)
        ])  # fmt: skip
        shared = running_sums([layer.shared for layer in layers])
        self.own_graphs = np.maximum(stored - np.diff(shared), 0.0)
        graphs = between(running_sums(stored)) - _inside(shared)
        late = between(running_sums([layer.halves[2] if layer.halves else 0.0 for layer in layers]))
        forward, backward = _most_of(inputs[:-1] + stored, inputs), _most_of(inputs[1:] + stored, inputs)
        sizes = {
            HeldKind.GRAPH: graphs,
            HeldKind.SAVED: between(inputs),
            HeldKind.FORWARD: forward,
            HeldKind.BACKWARD: backward,
            HeldKind.OUTPUT: np.broadcast_to(self.crossing[None, :], shape),
            HeldKind.GRADIENT: np.broadcast_to(self.returning[:, None], shape),
        }
        if self.movable:
            alone, more = (running_sums([(layer.movable or (0.0, 0.0))[n] for layer in layers]) for n in (0, 1))
            sizes[HeldKind.MOVED] = between(alone) + _inside(more)
            sizes[HeldKind.LEFT] = graphs - sizes[HeldKind.MOVED]
        if halves_known:
            sizes[HeldKind.HALVED], sizes[HeldKind.FORWARD_HALVED], sizes[HeldKind.LATE] = graphs, forward, late
            sizes[HeldKind.BACKWARD_HALVED] = np.maximum(backward, late)
        return sizes


def _inside(sums: Floats) -> Floats:
    """Return sums between two cuts, without what stands directly behind the first one."""
    found: Floats = sums[None, :] - np.append(sums[1:], sums[-1])[:, None]
    return found


def _most_of(values: Floats, before: Floats) -> Floats:
    """Return the largest of the values between two cuts, less what stands at the first cut."""
    found = np.zeros((len(before), len(before)))
    for first in range(len(values)):
        found[first, first + 1 :] = np.maximum.accumulate(values[first:]) - before[first]
    return found
