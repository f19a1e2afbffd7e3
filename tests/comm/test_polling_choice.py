"""How processes wait: asleep where they outnumber the cores of their machine, or as they are told."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from penstock import ConfigError
from penstock.comm.collective import control_plane
from penstock.comm.collective.control_plane import Waits, choose_polling, cores_of_this_rank
from penstock.comm.core.ticket import LATENCY, SHARED, Polling, Ticket
from penstock.job.cpus import Cpus
from penstock.options.run import RunOptions
from support.pool import Pool


def process(machine: str, cpus: int, quota: float | None = None) -> Cpus:
    return Cpus(machine, machine, tuple(range(cpus)), quota)


@pytest.mark.parametrize(
    ("waits", "processes", "found"),
    [
        ("auto", [process("a", 2)] * 2, LATENCY),
        ("auto", [process("a", 2)] * 3, SHARED),
        ("auto", [process("a", 1), process("b", 1), process("b", 1)], LATENCY),
        ("auto", [process("a", 64, quota=1.5)] * 2, SHARED),
        ("auto", [process("a", 64, quota=2.0)] * 2, LATENCY),
        ("latency", [process("a", 1)] * 3, LATENCY),
        ("shared", [process("a", 8)], SHARED),
    ],
)
def test_who_outnumbers_whom(
    waits: Waits, processes: list[Cpus], found: Polling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(control_plane, "gather_json", lambda *_: [cpus.as_json() for cpus in processes])
    assert choose_polling(waits, cores_of_this_rank(object())) is found  # type: ignore[arg-type]
    assert choose_polling(waits, cores_of_this_rank(None)) is LATENCY


def choose_here(group: dist.ProcessGroup, cpus: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpus, "of_this_process", lambda: process("here", cpus))
        return choose_polling("auto", cores_of_this_rank(group)) is SHARED


@pytest.mark.processes
def test_processes_of_one_machine_are_counted(pool: Pool) -> None:
    assert pool.submit(choose_here, 1, ranks=2) == [True, True]
    assert pool.submit(choose_here, 2, ranks=2) == [False, False]


def test_a_shared_core_is_not_polled() -> None:
    looks = []

    class Watched(Ticket):
        @property
        def done(self) -> bool:
            looks.append(1)
            return self._done

    assert not Watched("a lane").settles(0.05, SHARED)
    few = len(looks)
    assert not Watched("a lane").settles(0.05, LATENCY)
    assert few <= 3 < len(looks) - few


def test_other_ways_to_wait_are_refused() -> None:
    with pytest.raises(ConfigError, match="waits must be one of auto, latency, shared; got 'spin'"):
        RunOptions(waits="spin")  # type: ignore[arg-type]
