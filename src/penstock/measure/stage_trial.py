"""Blocks as one stage, whose passes and updates are run one by one, timed, and counted in bytes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.comm.core.rank_grid import RankKey
from penstock.comm.core.tensor_group import TensorGroup
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.trees import copied, detached, leaves_of
from penstock.errors import ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.stage_builder import StageBuilder
from penstock.schedule.build import ScheduleRequest
from penstock.stage.blocks.loss import LossFunction
from penstock.stage.blocks.rng import RngKey
from penstock.stage.in_flight_microbatch import Microbatch
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights
from penstock.weights.corrections.base import Correction
from penstock.weights.optim.optimizer_factory import OptimizerFactory

_ACTIVATIONS = "activations"
_MICROBATCHES = 2
_MICROBATCHES_AHEAD = 3  # of forwards that come first: with fewer a backward comes too early to move or recompute


class BlockPlace(NamedTuple):
    """Where blocks stand in their model.

    Attributes:
        first: they read the samples, so nothing wants a gradient of their input.
        last: the loss is computed from their output.
    """

    first: bool
    last: bool


class BlockInput(NamedTuple):
    """What blocks are given.

    Attributes:
        value: their input tree; that of the model for the first block, a message for others.
        wants: which leaves of a message want a gradient.
        target: the second argument of the loss, for the last block.
    """

    value: Any
    wants: tuple[bool, ...] = ()
    target: Any = None


class Training(NamedTuple):
    """How blocks are trained.

    Attributes:
        loss, optimizer: as of `penstock.runtime.pipeline.Pipeline`.
        options: of passes and updates; those that divide the model or the batch must have their defaults, but for
            `tensor_parallel`.
        correction: of staleness, which may ask for the values before an update.
        tensor: the processes that share every stage, and measure their parts of it together; of one it is alone.
    """

    loss: LossFunction
    optimizer: OptimizerFactory
    options: PipelineOptions
    correction: Correction | None = None
    tensor: TensorGroup = TensorGroup.alone(None)


class Trial(NamedTuple):
    """One microbatch, or a slice of its sequences.

    Attributes:
        forward, first, second: seconds of the forward, and of both parts of the backward; all in `first` if not halved.
        most_forward, most_backward: bytes of activations, at most, in each, those of earlier slices included.
        stored, late: bytes of activations that the forward has left, and of them between the parts of the backward.
        movable: those of them that can be moved away; 0 where nothing is.
        output: bytes of the output.
        gradients: bytes of the gradient of each leaf of the input.
    """

    forward: float
    first: float
    second: float
    most_forward: int
    most_backward: int
    stored: int
    late: int
    movable: int
    output: int
    gradients: tuple[int, ...]


class StageTrial:
    """Some blocks as the only stage that exists of a pipeline.

    Args:
        blocks: by name.
        place: in the model.
        training: how they are trained.
        halved: their backwards come in two halves.
        pipeline: which of several parallel pipelines.
        moved: their activations can be moved away.
        slices: of a sequence, which they are given one by one.

    Attributes:
        halved: as given.
        stage: which they are.

    Raises:
        CapabilityError: they cannot be such a stage.
        ConfigError: their parameters are divided among another number of processes than measure them.
    """

    def __init__(
        self,
        blocks: Mapping[str, Any],
        place: BlockPlace,
        training: Training,
        halved: bool = False,
        pipeline: int = 0,
        moved: bool = False,
        slices: int = 1,
    ) -> None:
        tensor, parts = training.tensor, training.options.partition.tensor_parallel
        if parts != tensor.size:
            raise ConfigError(
                f"tensor_parallel={parts}: blocks are measured together by the {parts} processes that share them, but "
                f"here by {tensor.size}; call this in each of {parts} processes, with TensorGroup.around(group) as "
                "`tensor` of Training, or leave tensor_parallel out"
            )
        if tensor.size > 1:  # which blocks are divided by, once and for all
            blocks = copy.deepcopy(blocks)
        around: dict[str, Any] = {} if place.first else {"the block before": nn.Identity()}
        around |= blocks
        if not place.last:
            around["the block behind"] = nn.Identity()
        depth = 3 - place.first - place.last
        balance = [*([] if place.first else [1]), len(blocks), *([] if place.last else [1])]
        options = training.options.changed(balance=balance, max_grad_norm=None)
        options = options.changed(offload="activations") if moved else options
        ahead = moved or options.recompute.recompute == "stage"
        request = schedule_to_try(depth, halved, ahead, slices)
        plan = PipelinePlan.make(around, request, options)
        (stage,) = plan.schedule.on_rank(0 if place.first else 1)
        self._place, self.halved, self._slices = place, halved, slices
        self._recorder = Recorder(stage.rank, time.perf_counter())
        key = RankKey(pipeline, stage.rank)
        builder = StageBuilder(key, plan, *training[:2], self._recorder, tensor)
        self.stage = builder.build(stage, blocks)
        self._k = self._batch = 0
        self._given: list[Tensor | None] = []  # gradients of the output

    def close(self) -> None:
        """Give the modules their own parameters back."""
        self.stage.restore()

    @property
    def weights(self) -> StageWeights:
        """The weights of the stage."""
        return self.stage.weights

    def run(self, given: BlockInput) -> Trial:
        """Run a microbatch."""
        return self.run_slices([given])[0]

    def run_slices(self, given: Sequence[BlockInput]) -> list[Trial]:
        """Run the slices of a microbatch: forwards in their order, backwards in the reverse one, then second halves.

        Args:
            given: to each.
        """
        live, pieces = self._recorder.live, range(self._slices)
        forwards, stored, firsts, seconds = [], [live.get(_ACTIVATIONS, 0)], {}, {}
        for j, each in enumerate(given):
            forwards.append(self._timed(partial(self._forward, each, j)))
            stored.append(live.get(_ACTIVATIONS, 0))
        movable = [self._movable_bytes(j) for j in pieces]
        for j in reversed(pieces):
            before, output = live.get(_ACTIVATIONS, 0), forwards[j][2]
            firsts[j] = *self._timed(partial(self._backward_for_inputs, output, j)), live.get(_ACTIVATIONS, 0) - before
        for j in reversed(pieces):
            seconds[j] = self._timed(partial(self._backward_for_weights, j))[0]
        self._k += 1
        found = []
        for j, (before, after) in enumerate(pairwise(stored)):
            (forward, most_forward, output), (first, most_backward, gradients, change) = forwards[j], firsts[j]
            graph, sent = after - before, 0 if self._place.last else _bytes_of(leaves_of(output))
            kept, returned = (graph, graph + change, movable[j]), tuple(_bytes_of([each]) for each in gradients)
            found.append(Trial(forward, first, seconds[j], most_forward, most_backward, *kept, sent, returned))
        return found

    def outputs_of(self, given: Sequence[BlockInput]) -> list[BlockInput]:
        """Return what the next stage is given, slice by slice, if this one is given something; not timed."""
        outputs = [self._forward(each, j) for j, each in enumerate(given)]
        self._backward(outputs)
        return list(map(_handed_on, outputs))

    def output_of(self, given: BlockInput) -> BlockInput:
        """Return what the next stage is given of a whole microbatch."""
        return self.outputs_of([given])[0]

    def update(self, given: BlockInput, clips: bool) -> float:
        """Run a microbatch, and the update with its gradient, of which this returns the seconds.

        Args:
            given: the microbatch.
            clips: the norm of the gradient is computed, too.
        """
        self._backward([self._forward(given)])
        weights = self.stage.weights

        def step() -> None:
            if clips:
                weights.gradient_squares(self._batch)
            weights.step(self._batch, 1.0, keeps_old=False)

        seconds, _, _ = self._timed(step)
        self._batch += 1
        if isinstance(weights, TrainedWeights):
            weights.store.retain([self._batch])
        weights.complete(self._batch)  # where parallel pipelines have other rows, these never come
        return seconds

    def _forward(self, given: BlockInput, piece: int = 0) -> Any:
        """Run the forward of a slice, or of the whole; returns its output."""
        runtime, key = self.stage, RngKey(self._batch, self._k)
        value = runtime.module.take(given.value) if self._place.first else given.value
        of_slices = (piece, self._slices) if self._slices > 1 else None
        microbatch = Microbatch(self._k, key, given.target, piece=of_slices)
        output, _, _ = runtime.passes.forward(microbatch, value, given.wants, self._batch)
        runtime.passes.flights[microbatch.key].auxiliary = 1e-3  # which the last stage would tell
        return output

    def _backward(self, outputs: Sequence[Any]) -> None:
        """Run the backwards of all slices of a microbatch."""
        for j in reversed(range(len(outputs))):
            self._backward_for_inputs(outputs[j], j)
        for j in reversed(range(len(outputs))):
            self._backward_for_weights(j)
        self._k += 1

    def _backward_for_inputs(self, output: Any, piece: int = 0) -> list[Tensor | None]:
        """Run the first half of a backward, or all of it; returns the gradients of the input."""
        passes, key = self.stage.passes, (self._k, piece)
        gradients = None if self.stage.module.has_loss else self._gradients(output)
        run = passes.backward_for_inputs if self.halved else passes.backward
        return run(key, self._batch, self._batch, gradients)

    def _backward_for_weights(self, piece: int = 0) -> None:
        """Run the second half of a backward, if there is one."""
        if self.halved:
            self.stage.passes.backward_for_weights((self._k, piece), self._batch, self._batch)

    def _movable_bytes(self, piece: int) -> int:
        """Return the bytes of what a forward has left that can be moved away."""
        passes = self.stage.passes
        return passes.graphs.movable_bytes(passes.flights[self._k, piece].work)

    def _gradients(self, output: Any) -> list[Tensor | None]:
        """Return gradients for the leaves of an output, made once for each shape."""
        leaves = leaves_of(output)
        shapes = [x.shape if isinstance(x, Tensor) else None for x in leaves]
        if shapes != [None if g is None else g.shape for g in self._given]:
            self._given = [
                torch.full_like(x.detach(), 1e-3) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves
            ]
        return self._given

    def _timed(self, work: Callable[[], Any]) -> tuple[float, int, Any]:
        """Run something, and wait until its device has done it.

        Returns:
            The seconds; the most bytes of activations meanwhile; and what it has returned.
        """
        device, recorder = self.stage.module.device, self._recorder
        recorder.peak[_ACTIVATIONS] = recorder.live.setdefault(_ACTIVATIONS, 0)
        _wait_for(device)
        start = time.perf_counter()
        found = work()
        _wait_for(device)
        return time.perf_counter() - start, recorder.peak[_ACTIVATIONS], found


def _handed_on(output: Any) -> BlockInput:
    """Return what the next stage is given of an output."""
    value, wants = detached(output)
    return BlockInput(pytree.tree_map(lambda x: copied(x) if isinstance(x, Tensor) else x, value), wants)


def _wait_for(device: torch.device) -> None:
    """Wait until a device has done its work; the processor computes while it is called."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _bytes_of(leaves: Any) -> int:
    """Return the bytes of the tensors among some leaves."""
    return sum(x.nbytes for x in leaves if isinstance(x, Tensor))


