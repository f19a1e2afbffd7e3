"""Start and end times, interval by interval, against two simulators that share no code with this one."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from penstock.schedule.lowering.lower import lower
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from support.buffer_oracle import bounded_times
from support.event_oracle import start_times
from support.examples import examples
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

GOLDEN = {path.stem: parse_schedule(path.read_text()) for path in (Path(__file__).parents[1] / "golden").glob("*.txt")}
FLUSHED = [name for name, schedule in GOLDEN.items() if not any(program.epilogue for program in schedule.programs)]
BESIDE = ("REDUCE", "AVERAGE", "GATHER", "OFFLOAD", "FETCH", "SEND")  # not on the compute lane
SWEEP = settings(max_examples=examples(200), derandomize=True, deadline=None, database=None)

time = st.sampled_from([0, 1, 2, 7])  # uneven: stages that wait, and stages that run far ahead
latency = st.sampled_from([0, 1, 9])


@st.composite
def stage_costs(draw, schedule):
    # Multiples of 12 stay whole when a slice or a chunk takes its share, so that times compare exactly.
    stages = [
        StageCost(12 * draw(time), 12 * draw(time), 12 * draw(time), draw(time)) for _ in range(schedule.num_stages)
    ]
    links = draw(st.one_of(latency, st.tuples(*[latency] * (schedule.ranks - 1))))
    return Costs(tuple(stages), latency=links)


@st.composite
def straight_schedules(draw):
    stages, method = draw(st.integers(1, 5)), draw(st.sampled_from(CHAINS))
    return make_schedule(method, stages, draw(st.integers(max(stages - 1, least(method, stages)), 8)))


def played(lowered, costs, batches):
    """Per rank, (start, end) of what its compute lane did, in order of time."""
    timeline, _ = play(lowered, costs, batches)
    rows = [[] for _ in range(lowered.schedule.ranks)]
    for i in timeline.intervals:
        if i.what not in BESIDE:
            rows[i.rank].append((i.start, i.end))
    return rows


def expected(rows):
    return [[(start, end) for action, start, end in row if action.op.value not in BESIDE] for row in rows]


@pytest.mark.slow
@SWEEP
@given(st.data(), straight_schedules(), st.integers(1, 4), st.sampled_from([(2, 2), (0, 2), (0, 3), (1, 1), (3, 4)]))
def test_every_method_on_the_documented_machine(data, schedule, batches, machine):
    """Windows, lookahead and the drain included: equal to the last digit."""
    costs = data.draw(stage_costs(schedule))
    rows = bounded_times(schedule, costs.duration, costs.latency, batches, *machine)
    timeline, _ = play(lower(schedule, *machine), costs, batches)
    got = [[] for _ in rows]
    for i in timeline.work():
        got[i.rank].append((i.label, i.start, i.end))
    assert got == [[(f"{a.op}{a.unit.first}", start, end) for a, start, end in row] for row in rows]


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "eager", "stash"])
def test_senders_that_stall(method):
    """Receivers that post late and stages of very different speed: sends wait for buffers, now one, now several."""
    random = Random(method)
    for _ in range(examples(60)):
        schedule = make_schedule(method, random.randint(2, 5), random.randint(4, 9))
        stages = [StageCost(random.choice([0, 1, 7]), random.choice([0, 1, 7]), 0) for _ in range(schedule.num_stages)]
        links = tuple(random.choice([0, 1, 9]) for _ in range(schedule.ranks - 1))
        costs, machine = Costs(tuple(stages), latency=links), (0, random.choice([2, 3]))
        rows = bounded_times(schedule, costs.duration, costs.latency, 1, *machine)
        assert played(lower(schedule, *machine), costs, 1) == expected(rows)


@SWEEP
@given(st.data(), st.sampled_from(FLUSHED), st.integers(1, 3))
def test_every_flushed_golden_file_with_endless_buffers(data, name, batches):
    """Slices, chunks, directions, branches, fused pairs, split backwards, offloading: all by dependencies alone."""
    schedule = GOLDEN[name]
    costs = data.draw(stage_costs(schedule))
    if name in ("evaluation", "frozen_front", "local_losses"):
        batches = 1  # rank 0 waits for nobody: its next batch would come before it may be received
    rows = start_times(schedule, costs.duration, costs.latency, batches)
    assert played(lower(schedule, lookahead=1000, window=1000), costs, batches) == expected(rows)


@SWEEP
@given(st.data(), st.sampled_from(sorted(GOLDEN)), st.integers(1, 4))
def test_buffers_that_run_out_only_delay(data, name, batches):
    """With two buffers per lane nothing starts earlier than without limits."""
    schedule = GOLDEN[name]
    costs = data.draw(stage_costs(schedule))
    rows = expected(start_times(schedule, costs.duration, costs.latency, batches))
    for got, wanted in zip(played(lower(schedule), costs, batches), rows, strict=True):
        assert len(got) == len(wanted)
        assert all(a[0] >= b[0] for a, b in zip(sorted(got), sorted(wanted), strict=True))


def test_an_endless_order_with_fused_pairs():
    """In the first batch one half of a pair is not there yet; the other half runs alone and takes its own time."""
    text = """
        rule stash
        microbatches 2
        nodes 0@0 1@1
        rank 0: [B-1^t-1+F0^t-1] STEP[t-1] [B0^t-1+F1^t]
        rank 1: F0^t B0^t F1^t B1^t STEP[t]
        drain 0: B-1^t-1 STEP[t-1]
    """
    turned = text.replace("[B-1^t-1+F0^t-1]", "[F0^t-1+B-1^t-1]").replace("[B0^t-1+F1^t]", "[F1^t+B0^t-1]")
    for written in (text, turned):
        schedule = parse_schedule(written)
        costs = Costs.uniform(schedule)
        rows = start_times(schedule, costs.duration, costs.latency, 3)
        assert played(lower(schedule), costs, 3) == expected(rows)


def test_the_oracles_agree_where_buffers_suffice():
    """Equal stages without latency never fill a lane: then both say what the closed forms say."""
    schedule = make_schedule("1f1b", 4, 6)
    costs = Costs.uniform(schedule)
    free, bounded = (oracle(schedule, costs.duration, 0, 1) for oracle in (start_times, bounded_times))
    assert free == bounded
    assert max(end for row in free for _, _, end in row) == 3 * (6 + 3)


def test_an_oracle_notices_an_order_that_waits_for_itself():
    schedule = parse_schedule("microbatches 2\nnodes 0@0 1@1\nrank 0: F0 B0 F1 B1\nrank 1: F1 B1 F0 B0\n")
    with pytest.raises(AssertionError, match="waits for itself"):
        start_times(schedule, lambda action: 1, 0, 1)
