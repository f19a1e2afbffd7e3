"""Who waits for parked activations, and RECVs that wait for buffers because others do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Action, Op, Stage
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.play import Machine
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from support.event_oracle import start_times

PARKED = (Path(__file__).parents[1] / "golden" / "parked.txt").read_text()

# Rank 0 takes microbatch 1 back where a batch ends; its backward is in the next period, or in the epilogue.
ENDLESS = """
    rule stash
    microbatches 2
    nodes 0@0 1@1
    rank 0: F0^t-1 B-1^t-1 STEP[t-1] F1^t OFFLOAD1@0>1/parked B0^t-1 FETCH1@0<1/parked
    rank 1: F0^t B0^t F1^t HOLD1@1<0/parked B1^t STEP[t] RETURN1@1>0/parked
    drain 0: B-1^t-1 STEP[t-1]
"""

# Rank 0 does so two batches ahead.
FAR_AHEAD = """
    rule stash
    microbatches 1
    nodes 0@0 1@1 2@2
    rank 0: F0^t-2 OFFLOAD0@0>1/parked FETCH0@0<1/parked B-2^t-4 STEP[t-2]
    rank 1: HOLD0@1<0/parked RETURN0@1>0/parked F0^t-1 B-1^t-2 STEP[t-1]
    rank 2: F0^t B0^t STEP[t]
    drain 0: B-2^t-4 STEP[t-2] B-1^t-3 STEP[t-1]
    drain 1: B-1^t-2 STEP[t-1]
"""


def awaiting(lowered: Lowered) -> list[tuple[int, int, str, list[int]]]:
    """Rank, part, action, and the microbatches that it waits for because a move has taken them."""
    return [
        (rank, part, str(i.action).split("@")[0], [k.first for k in i.awaits])
        for rank, program in enumerate(lowered.programs)
        for part in (0, 1)
        for i in program[part]
        if i.awaits
    ]


def test_who_waits_in_the_same_period() -> None:
    assert awaiting(lower(parse_schedule(PARKED))) == [(0, 0, "B1", [1]), (1, 0, "RETURN1", [1])]


def test_half_of_a_backward_waits() -> None:
    """The first half; the second one finds the activations there."""
    text = PARKED.replace("B0^t FETCH", "I0^t W0^t FETCH").replace("B1^t", "I1^t W1^t").replace("B2^t", "I2^t W2^t")
    text = text.replace("B0^t F1^t RETURN", "I0^t W0^t F1^t RETURN")
    assert awaiting(check(parse_schedule(text)).lowered)[0] == (0, 0, "I1", [1])
    between = text.replace("FETCH1@0<1/parked I1^t W1^t", "I1^t FETCH1@0<1/parked W1^t")
    assert awaiting(lower(parse_schedule(between)))[0] == (0, 0, "W1", [1])
    away = text.replace("FETCH1@0<1/parked", "FETCH1@0<1/parked OFFLOAD1 FETCH1")
    assert awaiting(check(parse_schedule(away)).lowered)[0] == (0, 0, "OFFLOAD1", [1])


def test_two_stages_may_park_with_one() -> None:
    text = """
        microbatches 2
        nodes 0@0 1@1 2@2
        rank 0: F0 OFFLOAD0@0>2/parked F1 FETCH0@0<2/parked B0 B1
        rank 1: F0 OFFLOAD0@1>2/parked F1 FETCH0@1<2/parked B0 B1
        rank 2: HOLD0@2<0/parked HOLD0@2<1/parked F0 RETURN0@2>1/parked F1 RETURN0@2>0/parked B0 B1
    """
    lowered = check(parse_schedule(text)).lowered
    sources = [
        (i.action.peer, [lowered.routes[k.route].source for k in i.awaits])
        for i in lowered.programs[2].period
        if i.action.op is Op.RETURN
    ]
    assert sources == [(Stage(1, 0, 1), [Stage(1, 0, 1)]), (Stage(0, 0, 0), [Stage(0, 0, 0)])]


def test_who_waits_in_a_later_period() -> None:
    """Or in the epilogue of a span that ends before."""
    assert awaiting(check(parse_schedule(ENDLESS)).lowered) == [
        (0, 0, "B-1", [-1]), (0, 1, "B-1", [-1]), (1, 0, "RETURN1", [1]),
    ]  # fmt: skip
    assert awaiting(check(parse_schedule(FAR_AHEAD)).lowered) == [
        (0, 0, "B-2", [-2]), (0, 1, "B-2", [-2]), (0, 1, "B-1", [-1]), (1, 0, "RETURN0", [0]),
    ]  # fmt: skip


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("text", [PARKED, ENDLESS, FAR_AHEAD])
def test_spans_of_any_length(text: str, batches: int) -> None:
    """Nothing is used before it has come, where messages take longer than passes; and no message is left over."""
    latency, starts = 9.0, dict[str, float]()

    def note(_rank: int, action: Action, t: int, start: float, _end: float) -> None:
        first = action.unit.first + t * schedule.microbatches
        starts[f"{action.op}{first}@{action.stage.index}"] = start

    schedule = parse_schedule(text)
    machine = Machine(check(schedule).lowered, unit_time, latency, note)
    machine.play(batches)
    parked = [int(name[7:-2]) for name in starts if name.startswith("OFFLOAD")]
    assert len(parked) == batches
    for k in parked:
        assert starts[f"RETURN{k}@1"] >= starts[f"OFFLOAD{k}@0"] + latency
        assert starts[f"B{k}@0"] >= starts[f"RETURN{k}@1"] + latency
    assert not any(machine.messages.arrived)


@pytest.mark.parametrize("text", [ENDLESS, FAR_AHEAD])
def test_nobody_waits_for_more(text: str) -> None:
    """By the times of an oracle that knows dependencies only."""
    schedule, found = parse_schedule(text), list[tuple[int, float]]()
    lowered = lower(schedule, lookahead=1000, window=1000)
    machine = Machine(lowered, unit_time, 0.0, lambda rank, _action, _t, start, _end: found.append((rank, start)))
    machine.play(4)
    rows = start_times(schedule, unit_time, 0.0, 4)
    assert sorted(found) == [(rank, start) for rank, row in enumerate(rows) for _, start, _ in row]


HELD_UP = """
    microbatches 4
    nodes 0@0 1@1
    rank 0: F0 F1 OFFLOAD0@0>1/parked F2 OFFLOAD1@0>1/parked F3 OFFLOAD2@0>1/parked FETCH0@0<1/parked B0 \