def schedule_to_try(depth: int, halved: bool, ahead: bool, slices: int) -> ScheduleRequest:
    """Return a schedule with what is tried.

    Args:
        depth, halved, slices: as of `StageTrial`.
        ahead: forwards come long before their backwards, so that activations can be moved or made again between.
    """
    microbatches = _MICROBATCHES_AHEAD if ahead else _MICROBATCHES
    if slices > 1:
        if halved:
            return ScheduleRequest(partial(_halves_of_slices, slices), depth, microbatches)
        return ScheduleRequest("terapipe", depth, microbatches, options={"slices": slices})
    whole = "gpipe" if ahead else "1f1b"
    return ScheduleRequest(_halves if halved else whole, depth, microbatches)


def _halves(stages: int, microbatches: int) -> list[str]:
    """Return an order in which no second half of a backward follows its first one, so that all are halved."""
    parts = (" ".join(f"{op}{k}" for k in range(microbatches)) for op in "FIW")
    return [" ".join(parts)] * stages


def _halves_of_slices(slices: int, stages: int, microbatches: int) -> list[str]:
    """Return the same for slices of sequences."""
    forwards = [f"{k}:{j}/{slices}" for k in range(microbatches) for j in range(slices)]
    backwards = [f"{k}:{j}/{slices}" for k in range(microbatches) for j in reversed(range(slices))]
    parts = [*(f"F{unit}" for unit in forwards), *(f"{op}{unit}" for op in "IW" for unit in backwards)]
    return [" ".join(parts)] * stages
