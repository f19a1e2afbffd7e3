"""Plays a span at given costs: its timeline, interval by interval."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from penstock.gc_pause import no_collection
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.ir.op_table import OPS
from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, Unit, format_unit
from penstock.schedule.machine.instructions import Lowered, Route
from penstock.schedule.proof.activations import Activations
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs
from penstock.timeline import Bubble, Interval, Timeline, Waiting


@no_collection
def play(
    lowered: Lowered, costs: Costs, batches: int, rejected: Collection[int] = ()
) -> tuple[Timeline, tuple[Fraction, ...]]:
    """Play a span without checking the schedule: its timeline, and the most activations that each rank holds in it."""
    recorder = _Recorder(lowered.schedule, share_of(costs.left))
    machine = costs.machine(lowered, recorder.observe, recorder.observe_message)
    machine.play(batches, rejected)
    if machine.copies_beside:
        recorder.sort_samples()
    return recorder.timeline, recorder.activations.peaks()


def predict(lowered: Lowered, costs: Sequence[Costs], batches: int = 1) -> list[Bubble]:
    """Return makespan and idle times of a span for each of several costs, without a timeline.

    The schedule is compiled once (`penstock.schedule.compiled`), and every number is that of the timeline that `play`
    makes, to the last bit. What cannot be compiled is played.

    Args:
        lowered: the schedule with its messages.
        costs: times of every stage, several times.
        batches: length of the span; the pipeline starts empty and is drained.

    Raises:
        ScheduleError: some ranks would wait for ever.
    """
    try:
        if any(each.slow_down(lowered.schedule.ranks) for each in costs):
            raise NotCompiledError("ranks slow each other down")
        return CompiledSpan(lowered, batches, any(each.transfer for each in costs)).bubbles(costs)
    except NotCompiledError:
        return [play(lowered, each, batches)[0].bubble() for each in costs]


def share_of(left: float) -> Fraction:
    """Return what is left of a microbatch's activations between I and W, to be counted exactly."""
    return Fraction(left).limit_denominator(1000)


class _Recorder:
    """Turns what the machine does into intervals and memory samples."""

    def __init__(self, schedule: Schedule, left: Fraction) -> None:
        self.m = schedule.microbatches
        self.timeline = Timeline(schedule.ranks, unit="")
        self.activations = Activations(schedule, left)
        self.samples = [self.timeline.memory.setdefault((r, "activations"), []) for r in range(schedule.ranks)]

    def observe(self, rank: int, action: Action, t: int, start: float, end: float) -> None:
        """Record one action that is not a message, or what it takes to send one."""
        if action.op is Op.SEND:
            label = f"send {action.payload} {_units(action.unit, t * self.m)}"
            self.timeline.intervals.append(Interval(rank, "compute", start, end, Waiting.POST, label))
            return
        self.timeline.intervals.append(_interval(rank, action, t, self.m, start, end))
        for time, amount in zip((start, end), self.activations.change(action), strict=True):
            if amount:
                held = self.activations.add(rank, amount)
                self.samples[rank].append((time, held / self.activations.scale))

    def sort_samples(self) -> None:
        """Count what is held in the order of time: a copy to the host ends, and frees memory, after later actions."""
        scale = self.activations.scale
        for rank, samples in enumerate(self.samples):
            held = [round(share * scale) for _, share in samples]
            changes = [now - before for before, now in pairwise([0, *held])]
            in_time = sorted(zip((time for time, _ in samples), changes, strict=True), key=lambda change: change[0])
            held = list(accumulate(change for _, change in in_time))
            samples[:] = [(time, share / scale) for (time, _), share in zip(in_time, held, strict=True)]
            self.activations.peak[rank] = max([self.activations.peak[rank], *held])

    def observe_message(self, route: Route, first: int, posted: float, arrived: float) -> None:
        """Record a message."""
        source, (index, direction, target), payload = route.source.rank, route.target, route.payload.value
        unit = first if route.count == 1 and not route.slice else format_unit(Unit(first, route.count, route.slice))
        lane, label = f"{payload} {source}>{target}", f"{payload} {unit}"
        self.timeline.intervals.append(
            Interval(source, lane, posted, arrived, "SEND", label, index, direction, -1, -1, "", first, 0, target)
        )


def _interval(rank: int, action: Action, t: int, m: int, start: float, end: float) -> Interval:
    op, (index, direction, _), unit, reads, parts, *_ = action
    if not parts and unit.count == 1 and unit.slice is None and unit.kind is Kind.TRAIN and reads is not None:
        k, version = unit.first + t * m, max(reads.versions[0] + t, 0)
        return Interval(
            rank, "compute", start, end, op.value, f"{op.value}{k}", index, direction, k // m, version, "", k
        )
    batch = unit.first + t if unit.kind is Kind.BATCH else unit.first // m + t
    version = batch + 1 if op is Op.STEP else -1 if reads is None else max(reads.versions[0] + t, 0)
    lane = "compute" if parts else OPS[op].lane.value
    k = -1 if unit.kind is Kind.BATCH or parts else unit.first + t * m
    together = tuple([_interval(rank, part, t, m, start, end) for part in parts])
    label = "+".join(part.label for part in together) if parts else _label(action, t, m)
    return Interval(rank, lane, start, end, op.value, label, index, direction, batch, version, "", k, 0, -1, together)


def _label(action: Action, t: int, m: int) -> str:
    """What to print: the operation and its unit, microbatches counted through the span."""
    unit = action.unit
    if unit.kind is Kind.BATCH:
        return f"{action.op.value}{unit.first + t}"
    return action.op.value + _units(unit, t * m)


def _units(unit: Unit, offset: int) -> str:
    """What to print of microbatches, counted through the span."""
    return format_unit(unit._replace(first=unit.first + offset))
