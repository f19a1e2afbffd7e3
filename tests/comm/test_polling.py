"""How processes wait: asleep where they outnumber the cores of their machine, or as they are told."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from penstock import ConfigError
from penstock.comm.collective import polling
from penstock.comm.collective.polling import choose_polling
from penstock.comm.core.ticket import LATENCY, SHARED, Polling, Ticket
from penstock.runtime.plan.options import RunOptions
from support.pool import Pool


@pytest.mark.parametrize(
    ("waits", "machines", "cores", "found"),
    [
        ("auto", ["a", "a"], 2, LATENCY),
        ("auto", ["a", "a", "a"], 2, SHARED),
        ("auto", ["a", "b", "b"], 1, LATENCY),
        ("latency", ["a", "a", "a"], 1, LATENCY),
        ("shared", ["a"], 8, SHARED),
    ],
)
def test_who_outnumbers_whom(
    waits: str, machines: list[str], cores: int, found: Polling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling.platform, "node", lambda: "a")
    monkeypatch.setattr(polling, "_cores", lambda: cores)
    monkeypatch.setattr(polling, "gather_json", lambda *_: [[name, cores] for name in machines])
    assert choose_polling(waits, object()) is found  # type: ignore[arg-type]
    assert choose_polling(waits, None) is LATENCY  # type: ignore[arg-type]


def choose_here(group: dist.ProcessGroup, cores: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polling, "_cores", lambda: cores)
        return choose_polling("auto", group) is SHARED


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
