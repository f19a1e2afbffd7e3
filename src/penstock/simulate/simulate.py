"""Predict the run of a schedule at given costs: its figures, and its timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal

from penstock.checks import in_short
from penstock.errors import ConfigError, ScheduleError
from penstock.idle_time import TimeSplit, split_time
from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.array_schedules.array_peak_activations import most_held_in_arrays
from penstock.schedule.array_schedules.array_send_windows import lower_arrays_freely
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.ir.schedule import WINDOW, Op, Payload, Schedule
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.send_window_search import lower_freely, unlimited
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.proof.activations import most_activations
from penstock.schedule.proof.check import check, too_narrow
from penstock.schedule.proof.proof import Proof
from penstock.schedule.rank_schedule import RankProof
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, check_links
from penstock.simulate.message_counts import count_messages, receive_buffers
from penstock.simulate.missing_updates import missing_updates
from penstock.simulate.play import play, share_of
from penstock.simulate.sharding_overlap import ShardFigures, shard_figures
from penstock.timeline import Bubble, Timeline

Window = int | Literal["unlimited"]
"""Messages that may be outstanding on a lane."""


@dataclass(frozen=True)
class Simulation:
    """The run of a schedule that a simulation predicts.

    Attributes:
        lowered: the schedule with its messages, as it was played.
        bubble: how much of it ranks stand idle.
        messages: the number of activations and gradients sent in all batches, recomputed activations included. Sums of
            gradients, decisions, and what is sent again after a rejected update are not counted.
        volume: what they carry, in outputs of a stage for one microbatch.
        window: the number of messages that may be outstanding on a connection, on either side.
        receive_buffers: per rank, the most messages that it has posted a RECV for and not used yet, in outputs of a
            stage for one microbatch; a sender keeps up to `window` more on each connection until they are on their way.
        make_timeline: plays the span for `timeline`.
        make_split: finds `time_split` without a timeline; None where only that can tell.
        parked: sends of parked activations, there and back, of all batches.
        shards: of a sharded schedule on a network, what it gathers and reduces, and what that costs.
        activations: per rank, the most microbatches in flight in a span of any length, in units of its whole share.
        versions: per rank, the most weight versions alive at once in a span of any length. Both are what a run provides
            for; how many activations this span holds, and when, is in the timeline.
        delays: per kind of pass (forward, recompute, backward) and rank, updates between the version read and the
            version updated, in the mean over a batch in the steady state; None where a rank recomputes nothing.
        missing_updates: per rank, the most updates of another pipeline that a forward lacks, HetPipe's s_global; None
            unless parallel pipelines agree now and then.
    """

    lowered: Lowered
    bubble: Bubble
    messages: int
    volume: float
    activations: tuple[float, ...]
    versions: tuple[int, ...]
    delays: Mapping[str, tuple[float | None, ...]]
    window: Window
    receive_buffers: tuple[float, ...]
    make_timeline: Callable[[], Timeline] = field(repr=False, compare=False)
    parked: int = 0
    shards: ShardFigures | None = None
    make_split: Callable[[], TimeSplit] | None = field(default=None, repr=False, compare=False)
    missing_updates: tuple[int, ...] | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """Every interval, and activations over time; played at the first look, as the figures do not take it."""
        return self.make_timeline()

    @cached_property
    def time_split(self) -> TimeSplit:
        """How long every rank works, and why it stands idle the rest of the time."""
        return split_time(self.timeline) if self.make_split is None else self.make_split()

    def __repr__(self) -> str:
        """Return the schedule, and the figures that matter most."""
        of = self.bubble
        return f"<Simulation of {self.lowered.schedule!r}: makespan {of.makespan:g}, bubble {of.bubble:.4f}>"

    def figures(self) -> dict[str, object]:
        """Return the figures under the names that `penstock simulate --json` prints."""
        return {
            "makespan": self.bubble.makespan,
            "rank_span": self.bubble.rank_span,
            "ideal": self.bubble.ideal,
            "bubble": self.bubble.bubble,
            "bubble_of_ideal": self.bubble.bubble_of_ideal,
            "rank_span_bubble": self.bubble.rank_span_bubble,
            "peak_activations": list(self.activations),
            "live_versions": list(self.versions),
            "messages": self.messages,
            "volume": self.volume,
            "parked": self.parked,
            "window": self.window,
            "receive_buffers": list(self.receive_buffers),
            "delays": {what: list(delays) for what, delays in self.delays.items()},
            **({} if self.missing_updates is None else {"missing_updates": list(self.missing_updates)}),
            **({} if self.shards is None else {"sharding": {k: list(v) for k, v in self.shards.per_rank().items()}}),
        }


def simulate_schedule(
    schedule: Schedule | Proof,
    costs: Costs,
    batches: int = 1,
    rejected: Collection[int] = (),
    window: Window | None = None,
) -> Simulation:
    """Predict a span of `batches` batches.

    Args:
        schedule: a schedule (it is checked first) or its proof.
        costs: times of every stage.
        batches: length of the span; the pipeline starts empty and is drained.
        rejected: batches whose update is made again, where updates come before the decision of all stages.
        window: messages that may be outstanding on a lane from one rank to another, on either side. If None, as the
            schedule says; where it leaves it open, the least that costs no time at these costs, neither in this span
            nor in a long run. A run of such a schedule takes the least that costs none where messages take no time:
            give `make_schedule` the window found here where they do.

    Raises:
        ScheduleError: the schedule is not legal, or some ranks would wait for ever with this window.
        ConfigError: `batches` or `window` is below 1, or the costs are for another number of stages.
    """
    if isinstance(schedule, RankProof):  # the messages of the other ranks are needed as well
        schedule = schedule.schedule
    proof = schedule if isinstance(schedule, Proof) else check(schedule)
    _check_asked(proof.schedule, costs, batches)
    asked = proof.schedule.window if window is None else window
    span = None if asked is not None else _as_proven(proof, costs, batches)
    lowered = _lower(proof, costs, batches, asked) if span is None else proof.lowered
    activations = _activations_of(proof, costs.left)
    played = rejected or costs.network is not None or costs.slow_down(proof.schedule.ranks)
    played = played or _copies_activations(proof.schedule)  # which are held until their copies end
    bubble = None if played else _compiled(span, lowered, costs, batches)
    timeline: Timeline | None = None
    if bubble is None:
        try:
            timeline, held = play(lowered, costs, batches, rejected)
        except ScheduleError as error:
            raise too_narrow(proof.schedule.name, lowered.window, proof.lowered.window, error) from None
        activations, bubble = tuple(map(max, held, activations)), timeline.bubble()
    drawn, parked = timeline, (Payload.PARKED,)
    splits = isinstance(lowered, ArrayLowered) and not costs.transfer and timeline is None
    return Simulation(
        lowered,
        bubble,
        *count_messages(lowered, batches),
        tuple(map(float, activations)),
        tuple(proof.versions_on(rank) for rank in range(proof.schedule.ranks)),
        _delays_of(proof),
        "unlimited" if asked == "unlimited" else lowered.window,
        receive_buffers(lowered, batches),
        lambda: play(lowered, costs, batches, rejected)[0] if drawn is None else drawn,
        count_messages(lowered, batches, parked)[0],
        None if timeline is None else shard_figures(proof, lowered, costs, batches, timeline, lambda *s: play(*s)[0]),
        (lambda: CompiledSpan(lowered, batches).time_split(costs)) if splits else None,
        missing_updates(proof.schedule),
    )


def _check_asked(schedule: Schedule, costs: Costs, batches: int) -> None:
    if batches < 1:
        raise ConfigError(f"batches must be at least 1, got {batches}")
    if not isinstance(costs, Costs):
        raise ConfigError(f"costs must be a Costs, such as Costs.uniform(plan.schedule); got {in_short(costs)}")
    if len(costs.stages) != schedule.num_stages:
        raise ConfigError(f"the costs describe {len(costs.stages)} stages, the schedule has {schedule.num_stages}")
    check_links(costs.latency, schedule.ranks)


def _compiled(span: CompiledSpan | None, lowered: Lowered, costs: Costs, batches: int) -> Bubble | None:
    """Return the figures of a span without playing it; None where it has to be played."""
    try:
        return (span or CompiledSpan(lowered, batches, bool(costs.transfer))).bubbles([costs])[0]
    except NotCompiledError:
        return None


def _as_proven(proof: Proof, costs: Costs, batches: int) -> CompiledSpan | None:
    """Return the span with the window of the proof, where that is the least that costs no time at these costs, too.

    The proof has looked for it in units of a forward. Times that are all a power of 2 as long, without messages that
    take time, lead to the same window, but that this span must not take longer with it, either.
    """
    schedule, lowered = proof.schedule, proof.lowered
    if not isinstance(lowered, ArrayLowered):
        return None
    examples = lowered.lowering.classes.examples
    factors = {costs.duration(a) / unit_time(a) for a in examples if unit_time(a)}
    others = any(costs.duration(a) for a in examples if not unit_time(a))
    if costs.longest_latency or costs.transfer or others or len(factors) != 1 or math.frexp(min(factors))[0] != 0.5:
        return None
    try:
        span = CompiledSpan(lowered, batches)
        ends = span.ends(costs)
        if not ends.held_up:
            return span
        free = CompiledSpan(lowered.lowering.at(unlimited(schedule, batches)), batches).ends(costs)
    except NotCompiledError:
        return None
    return span if ends.as_early_as(free) else None


def _lower(proof: Proof, costs: Costs, batches: int, window: Window | None) -> Lowered:
    """The schedule with its messages, for a window or the least that costs no time.

    Raises:
        ScheduleError: messages that are used out of order need a larger window.
        ConfigError: the window is no positive whole number.
    """
    if window not in (None, "unlimited") and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ConfigError(f"window must be a whole number of messages, at least 1, or 'unlimited'; got {window!r}")
    if isinstance(proof.lowered, ArrayLowered):
        try:
            if window is None:
                hop = costs.latency, (batches,), costs.transfer
                return lower_arrays_freely(proof.lowered.lowering, costs.duration, *hop)
            if not isinstance(window, str):
                return proof.lowered.lowering.at(window)
        except NotCompiledError:
            pass  # the actions say why
    if window is None:
        narrow = proof.lowered if proof.lowered.window == WINDOW else None
        return lower_freely(proof.schedule, costs.duration, costs.latency, (batches,), narrow, costs.transfer)
    if window == "unlimited":
        return lower(proof.schedule, window=unlimited(proof.schedule))
    try:
        return lower(proof.schedule, window=window)
    except ScheduleError as error:
        raise too_narrow(proof.schedule.name, window, proof.lowered.window, error) from None


def _activations_of(proof: Proof, left: float) -> tuple[Fraction, ...]:
    """Those of a span of any length, where `left` of a microbatch's activations is left between I and W."""
    if left == 1:
        return proof.activations
    if isinstance(proof.schedule, ArraySchedule):
        return tuple(most_held_in_arrays(proof.schedule, proof.steady_from + 2, share_of(left)))
    return most_activations(proof.schedule, proof.steady_from + 1, share_of(left))


def _copies_activations(schedule: Schedule) -> bool:
    """Whether activations are copied to the host."""
    if isinstance(schedule, ArraySchedule):  # arrays copy nothing
        return False
    actions = (action for program in schedule.programs for action in program.period)
    return any(action.op is Op.OFFLOAD and action.peer is None for action in actions)


def _delays_of(proof: Proof) -> dict[str, tuple[float | None, ...]]:
    """Find the delays of the passes on each rank, mean over its stages."""

    def mean(values: Sequence[float | None]) -> float | None:
        found = [value for value in values if value is not None]
        return sum(found) / len(found) if found else None

    facts = [[proof.stages[n] for n in proof.schedule.on_rank(rank)] for rank in range(proof.schedule.ranks)]
    return {
        "forward": tuple(mean([f.delay.forward for f in here]) for here in facts),
        "recompute": tuple(mean([f.recompute_delay for f in here]) for here in facts),
        "backward": tuple(mean([f.delay.backward for f in here]) for here in facts),
    }
