"""Work on a device has the times of its clock: of a stand-in that lags behind the host."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from penstock.comm.core.devices import DeviceClock, device_clock
from penstock.comm.core.trace_recorder import Recorder
from penstock.idle_time import split_time
from penstock.runtime.setup import rank_state
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.text_parser import parse_schedule
from penstock.stage import graph_builder
from penstock.timeline import Waiting
from support.cases import Case, make_batches, make_pipeline
from support.late_copies import LateCopies

OFFLOAD = Path(__file__).parents[1] / "golden" / "offload.txt"
ZERO = 5000.0  # seconds that the clock of the device is ahead


class SlowDevice:
    """Does what is issued to it `lag` seconds later, in order; counts how often the host has waited for it."""

    def __init__(self, lag: float) -> None:
        self.lag, self.waits, self.made = lag, 0, 0

    def event(self) -> SlowEvent:
        self.made += 1
        return SlowEvent(self)


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = time.perf_counter() + self.device.lag

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        self.device.waits += 1
        while not self.query():
            time.sleep(max(self.at - time.perf_counter(), 0.0))

    def elapsed_time(self, end: SlowEvent) -> float:
        assert self.query()
        assert end.query()
        return ((end.at + ZERO) - (self.at + ZERO)) * 1000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose time passes only while it sleeps."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Recorder, "now", staticmethod(lambda: now[0]))
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))


@pytest.mark.usefixtures("host")
def test_work_has_the_times_of_the_device_and_waits_those_of_the_host() -> None:
    device, recorder = SlowDevice(0.05), Recorder(0, time.perf_counter())
    recorder.use_clock(DeviceClock(device.event))
    recorder.align()
    start = recorder.begin()
    time.sleep(0.01)
    recorder.add_work(start, issued := recorder.now(), "F", "F0", 0, 0, 0, 0, 0)
    recorder.add("compute", issued, recorder.now(), Waiting.MESSAGE, "a wait")
    recorder.read_clock()
    assert recorder.busy == 0.0  # the device has not come so far, and is not waited for
    assert device.waits == 1
    recorder.pause()
    forward, wait = recorder.recording()["intervals"]
    assert forward[2] == pytest.approx(recorder.at(start + 0.05))
    assert forward[3] == pytest.approx(recorder.at(issued + 0.05))
    assert wait[2] == recorder.at(issued)
    assert recorder.busy == pytest.approx(forward[3] - forward[2])
    assert recorder.totals["F"] == [1, recorder.busy]


@pytest.mark.usefixtures("host")
def test_a_wait_of_the_device_for_copies_is_no_work() -> None:
    """The device waits for 0.03 before it works for 0.01; the host, which issues both, does not."""
    device, recorder = SlowDevice(0.05), Recorder(0, time.perf_counter())
    recorder.use_clock(DeviceClock(device.event))
    recorder.align()
    recorder.begin()
    start = recorder.wait_on_device(lambda: time.sleep(0.03), "copy B0", 0, 0, 0, 0)
    time.sleep(0.01)
    recorder.add_work(start, recorder.now(), "B", "B0", 0, 0, 0, 0, 0)
    recorder.pause()
    wait, backward = recorder.recording()["intervals"]
    assert wait[4:6] == ("copy", "copy B0")
    assert wait[3] - wait[2] == pytest.approx(0.03)
    assert backward[2] == pytest.approx(wait[3])
    assert recorder.busy == pytest.approx(0.01)
    assert recorder.totals["copy"] == [1, pytest.approx(0.03)]


@pytest.mark.usefixtures("host")
def test_events_are_used_again_and_bounded() -> None:
    """While none is left, work has the times at which it was issued."""
    device, told = SlowDevice(0.02), list[tuple[float, float]]()
    clock = DeviceClock(device.event, most=6)
    clock.align()

    def work() -> bool:
        clock.begin()
        return clock.end(lambda start, end: told.append((start, end)))

    assert [work() for _ in range(5)] == [True, True, True, False, False]
    for _ in range(20):
        clock.read(wait=True)
        assert work()
    assert device.made == 7
    clock.read(wait=True)
    assert len(told) == 23
    assert all(before[1] <= after[0] <= after[1] for before, after in pairwise(told))


@pytest.mark.usefixtures("host")
def test_work_that_failed_leaves_no_mark() -> None:
    clock, told = DeviceClock(SlowDevice(0.0).event), list[float]()
    clock.align()
    clock.begin()
    time.sleep(0.02)
    clock.begin()
    clock.end(lambda start, end: told.append(end - start))
    clock.read(wait=True)
    assert told == [0.0]


def test_backwards_of_a_device_wait_for_copies_under_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches of the first rank are moved in each of three batches (tests/golden/offload.txt)."""
    monkeypatch.setattr(rank_state, "device_clock", lambda _: DeviceClock(SlowDevice(0.01).event))
    monkeypatch.setattr(graph_builder, "side_stream", lambda _: LateCopies())
    case = Case("gpipe", 2, 4, spans=(3,), skips=())
    pipeline = make_pipeline(case, method=parse_schedule(OFFLOAD.read_text()))
    list(pipeline.run(make_batches(case)))
    timeline = pipeline.timeline()
    waits = [i for i in timeline.intervals if i.what == Waiting.COPY]
    assert [(i.rank, i.label) for i in waits] == [(0, f"copy B{4 * t + k}") for t in range(3) for k in (2, 3)]
    assert sum(split_time(timeline).idle[0]) > 0


