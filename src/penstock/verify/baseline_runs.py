"""The runs that a pipeline is compared with: the reference of its method, and plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from torch import Tensor, nn

from penstock.comm.core.devices import find_device, on_device
from penstock.options.passes import boundary_format, low_precision
from penstock.schedule.ir.schedule import Op, Schedule, passes
from penstock.train.data.window_sampler import batches
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory
from penstock.verify.config_to_reference import reference_method, reference_options
from penstock.verify.derived_delays import order_of
from penstock.verify.differences import Record, Value
from penstock.verify.optimizer_recorder import WatchedFactory
from penstock.verify.plain_torch import train_plain
from penstock.verify.reference import Reference, Scaling, train_reference
from penstock.weights.decision import LossScale


def run_reference(prepared: Prepared, count: int) -> tuple[Reference, WatchedFactory]:
    """Train the reference; also return its optimizers."""
    config = prepared.config
    watch, divisor = WatchedFactory(optimizer_factory(config.optimizer)), float(prepared.tokens_per_batch)
    if config.precision != "fp32":
        divisor = 2.0 ** round(math.log2(divisor))
    plan = prepared.plan
    num_stages = plan.schedule.num_stages
    result = train_reference(
        _stages(prepared, one_object=num_stages == 1),
        prepared.model.loss,
        data_of(prepared, count),
        method=reference_method(config),
        optimizer=watch,
        rate=rate_schedule(config.lr_schedule, config.batches),
        divisor=divisor,
        clip=config.max_grad_norm,
        scaling=Scaling(*astuple(LossScale())) if config.precision == "fp16" else None,
        seed=config.seed,
        parts=_parts(plan.schedule, config.width),
        tied=prepared.model.tied or {} if num_stages > 1 else {},
        precision=low_precision(config.precision),
        boundary=boundary_format(config.boundary_gradients),
        options=reference_options(plan.options.staleness.correction),
        order=order_of(config.row, plan.plain, config.recompute, config.segments, usual=not config.options),
        equations=config.row.reference,
    )
    return result, watch


def _parts(schedule: Schedule, width: int) -> list[list[int]]:
    """List the microbatches whose gradients are summed separately: per pipeline, and per direction of each."""
    parts: list[list[int]] = [[] for _ in range(schedule.directions)]
    for program in schedule.programs:
        for action in program.period:
            for p in passes(action):
                if p.op is Op.F and p.stage.index == 0:
                    parts[p.stage.direction] += p.unit.microbatches
    m = schedule.microbatches
    return [[w * m + k for k in sorted({k % m for k in part})] for w in range(width) for part in parts]


def record_of(result: Reference, updated: list[int], watch: WatchedFactory, decides: bool) -> Record:
    """Return the numbers of a reference."""
    end = len(result.losses)
    skipped = [float(not gradients) for gradients in result.gradients]
    decisions = {"norm": result.norms, "loss scale": result.scales, "skipped": skipped}
    return {
        "losses": _by_batch({"loss": result.losses, "loss weight": result.weights}),
        "decisions": _by_batch(decisions) if decides else {},
        "gradients": {(t, name): g for t in updated for name, g in result.gradients[t].items()},
        "weights": {(t, name): w for t in updated for name, w in result.versions[t + 1].items()},
        "optimizer state": {(end, name): value for name, value, _ in watch.states()},
        "final state": {(end, name): value for name, value in (result.versions[-1] | result.buffers).items()},
    }


def _by_batch(figures: Mapping[str, Sequence[float]]) -> dict[tuple[int, str], Value]:
    return {(t, name): value for name, values in figures.items() for t, value in enumerate(values)}


def run_plain(prepared: Prepared, count: int, begin: Sequence[Mapping[str, Tensor]]) -> Record:
    """Train in plain torch; return its numbers."""
    config = prepared.config
    record = train_plain(
        {name: block for stage in _stages(prepared, one_object=True) for name, block in stage.items()},
        prepared.model.loss,
        data_of(prepared, count),
        optimizer_factory(config.optimizer),
        rate_schedule(config.lr_schedule, config.batches),
        config.max_grad_norm,
        begin,
    )
    return record if decides(prepared) else {**record, "decisions": {}}


def decides(prepared: Prepared) -> bool:
    """Whether an update waits for what all stages decide about it together."""
    return bool(prepared.plan.options.deciding)


def _stages(prepared: Prepared, one_object: bool) -> Sequence[Mapping[str, nn.Module]]:
    """Make the model, as stages in a row; with `one_object`, tied parameters are one object."""
    device, model = find_device(prepared.config.device), prepared.model
    blocks = {name: block.make().to(device) for name, block in model.blocks.items()}
    if model.tied and one_object:
        blocks["head"].get_submodule("out").weight = blocks["embedding"].weight
    return model.chain([{name: blocks[name] for name in part} for part in prepared.plan.parts])


def data_of(prepared: Prepared, count: int) -> Iterator[Sequence[Any]]:
    """Yield the first batches of a configuration, on its device."""
    device, size = find_device(prepared.config.device), prepared.config.microbatch_size
    found = batches(prepared.windows, 0, count, prepared.microbatches, size)
    return ([on_device(pair, device) for pair in batch] for batch in found)
