"""The bytes that the stages of a model take, to predict the memory of a run with.

Every stage is run on its own (`penstock.measure.stage_trial`), one after the other, whatever graph they form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comm.p2p.stage_routes import entrances, neighbors_of
from penstock.comm.p2p.trees import leaves_of
from penstock.measure.stage_trial import BlockInput, BlockPlace, StageTrial, Training, Trial
from penstock.partition.blocks import LazyBlock, named_blocks
from penstock.runtime.rank.stage_snapshot import optimizer_state
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.schedule.ir.sharding import Level, read_sharding
from penstock.schedule.methods.data_parallel_sync import REDUCE
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.stage_sizes import SliceBytes, SnapshotBytes, StageBytes
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.corrections.base import StagePlace
from penstock.weights.memory.buffers import Layout
from penstock.weights.memory.gradient_scratch import Scratch
from penstock.weights.mixed_store import MixedStore
from penstock.weights.optim.optimizer_adapters import is_separable


def measure_stages(
    blocks: Any,
    parts: Sequence[Sequence[str]],
    sample: tuple[Any, Any],
    training: Training,
    recompute: bool = False,
    schedule: Schedule | None = None,
) -> dict[int, StageBytes]:
    """Measure the bytes of every stage of a model, by running a microbatch or two through each.

    Args:
        blocks: as of `penstock.runtime.pipeline.Pipeline`.
        parts: the names of the blocks of each stage.
        sample: a microbatch of the model, and its target.
        training: how it is trained; width and sharding count for what the optimizer remembers. With tensor parallelism
            the processes that share stages call this together; what is returned is what each of them takes.
        recompute: also what stages take whose blocks, or that as a whole, are recomputed.
        schedule: that it is for; needed where its stages are no chain, or it takes slices of sequences, moves
            activations away, or has several copies of a stage that divide its state.

    Returns:
        By the index of the stage.
    """
    moved = schedule is not None and Op.OFFLOAD in schedule.operations
    count, copies = (1, 1) if schedule is None else (schedule.slices, schedule.directions)
    training = _with_holders(training, copies)
    named, found = named_blocks(blocks), dict[int, StageBytes]()
    slicing = training.options.partition.slicing
    whole = StageInputs(sample[0], len(parts), schedule)
    pieces = [
        StageInputs(slicing.part(sample[0], (j, count)), len(parts), schedule) for j in range(count if count > 1 else 0)
    ]
    for index in whole.order:
        place, given, sliced = whole.place(index), whole.of(index), [each.of(index) for each in pieces]
        if place.last:
            given = given._replace(target=sample[1])
            sliced = [p._replace(target=slicing.part(sample[1], (j, count))) for j, p in enumerate(sliced)]
        own = {name: b.make() if isinstance(b := named[name], LazyBlock) else b for name in parts[index]}
        stage, leaves, behind = _measure_stage(own, place, given, training, recompute and count == 1, moved)
        whole.add(index, behind)
        found[index] = replace(stage, gradients=whole.divided(index, leaves))
        if pieces:
            slices, behinds = _measure_passes(own, place, sliced, _alone(training), recompute, moved)
            divided = [SliceBytes(kinds, each.output, whole.divided(index, each.gradients)) for kinds, each in slices]
            found[index] = replace(found[index], slices=divided)
            for inputs, each in zip(pieces, behinds, strict=True):
                inputs.add(index, each)
    return found


def _with_holders(training: Training, copies: int) -> Training:
    """Return how stages are trained that divide their state among all that hold it, several in each pipeline.

    How pipelines with weights of their own agree is nothing that a stage alone takes.
    """
    training = training._replace(options=training.options.changed(combine=REDUCE))
    parallel = training.options.data_parallel
    if read_sharding(parallel.sharding or "none").level in (Level.NONE, Level.FULL):
        return training
    return training._replace(options=training.options.changed(width=parallel.width * copies))


def _alone(training: Training) -> Training:
    """Return how a stage is trained in one pipeline, with nothing divided, recomputed or moved."""
    return training._replace(options=training.options.changed(width=1, sharding=None, recompute="none", offload="none"))


def _measure_stage(
    blocks: Mapping[str, Any], place: BlockPlace, given: BlockInput, training: Training, recompute: bool, moved: bool
) -> tuple[StageBytes, tuple[int, ...], BlockInput]:
    """Measure one stage; returns the bytes of the gradient of each leaf of its input, and what it hands on, too."""
    alone = _alone(training)
    [(kinds, passes)], [behind] = _measure_passes(blocks, place, [given], alone, recompute, moved)
    optimizers, scratches, rows, low, shares = zip(*_of_pipelines(blocks, place, given, training), strict=True)
    with closing(StageTrial(blocks, place, alone)) as trial:
        version, whole, frozen = buffer_bytes(trial.stage), whole_bytes(trial.stage), frozen_bytes(trial.stage)
        trial.update(given, clips=False)
        snapshot = SnapshotBytes(*_copied_for_snapshots(trial.stage), shares)
    held = version, whole, optimizers, frozen, scratches, rows, low
    return StageBytes(*held, kinds, passes.output, snapshot=snapshot), passes.gradients, behind


def _measure_passes(
    blocks: Mapping[str, Any],
    place: BlockPlace,
    given: Sequence[BlockInput],
    alone: Training,
    recompute: bool,
    moved: bool,
) -> tuple[list[tuple[dict[HeldKind, int], Trial]], list[BlockInput]]:
    """Measure the passes of a microbatch, or of the slices of its sequences if several are given.

    Returns:
        For each slice the bytes that its passes take, by kind, and its trial; and what the next stage is given.
    """
    slices = len(given)
    with closing(StageTrial(blocks, place, alone, moved=moved, slices=slices)) as trial:
        whole = trial.run_slices(given)
        behind = list(given) if place.last else trial.outputs_of(given)
    kinds = [{HeldKind.GRAPH: each.stored} for each in whole]
    if moved:
        for kind, each in zip(kinds, whole, strict=True):
            kind |= {HeldKind.MOVED: each.movable, HeldKind.LEFT: each.stored - each.movable}
    if alone.tensor.size == 1:  # else no backward comes in two halves
        with closing(StageTrial(blocks, place, alone, halved=True, moved=moved, slices=slices)) as trial:
            halved = trial.run_slices(given)
        for kind, each in zip(kinds, halved, strict=True):
            kind |= {HeldKind.HALVED: each.stored, HeldKind.LATE: each.late}
            if moved:
                kind |= {HeldKind.MOVED_HALVED: each.movable, HeldKind.LEFT_HALVED: each.stored - each.movable}
    if recompute:
        again = alone._replace(options=alone.options.changed(recompute="stage"))
        for kind, each in zip(kinds, _second(StageTrial(blocks, place, again, slices=slices), given), strict=True):
            kind[HeldKind.INPUT] = each.stored
        if slices == 1:
            kinds[0] |= _recomputed(blocks, place, given[0], alone)
    return list(zip(kinds, whole, strict=True)), behind


def _recomputed(
    blocks: Mapping[str, Any], place: BlockPlace, given: BlockInput, alone: Training
) -> dict[HeldKind, int]:
    """Return the bytes that a stage takes whose blocks are recomputed."""
    again = alone._replace(options=alone.options.changed(recompute="block"))
    (whole,) = _second(StageTrial(blocks, place, again), [given])
    kinds = {
        HeldKind.FORWARD: whole.most_forward,
        HeldKind.SAVED: whole.stored,
        HeldKind.BACKWARD: whole.most_backward,
    }
    if alone.tensor.size == 1:
        (halved,) = _second(StageTrial(blocks, place, again, halved=True), [given])
        kinds |= {HeldKind.FORWARD_HALVED: halved.most_forward, HeldKind.BACKWARD_HALVED: halved.most_backward}
    return kinds


def _second(trial: StageTrial, given: Sequence[BlockInput]) -> list[Trial]:
    """Run two microbatches, and return the second: which buffers a forward changes is known after the first."""
    with closing(trial):
        trial.run_slices(given)
        return trial.run_slices(given)


class _OfPipeline(NamedTuple):
    """Bytes of a stage that depend on the pipeline, as of `StageBytes`."""

    optimizer: int
    scratch: int
    rows: int
    low_rows: int
    shares: tuple[int, int, int]


def _of_pipelines(
    blocks: Mapping[str, Any], place: BlockPlace, given: BlockInput, training: Training
) -> list[_OfPipeline]:
    """Return, by pipeline, what the optimizer remembers after an update, the scratch that it may take, and its rows."""
    training = training._replace(options=training.options.changed(recompute="none", offload="none"))
    parallel = training.options.data_parallel
    if parallel.sharding in (None, "none"):
        training = training._replace(options=training.options.changed(width=1))
    elif read_sharding(parallel.sharding).level is Level.FULL:  # it divides updates in the same way
        training = training._replace(options=training.options.changed(sharding=Level.GRADIENTS.value))
    found = []
    for pipeline in range(training.options.data_parallel.width):
        with closing(StageTrial(blocks, place, training, pipeline=pipeline)) as trial:
            weights = trial.weights
            if not isinstance(weights, TrainedWeights) or weights.updater.optimizer is None:
                found.append(_OfPipeline(0, 0, 0, 0, (0, 0, 0)))
                continue
            trial.update(given, clips=False)
            layout, optimizer = weights.store.own_layout, weights.updater.optimizer
            scratch = Scratch(layout, is_separable(optimizer)).nbytes if _takes_scratch(training, optimizer) else 0
            remembered = sum(tensor.nbytes for tensor in weights.updater.tensors)
            rows = _version_rows(weights)
            found.append(_OfPipeline(remembered, scratch, layout.nbytes, rows, _shares_for_snapshots(weights)))
    return found


def _version_rows(weights: TrainedWeights) -> int:
    """Return the bytes of the own rows of a version."""
    if not isinstance(weights, ShardedWeights):
        return 0
    store = weights.store
    return Layout(store.shards.own(store.versions[store.newest].views)).nbytes


def _takes_scratch(training: Training, optimizer: torch.optim.Optimizer) -> bool:
    """Whether updates may take a scratch; where passes read ahead, if the values before an update are asked for."""
    if training.correction is None:
        return True
    corrector = training.correction.on(Layout({}), StagePlace(0, 1, 1, 1.0, ""))
    return not corrector.reads_ahead or corrector.looks_back(optimizer)


# --- the weights of a stage -------------------------------------------------------------------------------------------


def parameter_bytes(stage: StageRuntime) -> int:
    """Return the bytes of the trained parameters of a stage."""
    return _bytes_of(stage.module.tensors.trained.values())


def buffer_bytes(stage: StageRuntime) -> int:
    """Return the bytes of one copy of these, as passes read it, with its padding."""
    weights = stage.weights
    if not isinstance(weights, TrainedWeights):
        return 0
    return (weights.store.low_layout if isinstance(weights.store, MixedStore) else weights.store.layout).nbytes


def whole_bytes(stage: StageRuntime) -> int:
    """Return the bytes of a gradient, or of weights that are updated; `buffer_bytes` unless passes are in 16 bits."""
    return stage.weights.store.layout.nbytes if isinstance(stage.weights, TrainedWeights) else 0


def frozen_bytes(stage: StageRuntime) -> int:
    """Return the bytes of the frozen parameters and buffers of a stage."""
    return _bytes_of(stage.module.tensors.fixed)


def _copied_for_snapshots(stage: StageRuntime) -> tuple[int, int, int, int, int]:
    """Return the bytes of copies for a snapshot, as `SnapshotBytes` has them."""
    weights, tensors = stage.weights, stage.module.tensors
    frozen = tensors.frozen()
    buffers = _bytes_of(tensor for name, tensor in tensors.unversioned().items() if name not in frozen)
    fixed = buffers, _bytes_of(frozen.values())
    if not isinstance(weights, TrainedWeights):
        return 0, 0, 0, *fixed
    store = weights.store
    version = _bytes_of(store.versions[store.newest].views.values())
    return _bytes_of(store.master.views.values()), version, _bytes_of(weights.updater.state().values()), *fixed


def _shares_for_snapshots(weights: TrainedWeights) -> tuple[int, int, int]:
    """Return the bytes of what a pipeline copies for a snapshot, as `SnapshotBytes.shares` has them."""
    if not isinstance(weights, ShardedWeights):
        return 0, 0, 0
    store, optimizer = weights.store, optimizer_state(weights, Tensor.detach)[0]
    own = (store.shards.own(views) for views in (store.master.views, store.versions[store.newest].views))
    rows, version = (_bytes_of(views.values()) for views in own)
    return _bytes_of(optimizer.values()), rows, version


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


# --- what stages are given --------------------------------------------------------------------------------------------


class StageInputs:
    """What the stages of a model are given, as far as those before them have run.

    Args:
        given: a microbatch of the model.
        stages: how many there are.
        schedule: whose edges say which stages feed which; they are a chain if None.
    """

    def __init__(self, given: Any, stages: int, schedule: Schedule | None = None) -> None:
        self._given, self._outputs = given, dict[int, BlockInput]()
        self._takes: dict[int, tuple[int, ...]] = {index: (index - 1,) if index else () for index in range(stages)}
        self._returns: dict[int, tuple[bool, ...]] = dict.fromkeys(range(stages), (True,))
        self._entrances, self._fed = [0], set(range(stages - 1))
        if schedule is None:
            return
        neighbors = {index: neighbors_of(schedule, schedule.stage_at[index, 0]) for index in range(stages)}
        self._entrances = entrances(schedule)
        self._takes = {index: tuple(stage.index for stage in each.inputs) for index, each in neighbors.items()}
        self._returns = {index: each.returns for index, each in neighbors.items()}
        self._fed = {index for index, each in neighbors.items() if each.outputs}

    @property
    def order(self) -> Sequence[int]:
        """The stages, each behind those that feed it."""
        return tuple(TopologicalSorter(self._takes).static_order())

    def place(self, index: int) -> BlockPlace:
        """Return where a stage stands."""
        return BlockPlace(first=not self._takes[index], last=index not in self._fed)

    def add(self, index: int, output: BlockInput) -> None:
        """Keep the output of a stage, as those that it feeds are given it."""
        self._outputs[index] = output

    def of(self, index: int) -> BlockInput:
        """Return what a stage is given: a tuple where several feed it, as in a run."""
        sources = self._takes[index]
        if not sources:
            place = self._entrances.index(index)
            return BlockInput(self._given if len(self._entrances) == 1 else self._given[place])
        found = [self._outputs[source] for source in sources]
        wants = tuple(
            wanted and returned
            for each, returned in zip(found, self._returns[index], strict=True)
            for wanted in each.wants
        )
        return BlockInput(found[0].value if len(found) == 1 else tuple(each.value for each in found), wants)

    def divided(self, index: int, sizes: Sequence[int]) -> dict[int, int]:
        """Divide the bytes of the gradients of a stage's input, leaf by leaf, among the stages that feed it."""
        sources = self._takes[index]
        ends = accumulate((len(leaves_of(self._outputs[source].value)) for source in sources), initial=0)
        return {source: sum(sizes[first:last]) for source, (first, last) in zip(sources, pairwise(ends), strict=True)}
