"""What the tests of several folders share."""

import gc
import signal
from collections.abc import Iterator
from subprocess import CompletedProcess

import pytest
import torch
from hypothesis import settings

from support.chosen_cases import SHARE, cases_left_out
from support.command_line import Command, run
from support.examples import ALL
from support.pool import Pool
from support.smoke import smoke_tests

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")
settings.register_profile("some cases", deadline=None, max_examples=ALL // SHARE)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The number of threads changes the last bits of a sum."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_terminal() -> None:
    """Jobs in the background of a shell, and those under nohup, begin with these signals ignored."""
    _take_signals_of_a_terminal()


@pytest.fixture(autouse=True)
def _signals_of_each_test() -> None:
    """A run that fails in this process leaves signals ignored, as it expects to be the end of it."""
    _take_signals_of_a_terminal()


def _take_signals_of_a_terminal() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test computes: everywhere that is at hand."""
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes with a gloo group; see `Pool.submit`."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Command:
    """Run `penstock` with arguments in this process; workers are forked from one that lives as long as this one.

    So `penstock train` takes half a second; in processes of its own, as `support.command_line.start` runs it, five.
    What workers print does not go through this process but where pytest sends its own outputs: it is read from there.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def call(*arguments: object) -> CompletedProcess[str]:
        capture.read_global_capture()
        code, out, err = run(monkeypatch, capsys, *arguments)
        workers = capture.read_global_capture()
        return CompletedProcess(arguments, code, out + workers.out, err + workers.err)

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test` and `make check`."""
    parser.addoption("--some-cases", action="store_true", help="of tests with many cases or examples, a few")
    parser.addoption("--few-examples", action="store_true", help="of tests with many examples, a few")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples tests of properties try, before these are imported."""
    if config.getoption("some_cases") or config.getoption("few_examples"):
        settings.load_profile("some cases")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need the pool as `processes`, and those of `make check` as `smoke`; choose cases, if asked to."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
    if config.getoption("some_cases"):
        left_out = set(cases_left_out(items))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    for item in smoke_tests(items):
        item.add_marker("smoke")


def pytest_collection_finish() -> None:
    """Let Python's collector pass over what lives as long as the session: more than a million objects.

    Whatever collects during a test, and tests that count objects do so often, would look through all of them.
    """
    gc.collect()
    gc.freeze()
