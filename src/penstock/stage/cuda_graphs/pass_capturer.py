"""Forwards and backwards of a stage as CUDA graphs: recorded when they come a second time, and replayed.

A pass issues the same kernels for every microbatch, on tensors of the same shapes. So it is recorded, and the host
issues it by one call. A recording has its addresses; hence there is one for each buffer of weights with the buffer of
the gradient that is added to (under 2BW three pairs, in turns), and one for each microbatch that is in flight at the
same time. All recordings of the latter share memory, since one of them is in use at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.comm.core.devices import on_device
from penstock.comm.p2p.trees import detached
from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads
from penstock.stage.autograd.forward_graph import Graph
from penstock.stage.autograd.recompute import drawn_from, generator_states
from penstock.stage.autograd.saved_bytes import has_memory
from penstock.stage.blocks.loss import UnreadLoss
from penstock.stage.blocks.module import StageModule
from penstock.stage.blocks.rng import RngKey
from penstock.stage.cuda_graphs.captured_pass import CapturedPass, Claim, FixedMemory, Given, InFlightRoom, RecordingKey
from penstock.stage.cuda_graphs.recorder import GraphRecorder
from penstock.stage.graph_builder import BlockOutput
from penstock.stage.in_flight_microbatch import Microbatch
from penstock.weights.memory.buffers import Buffer, Handle

_LOG = logging.getLogger(__name__)
"""The graph of a forward, its output and its loss."""
Compute = Callable[[Microbatch, Any], tuple[Any, Tensor | None, UnreadLoss | None]]
"""Runs the blocks on an input; returns the output, the loss sum in its graph, and the loss."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PassCapturer:
    """Records the passes of one stage, and replays them.

    Args:
        module: its blocks.
        recorder: records work on its device.
        compute: runs the blocks.
        seed: returns the gradient of a loss sum, given that and the loss scale.
        hold: notified of the bytes of activations that begin to live.
        hooked: returns whether gradients of weights go through hooks of the user.
    """

    def __init__(
        self,
        module: StageModule,
        recorder: GraphRecorder,
        compute: Compute,
        seed: Callable[[Tensor, float], Tensor],
        hold: Callable[[int], None],
        hooked: Callable[[], bool],
    ) -> None:
        self._module, self._recorder, self._compute, self._seed, self._hold = module, recorder, compute, seed, hold
        self._hooked = hooked
        self._attributes = ModuleAttributes(module)
        self._passing = recorder.pool()
        self._nbytes: dict[RecordingKey, tuple[int, int]] = {}  # kept until a backward, and until its second half
        self._rooms: list[InFlightRoom] = []
        self._written: list[Tensor] = []  # buffers of modules that forwards change
        self._gradients: dict[Buffer, Buffer] = {}  # which one was last added to, by that of the weights
        self._offered = True

    def learn(self, weights: Handle) -> None:
        """Take note of the gradient that a backward on weights adds to."""
        if isinstance(weights.buffer, Buffer) and weights.buffer.gradient is not None:
            self._gradients[weights.buffer] = weights.buffer.gradient

    def refresh(self) -> None:
        """Drop all recordings if the modules were changed between two runs."""
        if self._attributes.changed():
            self._attributes = ModuleAttributes(self._module)
            self._rooms.clear()
            self._passing = self._recorder.pool()  # torch takes no pool whose recordings are all gone
            self._nbytes.clear()
            self._written.clear()
            self._offered = True

    def forward(
        self,
        microbatch: Microbatch,
        value: Any,
        wants: tuple[bool, ...],
        weights: Handle | None,
        halves: bool,
        build: Callable[[], BlockOutput],
    ) -> BlockOutput:
        """Replay the forward of a microbatch, or have it built where there is no recording, and can be none.

        Args:
            microbatch: which.
            value: the input tree, on the device.
            wants: which of its leaves want a gradient.
            weights: to read.
            halves: its backward comes in two halves.
            build: runs the blocks.
        """
        buffer = None if weights is None else weights.buffer
        given = self._given(microbatch, value, wants) if self._offered else None
        if given is None or not isinstance(buffer, Buffer) or self._hooked():
            return build()
        key = RecordingKey.of(given, halves)
        if key not in self._nbytes:
            return self._observe(key, given, build)
        gradient = self._gradients.get(buffer)
        if gradient is None:
            return build()
        room = next((room for room in self._rooms if room.is_free), None)
        if room is None:
            room = InFlightRoom(self._recorder.pool())
            self._rooms.append(room)
        if key not in room.memories:
            room.memories[key] = FixedMemory(given, room.kept, self._passing)
        try:
            captured = self._recording(room, key, buffer, gradient)
        except RuntimeError as error:
            self._give_up(_explained(error))
            return build()
        elsewhere = partial(self._elsewhere, captured, room, key)
        graph = ReplayedGraph(captured, room.claim(), elsewhere, self._nbytes[key])
        self._hold(graph.nbytes)
        return BlockOutput(graph, *self._replay(captured, given, microbatch))

    def _recording(self, room: InFlightRoom, key: RecordingKey, weights: Buffer, gradient: Buffer) -> CapturedPass:
        """Return the recording for two buffers, which is made if there is none.

        Raises:
            RuntimeError: it cannot be made.
        """
        found = room.passes.get((key, weights, gradient))
        if found is None:
            module, tensors = self._module, self._module.tensors
            before = tensors.bound
            drawing, module.rng.drawing = module.rng.drawing, frozenset()  # generators cannot be seeded meanwhile
            try:
                memory, pair = room.memories[key], (weights, gradient)
                found = CapturedPass(self._recorder, self._run, tensors.bind, memory, *pair, key.halves, self._written)
            finally:
                module.rng.drawing = drawing
                if before is not None:
                    tensors.bind(before)
            room.passes[key, weights, gradient] = found
        return found

    def _elsewhere(self, first: CapturedPass, room: InFlightRoom, key: RecordingKey, gradient: Buffer) -> CapturedPass:
        """Replay a forward again by the recording that adds to another gradient.

        It finds the buffers of modules as the first forward did, and leaves them as they are.
        """
        captured = self._recording(room, key, first.weights, gradient)
        present = [(buffer, buffer.clone()) for buffer in self._module_buffers()]
        # Through `data`: graphs of others, which keep the buffers, need not know of this.
        for buffer, content in first.buffers_before:
            buffer.data.copy_(content)
        captured.forward()
        for buffer, content in present:
            buffer.data.copy_(content)
        return captured

    def _module_buffers(self) -> list[Tensor]:
        return [buffer for block in self._module.modules.values() for buffer in block.buffers() if has_memory(buffer)]

    def _given(self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...]) -> Given | None:
        """What the forward of a microbatch gets; None if it is not dense tensors, or a target wants a gradient."""
        target, target_wants = detached(on_device(microbatch.target, self._module.device))
        leaves = pytree.tree_leaves((value, target))
        if any(target_wants) or not all(leaf is None or _is_dense(leaf) for leaf in leaves):
            return None
        return Given(value, wants, target)

    def _observe(self, key: RecordingKey, given: Given, build: Callable[[], BlockOutput]) -> BlockOutput:
        """Run the first pass on some shapes as it is, and find out whether such passes can be recorded."""
        before = [(buffer, buffer.clone()) for buffer in self._module_buffers()]
        with noticing_host_effects(self._module, given.tensors) as effects:
            built = build()
            reason = effects()
        known = {id(buffer) for buffer in self._written}
        self._written += [b for b, content in before if id(b) not in known and not torch.equal(b, content)]
        if built.auxiliary is not None:
            reason = "a block calls auxiliary()"
        if reason is None:
            self._nbytes[key] = built.graph.nbytes, built.graph.deferred_nbytes
        else:
            self._give_up(reason)
        return built

    def _replay(self, captured: CapturedPass, given: Given, microbatch: Microbatch) -> tuple[Any, UnreadLoss | None]:
        """Replay a forward; returns its output and its loss."""
        memory = captured.memory
        memory.fill(given)
        output, loss = captured.forward(), captured.loss
        if loss is None:
            return output, None
        seed = captured.seed
        if memory.scale != microbatch.scale and seed is not None:
            memory.scale = microbatch.scale
            seed.copy_(self._seed(seed, memory.scale))
        output = pytree.tree_map_only(Tensor, torch.clone, output)  # others may read it after the backward
        return output, pytree.tree_map_only(Tensor, torch.clone, loss)

    def _run(self, value: Any, target: Any) -> tuple[Any, Tensor | None, UnreadLoss | None]:
        """Run the blocks to be recorded."""
        return self._compute(Microbatch(0, RngKey(0, 0), target), value)

    def _give_up(self, reason: str) -> None:
        _LOG.warning("%s: its blocks run without CUDA graphs, since %s", self._module.where, reason)
        self._rooms.clear()
        self._offered = False


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and has_memory(leaf) and not leaf.is_nested


