"""Chooses what each stage recomputes: as little as fits into a limit of memory.

The bytes of every stage are measured with one microbatch (`penstock.measure.stage_bytes`), and what every rank
holds is predicted from them and the schedule, to the byte for runs in one process
(`penstock.simulate.memory.predicted`). Ranks choose one by one, as their memory does not depend on what others
recompute: of all ways in which a rank's stages may recompute none, their blocks or themselves, the one with the least
extra forwards that fits. So nothing depends on times, and all processes, and a run that is resumed, would find the
same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from penstock.byte_sizes import human_bytes
from penstock.errors import CapabilityError, ConfigError, PenstockError
from penstock.measure.stage_bytes import measure_stages
from penstock.measure.stage_trial import Training
from penstock.options.all_options import PipelineOptions
from penstock.options.parallelism import DataParallel
from penstock.partition.blocks import LazyBlock, cost_of, is_whole_model, named_blocks
from penstock.partition.replay.model_stages import UnitBlocks
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.plan.schedule_from_arguments import request_for
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.order import OrderFunction
from penstock.schedule.ir.schedule import Op, Schedule, Stage, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Source
from penstock.schedule.methods.choice import MethodChoice
from penstock.schedule.proof.proof import Proof
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import MemoryOptions, peak_bytes
from penstock.simulate.memory.stage_sizes import StageBytes
from penstock.stage.autograd.recompute import RecomputeMode
from penstock.stage.blocks.loss import LossFunction
from penstock.weights.optim.optimizer_factory import OptimizerFactory

_MOST_STAGES = 6  # of a rank that may differ; where it has more, all of them recompute alike

Plans = Callable[[RecomputeMode | tuple[RecomputeMode, ...]], Sequence[PipelinePlan]]
"""Returns the proven plans of a run, given what all stages recompute, or each of them."""

_Way = dict[int, RecomputeMode]
"""What some stages recompute, by index."""
SETTLED = 3
"""Batches after the first one that repeats, in which the last new peak comes."""
_KEPT = (HeldKind.GRAPH, HeldKind.SAVED, HeldKind.INPUT)  # of a microbatch in flight, by what is recomputed
_AGAIN = (HeldKind.GRAPH, HeldKind.BACKWARD)  # during its backward


@dataclass(frozen=True)
class RecomputeChoice:
    """What each stage recomputes under a limit.

    Attributes:
        recompute: of each stage, from the first to the last.
        peaks: the most bytes that each rank is predicted to hold so.
        without: the same if nothing were recomputed.
        limit: bytes of a rank.
    """

    recompute: tuple[RecomputeMode, ...]
    peaks: tuple[int, ...]
    without: tuple[int, ...]
    limit: float

    def __str__(self) -> str:
        """Return it in words."""
        said = f"{human_bytes(max(self.peaks))} on the fullest rank, of {human_bytes(self.limit)}"
        more = f"; without recompute {human_bytes(max(self.without))}" if self.without != self.peaks else ""
        return f"{', '.join(self.recompute)} ({said}{more})"


def choose_recompute(
    blocks: Any,
    sample: tuple[Any, Any],
    memory_limit: float,
    *,
    method: str | MethodChoice | OrderFunction,
    stages: int,
    microbatches: int,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    options: PipelineOptions | None = None,
) -> RecomputeChoice:
    """Choose what each stage of a pipeline recomputes, so that no rank holds more than a limit.

        choice = penstock.choose_recompute(blocks, (x, y), 2e9, method="1f1b", stages=4, microbatches=8, ...)
        pipeline = penstock.Pipeline(blocks, recompute=choice.recompute, method="1f1b", ...)

    The limit is about what Penstock accounts for (`Pipeline.peak_bytes`): weights, gradients, the optimizer's state,
    activations and messages; not about Python, torch's own memory, and what operations take for a moment.

    Args:
        blocks: as of `Pipeline`; copies are measured, of one stage at a time. The sample is the example of a whole
            model.
        sample: one microbatch of the model, and its target.
        memory_limit: bytes of a rank.
        method, stages, microbatches, loss, optimizer: as of `Pipeline`.
        options: all others; the defaults if None.

    Raises:
        ConfigError: nothing fits; or numbers depend on what is recomputed, so that nobody else should choose it.
        CapabilityError: the memory of the method is not predicted.
    """
    named = named_blocks(blocks, sample[0] if is_whole_model(blocks) else None, stages)
    request, correction = request_for(method, None, stages, microbatches)
    given = (options or PipelineOptions()).changed(correction=correction)

    def plans(recompute: RecomputeMode | tuple[RecomputeMode, ...]) -> list[PipelinePlan]:
        return [UnprovenPlan.of(named, request, given.changed(recompute=recompute)).prove()]

    return choose_for(plans, named, sample, memory_limit, loss, optimizer)


def choose_for(
    plans: Plans,
    blocks: Mapping[str, Any],
    sample: tuple[Any, Any],
    limit: float,
    loss: LossFunction,
    optimizer: OptimizerFactory,
) -> RecomputeChoice:
    """Choose what each stage recomputes so that every plan of a run fits.

    Args:
        plans: given what is recomputed.
        blocks: by name.
        sample, limit, loss, optimizer: as of `choose_recompute`.

    Raises:
        ConfigError, CapabilityError: as `choose_recompute`.
    """
    plain = plans("none")
    _check_free(plain)
    sizes = _measured(plain[0], blocks, sample, loss, optimizer)
    cost = [sum(cost_of(blocks[name]) for name in part) for part in plain[0].parts]
    peaks = without = _peaks(plain, sizes)
    least, schedule = list(without), plain[0].schedule
    groups = _groups(schedule)
    modes, refused = _modes(plans, plain[0])
    ways = [_ways(group, modes, cost) for group in groups]
    chosen: _Way = dict.fromkeys(range(schedule.num_stages), "none")
    saves = Savings(plain[0], sizes)
    while over := {rank for rank, peak in enumerate(peaks) if peak > limit}:
        for group, left in zip(groups, ways, strict=True):
            full = [rank for rank in sorted(over) if any(stage.index in group for stage in schedule.on_rank(rank))]
            if not full:
                continue
            while left and (short := [rank for rank in full if without[rank] - saves.most(left[0], rank) > limit]):
                least[short[0]] = min(least[short[0]], without[short[0]] - saves.most(left[0], short[0]))
                left.pop(0)
            if not left:
                raise _too_little(full[0], least[full[0]], limit, refused, saves)
            chosen |= left.pop(0)
        peaks = _peaks(plans(tuple(chosen.values())), sizes)
        least = [min(pair) for pair in zip(least, peaks, strict=True)]
    return RecomputeChoice(tuple(chosen.values()), peaks, without, limit)


def _check_free(plans: Sequence[PipelinePlan]) -> None:
    """Make sure that numbers do not depend on what is recomputed.

    Raises:
        ConfigError: they do.
    """
    for schedule in (plan.schedule for plan in plans):
        if RULES[schedule.rule].recompute is Source.NEWEST:
            raise ConfigError(
                f"{schedule.name}: a forward that is run again reads newer weights under rule {schedule.rule}, so the "
                "numbers depend on what is recomputed, which only you should choose: set recompute to none, block or "
                "stage"
            )


def _measured(
    plan: PipelinePlan, blocks: Mapping[str, Any], sample: tuple[Any, Any], loss: LossFunction, optimizer: Any
) -> dict[int, StageBytes]:
    """Measure the bytes of every stage on copies of its blocks.

    Raises:
        CapabilityError: processes share stages, which one alone cannot measure.
    """
    parallel, parts = plan.options.data_parallel, plan.options.partition.tensor_parallel
    if parts > 1:
        raise CapabilityError(
            f"recompute=auto is not offered with tensor_parallel={parts} yet, as it measures stages in one process; "
            "list what each stage recomputes"
        )
    options = PipelineOptions(
        precision=plan.options.precision,
        run=plan.options.run,
        data_parallel=DataParallel(parallel.width, sharding=str(plan.schedule.sharding.level)),
    )
    cut: Sequence[Sequence[str]] = plan.parts
    if isinstance(blocks, UnitBlocks):
        blocks = {part[0]: blocks.stage(cut, index) for index, part in enumerate(cut)}
        cut = [[name] for name in blocks]
    copies = {
        name: block if isinstance(block, LazyBlock) else LazyBlock(partial(copy.deepcopy, block), 0)
        for name, block in blocks.items()
    }
    training = Training(loss, optimizer, options, plan.options.staleness.correction)
    return measure_stages(copies, cut, sample, training, recompute=True, schedule=plan.schedule)


def _modes(plans: Plans, plain: PipelinePlan) -> tuple[dict[int, list[RecomputeMode]], list[str]]:
    """Return what each stage may recompute, and why not more.

    A stage whose backwards follow their forwards at once has nothing to recompute as a whole. Blocks of a stage that
    share a parameter are not recomputed one by one, as that adds up its gradient in another order.
    """
    found: dict[int, list[RecomputeMode]] = {index: ["none"] for index in range(plain.schedule.num_stages)}
    refused = ["block: blocks of one stage share parameters"] if plain.inside else []
    for mode in ("stage", "block") if not plain.inside else ("stage",):
        try:
            made = plans(mode)
        except PenstockError as error:
            refused.append(f"{mode}: {str(error).splitlines()[0]}")
            continue
        again = set[int]().union(*(plan.schedule.recomputed for plan in made)) if mode == "stage" else found
        for index in again:
            found[index].append(mode)
    return found, refused


def _groups(schedule: Schedule) -> list[set[int]]:
    """Return the stages that choose together: those of a rank, and of ranks that hold copies of these."""
    groups: list[set[int]] = []
    for rank in range(schedule.ranks):
        own = {stage.index for stage in schedule.on_rank(rank)}
        groups = [*(g for g in groups if not g & own), own.union(*(g for g in groups if g & own))]
    return groups


def _ways(group: set[int], modes: Mapping[int, Sequence[RecomputeMode]], cost: Sequence[float]) -> list[_Way]:
    """Return the ways of a group but the first, which recomputes nothing; those with the least extra forwards first.

    Of two that take the same, a stage is recomputed as a whole, which can be done while its gradient is on its way.
    """
    indices = sorted(group)
    if len(indices) <= _MOST_STAGES:
        found = [dict(zip(indices, way, strict=True)) for way in product(*(modes[index] for index in indices))]
    else:
        found = [
            {index: mode if mode in modes[index] else "none" for index in indices}
            for mode in ("none", "stage", "block")
        ]

    def work(way: _Way) -> tuple[float, int]:
        again = [index for index, mode in way.items() if mode != "none"]
        return sum(cost[index] for index in again), sum(way[index] == "block" for index in again)

    return sorted((way for way in found if set(way.values()) != {"none"}), key=work)


def _peaks(plans: Sequence[PipelinePlan], sizes: Mapping[int, StageBytes]) -> tuple[int, ...]:
    """Return the most bytes of every rank, of all pipelines and plans."""
    most = [0] * plans[0].schedule.ranks
    for plan in plans:
        options, proof = plan.options, plan.proof
        recompute = options.recompute
        asked = MemoryOptions(
            options.data_parallel.width,
            options.precision.low is not None,
            frozenset(index for index in range(proof.schedule.num_stages) if recompute.of(index) == "block"),
            options.staleness.spec,
            proof.steady_from + SETTLED,
            combine=options.data_parallel.combine,
            averages=options.update.ema_decay is not None,
        )
        for (_, rank), peak in peak_bytes(proof, sizes, asked).items():
            most[rank] = max(most[rank], peak)
    return tuple(most)


def _too_little(rank: int, least: int, limit: float, refused: Sequence[str], saves: Savings) -> ConfigError:
    more = f" (not possible here: {'; '.join(refused)})" if refused else ""
    return ConfigError(
        f"recompute=auto: rank {rank} takes at least {human_bytes(least, 2)}, but memory_limit is "
        f"{human_bytes(limit, 2)}; raise it, or take more stages, smaller microbatches or another method{more}. "
        f"{saves.rest(rank)}"
    )


class Savings:
    """The most that recomputing stages can save on a rank: what their microbatches in flight hold less.

    A stage that is recomputed as a whole reads its weights at other moments, so where these are gathered they count,
    too.

    Args:
        plan: that recomputes nothing.
        sizes: of its stages.
    """

    def __init__(self, plan: PipelinePlan, sizes: Mapping[int, StageBytes]) -> None:
        self._schedule, self._sizes = plan.schedule, sizes
        self._in_flight = {stage: _most_in_flight(plan.proof, stage) for stage in plan.schedule.stages}

    def most(self, way: Mapping[int, RecomputeMode], rank: int) -> int:
        """Return the bytes."""
        saved = 0
        for stage in self._schedule.on_rank(rank):
            mode = way.get(stage.index, "none")
            if mode != "none":
                kept = HeldKind.INPUT if mode == "stage" else HeldKind.SAVED
                less = (max(p[HeldKind.GRAPH], p[HeldKind.HALVED]) - p[kept] for p in self._passes(stage))
                saved += self._in_flight[stage] * max(0, *less)
                if mode == "stage" and self._schedule.sharding.level is Level.FULL:
                    saved += self._sizes[stage.index].version
        return saved

    def rest(self, rank: int) -> str:
        """Say what a rank holds however much is recomputed, and what would make it less."""
        stages = self._schedule.on_rank(rank)
        inputs = sum(self._in_flight[stage] * max(_least(p, _KEPT) for p in self._passes(stage)) for stage in stages)
        once = max(_least(p, _AGAIN) for stage in stages for p in self._passes(stage))
        said = f"Of that are {human_bytes(inputs)} inputs of microbatches in flight, and {human_bytes(once)} what a "
        said += "backward of one has made again: smaller microbatches take less of both"
        moments = sum(max(self._sizes[stage.index].optimizer) for stage in stages)
        if not moments:
            return said
        divided = self._schedule.sharding.level is not Level.NONE
        how = "more width divides it further" if divided else "sharding divides it among parallel pipelines (width)"
        return f"{said}; {human_bytes(moments)} is the optimizer's state: {how}"

    def _passes(self, stage: Stage) -> list[Mapping[HeldKind, int]]:
        """Return what passes of a microbatch take on a stage; of each slice where sequences come in slices."""
        sizes = self._sizes[stage.index]
        return [each.passes for each in sizes.slices] or [sizes.passes]


def _least(passes: Mapping[HeldKind, int], kinds: Sequence[HeldKind]) -> int:
    """Return the least bytes of some kinds, of those that were measured."""
    return min((passes[kind] for kind in kinds if kind in passes), default=0)


def _most_in_flight(proof: Proof, stage: Stage) -> int:
    """Return the most microbatches of a stage between forward and the end of their backward, in a span."""
    held = most = 0
    for action in actions_of(proof.schedule, stage.rank, proof.steady_from + SETTLED):
        for p in passes(action):
            if p.stage == stage and p.op in (Op.F, Op.B, Op.W):
                held += p.unit.count if p.op is Op.F else -p.unit.count
                most = max(most, held)
    return most
