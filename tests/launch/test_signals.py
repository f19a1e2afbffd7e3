"""What the launcher makes of signals."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import InterruptedRunError
from penstock.launch.signals import LauncherSignals
from penstock.measure.local_processes import in_processes


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test leaves, the handlers are those from before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def tell(number: signal.Signals) -> None:
    signal.raise_signal(number)  # to this thread; where another one takes it, the handler runs some time later


def test_the_first_signal_asks_and_the_second_kills(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with LauncherSignals(tmp_path / "drain") as signals:
        assert not signals.drain.exists()
        tell(signal.SIGTERM)
        assert signals.drain.exists()
        assert signals.fatal is None
        tell(signal.SIGINT)
        assert signals.fatal == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_where_nothing_is_lost_the_first_signal_kills(tmp_path: Path, number: signal.Signals) -> None:
    with LauncherSignals(tmp_path / "drain", kills=True) as signals:
        tell(number)
        assert signals.fatal == number
        assert not signals.drain.exists()


def wait_long(group: object, marker: str) -> None:
    Path(marker).touch()
    time.sleep(120)


def test_measuring_processes_end_at_the_first_signal(tmp_path: Path) -> None:
    """As those of `penstock profile`, which have nothing to save."""
    marker = tmp_path / "begun"

    def interrupt() -> None:
        while not marker.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(InterruptedRunError):
        in_processes(1, 60.0, wait_long, str(marker))


def test_a_terminal_that_is_closed_asks_however_often_it_says_so(tmp_path: Path) -> None:
    with LauncherSignals(tmp_path / "drain") as signals:
        for _ in range(3):
            tell(signal.SIGHUP)
        assert signals.drain.exists()
        assert signals.fatal is None
    tell(signal.SIGHUP)  # does not kill what is ending


def test_under_nohup_a_terminal_may_be_closed(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with LauncherSignals(tmp_path / "drain") as signals:
        tell(signal.SIGHUP)
        assert not signals.drain.exists()
