"""A schedule gets the least window that costs no time; what others say of time comes from an oracle without lanes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extend
from penstock.schedule.ir.schedule import WINDOW, Schedule
from penstock.schedule.load import prove_file
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.send_window_search import lower_freely, settled, unlimited
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.play import Machine
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.torch_csv import to_torch_csv
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from support.event_oracle import start_times
from support.examples import examples
from support.own_methods import prove
from support.schedules import make_schedule

Case = tuple[str, int, int, tuple[tuple[str, int], ...]]
CASES: list[Case] = [
    ("gpipe", 4, 16, ()), ("1f1b", 4, 8, ()), ("breadth-first", 4, 16, ()), ("breadth-first", 8, 16, ()),
    ("terapipe", 4, 8, (("slices", 4),)), ("interleaved", 4, 9, ()), ("zb-h2", 4, 8, ()), ("zb-v", 4, 8, ()),
    ("zb-interleaved", 4, 7, ()), ("zb-interleaved", 6, 12, ()), ("zb-interleaved", 8, 8, ()),
    ("zb-interleaved", 6, 18, (("chunks", 3),)), ("hanayo", 4, 12, (("waves", 3),)),
    ("bitpipe", 8, 32, (("in_flight", 12),)), ("chimera", 4, 8, ()), ("dualpipe", 4, 8, ()), ("bpipe", 4, 8, ()),
]  # fmt: skip
WIDER = [case for case in CASES if case[0] in ("breadth-first", "zb-interleaved", "hanayo", "bitpipe")]


@cache
def proven(case: Case) -> Proof:
    name, p, m, options = case
    return prove(ORDERS[name], p, m, options=dict(options))


def span(schedule: Schedule, window: int, latency: float = 0.0, batches: int = 1) -> float:
    machine = Machine(lower(schedule, window=window), unit_time, latency)
    machine.play(batches)
    return max(machine.clock)


def freely(schedule: Schedule, latency: float, batches: int = 1) -> float:
    """The makespan by dependencies alone: no lanes, no buffers."""
    rows = start_times(schedule, unit_time, latency, batches)
    return max(end for row in rows for _, _, end in row)


def costs_time(schedule: Schedule, window: int, latency: float = 0.0) -> bool:
    try:
        return any(span(schedule, window, latency, n) > freely(schedule, latency, n) + 1e-9 for n in (1, 2))
    except ScheduleError:
        return True  # some would wait for ever


@pytest.mark.parametrize("latency", [0.0, 0.5, 8.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_least_window_costs_no_time_and_one_less_does(case: Case, latency: float) -> None:
    schedule = proven(case).schedule
    window = lower_freely(schedule, unit_time, latency, (1,)).window
    assert not costs_time(schedule, window, latency)
    assert window == WINDOW or costs_time(schedule, window - 1, latency)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_takes_the_least_for_messages_without_latency(case: Case) -> None:
    proof = proven(case)
    assert proof.schedule.window is None
    assert proof.lowered.window == lower_freely(proof.schedule).window
    assert (proof.lowered.window > WINDOW) == (case in WIDER)
    assert not costs_time(proof.schedule, proof.lowered.window)


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "latency", "narrow", "free"),
    [
        ("gpipe", 4, 16, {}, 8.0, 196.0, 105.0),
        ("terapipe", 4, 16, {"slices": 4}, 8.0, 571.0, 98.25),
        ("breadth-first", 8, 16, {}, 0.0, 66.0, 58.5),
        ("zb-interleaved", 8, 8, {}, 0.0, 28.5, 27.5),
    ],
)
def test_what_a_window_of_two_cost(
    name: str, p: int, m: int, options: dict[str, int], latency: float, narrow: float, free: float
) -> None:
    """Makespans in forwards of a rank's whole share."""
    schedule = prove(ORDERS[name], p, m, options=options).schedule
    costs = Costs.uniform(schedule, latency=latency)
    found = {w: simulate_schedule(schedule, costs, window=w).bubble.makespan for w in (2, None, "unlimited")}
    assert found == {2: narrow, None: free, "unlimited": free}


def test_what_looking_two_actions_ahead_cost() -> None:
    """A message travels once its RECV is posted, so with latency room alone is not enough."""
    schedule = proven(("breadth-first", 4, 16, ())).schedule
    costs = Costs.uniform(schedule, latency=8.0)
    ends = []
    for lowered in (lower(schedule, lookahead=2, window=14), lower_freely(schedule, costs.duration, 8.0)):
        machine = Machine(lowered, costs.duration, costs.latency)
        machine.play(1)
        ends.append(max(machine.clock))
    assert ends == [230.5, 146.5]


ENDLESS = [
    ("2bw", 4, 4), ("stash", 4, 1), ("2bw-eager", 4, 6), ("wpipe", 5, 7), ("timeprest", 4, 3), ("pipemare", 3, 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "m"), ENDLESS)
def test_methods_without_flushes(name: str, p: int, m: int) -> None:
    """Over longer spans than the one that the window is chosen for."""
    proof = prove(name, p, m)
    for latency in (0.0, 3.0):
        window = lower_freely(proof.schedule, unit_time, latency).window
        for batches in (settled(proof.schedule), settled(proof.schedule) + 1, 12):
            free = span(proof.schedule, unlimited(proof.schedule), latency, batches)
            assert span(proof.schedule, window, latency, batches) == pytest.approx(free)
            if not latency:  # otherwise whether a batch follows is known a message later than the oracle knows it
                assert free == pytest.approx(freely(proof.schedule, latency, batches))