FETCH1@0<1/parked B1 FETCH2@0<1/parked B2 B3
    rank 1: HOLD0@1<0/parked HOLD1@1<0/parked F0 HOLD2@1<0/parked F1 F2 F3 RETURN0@1>0/parked RETURN1@1>0/parked \
RETURN2@1>0/parked B0 B1 B2 B3
"""


def test_a_receive_waits_for_a_buffer() -> None:
    """Rank 1 could run F0 at 1, but the RECV of the third message stands before HOLD1, and there are two buffers.

    The first one is free when OFFLOAD0 has come, at 2.
    """
    found: dict[tuple[int, str], float] = {}

    def note(_rank: int, action: Action, _t: int, start: float, _end: float) -> None:
        found[window, str(action).split("@")[0]] = start

    for window in (2, 3):
        machine = Machine(lower(parse_schedule(HELD_UP), window=window), unit_time, observer=note)
        machine.play(1)
        assert machine.held_up == (window == 2)
    assert [found[2, what] for what in ("HOLD1", "HOLD2", "RETURN0")] == [2.0, 3.0, 6.0]
    assert [found[3, what] for what in ("HOLD1", "HOLD2", "RETURN0")] == [0.0, 2.0, 5.0]


def test_receives_that_wait_for_each_other() -> None:
    """With one buffer rank 1 waits for OFFLOAD0 before F0, and rank 0 for B0 before OFFLOAD0."""
    text = """
        microbatches 3
        nodes 0@0 1@1
        rank 0: F0 F1 B0 OFFLOAD1@0>1/parked F2 OFFLOAD2@0>1/parked FETCH1@0<1/parked B1 FETCH2@0<1/parked B2
        rank 1: HOLD1@1<0/parked HOLD2@1<0/parked F0 B0 F1 F2 RETURN1@1>0/parked B1 RETURN2@1>0/parked B2
    """
    assert check(parse_schedule(text)).lowered.window == 2
    with pytest.raises(ScheduleError) as caught:
        check(parse_schedule(text), window=1)
    assert str(caught.value).splitlines() == [
        "unnamed cannot run with a window of 1: deadlock: 2 ranks would wait for ever",
        "  rank 0 at B0@0 waits for the gradient of microbatch 0 from rank 1",
        "  rank 1 at RECV2@1<0/parked waits for rank 0 to send earlier parked messages",
        "It is proven with a window of 2; set it to 2 or more",
    ]


def test_a_receive_for_the_next_batch_may_wait_for_this_one() -> None:
    """No message crosses the border of a batch, but far ahead of it the only buffer is wanted before B0 of this batch.

    Rank 0 offloads behind B0. A span of one batch never meets this.
    """
    text = """
        microbatches 2
        nodes 0@0 1@1
        rank 0: F0 F1 B0 OFFLOAD1@0>1/parked FETCH1@0<1/parked B1
        rank 1: HOLD1@1<0/parked F0 B0 F1 RETURN1@1>0/parked B1
    """
    check(parse_schedule(text), window=1)
    with pytest.raises(ScheduleError, match="rank 1 at RECV3@1<0/parked waits for rank 0 to send earlier parked"):
        check(parse_schedule(text), lookahead=9, window=1)
