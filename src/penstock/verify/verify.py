"""Verifies that a pipeline trains what its method says: trains the same batches two or three times and compares.

    pipeline    all ranks in this process, as configured
    reference   the equations of the method, one microbatch after the other (`penstock.verify.reference`): every number
                must be equal
    plain       one model and one optimizer in plain torch (`penstock.verify.plain_torch`): equal up to rounding; only
                for methods that read up-to-date weights, in fp32

Everything runs in this process, so what does not fit on one device cannot be verified. It takes the memory of the whole
pipeline, and in addition that of the weights and gradients of every batch (twice if plain torch is compared, too).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comm.core.devices import find_device, on_device
from penstock.errors import ConfigError
from penstock.job.cpus import Cpus
from penstock.models.gpt import TIED_EMBEDDINGS, gpt_blocks, language_loss
from penstock.schedule.ir.rules import RULES, Source
from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.ir.sharding import Level
from penstock.stage.precision import boundary_format, low_precision
from penstock.train.config.schema import TrainConfig
from penstock.train.data.windows import batches
from penstock.train.setup.build_pipeline import make_pipeline
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.prepare import Prepared, prepare
from penstock.verify.differences import Comparisons, Record, Value
from penstock.verify.optimizer_hooks import WatchedFactory
from penstock.verify.pass_order import order_of
from penstock.verify.plain_torch import train_plain
from penstock.verify.reference import Reference, Scaling, train_reference
from penstock.verify.report import ReportRow, Verification
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.blending import Blending
from penstock.weights.corrections.error_feedback import ErrorFeedback
from penstock.weights.corrections.ftpipe import FTPipe
from penstock.weights.corrections.gap_aware import GapAware
from penstock.weights.corrections.nag_pp import NagPP
from penstock.weights.corrections.pipelined_backprop import PipelinedBackprop
from penstock.weights.corrections.pipemare import PipeMare
from penstock.weights.corrections.prediction import Prediction
from penstock.weights.corrections.reading_ahead import ReadingAhead
from penstock.weights.decision import Decision, LossScale
from penstock.weights.optim.adapters import takes_rows

TOLERANCE = 1e-5
"""Tolerance for plain torch, which adds norms and the parts of parallel pipelines in another order. That changes the
last
of 24 bits, 6e-8, each time; after a few batches tensors differ by about 1e-7. Real faults differ by far more."""


def verify(config: TrainConfig, count: int) -> Verification:
    """Train the first batches of a run as a pipeline, as its reference and, where it applies, in plain torch.

    Args:
        config: of the run.
        count: the number of batches.

    Raises:
        ConfigError: the configuration cannot be verified; also whatever `penstock.train.setup.prepare.prepare` raises.
    """
    if config.phased:
        raise ConfigError(
            "verify checks one method at a time: set sync.batches=0, fallback.at=null and fallback.when=[], and verify "
            "each method separately"
        )
    if config.combine.chosen.apart:
        raise ConfigError(
            "verify supports only pipelines that add their gradients in every batch, not those that synchronize less "
            f"often (combine.kind={config.combine.kind}); leave combine out"
        )
    if config.delayed:
        raise ConfigError("delays: there is no reference to verify chosen delays against; leave delays out")
    prepared, left_out = prepare(config), _no_plain(config)
    correction = prepared.plan.options.staleness.correction
    if isinstance(correction, ErrorFeedback) or (isinstance(correction, PipelinedBackprop) and correction.spike):
        raise ConfigError(
            f"method {config.row.name!r} changes weights after the optimizer's step, where verify cannot observe it; "
            "Penstock's tests compare it with its reference. Verify the method it builds on: 2bw, newest or lwp"
        )
    low = next((name for name in (config.precision, config.boundary_gradients) if name not in ("fp32", "same")), None)
    if prepared.plan.schedule.slices > 1 and low is not None:
        raise ConfigError(
            f"method {config.row.name!r} adds up slices of sequences, whose rounding differs from the reference's, in "
            f"{low} by percents, so a comparison would show nothing; verify it with precision=fp32 and "
            "boundary_gradients=same"
        )
    kernels = prepared.plan.options.precision.kernels
    with _threads(config), torch.random.fork_rng(devices=[]), kernels.applied():
        reference, watch = _run_reference(prepared, count)
        updated = [t for t, gradients in enumerate(reference.gradients) if gradients]
        others = [(_record(reference, updated, watch, _decides(prepared)), _allowed(prepared))]
        if left_out is None:
            others.append((_run_plain(prepared, count, reference.versions), TOLERANCE))
        divided = prepared.plan.schedule.sharding.level is not Level.NONE
        if divided and not all(map(takes_rows, watch.optimizers)):
            raise ConfigError(
                f"verify compares the rows that each pipeline steps, but {config.optimizer.name} steps whole "
                "parameters; verify it with sharding=none, whose numbers are the same"
            )
        comparisons = Comparisons(others, config.width, divided)
        error = _ComparedRun(prepared, count, updated, comparisons).run()
    found = comparisons.results(complete=error is None)
    rows = tuple(ReportRow(kind, first, others[0] if others else None) for kind, (first, *others) in found.items())
    return Verification(config, count, rows, left_out, error)


def _decides(prepared: Prepared) -> bool:
    """Whether an update waits for what all stages decide about it together."""
    return bool(prepared.plan.options.deciding)


def _allowed(prepared: Prepared) -> float:
    """Return the relative difference that is allowed from the reference: 0, unless the run rounds differently."""
    if prepared.config.row.correction == "gap-aware":  # a gap is the difference of weights that are nearly the same
        return 10 * TOLERANCE
    schedule = prepared.plan.schedule
    rounds = schedule.slices > 1 or not _sums_in_order(schedule)  # other sums, or the same in another order
    rounds |= prepared.config.compile  # fused operations round once
    return TOLERANCE if rounds or prepared.config.undo == "in-place" else 0.0


def _sums_in_order(schedule: Schedule) -> bool:
    """Return whether every stage adds up gradients in the order of microbatches, as the reference does.

    All methods do; an order of one's own may run its backwards in another one.
    """
    last: dict[Stage, int] = {}
    for p in schedule.passes():
        if p.op in (Op.B, Op.W):
            if p.unit.first < last.get(p.stage, p.unit.first):
                return False
            last[p.stage] = p.unit.first
    return True


def _no_plain(config: TrainConfig) -> str | None:
    """Return why plain torch is not comparable, or None if it is."""
    method = config.row
    if RULES[method.rule].forward is not Source.BATCH:
        return f"{method.name} reads delayed weights"
    if config.boundary_gradients != "same":
        return f"gradients are rounded to {config.boundary_gradients} between stages"
    return None if config.precision == "fp32" else f"it is compared in fp32 only, not in {config.precision}"


class _ComparedRun:
    """Trains the pipeline and compares its numbers as they arrive.

    Args:
        prepared: the run.
        count: the number of batches.
        updated: the batches whose update must be made.
        comparisons: receive the numbers.
    """

    def __init__(self, prepared: Prepared, count: int, updated: list[int], comparisons: Comparisons) -> None:
        self._prepared, self._config, self._count = prepared, prepared.config, count
        self._updated, self._see = updated, comparisons.see
        self._decides = _decides(prepared)
        self._whole = self._config.width * prepared.plan.schedule.directions == 1  # else reports are of a part

    def run(self) -> Exception | None:
        """Train; returns what was raised on the way."""
        provisional = RULES[self._prepared.plan.schedule.rule].provisional
        watch = WatchedFactory(optimizer_factory(self._config.optimizer), self._update, waits=provisional)
        pipeline = make_pipeline(self._prepared, optimizer=watch)
        try:
            for report in pipeline.run(_data(self._prepared, self._count)):
                if self._whole:
                    self._loss(report.batch, report.loss, report.weight)
                self._decisions(report.decided)
            self._decisions(pipeline.decided())
        except Exception as error:  # any error is a finding about the pipeline
            return error
        for name, value in pipeline.state_dict().items():
            self._see("final state", self._count, name, value)
        for name, state, place in watch.states():
            self._see("optimizer state", self._count, name, state, place)
        return None

    def _update(self, kind: str, number: int, name: str, tensor: Tensor, pipeline: int) -> None:
        if number < len(self._updated):
            self._see(kind, self._updated[number], name, tensor, pipeline)
        else:
            self._see(kind, self._count - 1, f"{name} in an update too many", tensor, pipeline)

    def _loss(self, batch: int, loss: float | None, weight: float | None) -> None:
        self._see("losses", batch, "loss", math.nan if loss is None else loss)
        self._see("losses", batch, "loss weight", math.nan if weight is None else weight)

    def _decisions(self, decided: Iterable[Decision]) -> None:
        for d in decided:
            if not self._whole:
                self._loss(d.batch, d.loss, d.weight)
            if self._decides:
                for name, value in (("norm", d.norm), ("loss scale", d.scale), ("skipped", float(d.skipped))):
                    self._see("decisions", d.batch, name, value)


# --- the runs that it is compared with --------------------------------------------------------------------------------


def _run_reference(prepared: Prepared, count: int) -> tuple[Reference, WatchedFactory]:
    """Train the reference; also return its optimizers."""
    config = prepared.config
    watch, divisor = WatchedFactory(optimizer_factory(config.optimizer)), float(prepared.tokens_per_batch)
    if config.precision != "fp32":
        divisor = 2.0 ** round(math.log2(divisor))
    plan = prepared.plan
    num_stages = plan.schedule.num_stages
    blocks = _blocks(prepared, one_object=num_stages == 1)
    result = train_reference(
        [{name: blocks[name] for name in part} for part in plan.parts],
        language_loss,
        _data(prepared, count),
        method=_method_of_reference(config),
        optimizer=watch,
        rate=rate_schedule(config.lr_schedule, config.batches),
        divisor=divisor,
        clip=config.max_grad_norm,
        scaling=Scaling(*astuple(LossScale())) if config.precision == "fp16" else None,
        seed=config.seed,
        parts=_parts(plan.schedule, config.width),
        tied=TIED_EMBEDDINGS if config.model.tied and num_stages > 1 else {},
        precision=low_precision(config.precision),
        boundary=boundary_format(config.boundary_gradients),
        options=_options(plan.options.staleness.correction, config.row.rule),
        order=order_of(
            "" if "in_flight" in config.options else config.row.order, plan.plain, config.recompute, config.segments
        ),
    )
    return result, watch


_BY_RULE = MappingProxyType(
    {
        "flush": "1f1b",
        "provisional": "zb-h2-post",
        "double-buffer": "2bw",
        "stash": "stash",
        "vertical-sync": "vertical-sync",
        "newest": "newest",
        "admitted-newest": "timeprest",
    }
)
"""For every rule that needs no correction, a method with its equations; the delays of an order are derived from it."""

_OF_ITS_ORDER = ("ftpipe-aggregated",)
"""Corrections whose reference knows one order only."""

_STASHED = "predicted-stash"
"""The rule under which corrections predict for backwards what forwards read, where a choice is theirs."""


def _method_of_reference(config: TrainConfig) -> str:
    """Return the method whose equations the reference trains.

    Raises:
        ConfigError: no method of the reference has the rule of a schedule of one's own.
    """
    if config.schedule is None:
        return config.row.name
    rule, correction = config.row.rule, config.row.correction
    if correction in _OF_ITS_ORDER:
        raise ConfigError(
            f"{config.row.name}: there is no reference for orders of your own with correction {correction!r}, which "
            f"predicts from the gradients of the order of 1F1B; verify method {correction}"
        )
    if correction != "none":
        return correction  # the method that is called like it has its equations
    if rule not in _BY_RULE:
        raise ConfigError(
            f"{config.row.name}: there is no reference for orders of your own under rule {rule!r}; there is one for "
            f"{', '.join(_BY_RULE)}"
        )
    return _BY_RULE[rule]


def _options(correction: Correction | None, rule: str) -> dict[str, Any]:
    """Return the options of a correction, under a version rule, in the reference's names."""
    match correction:
        case PipelinedBackprop() if rule in (_STASHED, "stash"):
            return {"backward": "stash"}
        case FTPipe() if rule == _STASHED and not correction.decays and correction.ahead:
            return {"backward": "stash"}
        case PipeMare():
            return {"reschedule": correction.reschedule, "decay": correction.decay}
        case FTPipe() if correction.decays or not correction.ahead:
            raise ConfigError(
                f"correction {correction.name!r}: the reference predicts without weight decay, and each update at its "
                "own rate; verify it with ahead=1 and weight_decay=0"
            )
        case NagPP(adapts=True):
            return {"reschedule": correction.reschedule}
        case Prediction(name="xpipe"):
            return {"bias": "paper" if correction.uncorrected else "adam"}
        case Blending():
            return {"beta": correction.beta}
        case ReadingAhead():
            return {key: getattr(correction, key) for key in ("motion", "horizon", "a", "b")}
        case GapAware():
            return {"average": correction.average, "eps": correction.eps}
    return {}


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


