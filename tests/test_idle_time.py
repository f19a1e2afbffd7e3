"""Why ranks stood idle: by hand, in closed form, and adding up whatever happened."""

import pytest
from hypothesis import given, strategies as st

from penstock.idle_time import Idle, split_time
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Interval, Timeline, Waiting
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least


def did(rank, start, end, label, span=0):
    """A pass or an update, such as "F3" or "STEP0"; microbatches and batches are the same here."""
    what = label.rstrip("0123456789")
    number = int(label.removeprefix(what))
    microbatch = -1 if what == "STEP" else number
    return Interval(rank, "compute", start, end, what, label, rank, 0, number, microbatch=microbatch, span=span)


def waited(rank, start, end, kind, peer=-1):
    return Interval(rank, "compute", start, end, kind, "", peer=peer)


def split(ranks, *intervals):
    """In any order, because recordings of ranks are put one behind the other."""
    return split_time(Timeline(ranks, list(intervals[::-1])))


def test_every_cause_by_hand():
    """1F1B with three microbatches: rank 0 reads for 3 before F2, messages take 1, a decision is made at 29.

    Rank 1 waits for it from 23 on, but until 26 because rank 0 is not through.
    """
    rank_0 = [
        did(0, 0, 2, "F0"), did(0, 2, 4, "F1"), waited(0, 4, 9, "wait", 1), did(0, 9, 11, "B0"),
        waited(0, 11, 14, "data"), did(0, 14, 16, "F2"), did(0, 17, 19, "B1"), waited(0, 19, 24, "wait", 1),
        did(0, 24, 26, "B2"), waited(0, 26, 29, "control"), did(0, 29, 30, "STEP0"),
    ]  # fmt: skip
    rank_1 = [
        waited(1, -2, 3, "wait", 0), did(1, 3, 5, "F0"), did(1, 5, 8, "B0"), did(1, 8, 10, "F1"),
        did(1, 10, 13, "B1"), waited(1, 13, 17, "wait", 0), did(1, 18, 20, "F2"), did(1, 20, 23, "B2"),
        waited(1, 23, 29, "control"), did(1, 29, 30, "STEP0"),
    ]  # fmt: skip
    result = split(2, *rank_0, *rank_1)
    assert (result.makespan, result.busy) == (30, (13, 16))
    assert result.idle[0] == Idle(fill=4, drain=4, communication=2, data=3, control=3, engine=1)
    assert result.idle[1] == Idle(fill=2, drain=3, imbalance=3, communication=2, control=3, engine=1)
    shares = result.shares()
    assert shares["work"] == pytest.approx(29 / 60)
    assert shares["control"] == pytest.approx(6 / 60)
    assert result.shares(1)["imbalance"] == pytest.approx(3 / 30)


def test_copies_by_hand():
    """The gradients are sent at 5 and 8 and come at 6 and 9; what B0 reads is back from the host at 8, B1's at 8.

    So rank 0 fills until 5, for 1 the message is in transit, and for 2 nothing but the copy is missing.
    """
    there = [did(1, 2, 3, "F0"), did(1, 3, 5, "B0"), did(1, 5, 6, "F1"), did(1, 6, 8, "B1")]
    here = [did(0, 0, 1, "F0"), did(0, 1, 2, "F1"), did(0, 8, 8.5, "B0"), did(0, 9, 11, "B1")]
    back = [Interval(0, "copy", 4, 8, "FETCH", f"FETCH{k}", batch=k, microbatch=k) for k in (0, 1)]
    sent = [
        Interval(1, "gradient 1>0", 5 + 3 * k, 6 + 3 * k, "SEND", f"gradient {k}", microbatch=k, peer=0) for k in (0, 1)
    ]
    assert split(2, *there, *here, *back, *sent).idle[0] == Idle(fill=3, communication=1.5, copy=2)


def test_a_measured_copy_is_waited_for_by_name():
    """The device waits from 6 to 8 for what comes back; before that the gradient travels, and was made at 4."""
    passes = [*BATCH[:3], did(0, 8, 9, "B0")]
    result = split(2, *passes, waited(0, 1, 6, "wait", 1), waited(0, 6, 8, "copy")).idle[0]
    assert result == Idle(fill=3, communication=2, copy=2)


