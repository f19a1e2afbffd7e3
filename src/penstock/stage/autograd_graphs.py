"""The graphs of a stage between forward and backward: kept, moved away for a while, or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.comm.p2p.trees import detached
from penstock.partition.replay.model_stages import ModelStage
from penstock.stage.autograd.activation_offload import ActivationOffload
from penstock.stage.autograd.forward_graph import Graph
from penstock.stage.autograd.recompute import (
    BufferPlace,
    RecomputeInput,
    RecomputeInputSaver,
    copied_buffers,
    frames_of,
    put_back,
)
from penstock.stage.blocks.loss import UnreadLoss
from penstock.stage.blocks.module import StageModule
from penstock.stage.graph_builder import BlockOutput, GraphBuilder, value_of
from penstock.stage.in_flight_microbatch import Microbatch
from penstock.weights.memory.buffers import Handle


class Capturer(Protocol):
    """Replays passes that it has recorded (`penstock.stage.cuda_graphs.pass_capturer`)."""

    def forward(
        self,
        microbatch: Microbatch,
        value: Any,
        wants: tuple[bool, ...],
        weights: Handle | None,
        halves: bool,
        build: Callable[[], BlockOutput],
    ) -> BlockOutput:
        """Replay the forward of a microbatch, or have it built."""
        ...

    def learn(self, weights: Handle) -> None:
        """Take note of the gradient that a backward on weights adds to."""
        ...

    def refresh(self) -> None:
        """Follow what was changed on the modules between two runs."""
        ...


class StageGraphs:
    """The graphs of one stage, from the forwards that make them to the backwards that go through them.

    Attributes:
        hold: notified of the bytes of activations that begin to live, or (negative) cease to.

    Args:
        module: the blocks, to which the weights to be read are bound whenever this runs.
        builder: runs them.
        parts: names of the blocks that are recomputed together; empty where graphs are kept from forward to backward.
        hold: as the attribute.
        saves_inputs: inputs of forwards to be recomputed are saved; else they come again.
    """

    def __init__(
        self,
        module: StageModule,
        builder: GraphBuilder,
        parts: Sequence[Sequence[str]],
        hold: Callable[[int], None],
        saves_inputs: bool = True,
    ) -> None:
        self.hold = hold
        self._blocks, self._names = module.blocks, tuple(module.blocks)
        self._parts = [tuple(part) for part in parts]
        self._builder, self._build = builder, builder.build
        self._known, self._splits, self._side = builder.known, builder.splits, builder.side
        self._inputs = RecomputeInputSaver(module.blocks, module.where, saves_inputs, lambda: module.rng.drawing)
        self._before: Mapping[BufferPlace, Tensor] | None = None  # the buffers, before the first draft
        self._frames: Mapping[ModelStage, Any] = {}  # likewise, what code between layers finds
        self._capturer: Capturer | None = None

    def forward(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | RecomputeInput], BlockOutput]:
        """Run all blocks; returns what the backward goes through, in the order of the forward, and the output."""
        if self._parts:
            return self._run_in_parts(microbatch, value, wants, handle)
        build = partial(self._build, self._names, microbatch, value, wants, handle)
        if self._capturer is None:
            result = build()
        else:
            halves = self._splits is not None and self._splits(microbatch.key)
            result = self._capturer.forward(microbatch, value, wants, handle, halves, build)
        return [result.graph], result

    def capture_with(self, capturer: Capturer) -> None:
        """Have forwards recorded, and replayed."""
        self._capturer = capturer

    def backward_reads(self, handle: Handle | None) -> None:
        """Take note of the weights of a backward that comes now, and of the gradient that it adds to."""
        if self._capturer is not None and handle is not None:
            self._capturer.learn(handle)

    def refresh(self) -> None:
        """Follow what was changed on the modules between two runs."""
        if self._capturer is not None:
            self._capturer.refresh()

    def recompute(
        self, kept: RecomputeInput, microbatch: Microbatch, handle: Handle | None, value: Any = None
    ) -> BlockOutput:
        """Run a part of the stage again, with the same random numbers and buffers, and leave the buffers as they are.

        Args:
            kept: saved by its forward.
            microbatch: the same as in the forward.
            handle: the weights to read.
            value: the input, where it was not saved.
        """
        if not self._inputs.saves_inputs:
            self._inputs.provide(kept, value)
        with torch.enable_grad(), self._inputs.as_in_forward(kept):
            result = self._build(kept.names, microbatch, kept.value, kept.wants, handle)
        self.hold(-kept.nbytes)
        return result

    def begin_draft(self) -> None:
        """Save the module buffers before a forward on weights not decided on yet, which may have to be undone."""
        if self._before is None:
            self._before = copied_buffers(self._blocks.values())
            self._frames = frames_of(self._blocks.values())

    def discard_drafts(self, work: Iterable[Graph | RecomputeInput]) -> None:
        """Free the graphs of forwards on rejected weights and restore the module buffers from before them."""
        for piece in work:
            self.hold(-piece.nbytes)
        put_back(self._before or {}, self._blocks.values())
        for stage, found in self._frames.items():
            stage.restore(found)

    def accept_drafts(self) -> None:
        """Forget the saved module buffers: the weights are decided on, or the drafts were discarded."""
        self._before = None

    def offload(self, work: Sequence[Graph | RecomputeInput], away: bool) -> int:
        """Move saved tensors to the memory of the host, or back, and return their bytes."""
        nbytes = sum(offload.move(away=away) for offload in _offloads(work))
        self.hold(-nbytes if away else nbytes)
        return nbytes

    def movable_bytes(self, work: Sequence[Graph | RecomputeInput]) -> int:
        """Return the bytes of the saved tensors that can be moved."""
        return sum(offload.nbytes for offload in _offloads(work))

    def arriving(self, work: Sequence[Graph | RecomputeInput]) -> list[ActivationOffload]:
        """Return what may still be on its way back of what a backward reads; an accelerator copies beside its work."""
        return [] if self._side is None else [offload for offload in _offloads(work) if offload.arrives]

    def take_bytes(self, work: Sequence[Graph | RecomputeInput]) -> list[list[Tensor]]:
        """Take the saved tensors out of graphs, as bytes to be sent to another rank."""
        given = [offload.take_bytes() for offload in _offloads(work)]
        self.hold(-sum(tensor.nbytes for tensors in given for tensor in tensors))
        return given

    def put_bytes(self, work: Sequence[Graph | RecomputeInput], given: list[list[Tensor]]) -> None:
        """Put back what `take_bytes` took out."""
        for offload, tensors in zip(_offloads(work), given, strict=True):
            offload.put_bytes(tensors)
        self.hold(sum(tensor.nbytes for tensors in given for tensor in tensors))

    @property
    def divisor(self) -> float:
        """By which losses are divided before their backward."""
        return self._builder.divisor

    def evaluate(self, microbatch: Microbatch, value: Any) -> tuple[Any, UnreadLoss | None, float | None]:
        """Run all blocks and keep nothing."""
        output, _, loss = self._builder.compute(self._names, microbatch, value)
        return output, loss, value_of(self._builder.auxiliary)

    def _run_in_parts(
        self, microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[list[Graph | RecomputeInput], BlockOutput]:
        """Run part by part and keep the input of each instead of its graph."""
        work: list[Graph | RecomputeInput] = []
        *before, last = self._parts
        added: list[float] = []
        for names in before:
            kept, result = self._run_part(names, microbatch, value, wants, handle)
            work.append(kept)
            added += () if result.auxiliary is None else (result.auxiliary,)
            value, wants = detached(result.output)
            del result  # or its graph would live while the next one is made
        kept, result = self._run_part(last, microbatch, value, wants, handle)
        if added:
            result = result._replace(auxiliary=sum(added, result.auxiliary or 0.0))
        return [*work, kept], result

    def _run_part(
        self, names: Sequence[str], microbatch: Microbatch, value: Any, wants: tuple[bool, ...], handle: Handle | None
    ) -> tuple[RecomputeInput, BlockOutput]:
        kept = self._inputs.before_forward(names, value, wants, self._known)
        result = self._build(names, microbatch, value, wants, handle)
        self._inputs.after_forward(kept)
        self.hold(kept.nbytes - result.graph.nbytes)
        return kept, result


def _offloads(work: Sequence[Graph | RecomputeInput]) -> list[ActivationOffload]:
    return [piece.offload for piece in work if isinstance(piece, Graph) and piece.offload is not None]
