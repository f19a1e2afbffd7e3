"""Play a schedule with costs: the predicted timeline and its figures."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.schedule.activations import Activations
from penstock.schedule.check import Proof, check
from penstock.schedule.collection import no_collection
from penstock.schedule.ir import Action, Kind, Op, Payload, Schedule, format_unit, since
from penstock.schedule.lowered import Lowered
from penstock.schedule.machine import Machine
from penstock.schedule.ops import OPS
from penstock.simulate.costs import Costs
from penstock.timeline import Bubble, Interval, Timeline


@dataclass(frozen=True)
class Simulation:
    """A predicted run.

    Attributes:
        timeline: every interval, and activations over time.
        bubble: its figures.
        messages: activation and gradient sends of all batches.
        activations: per rank, the most microbatches in flight, in units of its whole share.
        versions: per rank, the most weight versions alive at once in a span of any length: what a run provides for.
    """

    timeline: Timeline
    bubble: Bubble
    messages: int
    activations: tuple[float, ...]
    versions: tuple[int, ...]

    def figures(self) -> dict[str, object]:
        """The figures under the names that `penstock simulate --json` prints."""
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
        }


def simulate_schedule(schedule: Schedule | Proof, costs: Costs, batches: int = 1) -> Simulation:
    """Predict a span of `batches` batches.

    Args:
        schedule: a schedule (it is checked first) or its proof.
        costs: times of every cut.
        batches: length of the span; the pipeline starts empty and is drained.

    Raises:
        ScheduleError: the schedule is not legal.
        ConfigError: `batches` is below 1, or the costs are for another number of stages.
    """
    proof = schedule if isinstance(schedule, Proof) else check(schedule)
    if batches < 1:
        raise ConfigError(f"batches must be at least 1, got {batches}")
    if len(costs.stages) != proof.schedule.cuts:
        raise ConfigError(f"the costs describe {len(costs.stages)} stages, the schedule has {proof.schedule.cuts}")
    timeline, activations = play(proof.lowered, costs, batches)
    return Simulation(
        timeline,
        timeline.bubble(),
        count_messages(proof.lowered, batches),
        activations,
        tuple(proof.versions_on(rank) for rank in range(proof.schedule.ranks)),
    )


@no_collection
def play(lowered: Lowered, costs: Costs, batches: int) -> tuple[Timeline, tuple[float, ...]]:
    """The timeline of a span and the peak activations per rank, without checking the schedule."""
    recorder = _Recorder(lowered.schedule)
    machine = Machine(lowered, costs.duration, costs.latency, recorder.observe)
    machine.play(batches)
    return recorder.timeline, tuple(map(float, recorder.activations.peaks()))


def steady_bubble(lowered: Lowered, costs: Costs, batches: int) -> float:
    """The bubble of one more batch in a long span: idle / total of what batch `batches` adds to the makespan."""
    shorter, longer = (play(lowered, costs, n)[0].bubble() for n in (batches, batches + 1))
    total = len(longer.busy) * (longer.makespan - shorter.makespan)
    return 1 - (sum(longer.busy) - sum(shorter.busy)) / total if total else 0.0


def count_messages(lowered: Lowered, batches: int) -> int:
    """Activation and gradient sends of a span."""
    m = lowered.schedule.microbatches
    return sum(
        max(batches - max(since(i.action.unit, m), 0), 0) if part == 0 else batches >= since(i.action.unit, m)
        for program in lowered.programs
        for part, instructions in enumerate(program)
        for i in instructions
        if i.action.op is Op.SEND and i.action.payload in (Payload.ACTIVATION, Payload.GRADIENT)
    )


class _Recorder:
    """Turns what the machine does into intervals and memory samples."""

    def __init__(self, schedule: Schedule) -> None:
        self.m = schedule.microbatches
        self.timeline = Timeline(schedule.ranks, unit="")
        self.activations = Activations(schedule)
        self.samples = [self.timeline.memory.setdefault((r, "activations"), []) for r in range(schedule.ranks)]

    def observe(self, rank: int, action: Action, t: int, start: float, end: float) -> None:
        """Record one action that is not a message."""
        self.timeline.intervals.append(_interval(rank, action, t, self.m, start, end))
        for time, amount in zip((start, end), self.activations.change(action), strict=True):
            if amount:
                held = self.activations.add(rank, amount)
                self.samples[rank].append((time, held / self.activations.scale))


def _interval(rank: int, action: Action, t: int, m: int, start: float, end: float) -> Interval:
    op, (cut, replica, _), unit, reads, parts, *_ = action
    if not parts and unit.count == 1 and unit.slice is None and unit.kind is Kind.TRAIN and reads is not None:
        k, version = unit.first + t * m, max(reads.versions[0] + t, 0)
        label = f"{op.value}{k}"
        return Interval(rank, "compute", start, end, op.value, label, cut, replica, k // m, version, "", k)
    batch = unit.first + t if unit.kind is Kind.BATCH else unit.first // m + t
    version = batch + 1 if op is Op.STEP else -1 if reads is None else max(reads.versions[0] + t, 0)
    lane = "compute" if parts else OPS[op].lane.value
    k = -1 if unit.kind is Kind.BATCH or parts else unit.first + t * m
    return Interval(rank, lane, start, end, op.value, _label(action, t, m), cut, replica, batch, version, "", k)


def _label(action: Action, t: int, m: int) -> str:
    """What to print: the operation and its unit, microbatches counted through the span."""
    if action.parts:
        return "+".join(_label(p, t, m) for p in action.parts)
    unit = action.unit
    if unit.kind is Kind.BATCH:
        return f"{action.op.value}{unit.first + t}"
    return action.op.value + format_unit(unit._replace(first=unit.first + t * m))
