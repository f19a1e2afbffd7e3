"""The profile of a model: every distinct block measured once, and the links between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

from penstock.comm.core.tensor_group import TensorGroup
from penstock.errors import CapabilityError, ConfigError
from penstock.measure.distinct_blocks import kind_of, title_of
from penstock.measure.stage_bytes import buffer_bytes, frozen_bytes, parameter_bytes, whole_bytes
from penstock.measure.stage_trial import BlockInput, BlockPlace, StageTrial, Training
from penstock.options.all_options import PipelineOptions
from penstock.partition.blocks import named_blocks
from penstock.plan.profile.schema import Numbers, Profile, ProfiledLayer, ProfiledLink
from penstock.stage.blocks.loss import LossFunction
from penstock.weights.optim.optimizer_factory import OptimizerFactory

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


class MeasuredBlock(NamedTuple):
    """What was measured of a block, or of another one of its kind.

    Attributes:
        name: of the block.
        kind: what it is; blocks of one kind are alike.
        passes: by microbatch size.
        weights: what its weights take.
        shared: by microbatch size, bytes that it and the block before both keep, if they are in one stage.
        movable_with: the same of what can be moved to the host's memory of both together, beside that of each.
        update_shared: seconds by which the update of both in one stage takes less than those of each by itself; None
            for the first block, and where one of them has no parameters.
    """

    name: str
    kind: str
    passes: Mapping[int, PassFigures]
    weights: BlockFigures
    shared: Mapping[int, int]
    movable_with: Mapping[int, int]
    update_shared: float | None = None


def measure_blocks(
    blocks: Any,
    samples: Mapping[int, tuple[Any, Any]],
    loss: LossFunction,
    optimizer: OptimizerFactory,
    options: PipelineOptions,
    seconds: float = 0.3,
    told: Callable[[str], None] = lambda name: None,  # noqa: ARG005
    tensor: TensorGroup | None = None,
) -> list[MeasuredBlock]:
    """Measure every distinct block of a model once, as a stage of its own.

    Args:
        blocks: as of `penstock.runtime.pipeline.Pipeline`; lazy ones are built one after the other.
        samples: by microbatch size, an input of the model and its target.
        loss, optimizer: as of `Pipeline`.
        options: of passes and updates; what divides model or batch must not be set, but for `tensor_parallel`.
        seconds: for each size of each block, once for every kind of pass.
        told: called with the name of each block that is measured.
        tensor: the processes that share each block by tensor parallelism, and call this together; none if None.

    Raises:
        ConfigError: there is no block, or one cannot be a stage; or `tensor_parallel` is another number of processes.
        CapabilityError: a block does something that stages cannot do.
    """
    named = named_blocks(blocks)
    training = Training(loss, optimizer, options, tensor=tensor or TensorGroup.alone(None))
    walk = _Walk(len(named), samples, training, seconds, told)
    with options.precision.kernels.applied():
        return [walk.measured(name, block) for name, block in named.items()]


class _Known(NamedTuple):
    """What was measured of a kind of blocks, and what the next block is given."""

    label: str
    passes: dict[int, PassFigures]
    weights: BlockFigures
    behind: dict[int, BlockInput]


class _Pair(NamedTuple):
    """What two blocks in one stage take beside each by itself, as `MeasuredBlock` has it."""

    shared: dict[int, int]
    movable_with: dict[int, int]
    update_shared: float | None


class _Place(NamedTuple):
    """A block, where it stands, what it is given, and its kind."""

    name: str
    block: Any
    place: BlockPlace
    inputs: dict[int, BlockInput]
    kind: Hashable


class _Walk:
    """Goes through a model from block to block, and measures each kind once."""

    def __init__(
        self,
        count: int,
        samples: Mapping[int, tuple[Any, Any]],
        training: Training,
        seconds: float,
        told: Callable[[str], None],
    ) -> None:
        self._count, self._samples, self._training = count, samples, training
        self._seconds, self._told = seconds, told
        self._known: dict[Hashable, _Known] = {}
        self._pairs: dict[tuple[Hashable, Hashable], _Pair] = {}
        self._titles: dict[str, int] = {}
        self._inputs = {size: BlockInput(value) for size, (value, _) in sorted(samples.items())}
        self._before: _Place | None = None
        self._number = 0

    def measured(self, name: str, block: Any) -> MeasuredBlock:
        """Return what the next block takes."""
        place = BlockPlace(self._number == 0, self._number == self._count - 1)
        self._number += 1
        here = _Place(name, block, place, self._with_targets(self._inputs, place), kind_of(block, place, self._inputs))
        if here.kind not in self._known:
            self._told(name)
            self._known[here.kind] = self._measure(here)
        label, passes, weights, behind = self._known[here.kind]
        both, before = _Pair(*(dict.fromkeys(self._inputs, 0),) * 2, None), self._before
        if before is not None:
            pair = before.kind, here.kind
            if pair not in self._pairs:
                self._pairs[pair] = self._together(before, here)
            both = self._pairs[pair]
        self._before, self._inputs = here, behind
        return MeasuredBlock(name, label, passes, weights, *both)

    def _with_targets(self, inputs: dict[int, BlockInput], place: BlockPlace) -> dict[int, BlockInput]:
        """Return inputs with what the loss takes, if they are those of a last block."""
        if not place.last:
            return inputs
        return {size: each._replace(target=self._samples[size][1]) for size, each in inputs.items()}

    def _measure(self, here: _Place) -> _Known:
        title = title_of(here.block)
        self._titles[title] = count = self._titles.get(title, 0) + 1
        measured = _measure_block(here.name, here.block, here.place, here.inputs, self._training, self._seconds)
        return _Known(title if count == 1 else f"{title} {count}", *measured)

    def _together(self, before: _Place, here: _Place) -> _Pair:
        """Return by how much less a stage of two blocks takes and keeps, and how many more bytes can be moved."""
        place = BlockPlace(before.place.first, here.place.last)
        blocks, inputs = {before.name: before.block, here.name: here.block}, self._with_targets(before.inputs, place)
        alone = {size: [self._known[each.kind].passes[size] for each in (before, here)] for size in inputs}
        with closing(StageTrial(blocks, place, self._training)) as both:
            shared = {n: sum(each.stored for each in alone[n]) - both.run(given).stored for n, given in inputs.items()}
            update = self._update_shared(both, before, here, inputs[min(inputs)])
        movable = _movable_bytes(blocks, place, inputs, self._training) or dict.fromkeys(inputs, 0)
        more = {n: max(most - sum(each.movable or 0 for each in alone[n]), 0) for n, most in movable.items()}
        return _Pair(shared, more, update)

    def _update_shared(self, both: StageTrial, before: _Place, here: _Place, given: BlockInput) -> float | None:
        """Return by how much less the update of a stage of two blocks takes than those of each by itself."""
        alone = [self._known[each.kind].weights for each in (before, here)]
        if not all(weights.parameters for weights in alone):
            return None
        together = _measure_update(both, given, self._training, self._seconds).step
        return sum(weights.step for weights in alone) - together


# --- one block --------------------------------------------------------------------------------------------------------


def _measure_block(
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
        passes = {size: _measure_passes(trial, given, seconds, tensor) for size, given in inputs.items()}
        behind = {} if place.last else {size: trial.output_of(given) for size, given in inputs.items()}
        weights = _measure_update(trial, inputs[min(inputs)], training, seconds)
    if place.first:
        kept = _measure_kept_inputs(name, block, place, inputs, training)
        passes = {size: replace(each, data=kept[size]) for size, each in passes.items()}
    movable = _movable_bytes({name: block}, place, inputs, training)
    if movable is not None:
        passes = {size: replace(each, movable=movable[size]) for size, each in passes.items()}
    try:
        with closing(StageTrial({name: block}, place, training, halved=True)) as trial:
            halved = {size: _measure_passes(trial, given, seconds, tensor) for size, given in inputs.items()}
    except CapabilityError:
        return passes, weights, behind
    passes = {size: replace(each, halves=halved[size].halves, late=halved[size].late) for size, each in passes.items()}
    return passes, weights, behind


def _movable_bytes(
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


def _measure_passes(trial: StageTrial, given: BlockInput, seconds: float, tensor: TensorGroup) -> PassFigures:
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


def _measure_update(trial: StageTrial, given: BlockInput, training: Training, seconds: float) -> BlockFigures:
    """Measure the update of a stage, for so many seconds or a few times.

    The first one, which makes the state, is not counted.
    """
    stage, parameters = trial.stage, parameter_bytes(trial.stage)
    whole = whole_bytes(stage) if training.options.precision.low is not None else None
    if not parameters:
        return BlockFigures(0, 0, whole, frozen_bytes(stage), 0, 0.0)
    clips = training.options.update.max_grad_norm is not None
    trial.update(given, clips)
    times, end = [trial.update(given, clips)], time.perf_counter() + seconds
    while _goes_on(len(times), end, training.tensor):
        times.append(trial.update(given, clips))
    figures = parameters, buffer_bytes(stage), whole, frozen_bytes(stage), trial.weights.optimizer_bytes
    return BlockFigures(*figures, median(times))


# --- the profile ------------------------------------------------------------------------------------------------------


def profile_of(
    name: str,
    measured: Sequence[MeasuredBlock],
    links: Sequence[ProfiledLink] = (),
    source: str = "measured",
    settings: Mapping[str, Any] | None = None,
    cores: float | None = None,
) -> Profile:
    """Return measured blocks as a profile.

    Args:
        name: of the model.
        measured: all its blocks.
        links: between devices.
        source: where the numbers come from.
        settings: keys of `penstock train` that the model was measured with.
        cores: how many ranks of this machine can work at full speed at once; None if there is no limit.
    """
    sizes = list(measured[0].passes)
    given: dict[str, Any] = {"format": "penstock profile 1", "name": name, "source": source, "microbatch_sizes": sizes}
    given |= {"settings": dict(settings)} if settings else {}
    given |= {"links": list(links)} if links else {}
    update = _update_of_stages(measured)
    layers = [_layer(block, behind, update) for block, behind in zip_longest(measured, measured[1:])]
    return Profile(**given, cores=cores, update=update, layers=layers)


def _update_of_stages(measured: Sequence[MeasuredBlock]) -> float:
    """Return the seconds that an update takes whatever is in its stage: no more than that of any block."""
    shared = [block.update_shared for block in measured if block.update_shared is not None]
    least = min((block.weights.step for block in measured if block.weights.parameters), default=0.0)
    return _rounded(min(max(median(shared), 0.0), least)) if shared else 0.0


def _layer(block: MeasuredBlock, behind: MeasuredBlock | None, update: float) -> ProfiledLayer:
    """Return a block as a layer of a profile.

    Args:
        block: that was measured.
        behind: the next one; None for the last block.
        update: the seconds of its own update that every stage takes once.
    """

    def each(value: Callable[[PassFigures], float]) -> Numbers:
        return _numbers([value(figures) for figures in block.passes.values()])

    def joined(values: Mapping[int, int]) -> Numbers:
        return _numbers(list(values.values()))

    weights, halves, sizes = block.weights, dict[str, Any](), dict[str, Any]()
    if weights.whole is not None:
        sizes["whole"] = float(weights.whole)
    if weights.frozen:
        sizes["frozen"] = float(weights.frozen)
    if all(figures.halves is not None for figures in block.passes.values()):
        halves = {
            "backward_input": each(lambda p: _rounded((p.halves or (0.0, 0.0))[0])),
            "backward_weight": each(lambda p: _rounded((p.halves or (0.0, 0.0))[1])),
            "late": each(lambda p: p.late or 0),
        }
    if any(figures.data for figures in block.passes.values()):
        sizes["data"] = each(lambda p: p.data)
    returned = {} if behind is None else {size: figures.returned for size, figures in behind.passes.items()}
    if any(nbytes != block.passes[size].output for size, nbytes in returned.items()):
        sizes["gradient"] = joined(returned)
    if all(figures.movable is not None for figures in block.passes.values()):
        sizes |= {"movable": each(lambda p: p.movable or 0), "movable_with": joined(block.movable_with)}
    return ProfiledLayer(
        name=block.name,
        kind=block.kind,
        forward=each(lambda p: _rounded(p.forward)),
        backward=each(lambda p: _rounded(p.backward)),
        output=each(lambda p: p.output),
        stored=each(lambda p: p.stored),
        shared=joined(block.shared),
        parameters=float(weights.parameters),
        buffer=float(weights.buffer),
        optimizer=float(weights.optimizer),
        step=_rounded(max(weights.step - update, 0.0)),
        **sizes,
        **halves,
    )


def _rounded(seconds: float) -> float:
    """Return seconds with the digits that mean something."""
    return float(f"{seconds:.4g}")


def _numbers(values: Sequence[float]) -> Numbers:
    """Return numbers by microbatch size, as a profile has them: one if all are equal."""
    found = [float(value) for value in values]
    return found[0] if len(set(found)) == 1 else found


def check_microbatch_sizes(sizes: Sequence[int]) -> None:
    """Refuse microbatch sizes that do not ascend.

    Raises:
        ConfigError: they do not, or there is none.
    """
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ConfigError(f"microbatch sizes must be positive and ascend, as in 1,2,4; got {list(sizes)}")