BATCH = [did(0, 0, 1, "F0"), did(1, 1, 2, "F0"), did(1, 2, 4, "B0"), did(0, 4, 6, "B0")]
NEXT = [did(0, 8, 9, "F0", 1), did(1, 10, 11, "F0", 1), did(1, 11, 13, "B0", 1), did(0, 13, 15, "B0", 1)]


@pytest.mark.parametrize(
    ("waits", "idle"),
    [
        ([], Idle(fill=3, drain=4, engine=2)),
        ([waited(1, 7, 10, "wait", 0)], Idle(fill=3, drain=4, communication=1, engine=1)),
        ([waited(1, 4, 10, "wait", 0)], Idle(fill=4, drain=4, communication=1)),
        ([waited(1, 4, 10, "control")], Idle(fill=1, drain=4, control=4)),
        ([waited(1, 4, 5, "post"), waited(1, 5, 6, "room", 0)], Idle(fill=3, drain=3, communication=1, engine=2)),
    ],
)
def test_a_pipeline_that_runs_empty_drains_and_fills_again(waits, idle):
    """Rank 1 ends a batch at 4, rank 0 at 6; the next one begins at 8. Numbers of microbatches begin again, too."""
    assert split(2, *BATCH, *NEXT, *waits, waited(0, 1, 4, "wait", 1)).idle[1] == idle


