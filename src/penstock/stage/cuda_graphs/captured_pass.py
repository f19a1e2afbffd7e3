"""A forward of a stage and its backward as recordings, between tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.p2p.trees import detached
from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads
from penstock.stage.autograd.forward_graph import Graph, open_inputs, run_backward
from penstock.stage.autograd.saved_bytes import edges_of, storage_bytes
from penstock.stage.autograd.split_backward import BackwardSplitter
from penstock.stage.autograd.weight_proxy import ProxyWeights
from penstock.stage.blocks.loss import UnreadLoss
from penstock.stage.cuda_graphs.recorder import GraphRecorder, RecordedWork
from penstock.weights.memory.buffers import Buffer

Compute = Callable[[Any, Any], tuple[Any, Tensor | None, UnreadLoss | None]]
"""Runs blocks on input and target; returns the output, the loss sum in its graph, and the loss."""


class Given(NamedTuple):
    """What a forward gets.

    Attributes:
        value: the input tree.
        wants: which of its leaves want a gradient.
        target: tree of targets, on the device of the stage.
    """

    value: Any
    wants: tuple[bool, ...]
    target: Any

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [leaf for leaf in pytree.tree_leaves((self.value, self.target)) if isinstance(leaf, Tensor)]

    def zeros_like(self) -> Given:
        """Return the same in memory of its own, zeroed."""
        value, target = pytree.tree_map_only(Tensor, torch.zeros_like, (self.value, self.target))
        return Given(value, self.wants, target)


class FixedMemory:
    """Tensors and pools that one microbatch in flight takes, with recordings.

    Args:
        given: as any forward gets it.
        kept: pool of what is kept from forwards to backwards.
        passing: pool of what only a backward takes, or a forward.

    Attributes:
        given: where forwards find what they get.
        gradients: where backwards find the gradients of the output's leaves, or of the loss sum.
        scale: of the loss whose gradient is there; 0 for none.
    """

    def __init__(self, given: Given, kept: Any, passing: Any) -> None:
        self.given, self.kept, self.passing = given.zeros_like(), kept, passing
        self.gradients: list[Tensor | None] = []
        self.scale = 0.0

    def fill(self, given: Given) -> None:
        """Write what a forward gets."""
        for place, tensor in zip(self.given.tensors, given.tensors, strict=True):
            place.copy_(tensor)

    def fill_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the output's leaves, or of the loss sum; None counts as zero."""
        for place, found in zip(self.gradients, gradients, strict=True):
            if place is not None and found is None:
                place.zero_()
            elif place is not None and found is not None and found is not place:
                place.copy_(found)


class CapturedPass:
    """A forward and its backward (or both halves of that), recorded on weights in one buffer; they add to another one.

    Args:
        recorder: records them.
        compute: runs the blocks.
        bind: makes the blocks compute with some leaves.
        memory: shared with other recordings, of which one is in use at a time.
        weights: read by the forward and the backward.
        gradient: the backward adds to it.
        halves: the backward comes in two halves.
        written: buffers of modules that forwards change.

    Attributes:
        memory, weights, gradient, halves: the same.
        buffers_before: the buffers that forwards change, with what the last one found there.
        loss: sum and weight; None where there is none.
        output: the output tree, without a graph.
        deferred_nbytes: of gradients that the first half of a backward keeps for the second one.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        compute: Compute,
        bind: Callable[[Mapping[str, Tensor]], None],
        memory: FixedMemory,
        weights: Buffer,
        gradient: Buffer,
        halves: bool,
        written: Sequence[Tensor],
    ) -> None:
        self._compute, self.memory, self.halves, self._written = compute, memory, halves, list(written)
        self.weights, self.gradient = weights, gradient
        self.buffers_before: list[tuple[Tensor, Tensor]] = []
        self._deferred: DeferredWeightGrads | None = None
        self._weights_backward: RecordedWork | None = None
        self.deferred_nbytes = 0
        self._graph: Graph | None = None
        self._wanted: list[bool] = []
        self._input_gradients: list[Tensor | None] = []
        self.output: Any = None
        self.loss: UnreadLoss | None = None
        with recorder.aside():
            leaves = self._leaves = accumulating_leaves(weights, gradient)
            self._proxies = ProxyWeights(leaves) if halves else None
        self._bind = partial(bind, leaves if self._proxies is None else self._proxies.tensors)
        self._forward = recorder.record(self._run_forward, memory.kept)
        if not memory.gradients:
            memory.gradients = self._room_for_gradients()
        self._backward = recorder.record(self._run_backward, memory.kept if halves else memory.passing)
        if halves:
            self.deferred_nbytes = storage_bytes(self._deferred_gradients(), ())
            self._weights_backward = recorder.record(partial(self._run_weights_backward, leaves), memory.passing)

    def forward(self) -> Any:
        """Compute the output and the loss; returns the output, whose leaves that were in a graph want a gradient."""
        self._forward.replay()
        leaves, spec = pytree.tree_flatten(self.output)
        for i, wants in enumerate(self._wanted):
            if wants:
                leaves[i] = leaves[i].detach().requires_grad_()
        return pytree.tree_unflatten(leaves, spec)

    @property
    def seed(self) -> Tensor | None:
        """Where the gradient of the loss sum is, on a stage that has a loss."""
        return None if self.loss is None else self.memory.gradients[0]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward, or its first half.

        Args:
            gradients: of the output's leaves, or of the loss sum.

        Returns:
            The gradients of the input's leaves, in memory of their own.
        """
        self.memory.fill_gradients(gradients)
        self._backward.replay()
        return [None if found is None else found.clone() for found in self._input_gradients]

    def backward_for_weights(self) -> None:
        """Run the second half of the backward."""
        assert self._weights_backward is not None
        self._weights_backward.replay()

    def _run_forward(self) -> None:
        given = self.memory.given
        self.buffers_before = [(buffer, buffer.clone()) for buffer in self._written]
        value, opened, count = open_inputs(given.value, given.wants)
        self._bind()
        splitter = None if self._proxies is None else BackwardSplitter(self._proxies)
        with splitter or nullcontext():
            output, total, self.loss = self._compute(value, given.target)
        deferred = None if splitter is None else splitter.deferred
        self._graph = Graph(opened, count, edges_of(output if total is None else total), total, 0, deferred)
        self.output, wanted = detached(output)
        self._wanted = list(wanted)

    def _room_for_gradients(self) -> list[Tensor | None]:
        graph = self._graph
        assert graph is not None
        ends = pytree.tree_leaves(self.output) if graph.seed is None else [graph.seed]
        return [
            None if edge is None else torch.zeros_like(end, requires_grad=False)
            for edge, end in zip(graph.outputs, ends, strict=True)
        ]

    def _run_backward(self) -> None:
        graph, self._graph = self._graph, None  # what it has saved goes back to the pool, for the next recording
        assert graph is not None
        graph.seed, self._deferred = None, graph.deferred
        self._input_gradients = run_backward(graph, self.memory.gradients)
        collect_gradients(self._leaves, self.gradient)

    def _deferred_gradients(self) -> Sequence[Tensor]:
        return () if self._deferred is None else self._deferred.gradients

    def _run_weights_backward(self, leaves: Mapping[str, Tensor]) -> None:
        deferred, self._deferred = self._deferred, None
        assert deferred is not None

        def add(name: str, found: Tensor) -> None:
            self.gradient.views[name].add_(found)

        deferred.run(leaves, add)


