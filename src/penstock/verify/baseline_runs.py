"""The runs that a pipeline is compared with: the reference of its method, and plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from torch import Tensor, nn

from penstock.comm.core.devices import find_device, on_device
from penstock.errors import CapabilityError, ConfigError
from penstock.options.passes import boundary_format, low_precision
from penstock.schedule.add_options import extend
from penstock.schedule.ir.schedule import Op, Schedule, passes
from penstock.schedule.ir.version_rules import RULES, Source
from penstock.schedule.methods.method import Method
from penstock.schedule.transforms.recompute import Segments
from penstock.train.config.own_schedule import held_method
from penstock.train.config.schema import TrainConfig
from penstock.train.data.window_sampler import batches
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory
from penstock.verify.differences import Record, Value
from penstock.verify.optimizer_recorder import WatchedFactory
from penstock.verify.plain_torch import train_plain
from penstock.verify.reference import Reference, Scaling, train_reference
from penstock.verify.reference.order_delays import USUAL, ReferenceOrder
from penstock.verify.reference.supported_methods import BY_RULE
from penstock.weights.corrections.base import Correction, OwnCorrection
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction
from penstock.weights.corrections.two_bw_ahead import ReadingAhead
from penstock.weights.decision import LossScale

KNOWN = "endless-1f1b"
"""The order whose delays the reference knows; it also knows those of version rules that do not depend on the order."""


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


def reference_method(config: TrainConfig) -> str:
    """Return the method whose equations the reference trains.

    Raises:
        ConfigError: no method of the reference has the rule of a schedule of one's own.
    """
    if config.schedule is None:
        return config.row.name
    rule, correction = config.row.rule, config.row.spec.name
    if held_method(config.schedule) is not None:
        return base_of(config.row)
    if correction != "none":
        return "3bw-ahead" if rule == "triple-buffer" else correction  # the method that is called like it
    if rule not in BY_RULE:
        raise ConfigError(
            f"{config.row.name}: there is no reference for orders of your own under rule {rule!r}; there is one for "
            f"{', '.join(BY_RULE)}"
        )
    return BY_RULE[rule]


def base_of(row: Method) -> str:
    """Return the method of the reference whose versions the forwards of a method of a user's own read.

    Raises:
        ConfigError: it has a correction, but no reference of it.
    """
    if row.spec.name != "none" and row.reference is None:
        raise ConfigError(
            f"method {row.name!r} has no reference to compare with: write its equations as a function, and give that "
            "as penstock.Method(reference=...) (docs/own-methods.md)"
        )
    of_copies = {"predicted-shared": "xpipe", "blended": "i-timeprest"}
    return BY_RULE.get(row.rule) or of_copies.get(row.rule, "stash")


def reference_options(correction: Correction | None) -> dict[str, Any]:
    """Return the options of a correction in the reference's names."""
    match correction:
        case OwnCorrection():
            return dict(correction.options)
        case PipeMare():
            return {"reschedule": correction.reschedule, "decay": correction.decay}
        case Prediction(name="xpipe"):
            return {"bias": "paper" if correction.uncorrected else "adam"}
        case Blending():
            return {"beta": correction.beta}
        case ReadingAhead():
            found = {key: getattr(correction, key) for key in ("motion", "horizon", "a", "b")}
            return {key: value for key, value in found.items() if value is not None}
    return {}


def order_of(
    method: Method,
    schedule: Schedule,
    recompute: str | Sequence[str] = "none",
    segments: Segments = 1,
    *,
    usual: bool = True,
) -> ReferenceOrder:
    """Describe a schedule's order for the reference, as numbers of updates between passes.

    Args:
        method: whose order it has.
        schedule: without RECOMPUTE actions.
        recompute, segments: as in `penstock.runtime.pipeline.Pipeline`.
        usual: whether the order has its usual numbers of microbatches in flight, and other options.

    Raises:
        CapabilityError: stages recompute differently under a rule where that changes what passes read.
    """
    rule = RULES[schedule.rule]
    delays = None
    if method.delays is not None and usual:
        delays = method.delays(schedule.num_stages, schedule.microbatches)
    elif rule.forward is not Source.BATCH and not (usual and method.order == KNOWN):
        delays = _updates_before_own(schedule, Op.F)
    if recompute == "none" or rule.recompute is not Source.NEWEST:
        return USUAL._replace(delays=delays)  # a recomputed forward reads the same weights, so it changes nothing
    if not isinstance(recompute, str):
        raise CapabilityError(
            f"{schedule.name}: under rule {schedule.rule} numbers depend on what is recomputed, and the reference "
            "recomputes all stages alike; set recompute to one word"
        )
    if recompute == "block":
        return ReferenceOrder(delays, "block")
    again = extend(schedule, recomputes=True, segments=segments).schedule
    members = {index for segment in again.segments for index in segment[1:]}
    firsts = [index for index in range(again.num_stages) if index not in members]
    sizes = [end - first for first, end in zip(firsts, [*firsts[1:], again.num_stages], strict=True)]
    return ReferenceOrder(delays, "stage", sizes, _updates_before_own(again, Op.R))


def _updates_before_own(schedule: Schedule, op: Op) -> list[list[int]]:
    """Count, per stage and microbatch, the updates between the version that a pass reads and the batch's own update."""
    m = schedule.microbatches
    found: dict[tuple[int, int], int] = {}
    for program in schedule.programs:
        for action in program.period:
            for p in passes(action):
                if p.op is op and p.reads is not None:
                    for number in p.unit.microbatches:
                        batch, k = divmod(number, m)
                        found[p.stage.index, k] = batch - p.reads.versions[-1]
    return [[found.get((index, k), 0) for k in range(m)] for index in range(schedule.num_stages)]