STEADY = [
    did(0, 0, 1, "F0"), did(0, 1, 2, "F1"), did(0, 10, 11, "F2"), did(0, 20, 21, "B0"), did(0, 21, 22, "B1"),
    did(1, 2, 3, "F0"), did(1, 3, 9, "F1"), did(1, 11, 12, "F2"), did(1, 18, 19, "B0"), did(1, 19, 20, "B1"),
    did(1, 20, 21, "B2"), did(0, 22, 23, "B2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("waits", "idle"),
    [
        ([waited(0, 2, 10, "room", 1)], Idle(imbalance=7, communication=1)),  # rank 1 works until 9
        ([waited(0, 2, 10, "room", 7)], Idle(communication=8)),
        ([waited(0, 2, 4, "post"), waited(0, 5, 9, "caller")], Idle(communication=2, engine=6)),
        ([waited(0, 2, 6, "data"), waited(0, 5, 9, "control")], Idle(data=4, control=3, engine=1)),  # that began first
    ],
)
def test_kinds_of_waits_in_the_middle(waits, idle):
    """GPipe; rank 0 cannot go on with its third forward. Its wait for the first gradient, from 11 to 20, is filling."""
    found = split(2, *STEADY, *waits, waited(0, 11, 20, "wait", 1)).idle[0]
    assert found == idle._replace(fill=8, communication=idle.communication + 1)


def test_an_update_in_the_middle_of_a_section_is_followed_by_its_passes():
    """2BW: rank 1 makes an update at 5, between two passes; nobody knows why it did nothing before."""
    passes = [did(0, 0, 3, "F0"), did(0, 3, 6, "F1"), did(0, 9, 12, "B0"), did(0, 12, 15, "B1")]
    passes += [did(1, 3, 4, "F0"), did(1, 5, 6, "STEP0"), did(1, 6, 7, "F1"), did(1, 7, 9, "B0"), did(1, 9, 12, "B1")]
    assert split(2, *passes, waited(0, 6, 9, "wait", 1)).idle[1] == Idle(fill=3, engine=1, drain=3)


def test_a_recompute_sends_nothing():
    """Rank 0 runs F0 again, ahead of time, while the gradient that it waits for is made and travels."""
    passes = [did(0, 0, 1, "F0"), did(1, 1, 2, "F0"), did(1, 2, 5, "B0"), did(2, 6, 7, "R0"), did(0, 8, 9, "B0")]
    assert split(3, *passes, waited(0, 1, 8, "wait")).idle[0] == Idle(fill=4, communication=3)


def test_a_message_comes_from_the_peer_not_from_a_parallel_pipeline():
    """Both pipelines number their microbatches alike: rank 3 waits for rank 2, which is done at 5, not for rank 0."""
    passes = [did(0, 0, 1, "F0"), did(2, 0, 5, "F0"), did(1, 2, 3, "F0"), did(3, 7, 8, "F0"), did(3, 9, 10, "F1")]
    passes += [did(0, 1, 9, "F1"), did(2, 5, 6, "F1"), did(1, 9, 10, "F1")]
    result = split(4, *passes, waited(3, 0, 7, "wait", 2), waited(1, 0, 2, "wait", 0), waited(3, 8, 9, "wait", 2))
    assert result.idle[3] == Idle(fill=5, communication=3)
    assert result.idle[1] == Idle(fill=1, communication=1, engine=6)


def test_a_wait_for_an_unknown_message_is_imbalance():
    """The begin of a long run is forgotten, so a pass may be missing."""
    passes = [did(0, 0, 1, "F0"), did(1, 1, 2, "F0"), did(1, 5, 6, "F1"), did(1, 6, 7, "B0"), did(0, 7, 8, "B0")]
    assert split(2, *passes, waited(1, 2, 5, "wait", 0)).idle[1] == Idle(fill=1, imbalance=3, drain=1)


def test_nothing_and_a_rank_that_does_nothing():
    assert split(2).idle == (Idle(), Idle())
    assert set(split(2).shares().values()) == {0}
    assert sum(split(2, did(0, 0, 4, "F0")).idle[1]) == 4


# --- simulated ------------------------------------------------------------------------------------------------------


def simulated(method, p, m, batches=1, times=(1, 1, 1), **options):
    schedule = make_schedule(method, p, m)
    return split_time(simulate_schedule(schedule, Costs.uniform(schedule, *times, **options), batches).timeline)


CLOSED = {  # of rank s, for each time that the pipeline fills and drains, at m >= 2p
    "gpipe": (lambda p, s, f, b: s * f + (p - 1 - s) * (f + b), lambda p, s, f, b: s * b),
    "1f1b": (lambda p, s, f, b: s * f + (p - 1 - s) * b, lambda p, s, f, b: s * b + (p - 1 - s) * f),
    "sequential": (lambda p, s, f, b: s * f + (p - 1 - s) * (f + b), lambda p, s, f, b: s * b),
    "2bw": (lambda p, s, f, b: s * f + (p - 1 - s) * b, lambda p, s, f, b: s * b + (p - 1 - s) * f),
}


@pytest.mark.parametrize("method", CLOSED)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("times", [(1, 1, 1), (10, 12, 7)])
@pytest.mark.parametrize("batches", [1, 3])
def test_fill_and_drain_in_closed_form(method, p, times, batches):
    m = 2 * p + 1
    rounds = {"sequential": batches * m, "2bw": 1}.get(method, batches)
    fill, drain = CLOSED[method]
    result = simulated(method, p, m, batches, times)
    for s in range(p):
        f, b = times[0], times[1] + times[2]
        assert result.idle[s] == Idle(fill=rounds * fill(p, s, f, b), drain=rounds * drain(p, s, f, b))


@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_equal_stages_have_no_imbalance(method, p, more):
    result = simulated(method, p, least(method, p) + more, 3, (1, 1, 1))
    assert all(idle == Idle(fill=idle.fill, drain=idle.drain) for idle in result.idle)


def test_an_order_that_does_not_alternate_drains_after_its_last_pass():
    """GPipe, with last backwards of 20 and first ones of 2: each gradient but the first comes 18 late, every batch."""
    schedule = make_schedule("gpipe", 2, 3)
    costs = Costs((StageCost(1, 1, 1), StageCost(1, 10, 10)))
    result = split_time(simulate_schedule(schedule, costs, 2).timeline)
    assert result.idle == (Idle(fill=2 * 21, imbalance=2 * 2 * 18), Idle(fill=2 * 1, drain=2 * 2))


def test_messages_that_take_half_a_unit():
    """GPipe with F = 1, B = 2. Rank 1 works from 1.5 to 7.5; the first gradient is made at 5.5 and there at 6."""
    result = simulated("gpipe", 2, 2, latency=0.5)
    assert result.makespan == 10
    assert result.idle == (Idle(fill=3.5, communication=0.5), Idle(fill=1, drain=2.5, communication=0.5))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_stage_is_imbalance_at_the_other(slow):
    """2BW: 27 in every microbatch, but at the ends, where the first and the last one must go all the way."""
    costs = Costs(tuple(StageCost(*(10, 10, 10) if s == slow else (1, 1, 1)) for s in (0, 1)))
    schedule = make_schedule("2bw", 2, 4)
    short, long = (split_time(simulate_schedule(schedule, costs, n).timeline).idle[1 - slow] for n in (3, 10))
    assert long == short._replace(imbalance=short.imbalance + 7 * 4 * 27)
    assert sum(short) == short.fill + short.drain + short.imbalance


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw"])
def test_a_decision_that_waits_for_the_drain_is_drain(method):
    """It takes no time here, so it changes nothing."""
    plain, deciding = (make_schedule(method, 3, 7, decides=decides) for decides in (False, True))
    splits = [split_time(simulate_schedule(s, Costs.uniform(s), 2).timeline) for s in (plain, deciding)]
    assert splits[0] == splits[1]


def test_a_decision_is_control():
    """F, B, a decision that takes two hops of 0.5, and an update of 1."""
    schedule = make_schedule("1f1b", 1, 1, decides=True)
    result = split_time(simulate_schedule(schedule, Costs.uniform(schedule, latency=0.5, step=1.0)).timeline)
    assert result.makespan == 5
    assert result.idle == (Idle(control=1),)


def test_an_update_waits_for_all_collectives_of_its_batch():
    """Without waits in the timeline; what it waits for after that is a message that it could not send."""
    reduce, decide = (Interval(0, "collective", start, end, "", "", batch=0) for start, end in ((3, 5), (5, 7)))
    result = split(1, did(0, 0, 3, "F0"), reduce, decide, did(0, 8, 9, "STEP0"), did(0, 9, 10, "B0"))
    assert result.idle == (Idle(control=4, communication=1),)


# --- whatever happens -----------------------------------------------------------------------------------------------

STRETCH = st.tuples(
    st.integers(0, 6),  # idle before
    st.integers(0, 5),  # work
    st.sampled_from(["F", "B", "I", "W", "R", "STEP"]),
    st.integers(-1, 3),  # microbatch
    st.integers(0, 1),  # span
)
WAITS = st.tuples(
    st.integers(0, 3), st.integers(-3, 40), st.integers(0, 12), st.sampled_from(list(Waiting)), st.integers(-1, 3)
)


@given(st.lists(st.lists(STRETCH, max_size=8), min_size=1, max_size=4), st.lists(WAITS, max_size=12), st.booleans())
def test_causes_are_complete_and_exclusive(lanes, waits, collectives):
    """Of any timeline, however little sense it makes; exactly, because the times are whole numbers."""
    intervals = []
    for rank, lane in enumerate(lanes):
        now = 0
        for idle, length, what, microbatch, span in lane:
            start = now + idle
            now = start + length
            place = {"batch": max(microbatch, 0), "microbatch": microbatch, "span": span}
            intervals.append(Interval(rank, "compute", start, now, what, what, rank, 0, **place))
            if collectives:
                intervals.append(Interval(rank, "collective", start - 1, start, "REDUCE", "", batch=max(microbatch, 0)))
    intervals += [
        Interval(rank % len(lanes), "compute", start, start + length, kind, "", peer=peer)
        for rank, start, length, kind, peer in waits
    ]
    timeline = Timeline(len(lanes), intervals)
    result, bubble = split_time(timeline), timeline.bubble()
    for busy, idle in zip(result.busy, result.idle, strict=True):
        assert busy + sum(idle) == bubble.makespan
        assert min(idle) >= 0
    shares = result.shares()
    assert sum(shares.values()) - shares["work"] == pytest.approx(bubble.bubble)


@given(st.sampled_from(sorted(CHAINS)), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.data())
def test_a_simulated_bubble_is_divided_without_a_rest(method, p, more, batches, data):
    times = st.integers(0, 8).map(lambda n: n / 4)
    stages = tuple(StageCost(*data.draw(st.tuples(times, times, times))) for _ in range(p))
    schedule = make_schedule(method, p, least(method, p) + more)
    timeline = simulate_schedule(schedule, Costs(stages, latency=data.draw(times)), batches).timeline
    result = split_time(timeline)
    for busy, idle in zip(result.busy, result.idle, strict=True):
        assert busy + sum(idle) == result.makespan
        assert idle.engine == idle.data == idle.control == 0