@pytest.mark.parametrize("method", ["1f1b", "2bw", "zb-h1"])
def test_a_pipeline_on_a_device_reads_its_clock_once_per_batch(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Each action once, later than it was issued, in order; the host waits only where a run begins and ends."""
    devices: list[SlowDevice] = []

    def clock_of(_: torch.device) -> DeviceClock:
        devices.append(SlowDevice(0.03))
        return DeviceClock(devices[-1].event)

    monkeypatch.setattr(rank_state, "device_clock", clock_of)
    case = Case(method, 2, 4, spans=(6,), skips=())
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    timeline = pipeline.timeline()
    assert [device.waits for device in devices] == [2, 2]
    schedule = make_pipeline(case).schedule
    for rank, seconds in pipeline.busy_seconds().items():
        work = timeline.work(rank)
        assert [i.label for i in work] == [f"{a.op}{a.unit.first}" for a in actions_of(schedule, rank, 6)]
        assert all(before.end <= after.start for before, after in pairwise(work))
        assert seconds == pytest.approx(sum(i.end - i.start for i in work))
        data = [i for i in timeline.intervals if i.rank == rank and i.what == Waiting.DATA]
        forwards = [i for i in work if i.what == "F"]
        for read, forward in zip(data, forwards, strict=True):
            assert forward.start - read.end > 0.03 - 1e-6
    split = split_time(timeline)
    for rank, busy in enumerate(split.busy):
        assert busy + sum(split.idle[rank]) == pytest.approx(split.makespan)


@pytest.mark.usefixtures("host")
def test_what_is_kept_of_a_long_run_is_all_of_its_end() -> None:
    """Nothing that was dropped began later than the time from which on everything is said to be kept."""
    device, recorder = SlowDevice(0.01), Recorder(0, time.perf_counter(), keep=3)
    recorder.use_clock(DeviceClock(device.event))
    recorder.align()
    for k in range(6):
        time.sleep(0.001)
        start = recorder.begin()
        recorder.add_work(start, recorder.now(), "F", f"F{k}", 0, 0, 0, 0, k)
        recorder.add("compute", recorder.now(), recorder.now(), Waiting.MESSAGE, "a wait")
    recorder.pause()
    recording = recorder.recording()
    assert [i[5] for i in recording["intervals"]] == ["a wait", "F5", "a wait"]
    assert recording["since"] == recording["intervals"][1][2]


def test_the_host_has_no_such_clock() -> None:
    assert device_clock(torch.device("cpu")) is None
    assert device_clock(torch.device("meta")) is None
