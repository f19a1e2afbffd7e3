"""Refuses what the runtime cannot run, by name: schedules, and options that do not go with them.

A schedule that is refused here can still be proven, drawn and simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.comm.p2p.stage_routes import needs_decisions
from penstock.errors import CapabilityError, ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.options.passes import Recompute
from penstock.partition.replay.model_stages import UnitBlocks
from penstock.partition.sequence_slices import EQUAL_SLICES, Slicing
from penstock.runtime.ops.handlers import HANDLERS
from penstock.schedule.build import ScheduleRequest, enough_in_flight
from penstock.schedule.ir.schedule import Kind, Op, Schedule, chain, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.corrections import find_correction
from penstock.schedule.methods.data_parallel_sync import REDUCE, Combine
from penstock.schedule.methods.table import METHODS
from penstock.weights.corrections.base import Correction, correction_spec

_OPS = frozenset(HANDLERS) | {Op.FUSED}  # fused passes are taken apart before they run
_RULES = frozenset(RULES) - {"frozen"}
_WIDE = frozenset({Op.B, Op.R})
"""Operations that may handle several microbatches at once."""


def check_offered(schedule: Schedule, combine: Combine = REDUCE) -> None:
    """Make sure that the runtime can run a schedule.

    Args:
        schedule: which.
        combine: how parallel pipelines agree.

    Raises:
        CapabilityError: it cannot yet; the message says what is missing.
    """
    whole = [action for program in schedule.programs for part in program for action in part]
    actions = [p for action in whole for p in passes(action)]
    missing = sorted(op.value for op in {a.op for a in (*whole, *actions)} - _OPS)
    if not combine.apart and any(a.op is Op.AVERAGE for a in actions):
        raise CapabilityError(
            f"{schedule.name}: the runtime averages parallel pipelines where it is told how, as in "
            "data_parallel=DataParallel(2, combine=Combine('average', every=4))"
        )
    if missing:
        raise CapabilityError(f"{schedule.name}: the runtime does not offer {', '.join(missing)} yet")
    if any((a.unit.count > 1 and a.op not in _WIDE) or a.unit.kind is Kind.EVAL for a in actions):
        raise CapabilityError(
            f"{schedule.name}: the runtime offers passes of one training microbatch so far, and whole backwards of "
            "several"
        )
    if any(p.op is Op.F and p.unit.first < 0 for program in schedule.programs for p in program.period):
        raise CapabilityError(f"{schedule.name}: the runtime offers periods that begin the forwards of their own batch")
    if schedule.frozen and schedule.slices > 1:
        raise CapabilityError(f"{schedule.name}: the runtime offers slices of sequences where all stages are trained")
    if schedule.rule not in _RULES:
        raise CapabilityError(f"{schedule.name}: the runtime does not offer version rule {schedule.rule!r} yet")
    if RULES[schedule.rule].rebinds and Op.OFFLOAD in {a.op for a in actions}:
        raise CapabilityError(f"{schedule.name}: graphs whose weights change meanwhile cannot be moved away")
    if RULES[schedule.rule].rebinds and Op.W in {a.op for a in actions}:
        raise CapabilityError(
            f"{schedule.name}: the runtime offers backwards in two halves where they read the weights of their forward"
        )
    if any(len(segment) > 1 for segment in schedule.segments) and schedule.slices > 1:
        raise CapabilityError(
            f"{schedule.name}: the runtime offers slices of sequences with recompute of single stages, not of segments"
        )
    if RULES[schedule.rule].provisional:
        _check_provisional(schedule)


def _check_provisional(schedule: Schedule) -> None:
    """Make sure that updates can be made before the decision of all stages, and that rejected forwards run again."""
    if needs_decisions(schedule):
        raise CapabilityError(
            f"{schedule.name}: an update before the decision of all stages needs the loss weight of the batch, which "
            "does not reach every stage here"
        )
    if schedule.frozen or any(a.op is Op.OFFLOAD for program in schedule.programs for a in program.period):
        raise CapabilityError(
            f"{schedule.name}: the runtime offers updates before the decision of all stages where all stages are "
            "trained and no activations are moved away"
        )
    for rank, (period, _) in enumerate(schedule.programs):
        last = max((i for i, a in enumerate(period) if a.op is Op.VALIDATE), default=0)  # none: the proof says so
        if not any(p.op is Op.F for a in period[last:] for p in passes(a)):
            raise CapabilityError(
                f"{schedule.name}: rank {rank} runs all forwards before VALIDATE; the last one must come after it"
            )


def check_divided(schedule: Schedule, blocks: int, balance: Sequence[int] | None) -> None:
    """Make sure that a model is not cut by cost for a method whose stages are no chain.

    Args:
        schedule: which.
        blocks: of the model.
        balance: blocks of each stage, if they are given.

    Raises:
        ConfigError: it is to be.
    """
    method = METHODS.get(schedule.name)
    if method is not None and method.divides_head and balance is None and blocks != schedule.num_stages:
        raise ConfigError(
            f"{schedule.name}: its {schedule.num_stages} stages are no chain, but layers, parts of an output layer and "
            "a loss; pass the blocks and the partition of a model made for it, such as those that "
            "penstock.models.vocabulary_parallel_gpt.vocabulary_parallel_gpt returns"
        )


def check_whole_model(blocks: Mapping[str, Any], schedule: Schedule, options: PipelineOptions) -> None:
    """Make sure that a method and options go with a whole model, whose stages each run its own forward.

    Raises:
        CapabilityError: they do not.
    """
    if not isinstance(blocks, UnitBlocks):
        return
    reasons = {
        f"the {schedule.num_stages} stages of {schedule.name} are no chain, as those of a whole model are": (
            schedule.edges != chain(schedule.num_stages)
        ),
        f"{schedule.name} takes slices of sequences, and the forward of a whole model takes whole ones": (
            schedule.slices > 1
        ),
        "cuda_graphs would not run the code around the layers of a whole model again": options.run.cuda_graphs,
        "tensor_parallel divides blocks with a method parallelize, and a whole model is no block": (
            options.partition.tensor_parallel > 1
        ),
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is not None:
        raise CapabilityError(f"{reason}; pass a list or dict of blocks, without example, or leave that out")


def check_slices(schedule: Schedule, recompute: Recompute, slicing: Slicing = EQUAL_SLICES) -> None:
    """Make sure that `slicing` and `recompute` go with slices of sequences, or with whole sequences.

    Raises:
        ConfigError: it does not.
    """
    if schedule.slices == 1 and slicing != EQUAL_SLICES:
        raise ConfigError(
            f"{schedule.name}: slicing says how sequences are cut, but this method takes whole ones; take seq1f1b or "
            "terapipe, or leave slicing out"
        )
    if schedule.slices > 1 and "block" in recompute.modes:
        raise ConfigError(
            f"{schedule.name}: recompute='block' does not go with slices of sequences; take 'stage' or 'none'"
        )


def check_recomputed_blocks(schedule: Schedule, recompute: Recompute) -> None:
    """Make sure that blocks are not to be run again where the schedule runs whole stages again.

    Raises:
        ConfigError: they are.
    """
    if any(recompute.of(index) == "block" for index in schedule.recomputed):
        raise ConfigError(f"{schedule.name}: the schedule recomputes whole stages, so recompute cannot be 'block'")


def check_compiled(schedule: Schedule, compiles: bool, backward_delays: bool) -> None:
    """Make sure that compiled blocks go with a schedule.

    They take weights as inputs, so versions that rotate through buffers are no reason to compile again.

    Args:
        schedule: which.
        compiles: whether blocks are compiled.
        backward_delays: whether backwards have delays of their own.

    Raises:
        CapabilityError: they do not.
    """
    if not compiles:
        return
    ops = schedule.operations
    reason = ""
    if RULES[schedule.rule].rebinds or backward_delays:
        reason = "backwards read other weights than their forward, which a compiled graph cannot be given"
    elif Op.W in ops:
        reason = "blocks whose backward comes in two halves run uncompiled"
    elif Op.OFFLOAD in ops:
        reason = "what a compiled graph saves cannot be moved away"
    elif schedule.slices > 1:
        reason = "blocks run on slices of sequences, which is not what is compiled"
    if reason:
        raise CapabilityError(f"{schedule.name}: {reason}; leave compile out")


def check_captured(schedule: Schedule, options: PipelineOptions) -> None:
    """Make sure that passes can be recorded as CUDA graphs, if they are to be.

    Raises:
        CapabilityError: they cannot.
    """
    if not options.run.cuda_graphs:
        return
    ops, rule = schedule.operations, RULES[schedule.rule]
    staleness = options.staleness
    reasons = {
        "backwards look weights up that their forward has not read": rule.rebinds or staleness.backward_delays,
        "stages read versions of their own choice (delays)": staleness.delays,
        "updates may be taken back": rule.provisional,
        "activations are moved to the host": Op.OFFLOAD in ops,
        "passes run on slices of sequences": schedule.slices > 1,
        "forwards run a second time (recompute)": options.recompute.modes != ("none",) or Op.R in ops,
        "weights are sharded": schedule.sharding.level is not Level.NONE,
        "parameters are divided (tensor_parallel)": options.partition.tensor_parallel > 1,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is not None:
        raise CapabilityError(f"{schedule.name}: cuda_graphs does not go with this: {reason}; leave cuda_graphs out")


def _check_uncorrected(schedule: Schedule, wanted: str) -> None:
    """Make sure that a schedule needs no correction; `wanted` is that of its method."""
    rule, lacks = RULES[schedule.rule], ""
    if rule.keeps_forward:
        lacks = "backwards read a blend of two versions, and nothing says of what shares"
    elif rule.copies_forward:
        lacks = "passes read predicted weights, and nothing says how they are predicted"
    elif wanted != "none":
        lacks = f"its correction is missing ({find_correction(wanted).summary})"
    if lacks:
        alike = (METHODS[schedule.name].order if schedule.name in METHODS else "", schedule.rule, "none")
        same = [row.name for row in METHODS.values() if (row.order, row.rule, row.correction) == alike]
        instead = f"; without it the method is {same[0]!r}" if same else ""
        raise ConfigError(f"{schedule.name}: {lacks}; pass staleness=correction_of({schedule.name!r}){instead}")


def check_correction(
    schedule: Schedule, correction: Correction | None, precision: torch.dtype | None, recompute: Recompute, tied: bool
) -> None:
    """Make sure that a correction goes with a schedule and what else is wanted.

    Raises:
        ConfigError: it does not.
    """
    method = METHODS.get(schedule.name)
    wanted = "none" if method is None else method.spec.name
    if correction is None:
        _check_uncorrected(schedule, wanted)
        return
    if wanted not in ("none", correction.name):
        raise ConfigError(
            f"{schedule.name}: this schedule's method has correction {wanted!r}, but correction {correction.name!r} "
            f"was given; pass staleness=correction_of({schedule.name!r}), or take the other method's schedule"
        )
    row = correction_spec(correction)
    rules = row.rules
    if rules and schedule.rule not in rules:
        raise ConfigError(
            f"correction {correction.name!r} goes with version rule {' or '.join(rules)}, but {schedule.name} has rule "
            f"{schedule.rule!r}"
        )
    if tied and not row.alike:
        raise ConfigError(
            f"{schedule.name}: correction {correction.name!r} steps every stage in its own way, so parameters which "
            "stages share would part; untie them"
        )
    for mode in ("stage",) if schedule.recomputed else recompute.modes:
        reason = correction.refuses(precision, mode)
        if reason is not None:
            raise CapabilityError(f"{schedule.name}: {reason}")


def idle_options(
    schedule: Schedule,
    options: PipelineOptions,
    asked: ScheduleRequest | None,
    devices: Collection[torch.device],
    processes: int,
    blocks: Iterable[Any] = (),
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> Iterator[str]:
    """Yield the options that find nothing to act on, each with the reason.

    They change no number, so they are no errors: a script may be tried with less than it was written for. Of the
    backends of attention (`sdpa`) nobody knows which blocks call it until they run.

    Args:
        schedule: with all that the options add.
        options: of the pipeline.
        asked: what the order was asked for with, if it was.
        devices: of the stages.
        processes: how many run the pipeline.
        blocks: of the model.
        optimizers: of the stages.
    """
    shared, known, made = options.partition.tensor_parallel, list(blocks), list(optimizers)
    whole = all(isinstance(block, nn.Module) and not hasattr(block, "parallelize") for block in known)
    no_state = all(type(o) is torch.optim.SGD and not any(g["momentum"] for g in o.param_groups) for o in made)
    host = options.run.offload_optimizer != "none"
    recompute, precision, parallel = options.recompute, options.precision, options.data_parallel
    again = {index for index in range(schedule.num_stages) if recompute.of(index) == "stage"}
    on_host = "ranks compute on the CPU, whose own memory is that of the host"
    one = "there is one pipeline (data_parallel=1)"
    at_once = "the backward of each microbatch follows its forward at once, so nothing is kept in between"
    cpu, away = {device.type for device in devices} == {"cpu"}, bool(recompute.offloaded)
    given, enough = (None, None) if asked is None else (asked.options.get("in_flight"), enough_in_flight(asked))
    low, rounds = precision.low is not None, precision.between_stages is not None
    for option, reason, idle in (
        ("reduce='fast'", f"{one}, and no other's gradients to add", parallel.fast and parallel.width == 1),
        ("reduce='fast'", "one process adds in the order of pipelines", parallel.fast and parallel.width > processes),
        (f"rank_order={parallel.rank_order!r}", one, parallel.rank_order != "tp-pp-dp" and parallel.width == 1),
        ("recompute='stage'", at_once, bool(again) and not again & schedule.recomputed),
        ("offload='activations'", at_once, away and not cpu and Op.OFFLOAD not in schedule.operations),
        ("offload='activations'", on_host, away and cpu),
        (f"offload_optimizer={options.run.offload_optimizer!r}", on_host, host and cpu),
        (
            f"offload_optimizer={options.run.offload_optimizer!r}",
            "SGD without momentum keeps no state",
            host and not cpu and bool(made) and no_state,
        ),
        (
            f"tensor_parallel={shared}",
            f"no block has a method parallelize(mesh), so all {shared} processes of a stage compute the same",
            shared > 1 and bool(known) and whole,
        ),
        ("tf32=True", "it is a format of GPUs, and ranks compute on the CPU", precision.tf32 is True and cpu),
        ("boundary_gradients='bf16'", "there is one stage, and so no boundary", rounds and schedule.num_stages == 1),
        (
            "boundary_gradients='bf16'",
            f"with precision={precision.precision!r} gradients between stages have 2 bytes already, but where a block "
            "returns float32",
            rounds and low and schedule.num_stages > 1,
        ),
        (f"waits={options.run.waits!r}", "one process runs all ranks", options.run.waits != "auto" and processes == 1),
        (f"in_flight={given}", f"{enough} on the first rank give the same order", enough is not None),
    ):
        if idle:
            yield f"{option} has no effect: {reason}"
