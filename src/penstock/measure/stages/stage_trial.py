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
from penstock.measure.stages.weight_bytes import WeightBytes
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
_MICROBATCHES_TO_MOVE = 3  # with fewer a backward comes too early


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
    """One microbatch.

    Attributes:
        forward, first, second: seconds of the forward, and of both parts of the backward; all in `first` if not halved.
        most_forward, most_backward: bytes of activations, at most, in each.
        stored, late: bytes of activations after the forward, and between the parts of the backward.
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
    output: int
    gradients: tuple[int, ...]
    movable: int = 0


class SliceTrial(NamedTuple):
    """One slice of the sequences of a microbatch.

    Attributes:
        stored: bytes of activations that its forward has left.
        late: the same between the parts of its backward; 0 if that is not halved.
        movable: those of them that can be moved away; 0 where nothing is.
        output: bytes of the output.
        gradients: bytes of the gradient of each leaf of the input.
        behind: what the next stage is given.
    """

    stored: int
    late: int
    movable: int
    output: int
    gradients: tuple[int, ...]
    behind: BlockInput


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
        request = schedule_to_try(depth, halved, moved, slices)
        plan = PipelinePlan.make(around, request, options)
        (stage,) = plan.schedule.on_rank(0 if place.first else 1)
        self._place, self.halved, self._slices = place, halved, slices
        self._recorder = Recorder(stage.rank, time.perf_counter())
        key = RankKey(pipeline, stage.rank)
        builder = StageBuilder(key, plan, *training[:2], self._recorder, tensor)
        self._runtime = builder.build(stage, blocks)
        self._k = self._batch = 0
        self._given: list[Tensor | None] = []  # gradients of the output

    def close(self) -> None:
        """Give the modules their own parameters back."""
        self._runtime.restore()

    @property
    def weights(self) -> StageWeights:
        """The weights of the stage."""
        return self._runtime.weights

    @property
    def weight_bytes(self) -> WeightBytes:
        """What its weights take, counted now."""
        return WeightBytes(self._runtime)

    def output_of(self, given: BlockInput) -> BlockInput:
        """Return what the next stage is given if this one is given something."""
        output, _ = self._forward(given)
        self._backward(output)
        return _handed_on(output)

    def run(self, given: BlockInput) -> Trial:
        """Run a microbatch."""
        live = self._recorder.live
        forward, most_forward, (output, _) = self._timed(lambda: self._forward(given))
        stored = live.get(_ACTIVATIONS, 0)
        movable = self._movable_bytes(0)
        sent = 0 if self._place.last else _bytes_of(leaves_of(output))
        first, most_backward, found = self._timed(lambda: self._backward_for_inputs(output))
        late = live.get(_ACTIVATIONS, 0)
        second, _, _ = self._timed(self._backward_for_weights)
        self._k += 1
        gradients = _bytes_of_each(found)
        return Trial(forward, first, second, most_forward, most_backward, stored, late, sent, gradients, movable)

    def run_slices(self, given: Sequence[BlockInput]) -> list[SliceTrial]:
        """Run the slices of a microbatch: forwards in their order, backwards in the reverse one.

        Args:
            given: to each.
        """
        live, pieces = self._recorder.live, range(self._slices)
        outputs, stored, backwards = [], [live.get(_ACTIVATIONS, 0)], {}
        for j, each in enumerate(given):
            outputs.append(self._forward(each, (j, self._slices))[0])
            stored.append(live[_ACTIVATIONS])
        movable = [self._movable_bytes(j) for j in pieces]
        for j in reversed(pieces):
            before = live[_ACTIVATIONS]
            gradients = _bytes_of_each(self._backward_for_inputs(outputs[j], j))
            backwards[j] = live[_ACTIVATIONS] - before, gradients
        for j in reversed(pieces):
            self._backward_for_weights(j)
        self._k += 1
        found = []
        for j, (before, after) in enumerate(pairwise(stored)):
            graph, (change, gradients) = after - before, backwards[j]
            sent = 0 if self._place.last else _bytes_of(leaves_of(outputs[j]))
            found.append(SliceTrial(graph, graph + change, movable[j], sent, gradients, _handed_on(outputs[j])))
        return found

    def update(self, given: BlockInput, clips: bool) -> float:
        """Run a microbatch, and the update with its gradient, of which this returns the seconds.

        Args:
            given: the microbatch.
            clips: the norm of the gradient is computed, too.
        """
        self._backward(self._forward(given)[0])
        weights = self._runtime.weights

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

    def _forward(self, given: BlockInput, piece: tuple[int, int] | None = None) -> tuple[Any, Any]:
        runtime, key = self._runtime, RngKey(self._batch, self._k)
        value = runtime.module.take(given.value) if self._place.first else given.value
        microbatch = Microbatch(self._k, key, given.target, piece=piece)
        output, loss, _ = runtime.passes.forward(microbatch, value, given.wants, self._batch)
        runtime.passes.flights[microbatch.key].auxiliary = 1e-3  # which the last stage would tell
        return output, loss

    def _backward(self, output: Any) -> None:
        self._backward_for_inputs(output)
        self._backward_for_weights()
        self._k += 1

    def _backward_for_inputs(self, output: Any, piece: int = 0) -> list[Tensor | None]:
        """Run the first half of a backward, or all of it; returns the gradients of the input."""
        passes, key = self._runtime.passes, (self._k, piece)
        gradients = None if self._runtime.module.has_loss else self._gradients(output)
        run = passes.backward_for_inputs if self.halved else passes.backward
        return run(key, self._batch, self._batch, gradients)

    def _backward_for_weights(self, piece: int = 0) -> None:
        """Run the second half of a backward, if there is one."""
        if self.halved:
            self._runtime.passes.backward_for_weights((self._k, piece), self._batch, self._batch)

    def _movable_bytes(self, piece: int) -> int:
        """Return the bytes of what a forward has left that can be moved away."""
        passes = self._runtime.passes
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
        device, recorder = self._runtime.module.device, self._recorder
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


def _bytes_of_each(gradients: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return the bytes of the gradient of each leaf, 0 where there is none."""
    return tuple(0 if gradient is None else gradient.nbytes for gradient in gradients)


def schedule_to_try(depth: int, halved: bool, moved: bool, slices: int) -> ScheduleRequest:
    """Return a schedule with what is tried; arguments as of `StageTrial`."""
    microbatches = _MICROBATCHES_TO_MOVE if moved else _MICROBATCHES
    if slices > 1:
        if halved:
            return ScheduleRequest(partial(_halves_of_slices, slices), depth, microbatches)
        return ScheduleRequest("terapipe", depth, microbatches, options={"slices": slices})
    whole = "gpipe" if moved else "1f1b"
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
