"""What one block takes: seconds of its passes and updates, and bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from penstock.comm.core.tensor_group import TensorGroup
from penstock.errors import CapabilityError
from penstock.measure.stages.stage_trial import BlockInput, BlockPlace, StageTrial, Training

_FEWEST, _MOST = 3, 200  # repetitions


@dataclass(frozen=True)
class PassFigures:
    """What one microbatch of a block takes.

    Attributes:
        forward, backward: seconds; the loss is part of the last block's.
        output: bytes of what is handed to the next block; 0 for the last one.
        stored: bytes that are kept from forward to backward.
        halves: seconds of the backward for the inputs and of that for the weights; None where it cannot be halved.
        late: bytes that are kept between them; None as `halves`.
        data: bytes of the model's own input that the first block reads, as its passes compute with them.
        movable: bytes of `stored` that can be moved to the host's memory; None where nothing can be.
        returned: bytes of the gradient of its input that goes back to the block before.
    """

    forward: float
    backward: float
    output: int
    stored: int
    halves: tuple[float, float] | None = None
    late: int | None = None
    data: int = 0
    movable: int | None = None
    returned: int = 0


@dataclass(frozen=True)
class BlockFigures:
    """What the weights of a block take.

    Attributes:
        parameters: bytes of its trained parameters.
        buffer: bytes of one copy of them as passes read it, padding included.
        whole: bytes of one gradient or master weights; None unless passes compute in 16 bits.
        frozen: bytes of frozen parameters and module buffers.
        optimizer: bytes that the optimizer remembers of them.
        step: seconds of an update, the norm of its gradient included where gradients are clipped.
    """

    parameters: int
    buffer: int
    whole: int | None
    frozen: int
    optimizer: int
    step: float


def measure_block(
    name: str, block: Any, place: BlockPlace, inputs: Mapping[int, BlockInput], training: Training, seconds: float
) -> tuple[dict[int, PassFigures], BlockFigures, dict[int, BlockInput]]:
    """Measure one block at several microbatch sizes.

    Args:
        name: of the block.
        block: a module or plain function.
        place: in the model.
        inputs: by microbatch size.
        training: how the model is trained.
        seconds: for each size and kind of backward, and for updates.

    Returns:
        What passes take by microbatch size, what weights take, and the inputs of the next block.
    """
    tensor = training.tensor
    with closing(StageTrial({name: block}, place, training)) as trial:
        passes = {size: _measure(trial, given, seconds, tensor) for size, given in inputs.items()}
        behind = {} if place.last else {size: trial.output_of(given) for size, given in inputs.items()}
        weights = measure_update(trial, inputs[min(inputs)], training, seconds)
    if place.first:
        kept = _measure_kept_inputs(name, block, place, inputs, training)
        passes = {size: replace(each, data=kept[size]) for size, each in passes.items()}
    movable = movable_bytes({name: block}, place, inputs, training)
    if movable is not None:
        passes = {size: replace(each, movable=movable[size]) for size, each in passes.items()}
    try:
        with closing(StageTrial({name: block}, place, training, halved=True)) as trial:
            halved = {size: _measure(trial, given, seconds, tensor) for size, given in inputs.items()}
    except CapabilityError:
        return passes, weights, behind
    passes = {size: replace(each, halves=halved[size].halves, late=halved[size].late) for size, each in passes.items()}
    return passes, weights, behind


def movable_bytes(
    blocks: Mapping[str, Any], place: BlockPlace, inputs: Mapping[int, BlockInput], training: Training
) -> dict[int, int] | None:
    """Return the bytes that can be moved to the host's memory of blocks in a stage, by microbatch size.

    None where activations of such blocks cannot be moved.
    """
    try:
        with closing(StageTrial(blocks, place, training, moved=True)) as trial:
            return {size: trial.run(given).movable for size, given in inputs.items()}
    except CapabilityError:
        return None


def _measure_kept_inputs(
    name: str, block: Any, place: BlockPlace, inputs: Mapping[int, BlockInput], training: Training
) -> dict[int, int]:
    """Return the bytes that a block keeps of its input where it is recomputed, by microbatch size."""
    again = training._replace(options=training.options.changed(recompute="block"))
    with closing(StageTrial({name: block}, place, again)) as trial:
        for given in inputs.values():
            trial.run(given)  # which buffers a forward changes is known after the first
        return {size: trial.run(given).stored for size, given in inputs.items()}


def _measure(trial: StageTrial, given: BlockInput, seconds: float, tensor: TensorGroup) -> PassFigures:
    """Measure the passes of a microbatch, for so many seconds or a few times.

    The first run is not counted: it allocates memory, and finds out what autograd saves.
    """
    trial.run(given)
    runs, end = [trial.run(given)], time.perf_counter() + seconds
    while _goes_on(len(runs), end, tensor):
        runs.append(trial.run(given))
    last = runs[-1]
    forward, backward = median(run.forward for run in runs), median(run.first + run.second for run in runs)
    if not trial.halved:
        return PassFigures(forward, backward, last.output, last.stored, returned=sum(last.gradients))
    halves = median(run.first for run in runs), median(run.second for run in runs)
    return PassFigures(forward, backward, last.output, last.stored, halves, last.late)


def _goes_on(runs: int, end: float, tensor: TensorGroup) -> bool:
    """Whether one more run is measured, after so many; processes that share the block ask together."""
    return runs < _FEWEST or (runs < _MOST and tensor.says(time.perf_counter() < end))


def measure_update(trial: StageTrial, given: BlockInput, training: Training, seconds: float) -> BlockFigures:
    """Measure the update of a stage, for so many seconds or a few times.

    The first one, which makes the state, is not counted.
    """
    there = trial.weight_bytes
    whole = there.whole if training.options.precision.low is not None else None
    if not there.parameters:
        return BlockFigures(0, 0, whole, there.frozen, 0, 0.0)
    clips = training.options.update.max_grad_norm is not None
    trial.update(given, clips)
    times, end = [trial.update(given, clips)], time.perf_counter() + seconds
    while _goes_on(len(times), end, training.tensor):
        times.append(trial.update(given, clips))
    figures = there.parameters, there.buffer, whole, there.frozen, trial.weights.optimizer_bytes
    return BlockFigures(*figures, median(times))
