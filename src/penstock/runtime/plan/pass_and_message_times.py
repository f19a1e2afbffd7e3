"""Measures the first batches of a run: passes of every rank, and messages from SEND to the end of the wait for them.

Only a message that its receiver waited for tells how long it was under way; of another one, which lay ready, the pass
that takes it says how long at most. A lane counts with the median of the first, unless a quarter of the others were
faster: then those that were waited for are exceptions, such as where a process had lost its core for a while. A lane
that nobody waited for counts as 0, as more microbatches in flight could bring nothing there. At most 16 messages of
each kind are told of a lane, so what ranks tell each other does not grow with the batch.

Stage c lies on rank c mod p: that is a chain, or the chunks of interleaved 1F1B, whose last rank sends to the first. Or
stages lie on a V: those from p on on the ranks from the last to the first, so both kinds of messages go both ways.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.trace_recorder import Recorder
from penstock.schedule.ir.rank_numbers import RankNumbers
from penstock.schedule.ir.schedule import Payload
from penstock.simulate.least_in_flight import RankTimes
from penstock.timeline import Interval, Waiting

_PASSES = ("F", "B", "I", "W", "R")
_TAKES = {"F": (Payload.ACTIVATION, -1), "B": (Payload.GRADIENT, 1), "I": (Payload.GRADIENT, 1)}  # from which rank
_MOST = 16  # messages of a lane
_ACTIVATIONS = "activations"


class Measured(NamedTuple):
    """The times of a pipeline in seconds, those of the slowest one where there are several.

    Attributes:
        times: of a microbatch on each rank.
        hops: from each rank but the last, the time of an activation there and of a gradient back.
        nbytes: of the most activations that each rank has held.
        around: with several chunks on a rank, the same from the last rank to the first.
        each: bytes that a microbatch adds to them on each rank, between its forward and its backward, or between the
            halves of that; empty if unknown.
    """

    times: tuple[RankTimes, ...]
    hops: tuple[tuple[float, float], ...]
    nbytes: tuple[int, ...]
    around: tuple[float, float] = (0.0, 0.0)
    each: tuple[int, ...] = ()

    @property
    def message(self) -> float:
        """The longest time of a message."""
        return max(time for hop in (*self.hops, self.around) for time in hop)

    @property
    def microbatch(self) -> float:
        """The longest time that a rank works for a microbatch."""
        return max(here.total for here in self.times)


def measure_rank(
    recording: Mapping[str, Any], batches: range, numbers: RankNumbers, *, folded: bool = False
) -> dict[str, Any]:
    """Return what one rank has measured, as plain values.

    Args:
        recording: of the rank (`penstock.comm.core.trace_recorder.Recorder.recording`).
        batches: counted from the start of training; the first one of each span, which fills the pipeline, is left out
            where others follow it.
        numbers: of all ranks.
        folded: stages lie on a V.

    Returns:
        Under "passes" the median seconds of each kind of pass of a microbatch, through all stages of the rank; under
        "nbytes" the peak of activations; under "each" the most of them that a microbatch holds between two passes;
        under "taken" messages: the global rank of the sender, the span, the stage that takes it, what was sent, by when
        it had come, whether somebody waited.
    """
    intervals = sorted((Interval(*interval) for interval in recording["intervals"]), key=lambda one: one.start)
    passes = [i for i in intervals if i.is_work and i.what in _PASSES and i.batch in batches]
    spans: dict[int, set[int]] = defaultdict(set)
    for one in passes:
        spans[one.span].add(one.batch)
    first = {span: min(found) for span, found in spans.items() if len(found) > 1}
    counted = [one for one in passes if one.batch != first.get(one.span)]
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in counted:
        seconds[one.what][one.stage].append(one.end - one.start)
    since = min((one.start for one in passes), default=0.0)
    memory = recording["memory"].get(_ACTIVATIONS, ())
    held = [amount for when, amount in memory if when >= since]
    return {
        "passes": {what: sum(map(median, of_stages.values())) for what, of_stages in seconds.items()},
        "taken": _taken(intervals, counted, numbers, folded),
        "nbytes": max(held, default=0),
        "each": max(_changed(memory, passes, "F"), -_changed(memory, passes, "W")),
    }


def _changed(memory: Sequence[tuple[float, int]], passes: Sequence[Interval], what: str) -> int:
    """The bytes by which a kind of pass of a microbatch has changed what is live, through all stages of the rank."""
    times, amounts = [when for when, _ in memory], [0, *(amount for _, amount in memory)]
    changes: dict[int, list[int]] = defaultdict(list)
    for one in passes:
        if one.what == what:
            before, after = bisect_left(times, one.start), bisect_right(times, one.end)
            changes[one.stage].append(amounts[after] - amounts[before])
    return sum(max(found, key=abs) for found in changes.values())


def _taken(
    intervals: Sequence[Interval], passes: Sequence[Interval], numbers: RankNumbers, folded: bool
) -> list[list[Any]]:
    """Messages that passes have taken, from the first to the last; a wait for one is the last before the pass."""
    waits: dict[tuple[int, str], float] = {}
    taken: dict[tuple[str, int, bool], list[list[Any]]] = defaultdict(list)
    counted = set(passes)
    for one in intervals:
        if one.what == Waiting.MESSAGE:
            waits[one.span, one.cause.partition(": ")[2]] = one.end
        elif one.is_work and one.what in _TAKES:
            payload, step = _TAKES[one.what]
            sent = f"{payload} {one.microbatch}"
            end = waits.pop((one.span, sent), None)
            if one not in counted:
                continue
            turn, place = divmod(one.stage + step, numbers.depth)
            pipeline, _ = numbers.place(one.rank)
            sender = numbers.number(pipeline, numbers.depth - 1 - place if folded and turn % 2 else place)
            if sender == one.rank:
                continue
            waited = end is not None
            taken[payload, sender, waited].append(
                [sender, one.span, one.stage, sent, end if waited else one.start, waited]
            )
    return [message for found in taken.values() for message in _spread(found)]


def messages_of_rank(recording: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return how long messages of one rank have been under way: receiver, payload, seconds, whether it was waited for.

    Args:
        recording: of the sender.
        told: by rank, what `measure_rank` has returned there; all on one clock.
    """
    sends = {
        (one.span, one.peer, one.stage, one.label): one.start
        for one in (Interval(*interval) for interval in recording["intervals"])
        if one.what == "SEND"
    }
    found = []
    for receiver, part in enumerate(told):
        for sender, span, stage, sent, end, waited in part["taken"]:
            posted = sends.get((span, receiver, stage, sent)) if sender == recording["rank"] else None
            if posted is not None:
                found.append([receiver, sent.partition(" ")[0], max(end - posted, 0.0), waited])
    return found