def _explained(error: RuntimeError) -> str:
    """Why a pass cannot be recorded, with what to do about the most frequent reason."""
    said = str(error).splitlines()[0]
    if "capturing" not in said:
        return said
    return (
        f"a block or the loss waits for the GPU, as .item(), float(tensor) and tensor.cpu() do; let them go on with "
        f"tensors (a loss may return its weight as one): {said}"
    )


class ModuleAttributes:
    """The attributes of the modules of a stage, to find out whether any has been given another value.

    Values in lists and dicts count one by one; the memory of frozen parameters and buffers also has to stay the same.

    Args:
        module: the blocks of the stage, and its loss.
    """

    def __init__(self, module: StageModule) -> None:
        self._module = module
        self._values, self._shape, self._places = self._now()

    def changed(self) -> bool:
        """Return whether one has another value now."""
        values, shape, places = self._now()
        same = shape == self._shape and all(a is b for a, b in zip(self._values, values, strict=True))
        return not same or places != self._places

    def _now(self) -> tuple[list[Any], pytree.TreeSpec, list[int]]:
        """The values, the lists and dicts that they are in, and where the memory of fixed tensors is."""
        values, shape = pytree.tree_flatten([_attributes(module) for module in _modules(self._module)])
        return values, shape, [tensor.data_ptr() for tensor in self._module.tensors.fixed if has_memory(tensor)]