def _record(result: Reference, updated: list[int], watch: WatchedFactory, decides: bool) -> Record:
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


def _run_plain(prepared: Prepared, count: int, begin: Sequence[Mapping[str, Tensor]]) -> Record:
    """Train in plain torch; return its numbers."""
    config = prepared.config
    record = train_plain(
        _blocks(prepared, one_object=True),
        language_loss,
        _data(prepared, count),
        optimizer_factory(config.optimizer),
        rate_schedule(config.lr_schedule, config.batches),
        config.max_grad_norm,
        begin,
    )
    return record if _decides(prepared) else {**record, "decisions": {}}


def _blocks(prepared: Prepared, one_object: bool) -> dict[str, nn.Module]:
    """Make the model; with `one_object`, tied parameters are one object."""
    device = find_device(prepared.config.device)
    blocks = {name: block.make().to(device) for name, block in gpt_blocks(prepared.model, prepared.config.seed).items()}
    if prepared.config.model.tied and one_object:
        blocks["head"].get_submodule("out").weight = blocks["embedding"].weight
    return blocks


def _data(prepared: Prepared, count: int) -> Iterator[Sequence[Any]]:
    device, size = find_device(prepared.config.device), prepared.config.microbatch_size
    found = batches(prepared.windows, 0, count, prepared.microbatches, size)
    return ([on_device(pair, device) for pair in batch] for batch in found)


@contextmanager
def _threads(config: TrainConfig) -> Iterator[None]:
    """Use as many threads as a rank does on this machine, as their number changes the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or Cpus.of_this_process().threads(config.stages * config.width))
    try:
        yield
    finally:
        torch.set_num_threads(before)