def merge(
    told: Sequence[Mapping[str, Any]], messages: Sequence[Iterable[Any]], numbers: RankNumbers, *, folded: bool = False
) -> Measured | None:
    """Return the times of all ranks; None where a rank has measured nothing.

    Args:
        told: by global rank, what `measure_rank` has returned there.
        messages: by global rank, what `messages_of_rank` has returned there.
        numbers: of all ranks; in a pipeline one follows the other.
        folded: stages lie on a V, so that a hop has both kinds of messages both ways, and the slower one counts.
    """
    if any("F" not in part["passes"] for part in told):
        return None
    seconds: dict[tuple[int, int, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for rank, found in enumerate(messages):
        for receiver, payload, time, waited in found:
            seconds[rank, receiver, payload][waited].append(time)
    lanes = {lane: _typical(*found) for lane, found in seconds.items()}

    depth = numbers.depth
    copies = [[told[number] for number in numbers.of_rank(rank)] for rank in range(depth)]

    def slowest(rank: int, *kinds: str) -> float:
        return max(float(sum(part["passes"].get(kind, 0.0) for kind in kinds)) for part in copies[rank])

    def hop(rank: int, behind: int) -> tuple[float, float]:
        ways = list(zip(numbers.of_rank(rank), numbers.of_rank(behind), strict=True))
        back = [(to, since) for since, to in ways]
        there, again = (ways + back, back + ways) if folded else (ways, back)
        activation = max(lanes.get((*way, Payload.ACTIVATION.value), 0.0) for way in there)
        return activation, max(lanes.get((*way, Payload.GRADIENT.value), 0.0) for way in again)

    return Measured(
        tuple(RankTimes(slowest(r, "F"), slowest(r, "R", "B", "I"), slowest(r, "W")) for r in range(depth)),
        tuple(hop(r, r + 1) for r in range(depth - 1)),
        tuple(max(part["nbytes"] for part in parts) for parts in copies),
        (0.0, 0.0) if folded else hop(depth - 1, 0),
        tuple(max(part["each"] for part in parts) for parts in copies),
    )


def _typical(ready: list[float], waited: list[float]) -> float:
    """The time of a message, from those of messages that lay ready, at most, and of those that were waited for."""
    if not waited:
        return 0.0
    return min([median(waited), *sorted(ready)[len(ready) // 4 :][:1]])


def _spread(found: list[Any]) -> list[Any]:
    """At most so many of them, from the first to the last."""
    step = max(len(found) / _MOST, 1.0)
    return [found[int(k * step)] for k in range(min(len(found), _MOST))]


def measured_by_all(recorder: Recorder, grid: RankGrid, batches: range, *, folded: bool) -> Measured | None:
    """Return what all ranks have measured, the same on all of them; all call this together.

    Args:
        recorder: of the rank in this process.
        grid: all ranks, each in a process of its own.
        batches: counted from the start of training.
        folded: stages lie on a V.

    Returns:
        The times; None where a rank has measured nothing.

    Raises:
        TransportError: a peer is dead.
    """
    recording = recorder.recording()
    mine = measure_rank(recording, batches, grid.numbers, folded=folded)
    told = gather_json(mine, "measuring passes", grid.control)
    messages = gather_json(messages_of_rank(recording, told), "measuring messages", grid.control)
    return merge(told, messages, grid.numbers, folded=folded)