def _modules(module: StageModule) -> list[nn.Module]:
    """All modules that a stage computes with."""
    roots = [*module.modules.values(), *([module.loss] if isinstance(module.loss, nn.Module) else [])]
    return [inner for root in roots for inner in root.modules()]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, and of its parameters in their places: those of versions take these in turns."""
    own = {name: value for name, value in vars(module).items() if name != "_parameters"}
    return own | {"_parameters": {name: vars(p) for name, p in module._parameters.items() if p is not None}}


@contextmanager
def noticing_host_effects(module: StageModule, given: Sequence[Tensor]) -> Iterator[Callable[[], str | None]]:
    """A context for a pass, which yields a function: why a CUDA graph of the pass would not do the same again.

    Args:
        module: the stage.
        given: tensors that the pass gets.
    """
    states = generator_states(module.blocks.values())
    attributes, versions = ModuleAttributes(module), _versions(given)
    with module.rng.noticing_draws() as drew:

        def reason() -> str | None:
            if any(vars(inner)[name] for inner in _modules(module) for name in _HOOKS):
                return "their modules have hooks"
            if drew() or drawn_from(states):
                return "they draw random numbers"
            if _versions(given) != versions:
                return "they write in place into what they get"
            return "they write attributes of their modules or parameters" if attributes.changed() else None

        yield reason


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often tensors have been written to, as far as torch counts."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class ReplayedGraph(Graph):
    """The graph of a forward that was replayed; its backward is replayed, too.

    Args:
        captured: the recording.
        claim: on the memory of the microbatch.
        elsewhere: replays the forward again, by a recording that adds to another gradient, and returns that.
        nbytes: kept until the backward, and of these until its second half.
    """

    def __init__(
        self,
        captured: CapturedPass,
        claim: Claim,
        elsewhere: Callable[[Buffer], CapturedPass],
        nbytes: tuple[int, int],
    ) -> None:
        super().__init__({}, 0, [], captured.seed, nbytes[0], deferred_nbytes=nbytes[1])
        self._captured, self._claim, self._elsewhere = captured, claim, elsewhere

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward, or its first half."""
        gradient = self._captured.weights.gradient
        assert gradient is not None
        gradient.finish_gradient()  # a recording adds, be it the first of its batch
        if gradient is not self._captured.gradient:
            self._captured = self._elsewhere(gradient)
        found = self._captured.backward(gradients)
        if self._captured.halves:
            self.deferred = ReplayedWeightGrads(self._captured, self._claim)
            self.deferred_nbytes += self._captured.deferred_nbytes
        return found


class ReplayedWeightGrads(DeferredWeightGrads):
    """The second half of a backward that is replayed.

    Args:
        captured: the recording.
        claim: on the memory of the microbatch.
    """

    def __init__(self, captured: CapturedPass, claim: Claim) -> None:
        super().__init__()
        self._captured, self._claim = captured, claim

    def run(self, weights: Mapping[str, Tensor], add: Callable[[str, Tensor], None]) -> None:  # noqa: ARG002
        """Replay it; the recording knows its weights and where it adds."""
        self._captured.backward_for_weights()
