"""The measured timeline says what happened: every action once, in order, with its batch and version, and every wait."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from itertools import pairwise

import pytest
import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.trace_recorder import Recorder
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Kind
from penstock.timeline import Timeline, Waiting
from support.cases import METHODS, Case, make_batches, make_pipeline, mixed
from support.pool import Pool


def measured(group: dist.ProcessGroup | None, case: Case) -> tuple[Timeline, dict[int, float]]:
    pipeline = make_pipeline(case, group)
    list(pipeline.run(make_batches(case)))
    return pipeline.timeline(), pipeline.busy_seconds()


def check_timeline(case: Case, timeline: Timeline) -> None:
    schedule = make_pipeline(case).schedule
    for rank in range(case.depth):
        actions = list(actions_of(schedule, rank, case.spans[0]))
        work = sorted(timeline.work(rank), key=lambda i: i.start)
        assert [i.label for i in work] == [f"{a.op}{a.unit.first}" for a in actions]
        for interval, action in zip(work, actions, strict=True):
            of_batch = action.unit.kind is Kind.BATCH
            assert interval.batch == (action.unit.first if of_batch else action.unit.first // case.m)
            assert interval.version == (action.unit.first + 1 if action.reads is None else action.reads.versions[0])
            assert (interval.stage, interval.lane) == (rank, "compute")
            assert (interval.microbatch, interval.span) == (-1 if of_batch else action.unit.first, 0)
        lane = sorted((i for i in timeline.intervals if i.rank == rank and i.lane == "compute"), key=lambda i: i.start)
        assert all(before.end <= after.start for before, after in pairwise(lane))
        for wait in (i for i in lane if i.what in (Waiting.MESSAGE, Waiting.ROOM)):
            to = "to take " if wait.what == Waiting.ROOM else ""
            assert re.fullmatch(rf"rank {wait.peer}: {to}(activation|gradient) \d+", wait.cause)
            assert abs(wait.peer - rank) == 1
        sends = [i for i in timeline.intervals if i.rank == rank and i.what == "SEND"]
        hops = case.m * case.spans[0]
        activations = [("activation", k, rank + 1) for k in range(hops) if rank < case.depth - 1]
        gradients = [("gradient", k, rank - 1) for k in range(hops) if rank > 0]
        assert sorted((i.label.split()[0], i.microbatch, i.peer) for i in sends) == activations + gradients
        assert all(i.start <= i.end for i in sends)
        kinds = Counter(i.what for i in lane)
        assert kinds[Waiting.POST] == len(sends)
        assert kinds[Waiting.DATA] == (hops if rank in (0, case.depth - 1) else 0)
        assert kinds[Waiting.CALLER] == case.spans[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_action_once_and_every_wait_explained(pool: Pool, method: str) -> None:
    case = Case(method, 3, 2, spans=(4,), skips=())
    for timeline, busy in (measured(None, case), pool.submit(measured, case, ranks=3)[0]):
        check_timeline(case, timeline)
        for rank, seconds in busy.items():
            assert seconds == pytest.approx(sum(i.end - i.start for i in timeline.work(rank)))


def test_all_ranks_gather_the_same_timeline(pool: Pool) -> None:
    case = Case("1f1b", 3, 2, spans=(2,), skips=())
    timelines = [timeline for timeline, _ in pool.submit(measured, case, ranks=3)]
    assert timelines[0] == timelines[1] == timelines[2]


def slow(x: Tensor) -> Tensor:
    time.sleep(0.05)
    return x * 1.0


def slow_first_stage(group: dist.ProcessGroup, case: Case) -> Timeline:
    blocks = mixed() | {"tanh": slow}
    pipeline = make_pipeline(case, group, blocks=blocks)
    list(pipeline.run(make_batches(case)))
    return pipeline.timeline()


def test_waits_name_the_peer_and_are_as_long_as_it_lets_wait(pool: Pool) -> None:
    case = Case("1f1b", 2, 2, spans=(2,), skips=())
    timeline = pool.submit(slow_first_stage, case, ranks=2)[1]
    waits = [i for i in timeline.intervals if i.rank == 1 and i.what == "wait"]
    first = next(i for i in waits if i.cause == "rank 0: activation 0")
    sender = next(i for i in timeline.work(0) if i.label == "F0")
    assert sender.end - sender.start >= 0.05
    assert first.end >= sender.end - 0.001  # on a common clock, a message is not there before it was made
    assert sum(i.end - i.start for i in waits) >= 0.1


def test_a_long_run_keeps_the_same_window_on_every_rank() -> None:
    case = Case("1f1b", 2, 2, spans=(30,), skips=())
    pipeline = make_pipeline(case)
    pipeline._ranks[0].recorder._entries = deque(maxlen=40)
    list(pipeline.run(make_batches(case)))
    timeline = pipeline.timeline()
    begins = [min(i.start for i in timeline.intervals if i.rank == rank) for rank in (0, 1)]
    assert abs(begins[0] - begins[1]) < timeline.makespan / 2
    assert 0 < timeline.since <= min(begins)
    assert {i.what for i in timeline.intervals} >= {"F", "B", "STEP"}
    assert len(timeline.work(1)) < 30


def test_totals_cover_the_intervals_that_were_dropped() -> None:
    case = Case("1f1b", 2, 2, spans=(30,), skips=())
    whole, short = make_pipeline(case), make_pipeline(case)
    short._ranks[0].recorder._entries = deque(maxlen=40)
    for pipeline in (whole, short):
        list(pipeline.run(make_batches(case)))
        counts = {what: total.times for (rank, what), total in pipeline.timeline().totals.items() if rank == 0}
        assert counts == {"F": 60, "B": 60, "STEP": 30} | {what: counts[what] for what in counts.keys() - set("FB")}
        assert counts["STEP"] == 30
        work = sum(pipeline.timeline().totals[0, what].seconds for what in ("F", "B", "STEP"))
        assert work == pytest.approx(pipeline.busy_seconds()[0])
    timeline = whole.timeline()
    for (rank, what), total in timeline.totals.items():
        kept = [i.end - i.start for i in timeline.intervals if (i.rank, i.what, i.lane) == (rank, what, "compute")]
        assert (len(kept), pytest.approx(sum(kept))) == (total.times, total.seconds)


def test_memory_is_exact_where_its_beginning_was_dropped() -> None:
    """Amounts follow from the last ones; a kind that has not changed since is shown from the window's beginning."""
    short, whole = Recorder(0, 0.0, keep=8), Recorder(0, 0.0)
    for recorder in (short, whole):
        recorder.hold("constant", 7)
        for k in range(20):
            recorder.hold("a", k % 5)
            recorder.change("b", 3 if k % 2 else -3)
    kept, every = short.recording(), whole.recording()
    assert every["memory"]["constant"] == [(every["memory"]["constant"][0][0], 7)]
    assert [amount for _, amount in kept["memory"]["a"]] == [1, 2, 3, 4]  # from nothing
    assert [amount for _, amount in kept["memory"]["b"]] == [-3, 0, -3, 0]
    assert kept["memory"]["constant"] == [(kept["since"], 7)]
    assert [amount for _, amount in every["memory"]["a"]] == [k % 5 for k in range(20)]