GOLDEN = [parse_schedule(path.read_text(), path.stem) for path in sorted(Path("tests/golden").glob("*.txt"))]


@settings(max_examples=examples(80), derandomize=True, deadline=None, database=None)
@given(st.data())
def test_more_room_never_takes_longer(data: st.DataObject) -> None:
    """What halving relies on, for any costs and any schedule."""
    schedule = data.draw(st.sampled_from([*GOLDEN, *(proven(case).schedule for case in CASES[:10])]))
    times = data.draw(st.lists(st.integers(0, 9), min_size=7, max_size=7))
    latency, batches = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 3))
    ends = []
    for window in range(1, 8):
        try:
            machine = Machine(lower(schedule, window=window), lambda a: unit_time(a) * times[a.stage.rank % 7], latency)
            machine.play(batches)
            ends.append(max(machine.clock))
        except ScheduleError:
            ends.append(float("inf"))
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] >= span_of(schedule, unlimited(schedule), times, latency, batches)


def span_of(schedule: Schedule, window: int, times: list[int], latency: float, batches: int) -> float:
    machine = Machine(lower(schedule, window=window), lambda a: unit_time(a) * times[a.stage.rank % 7], latency)
    machine.play(batches)
    return max(machine.clock)


@pytest.mark.parametrize("case", WIDER, ids=str)
def test_a_proof_holds_for_larger_windows(case: Case) -> None:
    proof = proven(case)
    for window in (proof.lowered.window + 1, 2 * proof.lowered.window, unlimited(proof.schedule)):
        wider = check(proof.schedule, window=window)
        assert (wider.stages, wider.activations) == (proof.stages, proof.activations)


# --- set by the user -------------------------------------------------------------------------------------------------


def test_a_window_can_be_chosen() -> None:
    schedule = make_schedule("breadth-first", 4, 8, window=9)
    assert schedule.window == 9
    assert "\nwindow 9\n" in str(schedule)
    assert parse_schedule(str(schedule)) == schedule
    assert check(schedule).lowered.window == 9
    assert prove("1f1b", 4, 8, window=1).lowered.window == 1
    assert extend(prove("1f1b", 4, 8), window=5).lowered.window == 5
    assert extend(schedule, decides=True, recomputes=True).lowered.window == 9


@pytest.mark.long
def test_a_chosen_window_that_is_too_small_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        prove("zb-interleaved", 8, 16, window=1)
    proof = prove("zb-interleaved", 8, 16)
    with pytest.raises(ScheduleError, match=r"cannot run with a window of 1: deadlock.*(?s:.*)set it to \d+ or more"):
        simulate_schedule(proof, Costs.uniform(proof.schedule), window=1)


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "least"])
def test_a_window_is_a_positive_number(window: object) -> None:
    schedule = make_schedule("1f1b", 2, 2)
    for call in (
        lambda: make_schedule("1f1b", 2, 2, window=window),  # type: ignore[arg-type]
        lambda: extend(schedule, window=window),  # type: ignore[arg-type]
        lambda: simulate_schedule(schedule, Costs.uniform(schedule), window=window),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="window must be a whole number of messages, at least 1"):
            call()


def test_the_simulator_says_which_window_it_took_and_what_it_holds() -> None:
    schedule = make_schedule("gpipe", 2, 8)
    costs = Costs.uniform(schedule, latency=4.0)
    found = simulate_schedule(schedule, costs)
    assert found.window == found.figures()["window"] == lower_freely(schedule, costs.duration, 4.0, (1,)).window
    assert found.receive_buffers == (found.window, found.window)
    chosen = replace(schedule, window=3)
    assert simulate_schedule(chosen, costs).receive_buffers == (3, 3)
    assert simulate_schedule(chosen, costs, window=4).window == 4
    assert simulate_schedule(chosen, costs, window="unlimited").receive_buffers == (8, 8)


def test_room_grows_with_what_is_added() -> None:
    """Recomputes take time, so others get further ahead."""
    plain = prove("hanayo", 12, 36)
    again = extend(plain, recomputes=True)
    with pytest.raises(ScheduleError, match=r"deadlock|raise the window"):
        check(again.schedule, window=2)
    assert again.lowered.window > 2


@pytest.mark.parametrize(("name", "p", "m"), [("breadth-first", 2, 8), ("zb-interleaved", 4, 7)])
def test_room_for_an_order_from_a_file(name: str, p: int, m: int, tmp_path: Path) -> None:
    """Torch's tables cannot name a window, and ours need not."""
    proof = prove(name, p, m)
    for suffix, text in ((".csv", to_torch_csv(proof.schedule)), (".txt", str(proof.schedule))):
        path = tmp_path / f"{name}{suffix}"
        path.write_text(text)
        read = prove_file(path)
        assert read.schedule == proof.schedule
        assert read.lowered.window == proof.lowered.window > WINDOW


def test_a_window_does_not_mend_what_is_wrong_otherwise() -> None:
    circle = parse_schedule(
        "schedule circle\nrule flush\nmicrobatches 1\nnodes 0@0 1@1 2@0 3@1\n"
        "rank 0: F0@2^t F0@0^t B0@2^t B0@0^t STEP[t]@0 STEP[t]@2\n"
        "rank 1: F0@1^t F0@3^t B0@3^t B0@1^t STEP[t]@1 STEP[t]@3\n"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        check(circle)