def accumulating_leaves(weights: Buffer, gradient: Buffer) -> dict[str, Tensor]:
    """Return leaves over the memory of weights whose gradients are added to another buffer's, by name."""
    leaves = {name: view.detach().requires_grad_() for name, view in weights.views.items()}
    for name, leaf in leaves.items():
        place = gradient.views[name]
        if place.dtype == leaf.dtype:
            leaf.grad = place
        else:
            leaf.register_post_accumulate_grad_hook(_adds_to(place))  # type: ignore[no-untyped-call]
    return leaves


def collect_gradients(leaves: Mapping[str, Tensor], gradient: Buffer) -> None:
    """Move gradients to their places that the backward of a block has put elsewhere (`Buffer.collect`)."""
    for name, leaf in leaves.items():
        place, found = gradient.views[name], leaf.grad
        if place.dtype != leaf.dtype:
            if found is not None:
                _adds_to(place)(leaf)
        elif found is not place:
            place.zero_() if found is None else place.copy_(found)
            leaf.grad = place


def _adds_to(place: Tensor) -> Callable[[Tensor], None]:
    """Make a hook that adds the gradient of a leaf to a tensor of another format."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        place.add_(leaf.grad)
        leaf.grad = None

    return add


class RecordingKey(NamedTuple):
    """What a recording depends on, but for the buffers.

    Attributes:
        spec: the tree of input and target.
        wants: which leaves of the input want gradients.
        tensors: shape, strides and dtype of each leaf; None of one that is None.
        halves: the backward comes in two halves.
    """

    spec: pytree.TreeSpec
    wants: tuple[bool, ...]
    tensors: tuple[object, ...]
    halves: bool

    @classmethod
    def of(cls, given: Given, halves: bool) -> RecordingKey:
        """What recordings of a forward that gets this depend on."""
        leaves, spec = pytree.tree_flatten((given.value, given.target))
        kinds = tuple(None if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        return cls(spec, given.wants, kinds, halves)


class Claim:
    """What a microbatch has of a room, until it is dropped."""


class InFlightRoom:
    """Room for one microbatch in flight: its memory, and the recordings that use it.

    Args:
        kept: pool of memory for what is kept from forwards to backwards.

    Attributes:
        kept: the same.
        memories: by what recordings depend on.
        passes: by that, and the buffers of weights and gradient.
    """

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.memories: dict[RecordingKey, FixedMemory] = {}
        self.passes: dict[tuple[RecordingKey, Buffer, Buffer], CapturedPass] = {}
        self._claim: Callable[[], Claim | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether no microbatch has it."""
        return self._claim() is None

    def claim(self) -> Claim:
        """Give it to a microbatch."""
        claim = Claim()
        self._claim = ref(claim)
        return claim
