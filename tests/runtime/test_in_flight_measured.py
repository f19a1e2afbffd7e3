"""What ranks have measured, from recordings in which everything took a known time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.plan.pass_and_message_times import Measured, measure_rank, merge, messages_of_rank
from penstock.schedule.ir.rank_numbers import RankNumbers
from penstock.simulate.least_in_flight import least_in_flight
from penstock.timeline import Waiting

M, BATCHES = 3, 4
PAIR = RankNumbers(1, 2)
ORIGINS = (100.0, 7.0, 31.0, 5.0)  # zero of the common clock on that of each process


class Named:
    """What an interval of work is called."""

    label = "F0"


def recordings(
    times: Sequence[Mapping[str, float]],
    lanes: Mapping[tuple[int, str], float],
    depth: int,
    late: Sequence[str] = (),
    soon: float = 1.0,
) -> list[Any]:
    """Of ranks, each of which runs its passes, and whose neighbours wait for its messages.

    Args:
        times: seconds of each kind of pass, by rank.
        lanes: seconds of the messages of a rank, by payload.
        depth: ranks of a pipeline.
        late: payloads that nobody waits for.
        soon: seconds from the SEND of a message to the pass that takes it.
    """
    recorders = [Recorder(rank, origin) for rank, origin in zip(range(len(times)), ORIGINS, strict=False)]
    for recorder in recorders:
        recorder.begin_span()
        recorder.begin_span()  # the first one was an evaluation
    for k in range(M * BATCHES):
        slow = 9.0 if k < M else 1.0  # batch 0 fills the pipeline
        for rank, recorder in enumerate(recorders):
            now = 10.0 * k + 5.0 + soon + recorder.origin
            for what, seconds in times[rank].items():
                recorder.add_work(now, now + slow * seconds, what, Named(), rank % depth, 0, k // M, 0, k)
        for (rank, payload), seconds in lanes.items():
            receiver = rank + (1 if payload == "activation" else -1)
            if rank // depth != receiver // depth:
                continue
            sent, label = 10.0 * k + 5.0, f"{payload} {k}"
            at, there = (recorders[r].origin + sent for r in (rank, receiver))
            to = receiver % depth
            recorders[rank].add(f"{payload} x", at, at + 8, "SEND", label, to, microbatch=k, peer=receiver)
            if payload not in late:
                wait = Waiting.MESSAGE
                cause = f"rank {rank}: {label}"
                recorders[receiver].add(
                    "compute", there - 1, there + slow * seconds, wait, f"wait for {cause}", cause=cause, peer=rank
                )
    return [recorder.recording() for recorder in recorders]


def measured(parts: Sequence[Any], depth: int) -> Measured | None:
    numbers = RankNumbers(len(parts) // depth, depth)
    told = [measure_rank(part, range(BATCHES), numbers) for part in parts]
    return merge(told, [messages_of_rank(part, told) for part in parts], numbers)


def test_passes_and_messages_of_a_chain() -> None:
    times = [{"F": 0.1, "B": 0.2}, {"F": 0.3, "B": 0.4}, {"F": 0.5, "B": 0.6}]
    lanes = {(0, "activation"): 0.7, (1, "activation"): 0.8, (1, "gradient"): 0.05, (2, "gradient"): 0.01}
    found = measured(recordings(times, lanes, 3), 3)
    assert found is not None
    for here, rank in zip(found.times, times, strict=True):
        assert here == pytest.approx((rank["F"], rank["B"], 0))
    assert [time for hop in found.hops for time in hop] == pytest.approx([0.7, 0.05, 0.8, 0.01])
    assert found.message == pytest.approx(0.8)
    assert found.microbatch == pytest.approx(1.1)
    assert least_in_flight(found.times, found.hops) == (4, 3, 1)


def test_chunks_of_a_rank_count_together_and_send_around() -> None:
    """Rank 0 has stages 0 and 2, rank 1 stages 1 and 3; labels of messages are the same for both chunks."""
    recorders = [Recorder(rank, origin) for rank, origin in zip(range(2), ORIGINS, strict=False)]
    took = {1: 0.7, 2: 0.4, 3: 0.6}  # seconds of the activation that a stage takes
    for recorder in recorders:
        recorder.begin_span()
    for k in range(M * BATCHES):
        for stage in range(4):
            rank, start = stage % 2, 10.0 * k + 2.0 * stage
            here, label = recorders[rank], f"activation {k}"
            if stage:
                sent, sender = start - 1, recorders[1 - rank]
                at, arrived = sender.origin + sent, here.origin + sent + took[stage]
                sender.add("activation x", at, at + 8, "SEND", label, stage, microbatch=k, peer=rank)
                cause = f"rank {1 - rank}: {label}"
                here.add("compute", arrived - 0.3, arrived, Waiting.MESSAGE, "", cause=cause, peer=1 - rank)
            begun = here.origin + start
            here.add_work(begun, begun + 0.1 * (1 + stage), "F", Named(), stage, 0, k // M, 0, k)
    found = measured([recorder.recording() for recorder in recorders], 2)
    assert found is not None
    assert [times.forward for times in found.times] == pytest.approx([0.1 + 0.3, 0.2 + 0.4])
    assert found.hops[0] == pytest.approx((0.65, 0))
    assert found.around == pytest.approx((0.4, 0))
    assert found.message == pytest.approx(0.65)


def test_backwards_in_two_halves_and_recomputes_are_told_apart() -> None:
    found = measured(recordings([{"F": 0.1, "R": 0.1, "I": 0.2, "W": 0.3}] * 2, {}, 2), 2)
    assert found is not None
    assert found.times[0] == pytest.approx((0.1, 0.3, 0.3))


def test_a_lane_that_nobody_waits_for_hides_nothing() -> None:
    lanes = {(0, "activation"): 0.7, (1, "gradient"): 0.05}
    found = measured(recordings([{"F": 1.0, "B": 1.0}] * 2, lanes, 2, late=["activation"]), 2)
    assert found is not None
    assert found.hops[0] == pytest.approx((0, 0.05))


def test_of_several_pipelines_the_slowest_counts() -> None:
    times = [{"F": 0.1, "B": 0.9}, {"F": 0.1, "B": 0.1}, {"F": 0.2, "B": 0.3}, {"F": 0.1, "B": 0.1}]
    lanes = {(0, "activation"): 0.1, (2, "activation"): 0.4, (1, "gradient"): 0.3, (3, "gradient"): 0.2}
    found = measured(recordings(times, lanes, 2), 2)
    assert found is not None
    assert found.times[0] == pytest.approx((0.2, 0.9, 0))
    assert found.hops[0] == pytest.approx((0.4, 0.3))


def test_what_ranks_tell_each_other_does_not_grow() -> None:
    parts = recordings([{"F": 1.0, "B": 1.0}] * 2, {(0, "activation"): 0.7}, 2)
    many = [
        part
        | {
            "intervals": [
                (*i[:2], i[2] + 1e3 * n, i[3] + 1e3 * n, *i[4:]) for n in range(50) for i in part["intervals"]
            ]
        }
        for part in parts
    ]
    assert sum(waited for *_, waited in measure_rank(many[1], range(BATCHES), PAIR)["taken"]) == 16


def test_waits_that_are_exceptions_do_not_count() -> None:
    """A few messages were slow; most lay ready in less time."""
    (first, second) = recordings([{"F": 1.0, "B": 1.0}] * 2, {(0, "activation"): 3.0}, 2, soon=0.5)
    intervals = [i for i in second["intervals"] if i[4] != "wait" or i[5].endswith((" 4", " 9"))]
    found = measured([first, second | {"intervals": intervals}], 2)
    assert found is not None
    assert found.hops[0][0] == pytest.approx(0.5)


def test_the_first_batch_of_a_span_does_not_count_where_others_follow() -> None:
    parts = recordings([{"F": 0.1, "B": 0.2}] * 2, {(0, "activation"): 0.4}, 2)
    told = [measure_rank(part, range(2), PAIR) for part in parts]  # the first was slow
    found = merge(told, [messages_of_rank(part, told) for part in parts], PAIR)
    assert found is not None
    assert found.times[0] == pytest.approx((0.1, 0.2, 0))
    assert found.hops[0][0] == pytest.approx(0.4)


def test_the_only_batch_of_a_span_counts_and_others_do_not() -> None:
    parts = recordings([{"F": 0.1, "B": 0.2}] * 2, {}, 2)
    told = [measure_rank(part, range(2, 3), PAIR) for part in parts]
    assert told[0]["passes"]["F"] == pytest.approx(0.1)
    assert merge([measure_rank(part, range(8, 9), PAIR) for part in parts], [[], []], PAIR) is None


def test_stages_on_a_v_send_both_ways_and_the_slower_way_counts() -> None:
    """Rank 0 has stages 0 and 3, rank 1 stages 1 and 2; between 1 and 2 there is no message."""
    recorders = [Recorder(rank, origin) for rank, origin in zip(range(2), ORIGINS, strict=False)]
    places, took = (0, 1, 1, 0), {1: 0.4, 3: 0.7}  # seconds of the activation that a stage takes
    for recorder in recorders:
        recorder.begin_span()
    for k in range(M * BATCHES):
        for stage, rank in enumerate(places):
            start, here, label = 10.0 * k + 2.0 * stage, recorders[rank], f"activation {k}"
            if stage in took:
                sent, sender = start - 1, recorders[1 - rank]
                at, arrived = sender.origin + sent, here.origin + sent + took[stage]
                sender.add("activation x", at, at + 8, "SEND", label, stage, microbatch=k, peer=rank)
                cause = f"rank {1 - rank}: {label}"
                here.add("compute", arrived - 0.3, arrived, Waiting.MESSAGE, "", cause=cause, peer=1 - rank)
            here.add_work(here.origin + start, here.origin + start + 0.1, "F", Named(), stage, 0, k // M, 0, k)
    parts = [recorder.recording() for recorder in recorders]
    told = [measure_rank(part, range(BATCHES), PAIR, folded=True) for part in parts]
    found = merge(told, [messages_of_rank(part, told) for part in parts], PAIR, folded=True)
    assert found is not None
    assert found.hops[0] == pytest.approx((0.7, 0))
    assert (found.around, found.message) == ((0.0, 0.0), pytest.approx(0.7))


def test_what_a_microbatch_holds_between_two_passes_counts() -> None:
    """Two forwards of 100 bytes each, whose backwards leave 130 until their second halves."""
    recorder = Recorder(0, 0.0)
    recorder.begin_span()
    for k, what in enumerate("FFIWIW"):
        recorder.add_work(k + 0.1, k + 0.9, what, Named(), 0, 0, 0, 0, k)
    live = [(k + 0.5, nbytes) for k, nbytes in enumerate((100, 200, 230, 100, 130, 0))]
    found = measure_rank(recorder.recording() | {"memory": {"activations": live}}, range(BATCHES), RankNumbers(1, 1))
    assert (found["each"], found["nbytes"]) == (130, 230)
