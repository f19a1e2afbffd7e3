"""The bytes that the stages of a model take, to predict the memory of a run with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.measure.stages.stage_inputs import StageInputs
from penstock.measure.stages.stage_trial import BlockInput, BlockPlace, SliceTrial, StageTrial, Training, Trial
from penstock.partition.blocks import LazyBlock, named_blocks
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.schedule.ir.sharding import Level, read_sharding
from penstock.schedule.methods.data_parallel_sync import REDUCE
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.stage_sizes import SliceBytes, SnapshotBytes, StageBytes
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.corrections.base import StagePlace
from penstock.weights.memory.buffers import Layout
from penstock.weights.memory.gradient_scratch import Scratch
from penstock.weights.optim.optimizer_adapters import is_separable


class _Joined(nn.Module):
    """Several blocks as one."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__()
        self.modules_of = nn.ModuleList(block for block in blocks if isinstance(block, nn.Module))
        self._run = list(blocks)

    def forward(self, value: Any) -> Any:
        """Run one after the other."""
        for block in self._run:
            value = block(value)
        return value

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Let the blocks divide themselves among the processes of a mesh."""
        blocks: list[Any] = list(self.modules_of)
        for block in blocks:
            if hasattr(block, "parallelize"):
                block.parallelize(mesh)

    @property
    def tensor_sections(self) -> dict[str, int]:
        """Of how many sections parameters of the blocks consist."""
        return {
            f"modules_of.{place}.{path}": count
            for place, block in enumerate(self.modules_of)
            for path, count in getattr(block, "tensor_sections", {}).items()
        }


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
            slices = _measure_slices(own, place, sliced, training, recompute, moved)
            divided = [SliceBytes(kinds, each.output, whole.divided(index, each.gradients)) for kinds, each in slices]
            found[index] = replace(found[index], slices=divided)
            for inputs, (_, each) in zip(pieces, slices, strict=True):
                inputs.add(index, each.behind)
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


def _measure_stage(
    blocks: Mapping[str, Any], place: BlockPlace, given: BlockInput, training: Training, recompute: bool, moved: bool
) -> tuple[StageBytes, tuple[int, ...], BlockInput]:
    """Measure one stage; returns the bytes of the gradient of each leaf of its input, and what it hands on, too."""
    alone = training._replace(
        options=training.options.changed(width=1, sharding=None, recompute="none", offload="none")
    )
    with closing(StageTrial(blocks, place, alone, moved=moved)) as trial:
        passes, stage = trial.run(given), _weights(trial)
        behind = given if place.last else trial.output_of(given)
    halved = None
    if training.tensor.size == 1:  # else no backward comes in two halves
        with closing(StageTrial(blocks, place, alone, halved=True, moved=moved)) as trial:
            halved = trial.run(given)
    kinds = _from_forward_to_backward(passes, halved, moved)
    if recompute:
        kinds |= _recomputed(blocks, place, given, alone)
    stage = replace(stage, passes=kinds, output=passes.output)
    optimizers, scratches, rows, low, shares = zip(*_of_pipelines(blocks, place, given, training), strict=True)
    with closing(StageTrial(blocks, place, alone)) as trial:
        trial.update(given, clips=False)
        snapshot = SnapshotBytes(*trial.weight_bytes.copied_for_snapshots(), shares)
    stage = replace(stage, optimizer=optimizers, scratch=scratches, rows=rows, low_rows=low, snapshot=snapshot)
    return stage, passes.gradients, behind


def _from_forward_to_backward(
    whole: Trial | SliceTrial, halved: Trial | SliceTrial | None, moved: bool
) -> dict[HeldKind, int]:
    """Return what the graphs of a microbatch or slice take, if its backward comes as a whole, and in two halves."""
    kinds = {HeldKind.GRAPH: whole.stored}
    if moved:
        kinds |= {HeldKind.MOVED: whole.movable, HeldKind.LEFT: whole.stored - whole.movable}
    if halved is not None:
        kinds |= {HeldKind.HALVED: halved.stored, HeldKind.LATE: halved.late}
    if halved is not None and moved:
        kinds |= {HeldKind.MOVED_HALVED: halved.movable, HeldKind.LEFT_HALVED: halved.stored - halved.movable}
    return kinds


def _recomputed(
    blocks: Mapping[str, Any], place: BlockPlace, given: BlockInput, training: Training
) -> dict[HeldKind, int]:
    """Return what a stage takes whose blocks are recomputed, and what it keeps that is recomputed as a whole."""
    training = training._replace(options=training.options.changed(recompute="block"))
    whole, joined = _second(StageTrial(blocks, place, training), given), {"all": _Joined(list(blocks.values()))}
    kinds = {
        HeldKind.FORWARD: whole.most_forward,
        HeldKind.SAVED: whole.stored,
        HeldKind.BACKWARD: whole.most_backward,
        HeldKind.INPUT: _second(StageTrial(joined, place, training), given).stored,
    }
    if training.tensor.size == 1:
        halved = _second(StageTrial(blocks, place, training, halved=True), given)
        kinds |= {HeldKind.FORWARD_HALVED: halved.most_forward, HeldKind.BACKWARD_HALVED: halved.most_backward}
    return kinds


def _measure_slices(
    blocks: Mapping[str, Any],
    place: BlockPlace,
    given: Sequence[BlockInput],
    training: Training,
    recompute: bool,
    moved: bool,
) -> list[tuple[dict[HeldKind, int], SliceTrial]]:
    """Measure the slices of a microbatch; returns for each what its passes take, by kind, and what was run."""
    alone = training._replace(
        options=training.options.changed(width=1, sharding=None, recompute="none", offload="none")
    )
    slices = len(given)
    with closing(StageTrial(blocks, place, alone, moved=moved, slices=slices)) as trial:
        whole = trial.run_slices(given)
    with closing(StageTrial(blocks, place, alone, halved=True, moved=moved, slices=slices)) as trial:
        halved = trial.run_slices(given)
    kinds = [_from_forward_to_backward(*each, moved) for each in zip(whole, halved, strict=True)]
    if recompute:
        again = alone._replace(options=alone.options.changed(recompute="stage"))
        with closing(StageTrial(blocks, place, again, slices=slices)) as trial:
            trial.run_slices(given)  # which buffers a forward changes is known after the first
            for kind, each in zip(kinds, trial.run_slices(given), strict=True):
                kind[HeldKind.INPUT] = each.stored
    return list(zip(kinds, whole, strict=True))


def _second(trial: StageTrial, given: BlockInput) -> Trial:
    """Run two microbatches, and return the second: which buffers a forward changes is known after the first."""
    with closing(trial):
        trial.run(given)
        return trial.run(given)


def _weights(trial: StageTrial) -> StageBytes:
    """Return what is there once for a stage."""
    weights = trial.weight_bytes
    return StageBytes(weights.buffer, weights.whole, (0,), weights.frozen)


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
            found.append(
                _OfPipeline(remembered, scratch, layout.nbytes, rows, trial.weight_bytes.shares_for_snapshots())
            )
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
