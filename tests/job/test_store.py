"""Where the store of a job listens, and what is said when nobody can meet there."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest

from penstock.errors import ConfigError, TransportError
from penstock.job.place import JobPlace
from penstock.job.store import is_loopback, job_store, listening_store

SECONDS = timedelta(seconds=5)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "localhost"])
def test_it_listens_where_it_was_told_to_and_nowhere_else(address: str) -> None:
    store = listening_store(address, 0, SECONDS)
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == store.port]
    assert listening[:1] == [socket.gethostbyname(address)]
    store.set("key", "value")
    place = JobPlace("the launcher", 1, 2, address, store.port)
    assert job_store(place, SECONDS, 5.0).get("key") == b"value"


def test_a_store_that_cannot_be_served_is_refused(port: int) -> None:
    place = JobPlace("srun", 0, 2, "127.0.0.1", port, 0, 2)
    with pytest.raises(ConfigError, match="port is taken; set MASTER_PORT to another one"):
        job_store(place, SECONDS, 5.0)
    with pytest.raises(ConfigError, match=r"cannot listen there .*; set MASTER_ADDR to an address of its machine"):
        job_store(replace(place, address="192.0.2.1"), SECONDS, 5.0)
    message = "that is 127.0.0.1 here, which other machines cannot reach; set MASTER_ADDR"
    with pytest.raises(ConfigError, match=message):
        job_store(replace(place, address="localhost", local_size=1), SECONDS, 5.0)


def test_a_store_that_nobody_serves_is_not_waited_for_forever() -> None:
    place = JobPlace("srun", 1, 2, "127.0.0.1", 1)
    with pytest.raises(
        TransportError, match=r"rank 1, joining the job: nobody serves .* start every process with srun"
    ):
        job_store(place, SECONDS, 0.1)


def test_a_signal_interrupts_the_wait_for_it() -> None:
    class ToldError(Exception):
        pass

    def tell(*_: object) -> None:
        raise ToldError

    before = signal.signal(signal.SIGUSR1, tell)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    try:
        with pytest.raises(ToldError):
            job_store(JobPlace("srun", 1, 2, "127.0.0.1", 1), SECONDS, 60.0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_addresses_of_this_machine_alone() -> None:
    assert [is_loopback(address) for address in ("localhost", "127.3.2.1", "::1", "192.0.2.1")] == [True] * 3 + [False]