@pytest.mark.smoke
def test_a_recorder_of_a_long_run_reaches_its_bound_soon() -> None:
    """However rarely a kind of memory changes, it takes no entries beside those of the intervals."""
    recorder = Recorder(0, 0.0, keep=100)
    for k in range(60):
        recorder.add("compute", k, k + 1, "wait", "wait")
        for kind in ("a", "b", "c"):
            recorder.change(kind, 1)
    found = recorder.recording()
    assert len(found["intervals"]) + sum(map(len, found["memory"].values())) <= 100 + 3  # and where each kind begins
    assert found["totals"]["wait"] == [60, 60.0]


def test_evaluation_is_not_taken_for_training() -> None:
    case = Case("1f1b", 2, 2, spans=(3,), skips=())
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    pipeline.evaluate(make_batches(case))
    list(pipeline.run(make_batches(case)))
    for rank in range(2):
        work = pipeline.timeline().work(rank)
        assert [i.label for i in work if i.batch < 0] == [f"Fe{k}" for k in range(6)]
        assert [i.batch for i in work if i.label.startswith("F") and i.batch >= 0] == [k // 2 for k in range(12)]
        forwards = [(i.span, i.microbatch) for i in work if i.what == "F"]
        assert forwards == [(span, k) for span in range(3) for k in range(6)]


@pytest.mark.smoke
def test_peaks_are_those_of_sums_taken_anew() -> None:
    """The total is kept as a running sum; every kind may come, grow, shrink and go."""
    recorder, live, most = Recorder(0, 0.0), dict[str, int](), 0
    changes = [("a", 5), ("b", 7), ("a", 2), ("b", 0), ("c", 4), ("c", 4), ("a", 9), ("b", 1), ("a", 0), ("c", 3)]
    for kind, nbytes in changes:
        recorder.hold(kind, nbytes)
        live[kind] = nbytes
        most = max(most, sum(live.values()))
        assert recorder.live == live
        assert recorder.peak_total == most
    assert recorder.peak == {"a": 9, "b": 7, "c": 4}
