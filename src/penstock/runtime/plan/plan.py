"""The plan of a pipeline: what follows from its blocks, its schedule and its options, checked before anything is made.

A plan needs no processes, and no modules where blocks are lazy. So `penstock train` makes it before it starts its
workers, and `Pipeline`, `penstock compare` and `penstock verify` make the same one: each check stands here once. They
run in one order, cheap ones first. Options by themselves have been checked when they were made; then come the number of
blocks, the schedule as it is built, and what goes with what. An `UnprovenPlan` has passed all of these; proofs come
last, and with them the search for the smallest legal number of microbatches where one fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.errors import ConfigError, ScheduleError
from penstock.options.all_options import PipelineOptions
from penstock.partition.aliased_parameters import check_shared_memory
from penstock.partition.blocks import check_enough, cut_blocks
from penstock.partition.emulated_delays import BlockDelays, resolve_both
from penstock.partition.tied import Tie, find_ties
from penstock.runtime.plan.actions_for_options import (
    GivenSchedule,
    adapting,
    additions,
    check_limits_something,
    check_ranks,
    check_same_places,
    prove_with_all_actions,
    schedule_of,
    with_all_actions,
    with_own_sharding,
    without_own_sharding,
)
from penstock.runtime.plan.capabilities import (
    check_captured,
    check_compiled,
    check_correction,
    check_divided,
    check_recomputed_blocks,
    check_slices,
    check_whole_model,
)
from penstock.runtime.plan.options_equal_on_ranks import common_options
from penstock.runtime.plan.received_schedule import KnownSchedule, described, identity
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import InFlightChoice
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.proof.proof import Proof
from penstock.weights.corrections.base import Correction


@dataclass(frozen=True)
class UnprovenPlan:
    """A plan that has passed every check but the proof of its schedule.

    Attributes:
        options: of the pipeline.
        given: the schedule as it was asked for.
        schedule: what ranks run: `given` with every action that the options need, its fused passes taken apart.
        parts: names of the blocks of each stage.
        ties: parameters that stages share.
        inside: parameters that blocks of one stage share: name -> name of the one that it is the same as.
        delays: of every block, in updates.
        backward_delays: the same in backwards; None where they are those of forwards.
        auto: what the schedule was asked for with, if its microbatches in flight are still to be found, or have been,
            for links that take time.
    """

    options: PipelineOptions
    given: GivenSchedule
    schedule: Schedule
    parts: list[list[str]]
    ties: Sequence[Tie]
    inside: Mapping[str, str]
    delays: BlockDelays
    backward_delays: BlockDelays | None
    auto: ScheduleRequest | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        blocks: Mapping[str, Any],
        given: GivenSchedule,
        options: PipelineOptions,
        known: KnownSchedule | None = None,
    ) -> UnprovenPlan:
        """Check everything but the proof.

        Args:
            blocks: the model, by name; of lazy blocks that do not say their cost, it is counted without memory (torch's
                meta device).
            given: the schedule.
            options: of the pipeline.
            known: what another rank has built of it, and checked there; built here if None.

        Raises:
            ConfigError: model, schedule and options do not fit.
            CapabilityError: the runtime does not offer it.
            ScheduleError: the schedule cannot be built, or cannot have the recomputes that are wanted.
        """
        options = with_own_sharding(given, options)
        given = _as_known(without_own_sharding(given, options), known, len(blocks))
        if isinstance(given, ScheduleRequest):
            check_enough(blocks, given.stages)  # every rank holds a stage, so this much is known before it is built
        plain, staleness, tied = schedule_of(given), options.staleness, options.partition.tied or {}
        check_ranks(given, plain)
        parallel, recompute = options.data_parallel, options.recompute
        recompute.check_stages(plain.num_stages)
        balance, cut, by = options.partition.balance, options.partition.cut, options.partition.by
        check_whole_model(blocks, plain, options)
        check_divided(plain, len(blocks), balance)
        if balance is None and cut is None and known is not None:
            balance = known.balance  # costs are counted, or measured, once
        parts = cut_blocks(blocks, plain.num_stages, balance, cut, by)
        check_shared_memory(blocks)
        ties, inside = find_ties(blocks, parts, tied)
        fault = parallel.combine.fault(
            plain,
            parallel.width,
            staleness.spec.name,
            tied=bool(ties),
            fast=parallel.fast,
            delayed=staleness.chosen,
        )
        if fault is not None:
            raise ConfigError(fault)
        check_slices(plain, recompute, options.partition.slicing)
        check_compiled(plain, options.run.compile, staleness.backward_delays is not None)
        again = recompute.modes != ("none",)
        delays, backward = resolve_both(staleness.delays, staleness.backward_delays, blocks, tied, plain, again)
        schedule = _whole(given, options, ties, known)
        check_captured(schedule, options)
        check_recomputed_blocks(schedule, recompute)
        check_correction(schedule, staleness.correction, options.precision.low, recompute, tied=bool(ties))
        auto = adapting(given, options)
        check_limits_something(auto, options)
        places = options, given, schedule, parts, ties, inside, delays, backward
        return UnprovenPlan(*places, auto=auto)

    def prove(self) -> PipelinePlan:
        """The plan with the proof of its schedule.

        Raises:
            ScheduleError: the schedule is wrong; where only m is too small, the message names the smallest legal m.
        """
        given = self.given
        plain = given.schedule if isinstance(given, ScheduleRequest) else given
        try:
            proof = prove_with_all_actions(plain, self.options, stages_of(self.ties))
        except ScheduleError:
            if isinstance(given, ScheduleRequest):
                given.prove()  # raises, with the smallest legal m, if what was asked for is wrong by itself
            raise
        return self.proven(proof)

    def proven(self, proof: Proof) -> PipelinePlan:
        """The plan with a proof of its schedule that is there already."""
        return PipelinePlan(**self._values() | {"schedule": proof.schedule}, proof=proof)

    def followed_by(
        self, given: GivenSchedule, correction: Correction | None, known: KnownSchedule | None = None
    ) -> UnprovenPlan:
        """The plan under which the same stages go on with another schedule.

        Args:
            given: the schedule.
            correction: of its method.
            known: as of `of`.

        Raises:
            ConfigError: stages cannot go on under another schedule, or not under this one.
            CapabilityError: the runtime does not offer it.
        """
        combine = self.options.data_parallel.combine
        if combine.apart:
            raise ConfigError(
                f"parallel pipelines with combine={combine.kind} cannot go on under another method: they have "
                "weights of their own; leave combine out"
            )
        backward = self.delays if self.backward_delays is None else self.backward_delays
        if any((*self.delays.by_block.values(), *backward.by_block.values())):
            raise ConfigError(
                "a pipeline with delays of its own choice cannot go on under another method; leave delays out"
            )
        given = _as_known(without_own_sharding(given, self.options), known, sum(map(len, self.parts)))
        options = self.options.changed(correction=correction)
        schedule = _whole(given, options, self.ties, known)
        check_same_places(self.schedule, schedule)
        check_compiled(schedule, options.run.compile, backward_delays=False)
        check_captured(schedule, options)
        recompute = options.recompute
        check_recomputed_blocks(schedule, recompute)
        check_correction(schedule, correction, options.precision.low, recompute, tied=bool(self.ties))
        auto = adapting(given, options)
        return UnprovenPlan(**self._values() | {"options": options, "given": given, "schedule": schedule, "auto": auto})

    def adapted(self, choice: InFlightChoice, window: int, known: KnownSchedule | None = None) -> UnprovenPlan:
        """The plan under which the same stages go on, with numbers in place of `auto`.

        Args:
            choice: of the microbatches in flight.
            window: messages that may be outstanding on a lane.
            known: as of `of`.
        """
        assert self.auto is not None
        request = replace(choice.applied(self.auto), window=window)
        following = self.followed_by(request, self.options.staleness.correction, known)
        return replace(following, auto=self.auto)

    @property
    def description(self) -> str:
        """Name, rule and sizes, for messages."""
        return f"{described(self.given)}, {sum(map(len, self.parts))} blocks"

    @property
    def common_options(self) -> dict[str, str]:
        """The options that must be alike on all ranks: name -> text."""
        sharding = additions(self.plain, self.options, stages_of(self.ties))["sharding"]
        return common_options(self.options, self.ties, self.delays, self.backward_delays, sharding)

    @property
    def identity(self) -> str:
        """What is the same on two ranks if they have the same plan."""
        added = additions(self.plain, self.options, sorted(stages_of(self.ties)))
        return f"{identity(self.given)}\n{added}\n{self.common_options}\n{self.parts}\n{self.auto is not None}"

    @property
    def plain(self) -> Schedule:
        """The schedule as it was asked for, without what the options add."""
        return schedule_of(self.given)

    @property
    def divisor(self) -> float:
        """c, which losses are divided by: in low precision a power of two, so that the gradient S / c is not rounded.

        S is the loss scale.
        """
        parallel, given = self.options.data_parallel, self.options.precision.divisor
        pipelines = 1 if parallel.combine.apart else parallel.width
        divisor = float(pipelines * self.schedule.microbatches if given is None else given)
        return divisor if self.options.precision.low is None else 2.0 ** round(math.log2(divisor))

    def _values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(UnprovenPlan)}


@dataclass(frozen=True)
class PipelinePlan(UnprovenPlan):
    """A plan that has passed every check.

    Attributes:
        proof: of `schedule`.
    """

    proof: Proof

    @classmethod
    def make(cls, blocks: Mapping[str, Any], given: GivenSchedule, options: PipelineOptions) -> PipelinePlan:
        """Check everything, the proof included.

        Args:
            blocks: the model, by name; of lazy blocks that do not say their cost, it is counted without memory (torch's
                meta device).
            given: the schedule.
            options: of the pipeline.

        Raises:
            ConfigError: model, schedule and options do not fit.
            CapabilityError: the runtime does not offer it.
            ScheduleError: the schedule is wrong.
        """
        return UnprovenPlan.of(blocks, given, options).prove()


def stages_of(ties: Sequence[Tie]) -> set[int]:
    """The stages that share parameters."""
    return {index for tie in ties for index in tie.stages}


def _as_known(given: GivenSchedule, known: KnownSchedule | None, blocks: int) -> GivenSchedule:
    """The schedule as it was asked for, which is not built here if it is known.

    Raises:
        OtherScheduleError: another one is known.
    """
    if known is None:
        return given
    known.check_asked(given, blocks)
    return known.given_as(given) if isinstance(given, ScheduleRequest) else given


def _whole(
    given: GivenSchedule, options: PipelineOptions, ties: Sequence[Tie], known: KnownSchedule | None
) -> Schedule:
    """The schedule with every action that the options need."""
    tied = stages_of(ties)
    if known is None:
        return with_all_actions(given, options, tied)
    return known.whole_from(lambda: with_all_actions(given, options, tied))
